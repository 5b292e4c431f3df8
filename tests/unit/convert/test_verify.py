"""What `dataload verify` finds: in one reading, and in parts."""

import numpy as np
import pytest

import dataload
from dataload.convert.blocks import Reading, merge_findings, verify_part
from dataload.errors import ConfigError

LENGTHS = [4, 1, 6, 3, 2]
BAD = (1, 4, 5, 10, 15)
PARTS = [1, 2, 3, 5]


def decode(data):
    if int(data) in BAD:
        raise ValueError(f"bad {int(data)}")
    return int(data)


def opening_of(paths):
    return lambda path: dataload.open(paths if path is None else path, codec=decode)


@pytest.fixture
def paths(tmp_path):
    ends = np.cumsum(LENGTHS).tolist()
    found = [str(tmp_path / f"{number}.array_record") for number in range(len(LENGTHS))]
    for path, end, length in zip(found, ends, LENGTHS, strict=True):
        with dataload.create(path) as writer:
            writer.extend(b"%d" % index for index in range(end - length, end))
    return found


def in_parts(paths, parts, limit=None):
    calls = []
    reports = [
        verify_part(opening_of(paths), paths, limit, part=(n, parts), progress=lambda *each: calls.append(each))
        for n in range(1, parts + 1)
    ]
    assert {total for _, total in calls} == {0}, "unknown"
    if limit is None:
        assert max(done for done, _ in calls) == max(records for records, _ in reports)
    return sum(records for records, _ in reports), [*merge_findings(reports)]


def test_records_are_found_with_their_files(paths):
    calls = []
    reading = Reading(lambda *each: calls.append(each))
    whole = [*reading.findings(opening_of(paths), paths, None)]
    assert (reading.records, calls[-1]) == (16, (16, 16))
    places = [
        (paths[file], index, record)
        for file, index, record in [(0, 1, 1), (1, 4, 0), (2, 5, 0), (2, 10, 5), (4, 15, 1)]
    ]
    assert [(each.path, each.index, each.record) for each in whole] == places
    assert whole[1].line() == f"[4] {paths[1]}, record 0: codec {__name__}.decode raised ValueError: bad 4"
    for parts in PARTS:
        assert in_parts(paths, parts) == (16, whole)
    assert in_parts(paths, 2, limit=1)[1][0] == whole[0]


def test_errors_of_settings_are_no_findings(paths):
    with pytest.raises(ConfigError, match="did you mean"):
        [*Reading(lambda *_: None).findings(lambda _: dataload.open(paths, codek=1), paths, None)]
