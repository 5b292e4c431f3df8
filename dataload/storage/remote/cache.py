"""A node's cache of whole shards, shared by its processes through files and locks alone.

``<root>/shards/<name>~<version>~<size>`` are complete files that never change; ``~<MD5>`` follows if the ETag is one.
The hidden ``.<same name>.part`` is a download by the process that holds its exclusive lock; others wait for that lock.
Readers hold a shared lock, a lease. Only files without locks are evicted, least recently used first. Locks end with
their processes, so a killed process leaves an unlocked download, which the next download or eviction takes over.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dataload._util.caches import PerProcess
from dataload._util.system import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, NO_FOLLOW, open_file, open_folder, reserve
from dataload._util.threads import Wait
from dataload.errors import ConfigError, MachineError, SourceError
from dataload.storage.local.folders import discard_untrusted, distrust, trusted_folder
from dataload.storage.remote.jobs import describe_jobs, is_at, lock, opened
from dataload.storage.remote.settings import ObjectVersion

_LONGEST_NAME = 80
_MD5 = re.compile(r"[0-9a-f]{32}")  # a multipart ETag ends with the number of parts
_WITH_MD5 = ("s3://", "gs://")
_SPARED = 20  # without a budget, this fraction of the disk stays free, 1 in 20
_SPARED_BYTES = 1 << 16  # with one, for the files of plans and jobs


_arrivals: PerProcess[Counter[str]] = PerProcess()  # of shards that this process wanted, by cache


class Lease:
    """Permission to read a shard, a file of `size` bytes, until the last reference is dropped."""

    __slots__ = ("__weakref__", "path", "size")

    def __init__(self, path: str, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor).atexit = False  # first: also if what follows fails
        self.path: str = path
        self.size: int = os.fstat(descriptor).st_size


class CacheFullError(MachineError):
    """The cache has no room for a shard because others are being read, or another process has stalled."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache: path, size in bytes, and last use in seconds since the epoch."""

    path: str
    size: int
    used: float

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def is_part(self) -> bool:
        """True for an unfinished download, running or abandoned."""
        return self.name.startswith(".")

    def is_used(self) -> bool:
        with opened(self.path) as descriptor:
            return descriptor is not None and not lock(descriptor, LOCK_EX | LOCK_NB)


