"""Small samples of the searches in tests/fuzz; ``make torn``, ``make names``, ``make kills`` and others try more."""

import errno
import io
import itertools
import subprocess
import sys
from pathlib import Path

import faults
import pyarrow.csv
import pytest
import torn
from samples import sampled

SLOW = pytest.mark.slow_suite
REMOTE = dict.fromkeys(("jobs killed at S3", "jobs with one cache"), pytest.mark.remote)
FUZZ = Path(__file__).parents[1] / "fuzz"
NAMES = ("wids", "manifest of wids", "hugging face, splits", "wids at a URL")


HOW = {"serial": (0, "threads"), "threads": (2, "threads"), "processes": (2, "processes")}
ONCE = {".syr": "threads", ".tar": "serial", ".array_record": "threads", ".lmdb": "processes", ".torchrecord": "serial"}
SEARCHES = {  # what is tried and what is said, by name
    "torn": ("torn.py --rounds 2", [": 0 wrong; from the last piece to the error "]),
    "names": ("names.py --every 9", [" 0 failures"]),
    "writers killed": ("job_kills.py --every 15 --rounds 0 --seed 1 local/.*write.*/", [": 0 failed"]),
    "jobs killed here": ("job_kills.py --every 120 --rounds 0 --seed 1 local", [": 0 failed"]),
    "jobs killed at S3": ("job_kills.py --every 23 --rounds 0 --seed 1 s3/.*/syr", [": 0 failed"]),
    "jobs with one cache": ("cache_jobs.py --rounds 6 --first 11", ["6 rounds"]),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=REMOTE.get(name, SLOW)) for name in SEARCHES])
@pytest.mark.slow
def test_a_search_finds_nothing(name):
    (script, *arguments), said = SEARCHES[name][0].split(), SEARCHES[name][1]
    command = [sys.executable, FUZZ / script, *arguments, *(NAMES if name == "names" else ())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in said:
        assert text in done.stdout


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


def test_failures_of_a_store_are_no_bad_records(tmp_path):
    wrong = []
    faults.write(tmp_path, "syrah")
    options = {"policies": ("skip",), "kinds": ("404", "403"), "most": 4}
    found = faults.try_requests("syrah", tmp_path, **options, report=wrong.append)
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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("suffix", "how"), sampled(itertools.product(torn.NAMES, HOW), ONCE.items()))
def test_a_file_that_shrinks_is_an_error_of_that_file(tmp_path, suffix, how):
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        this = torn.Round(suffix, "shrinking", True, *HOW[how], "raise")
        assert torn.run_round(tmp_path / f"{number}", this)[0] == ""
