"""Files by which processes that share a cache know which live, the bytes that each may take, and what is to come."""

from __future__ import annotations

import json
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, TypeVar

from dataload._util import system
from dataload._util.caches import PerProcess
from dataload._util.system import LOCK_EX, LOCK_NB, NO_FOLLOW, open_file, read_at, write_at
from dataload._util.threads import Wait
from dataload.storage.errors import write_errors
from dataload.storage.local.folders import trusted_folder

T = TypeVar("T")


class LivingFile:
    """A file locked while this process lives, and deleted with this object, or by others after a kill."""

    def __init__(self, directory: str, prefix: str, content: bytes) -> None:
        living(directory)
        while True:
            with write_errors(directory):
                descriptor, path = tempfile.mkstemp(dir=directory, prefix=prefix)
            with ExitStack() as stack:
                stack.callback(os.close, descriptor)
                with write_errors(path):
                    os.write(descriptor, content)
                # Before it is locked, another process may take its owner for dead, and delete it.
                if lock(descriptor, LOCK_EX | LOCK_NB) and is_at(descriptor, path):
                    stack.pop_all()
                    break
        self.path: str = path
        self.descriptor: int = descriptor
        weakref.finalize(self, _delete, path, os.getpid())
        weakref.finalize(self, os.close, descriptor).atexit = False  # threads use it to the end of the process


def living(directory: str) -> list[str]:
    """Return the paths of the living files in a directory, and delete files of dead processes."""
    found: list[str] = []
    with suppress(FileNotFoundError), os.scandir(directory) as files:
        for file in files:
            with opened(file.path) as descriptor, suppress(FileNotFoundError):
                if descriptor is not None and lock(descriptor, LOCK_EX | LOCK_NB):
                    os.unlink(file.path)
                elif descriptor is not None:
                    found.append(file.path)
    return found


def _delete(path: str, pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def opened(path: str) -> Generator[int | None]:
    """Open a file in order to lock it; None if it is gone."""
    try:
        descriptor = open_file(path, os.O_RDONLY | NO_FOLLOW)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int) -> bool:
    """Lock a file; return False if `kind` does not wait and the lock is taken."""
    with suppress(BlockingIOError):
        system.lock(descriptor, kind)
        return True
    return False


def is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


_SECONDS_BETWEEN_LOOKS = 0.25
_CLAIM = "job-"  # starts the names of files


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a process: `share` of its job's bytes (0 for unplanned reads); it needs `need` of them."""

    job: int = 0
    process: int = 0
    reads: str = "unknown data"
    share: float = 0.0
    need: int = 0
    since: float = 0.0


class Shares:
    """The share of one claim in the cache at `root`, registered by a file that is locked while this object lives."""

    # Each job gets the bytes that it needs and an equal share of the rest; its processes and `sharers` ranks divide
    # both.

    def __init__(
        self,
        root: str,
        limit: Callable[[], int],
        reads: str,
        share: float = 0.0,
        need: int = 0,
        *,
        ranks: int = 1,
        sharers: int = 1,
    ) -> None:
        job = os.getppid() if ranks > 1 else os.getpid()
        self._own = Claim(job=job, process=os.getpid(), reads=reads, share=share, need=need, since=time.time())
        self._root, self._limit, self._sharers = root, limit, sharers
        self._register()

    def _register(self) -> None:
        self._folder = trusted_folder(self._root, "jobs")
        self._file = LivingFile(self._folder, _CLAIM, json.dumps(asdict(self._own)).encode())
        self._looked = -_SECONDS_BETWEEN_LOOKS

    def look(self) -> list[Claim]:
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            if not os.path.exists(self._file.path):
                self._register()  # the cache was deleted
            self._others = [_read(path) for path in living(self._folder) if path != self._file.path]
            self._bytes = self._limit()
            self._looked = time.monotonic()
        return self._others

    def budget(self) -> int:
        own, others = self._own, self.look()
        needs = _needs([own, *others])
        job = needs[own.job] + max(0, self._bytes - sum(needs.values())) // len(needs)
        mates = [other for other in others if other.process == own.process or self._sharers > 1]
        shares = own.share + sum(other.share for other in mates if other.job == own.job)
        if not own.share:
            return self._bytes if shares else job  # plans of the same process make room for such reads
        return max(own.need, int(job * own.share / max(shares, self._sharers)))

    def left(self) -> int:
        """Return the bytes that earlier jobs do not need."""
        needs = _needs([other for other in self.look() if other.since < self._own.since])
        return max(0, self._bytes - sum(need for job, need in needs.items() if job != self._own.job))


def _needs(claims: list[Claim]) -> dict[int, int]:
    needs: dict[int, int] = {}
    for claim in claims:
        needs[claim.job] = max(needs.get(claim.job, 0), claim.need)
    return needs


def _read(path: str) -> Claim:
    try:
        with open(path, "rb") as file:
            return Claim(**json.load(file))
    except (OSError, ValueError, TypeError):
        return Claim()  # of another version


def describe_claim(path: str) -> str:
    """Return who reads what, "" for a file without a claim."""
    if not os.path.basename(path).startswith(_CLAIM):
        return ""
    claim = _read(path)
    needs = f" and needs {claim.need:,} bytes" if claim.need else ""
    return f"process {claim.process or '?'} reads {claim.reads}{needs}"


def describe_jobs(root: str) -> str:
    found = dict.fromkeys(filter(None, map(describe_claim, living(os.path.join(root, "jobs")))))
    return "; ".join(found) or "no other process is registered"


_LONGEST_WAIT = 5.0  # seconds, for a shard without progress


class Coming(IntEnum):
    """The plan for a shard that is not in the cache."""

    UNKNOWN = 0
    SOON = 1  # wait for it
    NEVER = 2  # read it by range


_KNOWN = frozenset(map(int, Coming))


class Board:
    """The prefetch plan for each shard, which tells readers in all processes which to wait for, and whether one does.

    It is a file with 2 bytes per shard.
    """

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
    board: Board | BoardReader, url: str, find: Callable[[], T | None], progress: Callable[[], object]
) -> T | Coming:
    """Wait for a planned shard, while its `progress` changes; return what `find` finds, or what to do instead."""
    waited, wait = False, Wait(_LONGEST_WAIT)
    while (found := find()) is None:
        coming = board.look(url, waits=True)
        if coming is not Coming.SOON:
            # If the plan has given up, reading the needed records by range is less than a shard.
            return Coming.NEVER if waited else coming
        if not wait.goes_on(progress()):
            return Coming.UNKNOWN
        waited = True
    return found
