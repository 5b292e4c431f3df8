"""Files of the original library, and what its own readers made of them: see arrayrecord/README.md."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataload.errors import ConfigError, CorruptFileError, DataloadError, SourceNotFoundError
from dataload.sources.array_record.reader import ArrayRecordSource

GOLDEN = Path(__file__).parent / "arrayrecord"
CASES = json.loads((GOLDEN / "manifest.json").read_text())
FILES = [case for case in CASES if case.get("kind") != "data_source"]
SOURCES = [case for case in CASES if case.get("kind") == "data_source"]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def in_golden(monkeypatch):
    monkeypatch.chdir(GOLDEN)


@pytest.fixture(autouse=True)
def quiet_group_sizes(recwarn):
    """Only group16 warns, and only once."""
    yield
    assert all("group16.array_record was written with group_size:16" in str(w.message) for w in recwarn)
    assert len(recwarn) <= 1


def of(cases, expect):
    return pytest.mark.parametrize("case", [c for c in cases if c["expect"] == expect], ids=lambda c: c["why"][:50])


def paths_of(case):
    return [SimpleNamespace(**path) if isinstance(path, dict) else path for path in case["paths"]]


def check(source, case):
    records = source.read(range(len(source)))
    assert len(source) == case["num_records"] == len(records)
    assert [sha(record) for record in records] == case["records_sha256"]
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(source)), 2))
    assert [sha(record) for record in source.read(order)] == [case["records_sha256"][i] for i in order]


@pytest.mark.filterwarnings("always:.*group_size")
@of(FILES, "ok")
def test_files_of_the_original(case):
    with ArrayRecordSource(case["file"]) as source:
        check(source, case)
        assert [len(record) for record in source] == case["record_lengths"]


@of(SOURCES, "ok")
def test_what_the_original_source_selects(case):
    with ArrayRecordSource(paths_of(case)) as source:
        check(source, case)
        if "getitems" in case:
            found = source.__getitems__(case["getitems"]["keys"])
            assert [sha(record) for record in found] == case["getitems"]["records_sha256"]
        with pytest.raises(IndexError, match=f"index {len(source)} is out of range"):
            source[len(source)]


@of(SOURCES, "error")
def test_selections_that_no_file_has(case):
    """The original believes most of them, and gives empty records for one."""
    wanted = SourceNotFoundError if "missing" in case["file"] or "no slice syntax" in case["why"] else ConfigError
    if "negative" in case["why"]:
        wanted = SourceNotFoundError
    with pytest.raises(wanted, match=r"\.array_record") as caught, ArrayRecordSource(paths_of(case)) as source:
        len(source)
    assert isinstance(caught.value, DataloadError)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("corrupt_empty_file", "byte 0: the file is empty: its writer was never closed"),
        ("corrupt_truncated_half", "byte 65536: the file has 65536 bytes, the smallest ArrayRecord 131072"),
    ],
)
def test_files_that_do_not_open(name, message):
    with pytest.raises(CorruptFileError, match=f"{name}.array_record, {message}") as caught:
        len(ArrayRecordSource(f"{name}.array_record"))
    assert caught.value.path == f"{name}.array_record"


def test_a_damaged_record_leaves_the_others():
    (case,) = [case for case in FILES if case["file"] == "corrupt_zeroed_record.array_record"]
    (bad,) = case["bad_records"]
    with ArrayRecordSource(case["file"]) as source:
        good = [index for index in range(case["num_records"]) if index != bad]
        assert [sha(record) for record in source.read(good)] == [case["records_sha256"][index] for index in good]
        for request in ([bad], [0, bad, 1], np.arange(case["num_records"]), np.arange(25)[::-1]):
            with pytest.raises(CorruptFileError, match=f"record {bad}: .*the hash of the chunk's data") as caught:
                source.read(request)
            assert (caught.value.path, caught.value.index) == (case["file"], bad)
        assert sha(source[0]) == case["records_sha256"][0]
    with ArrayRecordSource(f"{case['file']}[10:13]") as source:  # the number is that of the file
        with pytest.raises(CorruptFileError, match=f"record {bad}: "):
            source[1]
        assert sha(source[0]) == case["records_sha256"][10]


def test_every_case_is_tried():
    assert {case["file"] for case in FILES if case["expect"] == "error"} == {
        "corrupt_empty_file.array_record",
        "corrupt_truncated_half.array_record",
        "corrupt_zeroed_record.array_record",
    }
    assert len(CASES) == 33