class ShardCache:
    """The shards below `root`, at most `budget` bytes; None: a `share` of the free disk, sparing a twentieth."""

    def __init__(self, root: str, budget: int | None, *, share: float = 1, timeout: float = 120.0) -> None:
        self.root = root
        self._share = share
        self._directory = trusted_folder(root, "shards")
        self._budget = budget
        self._timeout = timeout

    @staticmethod
    def name(url: str, version: ObjectVersion) -> str:
        identity = hashlib.blake2b(f"{url}\0{version.tag}\0{version.size}".encode(), digest_size=10).hexdigest()
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", url.rpartition("/")[2])[-_LONGEST_NAME:].lstrip(".")
        md5 = version.tag.strip('"')
        suffix = f"~{md5}" if version.has_etag and url.startswith(_WITH_MD5) and _MD5.fullmatch(md5) else ""
        return f"{name}~{identity}~{version.size}{suffix}"

    def find(self, name: str) -> Lease | None:
        """Return a lease of a shard if it is here, at its full length."""
        path = os.path.join(self._directory, name)
        while True:
            try:
                descriptor = open_file(discard_untrusted(path), os.O_RDONLY | NO_FOLLOW)
            except FileNotFoundError:
                return None
            lease = Lease(path, descriptor)
            intact = lease.size == int(name.split("~")[2])
            if intact and lock(descriptor, LOCK_SH) and is_at(descriptor, path):
                with suppress(OSError):
                    os.utime(path)  # the last use
                return lease
            del lease  # evicted in between
            if not intact:
                with suppress(FileNotFoundError):
                    os.unlink(path)  # another program has cut it: it is downloaded again

    def names(self) -> set[str]:
        with suppress(FileNotFoundError):
            return {name for name in os.listdir(self._directory) if not name.startswith(".")}
        return set()

    def holds(self, name: str) -> bool:
        return os.path.exists(os.path.join(self._directory, name))

    def progress(self, name: str) -> object:
        """Return a value that changes as a shard's download advances; None if no process writes it."""
        with suppress(FileNotFoundError):
            status = os.stat(os.path.join(self._directory, f".{name}.part"))
            return (status.st_ino, status.st_mtime_ns) if status.st_size else None
        return None

    def evict(self, name: str) -> None:
        _evict(os.path.join(self._directory, name))

    def limit(self, used: int | None = None) -> int:
        """Return the bytes that shards may take; they take `used`, if that is known."""
        disk = shutil.disk_usage(trusted_folder(self.root, "shards"))
        free = disk.free
        if self._budget is not None and self._budget < free:
            return self._budget
        used = self._used() if used is None else used
        if self._budget is not None:
            return max(0, min(self._budget, used + free - _SPARED_BYTES))
        spared = disk.total // _SPARED
        return max(0, min(used + free - spared, int(self._share * (used + free))))

    def most(self) -> int:
        """Return the budget, or the limit without one: other programs may free disk space again."""
        return self.limit() if self._budget is None else self._budget

    def check_size(self, url: str, size: int) -> None:
        if self._budget is not None and size > self._budget:
            raise self.too_small(url, size, self._budget)

    def too_small(self, url: str, size: int, budget: int) -> ConfigError:
        return ConfigError(
            f"{url} has {size} bytes, and the budget of the cache {self._directory} is {budget}: raise "
            "remote.budget to the size of several shards, or set remote.mode to 'ranges' if the format supports it",
            key="remote.budget",
            value=budget,
        )

    def fetch(
        self,
        url: str,
        version: ObjectVersion,
        download: Callable[[int], None],
        give_up: Callable[[], bool],
        wait: Wait | None = None,
    ) -> Lease:
        """Return a lease of a shard, downloading it by `download` or waiting for another process that does."""
        self.check_size(url, version.size)
        wait, remade, arrivals = wait or Wait(0), False, _arrivals.get(Counter)
        while True:
            try:
                with self._evicting(url, version.size, give_up):
                    lease = self._fetch(url, version, download, give_up, wait)
                    arrivals[self.root] += 1
                    return lease
            except CacheFullError as error:
                # Other threads of this process take turns; progress of other jobs does not help.
                if not wait.goes_on(arrivals[self.root]):
                    raise CacheFullError(f"{error}; {self._holders()}", path=url) from error
            except FileNotFoundError as error:
                if isinstance(error, SourceError):
                    raise
                if remade:
                    what = f"the cache {self._directory} is repeatedly deleted while it is in use"
                    raise SourceError(f"{what}: set remote.cache to another directory", path=url) from error
                remade = bool(trusted_folder(self.root, "shards"))

    @contextmanager
    def _evicting(self, url: str, size: int, give_up: Callable[[], bool]) -> Generator[None]:
        """Leave the ``with`` block without an error if the disk was full and an eviction made room."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self._evict_one() or (give_up() and self._evict_one()):
                return
            free = shutil.disk_usage(self._directory).free
            raise CacheFullError(
                f"the disk of the cache {self._directory} is full: {url} needs {size} bytes, the budget is "
                f"{self._budget or 'all of the disk'}, and nothing is left to evict; "
                f"{free:,} bytes are free",
                path=url,
            ) from error

    def _holders(self) -> str:
        used = [file for file in self.files() if file.is_used()]
        names = [file.name.lstrip(".").partition("~")[0] for file in used]
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        held = f"shards in use: {some} ({sum(file.size for file in used):,} bytes)" if used else "no shard is in use"
        remedy = "raise remote.budget, free space on the disk, or end one of these jobs"
        return f"{held}; {describe_jobs(self.root)}: {remedy}"

    def _await(self, descriptor: int, kind: int, wait: Wait, progress: Callable[[], object], what: str) -> None:
        """Lock a file that another process holds, waiting while that process makes progress."""
        own = Wait(self._timeout, pause=wait.pause)
        while not lock(descriptor, kind | LOCK_NB):
            if not own.goes_on(progress()):
                raise CacheFullError(f"another process has not {what} for {self._timeout:g} s")

    def _fetch(
        self, url: str, version: ObjectVersion, download: Callable[[int], None], give_up: Callable[[], bool], wait: Wait
    ) -> Lease:
        name = self.name(url, version)
        path, partial = os.path.join(self._directory, name), os.path.join(self._directory, f".{name}.part")
        while (lease := self.find(name)) is None:
            descriptor = open_file(partial, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o600)
            ours = lock(descriptor, LOCK_EX | LOCK_NB)
            try:
                if not ours:
                    # Wait for the download, but not for an exclusive lock: the file has a lease afterwards.
                    what = f"written to {partial}"
                    self._await(descriptor, LOCK_SH, wait, lambda: self.progress(name), what)
                    continue
                # The previous holder of the lock may have published or evicted the file.
                if is_at(descriptor, partial):
                    if os.path.exists(path) or distrust(os.fstat(descriptor)):
                        os.unlink(partial)
                        continue
                    self._fill(descriptor, url, version.size, download, give_up)
                    with self._deciding():  # else a concurrent listing may see neither name
                        os.rename(partial, path)
                    lock(descriptor, LOCK_SH)
                    if is_at(descriptor, path):
                        lease = Lease(path, os.dup(descriptor))
                        break
            except BaseException:
                with suppress(OSError):
                    if ours and is_at(descriptor, partial):
                        os.unlink(partial)
                lock(descriptor, LOCK_UN)  # a thread that still writes may hold a duplicate of the descriptor
                raise
            finally:
                os.close(descriptor)
        return lease

    def _fill(
        self, descriptor: int, url: str, size: int, download: Callable[[int], None], give_up: Callable[[], bool]
    ) -> None:
        with self._deciding():
            os.ftruncate(descriptor, 0)
            self._make_room(url, size, give_up)
            _allocate(descriptor, size)
        download(descriptor)
        # Otherwise a crash of the machine could leave a shard of zeros under its final name.
        os.fsync(descriptor)

    @contextmanager
    def _deciding(self) -> Generator[None]:
        descriptor = open_folder(self._directory)
        try:
            self._await(descriptor, LOCK_EX, Wait(0), self.names, f"unlocked {self._directory}")
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, url: str, size: int, give_up: Callable[[], bool]) -> None:
        while (excess := (used := self._used()) + size - (limit := self.limit(used))) > 0:
            if not self._evict_one() and not give_up():
                what = "the budget" if limit == self._budget else "the disk"
                rule = "; without remote.budget, a twentieth of the disk stays free" if self._budget is None else ""
                raise CacheFullError(
                    f"the cache {self._directory} has no room for {url}, which needs {size} bytes, {excess} more than "
                    f"{what} leaves beside the shards that are being read{rule}",
                    path=url,
                )

    def _used(self) -> int:
        return sum(status.st_size for _, status in self._statuses())

    def files(self) -> list[CachedFile]:
        """Return all files, unfinished downloads included, least recently used first."""
        found = [CachedFile(path, status.st_size, status.st_mtime) for path, status in self._statuses()]
        return sorted(found, key=lambda file: file.used)

    def _statuses(self) -> Iterator[tuple[str, os.stat_result]]:
        with suppress(FileNotFoundError), os.scandir(self._directory) as files:
            for file in files:
                try:  # not suppress, which takes as long as the call: there may be thousands
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield file.path, status

    def prune(self, budget: int = 0, only: Container[str] | None = None) -> list[CachedFile]:
        """Delete unused files, `only` these paths, least recently used first, until the rest fits; return them."""
        with self._deciding():
            files, gone = self.files(), list[CachedFile]()
            used = sum(file.size for file in files)
            # Remove abandoned downloads first.
            for file in sorted(files, key=lambda file: not file.is_part):
                if (file.is_part or used > budget) and (only is None or file.path in only) and _evict(file.path):
                    gone.append(file)
                    used -= file.size
        return gone

    def remove(self, file: CachedFile) -> None:
        """Delete a file even if it is being read: readers keep it, and the next opening downloads it again."""
        with self._deciding(), suppress(FileNotFoundError):
            os.unlink(file.path)

    def _evict_one(self) -> bool:
        return any(_evict(file.path) for file in self.files())


def _evict(path: str) -> bool:
    """Delete a file without readers and writers; return whether it was deleted."""
    with opened(path) as descriptor, suppress(OSError):
        if descriptor is not None and lock(descriptor, LOCK_EX | LOCK_NB) and is_at(descriptor, path):
            os.unlink(path)
            return True
    return False


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space of a file, so that others count it and a full disk shows at once where supported."""
    try:
        reserve(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # also for a size of 0
            raise
        os.ftruncate(descriptor, size)
