"""A small sample of tests/fuzz/faults.py: whatever fails, batches are right or the error says whose fault it is."""

import errno
import io

import faults
import pyarrow.csv
import pytest


@pytest.fixture(scope="module", autouse=True)
def arrows_pipe():
    """Arrow makes a pipe for signals when it first reads CSV, which lives as long as the process."""
    pyarrow.csv.read_csv(io.BytesIO(b"n\n1\n"))


@pytest.mark.parametrize("name", faults.WRITTEN)
def test_failures_of_the_system_are_no_bad_records(name, tmp_path):
    wrong = []
    numbers = {number: faults.NUMBERS[number] for number in (errno.EIO, errno.EMFILE)}
    opened = faults.write(tmp_path, name)
    found = faults.try_calls(name, opened, policies=("skip",), numbers=numbers, most=8, report=wrong.append)
    assert not wrong
    assert found["refused"] > 1


@pytest.mark.usefixtures("object_server")  # starts obstore's threads, which live as long as the process
def test_failures_of_a_store_are_no_bad_records(tmp_path):
    wrong = []
    faults.write(tmp_path, "syrah")
    found = faults.try_requests(
        "syrah", tmp_path, policies=("skip",), kinds=("404", "403"), most=4, report=wrong.append
    )
    assert not wrong
    assert found["refused"]


@pytest.mark.usefixtures("object_server")
def test_failures_of_the_cache_are_no_bad_records(tmp_path):
    wrong = []
    faults.write(tmp_path, "syrah")
    numbers = {number: faults.NUMBERS[number] for number in (errno.EIO, errno.ENOSPC)}
    found = faults.try_cache("syrah", tmp_path, policies=("skip",), numbers=numbers, most=12, report=wrong.append)
    assert not wrong
    assert found["refused"]
    assert found["right"]
