"""What the original Syrah wrote, value by value, and files that it cannot read; see syrah/README.md."""

import hashlib

import numpy as np
import pytest
from golden_values import SYRAH, SYRAH_CASES, syrah_cases

from dataload.collate import default_collate
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.syrah.reader import SyrahSource
from dataload.sources.syrah.writer import SyrahWriter
from dataload.testing.compare import difference


def check_value(value, expected):
    if expected["dtype"] == "str":
        assert type(value) is str
        data = value.encode()
    else:
        assert isinstance(value, np.ndarray)
        assert (value.dtype.name, list(value.shape)) == (np.dtype(expected["dtype"]).name, expected["shape"])
        data = value.tobytes()
    if "hex" in expected:
        assert data.hex() == expected["hex"]
    else:
        assert len(data) == expected["nbytes"]
        assert hashlib.sha256(data).hexdigest() == expected["sha256"]


def check_record(record, expected, keys):
    assert list(record) == keys
    for key, value in expected.items():
        check_value(record[key], value)


def check_columns(source, indices):
    """The columnar path gives what collating the records gives, or refuses them as collating does."""
    records = source.read(indices)
    try:
        expected = default_collate(records)
    except ConfigError:
        with pytest.raises(ConfigError, match="cannot stack field"):
            source.read_batch(indices)
        return
    found = difference(source.read_batch(indices), expected, "batch")
    assert found is None, found


def test_every_file_has_a_case():
    assert {case["file"] for case in SYRAH_CASES} == {path.name for path in SYRAH.glob("*.syr")}
    assert len(SYRAH_CASES) == 47


@pytest.mark.parametrize("case", syrah_cases("ok"))
def test_every_value_is_what_the_original_reads(case):
    with SyrahSource(SYRAH / case["file"]) as source:
        assert len(source) == case["num_records"] == len(case["records"])
        assert list(source.fields) == case["keys"]
        for index, expected in enumerate(case["records"]):
            check_record(source[index], expected, case["keys"])
        backwards = list(range(len(source)))[::-1]
        for index, record in zip(backwards, source.read(backwards), strict=True):
            check_record(record, case["records"][index], case["keys"])
        check_columns(source, [*backwards, *backwards[:2]])


@pytest.mark.parametrize("case", syrah_cases("error"))
def test_every_bad_file_is_a_named_error(case):
    path = SYRAH / case["file"]
    bad = case.get("bad_records")
    with SyrahSource(path) as source:
        if bad is None:
            with pytest.raises(CorruptFileError, match=path.name) as caught:
                source.read(range(len(source)))
            assert caught.value.path == str(path)
            assert caught.value.offset is not None
            return
        for index, expected in enumerate(case["records"]):
            if index in bad:
                with pytest.raises(CorruptFileError, match=path.name) as caught:
                    source[index]
                assert caught.value.index == index
            else:
                check_record(source[index], expected, case["keys"])


@pytest.mark.parametrize("case", syrah_cases("ok"))
def test_what_was_read_is_written_and_read_again(case, tmp_path):
    source = SyrahSource(SYRAH / case["file"])
    with SyrahWriter(tmp_path / "again.syr") as writer:
        writer.extend(source)
    again = SyrahSource(tmp_path / "again.syr")
    found = difference(list(again), list(source), "records")
    assert found is None, found


def test_shapes_that_the_original_lost_are_given_back():
    flat = SyrahSource(SYRAH / "basic.syr")
    with SyrahSource(SYRAH / "basic.syr", shapes={"features": (4, -1)}) as source:
        assert source.read_batch([3, 1])["features"].shape == (2, 4, 4)
        assert source[5]["features"].tolist() == flat[5]["features"].reshape(4, 4).tolist()
