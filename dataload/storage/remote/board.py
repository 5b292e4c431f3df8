"""A file by which the plan that downloads ahead tells readers, in all processes, which shards to wait for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from dataload._util.per_process import PerProcess
from dataload.storage.remote.cache import Lease

_PAUSE = 0.01  # seconds between two looks
_LONGEST_WAIT = 5.0  # for a shard whose download has not begun; nobody should have to


class Coming(IntEnum):
    """The plan for a shard that is not in the cache."""

    UNKNOWN = 0
    SOON = 1  # wait for it
    NEVER = 2  # read it by range


_KNOWN = frozenset(map(int, Coming))


class Board:
    """The plan for each shard, told to all processes that read on its behalf, and the shards that they wait for.

    It is a file with two bytes for each shard, the second of which is not 0 while a reader waits. It is not mapped,
    because whoever shortens a mapped file kills the process. The process that made it holds a lock on the file; what a
    killed one leaves is unlocked, and deleted by the next.

    Args:
        directory: Where the file is.
        urls: The shards.
    """

    def __init__(self, directory: str, urls: Sequence[str]) -> None:
        os.makedirs(directory, 0o700, exist_ok=True)
        with os.scandir(directory) as left:
            for file in left:
                with contextlib.suppress(OSError), open(file.path, "rb") as old:
                    fcntl.flock(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(file.path)
        file, self._path = tempfile.mkstemp(dir=directory, prefix="plan-")
        fcntl.flock(file, fcntl.LOCK_EX)
        os.ftruncate(file, 2 * len(urls))
        self.numbers: dict[str, int] = {url: number for number, url in enumerate(urls)}
        self._file = file
        weakref.finalize(self, _delete, self._path, os.getpid())
        weakref.finalize(self, os.close, file).atexit = False  # threads use it to the end of the process

    def set(self, shard: int, coming: Coming) -> None:
        """Publish what is known about a shard."""
        os.pwrite(self._file, bytes([coming]), 2 * shard)

    def take_waiting(self) -> list[int]:
        """Return the shards that a reader has waited for since the last call."""
        found = os.pread(self._file, 2 * len(self.numbers), 0)[1::2]
        waiting = [shard for shard, waits in enumerate(found) if waits] if found.strip(b"\0") else []
        for shard in waiting:
            os.pwrite(self._file, b"\0", 2 * shard + 1)
        return waiting

    def clear(self) -> None:
        """Tell all readers to help themselves."""
        os.pwrite(self._file, bytes(2 * len(self.numbers)), 0)

    def look(self, url: str, *, waits: bool = False) -> Coming:
        """Return what the plan says about a shard."""
        return _look(self._file, self.numbers.get(url), waits=waits)

    def __reduce__(self) -> Any:
        return BoardReader, (self._path, self.numbers)


class BoardReader:
    """A `Board` in another process; see there."""

    def __init__(self, path: str, numbers: Mapping[str, int]) -> None:
        self._path = path
        self._numbers = numbers
        self._file: PerProcess[int | None] = PerProcess()

    def look(self, url: str, *, waits: bool = False) -> Coming:
        """See `Board.look`."""
        found = self._file.get(self._open)
        return Coming.UNKNOWN if found is None else _look(found, self._numbers.get(url), waits=waits)

    def _open(self) -> int | None:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None  # its process is gone
        weakref.finalize(self, os.close, file).atexit = False
        return file

    def __reduce__(self) -> Any:
        return BoardReader, (self._path, self._numbers)


def _look(file: int, number: int | None, *, waits: bool) -> Coming:
    found = b"" if number is None else os.pread(file, 1, 2 * number)
    if number is None or not found or found[0] not in _KNOWN:  # of no interest, or somebody else wrote to the file
        return Coming.UNKNOWN
    coming = Coming(found[0])
    if waits and coming is Coming.SOON:
        os.pwrite(file, b"\1", 2 * number + 1)
    return coming


def _delete(path: str, pid: int) -> None:
    if pid == os.getpid():
        with contextlib.suppress(OSError):
            os.unlink(path)


def wait_for(
    board: Board | BoardReader, url: str, find: Callable[[], Lease | None], is_arriving: Callable[[], bool]
) -> Lease | Coming:
    """Wait for a shard that a plan downloads, and return a lease of it, or what its reader should do instead.

    Args:
        board: The plan's board.
        url: The shard.
        find: Returns a lease if the shard is here.
        is_arriving: Returns whether it is being downloaded.
    """
    waited, deadline = False, time.monotonic() + _LONGEST_WAIT
    while (lease := find()) is None:
        coming = board.look(url, waits=True)
        if coming is not Coming.SOON:
            # If the plan has given up meanwhile, the records that are needed now are less than a shard.
            return Coming.NEVER if waited else coming
        if is_arriving():
            deadline = time.monotonic() + _LONGEST_WAIT
        elif time.monotonic() > deadline:
            return Coming.UNKNOWN
        waited = True
        time.sleep(_PAUSE)
    return lease
