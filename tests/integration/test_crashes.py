"""Jobs that are killed, once in each state of their directory; `make kills` does so before each operation and request.

Run again, they leave what an unbroken run leaves.
"""

import os
import shutil
import signal

import killed
import pytest
from converted import content

import dataload
from dataload.errors import ConfigError, DataloadError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]
FREE = ("the lock is held", "the journal is begun", "the log is begun", "a shard is in its hidden folder")
"""The states in which another conversion may begin, because no shard is there."""


def place(directory, job="convert"):
    directory.mkdir()
    at = str(directory), "syr", {}
    killed.prepare(job, *at, forget=lambda name: (directory / name).unlink())
    return at


def convert_killed(tmp_path, name, state):
    """Return the directory of a conversion that was killed in a state."""
    for _ in range(5):  # another thread of it may go on until the kill arrives
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        at = place(tmp_path / name)
        assert killed.run(killed.job_killed_when, "convert", at, state) == -signal.SIGKILL
        if killed.STATES[state](killed.Seen(at[0])):
            return at
    raise AssertionError(state)


def readable(directory):
    """Return the numbers of the records that opening the directory gives; None if it is refused."""
    try:
        with dataload.open(directory, format="syrah") as source:
            return [int(record["n"]) for record in source]
    except DataloadError:
        return None


@pytest.mark.parametrize("state", [state for state in killed.STATES if state != "lengths are written"])
def test_a_conversion_that_is_killed(tmp_path, state):
    killed.JOBS["convert"](*place(tmp_path / "unbroken"), again=False)
    at = convert_killed(tmp_path, "killed", state)
    assert readable(at[0]) in (None, [*range(4)], [*range(9)])
    if state in FREE:
        other = convert_killed(tmp_path, "fresh", state)
        killed.JOBS["convert"](*other, again=False)
        assert content(tmp_path / "fresh") == content(tmp_path / "unbroken")
    else:
        with pytest.raises(ConfigError, match=r"a-00000-of-00002.syr exists"):
            killed.JOBS["convert"](*at, again=False)
    killed.JOBS["convert"](*at, again=True)
    assert content(tmp_path / "killed") == content(tmp_path / "unbroken")


def test_statistics_that_are_killed(tmp_path):
    killed.JOBS["stats"](*place(tmp_path / "unbroken", "stats"), again=False)
    at = place(tmp_path / "killed", "stats")
    assert killed.run(killed.job_killed_when, "stats", at, "lengths are written") == -signal.SIGKILL
    killed.JOBS["stats"](*at, again=True)
    assert content(tmp_path / "killed") == content(tmp_path / "unbroken")


@pytest.mark.parametrize("job", killed.JOBS)
def test_a_job_that_is_killed_half_way(tmp_path, job):
    at = place(tmp_path / "unbroken", job)
    assert killed.run(killed.job_killed_before, job, at, killed.NEVER, tmp_path / "count") == 0
    killed.complete(job, *at)
    half = int((tmp_path / "count").read_text()) // 2
    at = place(tmp_path / "killed", job)
    assert killed.run(killed.job_killed_before, job, at, half, tmp_path / "count") == -signal.SIGKILL
    killed.JOBS[job](*at, again=True)
    killed.complete(job, *at)
    assert content(tmp_path / "killed") == content(tmp_path / "unbroken")


def test_a_torn_line_costs_its_shard(tmp_path):
    killed.JOBS["convert"](*place(tmp_path / "unbroken"), again=False)
    at = convert_killed(tmp_path, "killed", "a shard has its line")
    log = tmp_path / "killed" / ".a.syr.convert.log"
    os.truncate(log, log.stat().st_size - 1)
    report = killed.JOBS["convert"](*at, again=True)
    assert (report.resumed, "1 damaged line of" in str(report.notes)) == (0, True)
    assert content(tmp_path / "killed") == content(tmp_path / "unbroken")
