"""A file by which the prefetch plan tells readers, in all processes, which shards to wait for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

from dataload._util.caches import PerProcess
from dataload._util.system import NO_FOLLOW, open_file, read_at, write_at
from dataload._util.threads import Wait
from dataload.storage.remote.cache import Lease
from dataload.storage.remote.jobs import LivingFile

_LONGEST_WAIT = 5.0  # seconds, for a shard without progress


class Coming(IntEnum):
    """The plan for a shard that is not in the cache."""

    UNKNOWN = 0
    SOON = 1  # wait for it
    NEVER = 2  # read it by range


_KNOWN = frozenset(map(int, Coming))


class Board:
    """The plan for each shard, and whether a reader waits: a file with 2 bytes per shard."""

    def __init__(self, directory: str, urls: Sequence[str]) -> None:
        self.numbers: dict[str, int] = {url: number for number, url in enumerate(urls)}
        self._living = LivingFile(directory, "plan-", bytes(2 * len(urls)))
        self._file = self._living.descriptor  # not mapped: truncating a mapped file kills its readers

    def set(self, shard: int, coming: Coming) -> None:
        """Publish the plan for a shard. Without one, its reader waits for seconds and then downloads it itself."""
        with suppress(OSError):
            write_at(self._file, bytes([coming]), 2 * shard)

    def take_waiting(self) -> list[int]:
        """Return the shards that readers have waited for since the last call."""
        found = read_at(self._file, 2 * len(self.numbers), 0)[1::2]
        waiting = [shard for shard, waits in enumerate(found) if waits] if found.strip(b"\0") else []
        for shard in waiting:
            write_at(self._file, b"\0", 2 * shard + 1)
        return waiting

    def clear(self) -> None:
        with suppress(OSError):
            write_at(self._file, bytes(2 * len(self.numbers)), 0)

    def look(self, url: str, *, waits: bool = False) -> Coming:
        return _look(self._file, self.numbers.get(url), waits=waits)

    def __reduce__(self) -> Any:
        return BoardReader, (self._living.path, self.numbers)


class BoardReader:
    """A `Board` in another process."""

    def __init__(self, path: str, numbers: Mapping[str, int]) -> None:
        self._path = path
        self._numbers = numbers
        self._file: PerProcess[int | None] = PerProcess()

    def look(self, url: str, *, waits: bool = False) -> Coming:
        found = self._file.get(self._open)
        return Coming.UNKNOWN if found is None else _look(found, self._numbers.get(url), waits=waits)

    def _open(self) -> int | None:
        try:
            file = open_file(self._path, os.O_RDWR | NO_FOLLOW)
        except OSError:
            return None  # its process is gone
        weakref.finalize(self, os.close, file).atexit = False
        return file

    def __reduce__(self) -> Any:
        return BoardReader, (self._path, self._numbers)


def _look(file: int, number: int | None, *, waits: bool) -> Coming:
    with suppress(OSError):
        found = b"" if number is None else read_at(file, 1, 2 * number)
        if number is None or not found or found[0] not in _KNOWN:  # not planned, or the file was damaged
            return Coming.UNKNOWN
        coming = Coming(found[0])
        if waits and coming is Coming.SOON:
            write_at(file, b"\1", 2 * number + 1)
        return coming
    return Coming.UNKNOWN


def wait_for(
    board: Board | BoardReader, url: str, find: Callable[[], Lease | None], progress: Callable[[], object]
) -> Lease | Coming:
    """Wait for a planned shard, while its `progress` changes; return a lease of it, or what its reader should do."""
    waited, wait = False, Wait(_LONGEST_WAIT)
    while (lease := find()) is None:
        coming = board.look(url, waits=True)
        if coming is not Coming.SOON:
            # If the plan has given up, reading the needed records by range is less than a shard.
            return Coming.NEVER if waited else coming
        if not wait.goes_on(progress()):
            return Coming.UNKNOWN
        waited = True
    return lease
