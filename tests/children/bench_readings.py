"""Readings of `dataload.bench` for tests: what tasks name must be importable in the process that measures."""

import subprocess
import sys
import threading

import numpy as np

from dataload.bench.task import check_batch


class Reading:
    """Batches of 4 numbers, `batches` an epoch."""

    def __init__(self, batches=3):
        self.settings = {"made": "up"}
        self.epochs = []
        self.closed = False
        self._count = batches

    def batches(self, epoch):
        self.epochs.append(epoch)
        for number in range(self._count):
            yield {"x": np.arange(4, dtype=np.uint8) + number % 100}

    def check(self, batch):
        return check_batch(batch)

    def close(self):
        self.closed = True


def numbers(task):
    return Reading()


def nothing(task):
    return Reading(batches=0)


def failing(task):
    raise OSError("the file\x1b[31m is gone")


def silent(task):
    raise SystemExit(3)


def hanging(task):
    """Never ends, and has a process of its own, which keeps its pipes open and holds the pipe ``task.path``."""
    with open(task.path, "wb", buffering=0) as pipe:
        pipe.write(b"begun")
        subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"], pass_fds=[pipe.fileno()])
        threading.Event().wait()


class in_a_process(Reading):
    """Each batch touches 4 MB in another process."""

    def __init__(self, task):
        super().__init__()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TOUCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def batches(self, epoch):
        for batch in super().batches(epoch):
            self._process.stdin.write(b"x")
            self._process.stdout.read(1)
            yield batch

    def close(self):
        super().close()
        self._process.communicate()


_TOUCH = """
import mmap, sys
while sys.stdin.buffer.read(1):
    with mmap.mmap(-1, 4 << 20) as memory:
        memory[:] = bytes(4 << 20)
    sys.stdout.buffer.write(b"x")
    sys.stdout.buffer.flush()
"""
