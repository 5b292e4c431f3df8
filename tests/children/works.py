"""What worker processes do in the tests: a module that they can import."""

import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from dataload import Ragged
from dataload.types import BytesColumn


def values():
    """Something of every sort that a batch may be."""
    base = np.arange(60_000, dtype=np.int32).reshape(3, 100, 200)
    read_only = base.copy()
    read_only.flags.writeable = False
    structured = np.zeros(5000, [("a", "<i4"), ("b", ">f8", (2,)), ("c", "S3")])
    structured["a"], structured["c"] = np.arange(5000), b"xyz"
    column = BytesColumn.packed(np.arange(60_000).astype(np.uint8), np.array([3, 3, 40_000, 60_000]))
    return {
        "contiguous": base,
        "fortran": np.asfortranarray(base[0]),
        "strided": base[:, ::2, ::-3],
        "read_only": read_only,
        "big_endian": base.astype(">i4"),
        "structured": structured,
        "record array": structured.view(np.recarray),
        "masked": np.ma.masked_array(base, base % 2),
        "dates": np.arange(5000).astype("datetime64[s]"),
        "text": np.array(["abc", "de"] * 5000),
        "objects": np.array([{"a": 1}, None, "x"], object),
        "zero_d": np.array(3.5),
        "scalar": np.float32(1.5),
        "empty": np.empty((0, 7), np.float32),
        "empties": [np.empty(0), np.empty((3, 0), np.int8)],
        "large then empty": [base, np.empty(0)],
        "bool": base % 2 == 0,
        "half": base.astype(np.float16),
        "complex": base.astype(np.complex64),
        "ragged": Ragged(np.arange(30_000), np.array([0, 10, 30_000])),
        "nested": {"x": [base, (base + 1, {"y": base + 2})], "label": 7, "names": ["a", "b"]},
        "bytes": [bytes(range(256)) * 300, b"", bytearray(b"x" * 40_000)],
        "str": ["long" * 20_000, ""],
        "plain": {"a": 1, "b": None, "c": (1.5, True)},
        "same twice": [base] * 2,
        "columns": [column, column[1:3], column[::2], column[:0]],
    }


def assert_same(found, expected):
    """Equal in value, type, dtype, shape, layout of memory as far as it is one piece, and whether it may be written."""
    assert type(found) is type(expected)
    if isinstance(expected, np.ma.MaskedArray):
        assert_same(found.data, expected.data)
        assert_same(found.mask, expected.mask)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.flags.writeable == expected.flags.writeable
        if expected.flags.forc and expected.size:
            assert found.strides == expected.strides
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Ragged):
        assert_same(found.values, expected.values)
        assert_same(found.offsets, expected.offsets)
    else:
        assert found == expected


def value_batch(samples):
    """One of `values` for each index."""
    return list(values().values())[samples[0]["index"]]


def lambda_at_14480(samples):
    """Cannot be pickled, long after steps began to be made several at a time."""
    return {"index": [sample["index"] for sample in samples], "x": LATE_LAMBDA if samples[0]["index"] == 14480 else 0}


LATE_LAMBDA = lambda: None  # noqa: E731


def die_at_14483(sample):
    if sample["index"] == 14483:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def echo(task, status):
    return task


def large(task, status):
    return np.full(20_000, task, np.int32)


def do(task, status):
    """Whatever the task says."""
    what, *rest = task
    status.at(2, 3, 4)
    if what == "die":
        os.kill(os.getpid(), rest[0])
    elif what == "exit":
        os._exit(rest[0])
    elif what == "sys.exit":
        sys.exit(rest[0])
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        hang_here()

    elif what == "raise":
        raise KeyError("no such thing")
    elif what == "unpicklable":
        return lambda: None
    elif what == "unloadable":
        return Unloadable()
    elif what == "grandchild":
        if not os.fork():
            signal.alarm(30)  # if the test forgets it
            open(rest[0]).close()  # blocks until the test opens the pipe
            os._exit(0)
        os._exit(5)
    elif what == "fork":
        if child := os.fork():
            os.waitpid(child, 0)
    elif what == "pid":
        return os.getpid()
    elif what == "threads":
        import threadpoolctl

        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info()], threading.current_thread().name
    elif what == "signals":
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN, signal.pthread_sigmask(signal.SIG_BLOCK, [])
    elif what == "environment":
        return os.environ["OMP_NUM_THREADS"], multiprocessing.current_process().daemon
    return rest


def hang_here(mark=Path(__file__)):
    """As long as there is a file, which for most is for ever."""
    while mark.exists():
        time.sleep(0.05)


class Unloadable:
    def __reduce__(self):
        return int, ("this is no number",)


def leave(code):
    os._exit(code)  # `make coverage` replaces it by one that cannot be pickled


class DiesWhenLoaded:
    """A work whose import ends the process."""

    def __call__(self, task, status):
        return task

    def __reduce__(self):
        return leave, (7,)


class FailsWhenLoaded(DiesWhenLoaded):
    def __reduce__(self):
        return __import__, ("no_such_module",)


class Records:
    """A source whose records are arrays that say which they are."""

    def __init__(self, length, size=5000):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": np.full(self.size, index), "index": index}


def draw(sample):
    return {
        "index": sample["index"],
        "numpy": np.random.rand(),  # noqa: NPY002 - the global one is meant
        "random": random.random(),
    }


class DieOnce:
    """Kills its process at an index, unless a file says that it has done so."""

    def __init__(self, index, mark):
        self.index, self.mark = index, mark

    def __call__(self, sample):
        if sample["index"] == self.index and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


class HangAt:
    """Does not come back from the first time at an index; says in a file which process that is."""

    def __init__(self, index, mark):
        self.index, self.mark = index, mark

    def __call__(self, sample):
        if sample["index"] == self.index and not self.mark.exists():
            self.mark.with_suffix(".new").write_text(str(os.getpid()))
            self.mark.with_suffix(".new").rename(self.mark)
            hang_here(self.mark)
        return sample

    def let_go(self):
        self.mark.unlink()


class Hang:
    """A transform that never ends, after the worker has put a file into a directory."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self, sample):
        Path(self.directory, f"{os.getpid()}-{threading.get_ident()}").touch()
        self.wait()
        return sample

    def wait(self):
        hang_here()


class Hold(Hang):
    """Never ends either, and keeps the GIL."""

    def wait(self):
        re.match(r"(a|aa)+$", "a" * 100 + "b")


class Doze(Hang):
    """Takes a moment."""

    def wait(self):
        time.sleep(0.2)


def workers():
    """Ids of the worker processes of this process, however they were started."""
    found = []
    for child in _children(os.getpid()):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"multiprocessing.forkserver" in command:
            found += _children(child)
        elif b"multiprocessing.resource_tracker" not in command and os.getsid(child) == os.getsid(0):
            found.append(child)  # servers of tests have sessions of their own
    return sorted(found)


def _children(pid):
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def collector(task, status):
    """Return whether this process collects garbage, and the number of objects that are left out."""
    return gc.isenabled(), gc.get_freeze_count()


def interrupted():
    """Exit with code 7 if Ctrl-C interrupts this process."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # the signal ends it
    except KeyboardInterrupt:
        sys.exit(7)
