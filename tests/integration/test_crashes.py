"""Jobs that are killed before an operation on files: run again, they leave what an unbroken run leaves."""

import multiprocessing
import signal
import sys
from pathlib import Path

import pytest
from converted import content

import dataload
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards
from dataload.errors import DataloadError

sys.path.append(str(Path(__file__).parents[1] / "children"))
import crashes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]
NEVER = 1 << 30


def prepare(job, directory):
    """Make what the job finds."""
    directory.mkdir()
    if job == "overwrite":
        convert(dataload.MemorySource([{"n": 0}] * 8), directory / "a.syr", shards=2)
    elif job in ("part", "merge"):
        for number in (1, 2)[: 1 if job == "part" else 2]:
            convert(crashes.source(), directory / "a.syr", shards=3, part=(number, 2))
    elif job != "convert":
        convert(crashes.source(), directory / "a.syr", shards=3)
        (directory / "dataload.json").unlink()
        (directory / ".a.syr.convert.json").unlink()
        for number in (1, 2) if job == "merged stats" else ():
            index_shards(str(directory), measuring=Measuring(), part=(number, 2))


def run(job, directory, before, counted):
    arguments = job, directory, before, counted
    process = multiprocessing.get_context("forkserver").Process(target=crashes.run, args=arguments)
    process.start()
    process.join()
    code = process.exitcode
    process.close()
    return code


def readable(job, directory):
    """Return the records that opening the directory gives; None if it is refused."""
    try:
        with dataload.open(directory) as source:
            return [int(record["n"]) for record in source]
    except DataloadError:
        assert job != "overwrite" or not (directory / "dataload.json").exists() or "stale" in str(sys.exc_info()[1])
        return None


@pytest.mark.parametrize("kills", [8, pytest.param(1000, marks=pytest.mark.slow_suite)])
@pytest.mark.parametrize("job", crashes.JOBS)
def test_a_kill_before_an_operation(tmp_path, job, kills):
    prepare(job, tmp_path / "unbroken")
    assert run(job, tmp_path / "unbroken", NEVER, tmp_path / "count") == 0
    expected, operations = content(tmp_path / "unbroken"), int((tmp_path / "count").read_text())
    for before in range(operations - 1, -1, -max(1, operations // kills)):
        directory = tmp_path / str(before)
        prepare(job, directory)
        assert run(job, directory, before, tmp_path / "killed") == -signal.SIGKILL
        assert readable(job, directory) in (None, [*range(9)], [0] * 8), "all of the old data, or of the new"
        crashes.JOBS[job](directory, True)
        assert content(directory) == expected, f"killed before operation {before} of {operations}"
