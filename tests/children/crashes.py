"""Jobs in processes that are killed before an operation on files."""

import os
import signal
import sys

import numpy as np

import dataload
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards

OPERATIONS = ("open", "os.", "shutil.", "fcntl.")  # audit events


def source():
    return dataload.MemorySource([{"x": np.arange(i + 1.0), "n": np.array(i)} for i in range(9)])


JOBS = {
    "convert": lambda directory, again: convert(source(), directory / "a.syr", shards=2, resume=again),
    "overwrite": lambda directory, _: convert(source(), directory / "a.syr", shards=2, overwrite=True),
    "part": lambda directory, _: convert(source(), directory / "a.syr", shards=3, part=(2, 2)),
    "merge": lambda directory, _: convert(source(), directory / "a.syr", shards=3, merge=True),
    "index": lambda directory, _: index_shards(str(directory)),
    "stats": lambda directory, _: index_shards(str(directory), measuring=Measuring()),
    "merged stats": lambda directory, _: index_shards(str(directory), measuring=Measuring(), merge=True),
}


def run(job, directory, before, counted):
    """Run a job, and kill this process before operation `before`; write the number of operations to `counted`."""
    left = before

    def note(event, _):
        nonlocal left
        if event.startswith(OPERATIONS):
            left -= 1
            if left == -1:  # the kill is an operation, too
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    JOBS[job](directory, False)
    counted.write_text(str(before - left))
