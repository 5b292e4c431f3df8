"""A node's cache of whole shards, shared by its processes through nothing but files and locks.

``<root>/shards/<name>~<version>`` are complete files that never change. The hidden ``.<same name>.part`` is being
downloaded by the process that holds its exclusive lock; others wait for its end. Whoever reads a shard holds a shared
lock on it, its lease; only files whose exclusive lock is free are evicted, the longest unused first. Locks end with
their processes, so what a killed one leaves is an unlocked part, which the next download or eviction takes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dataload.errors import ConfigError, SourceError
from dataload.storage.remote.settings import ObjectVersion

_LONGEST_NAME = 80
_SPARED = 20  # without a budget, one part in so many of the disk stays free


class Lease:
    """The right to read a shard, until the last reference is dropped.

    Attributes:
        path: Its file.
    """

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        weakref.finalize(self, os.close, descriptor).atexit = False


class CacheFullError(SourceError):
    """There is no room for a shard: others are being read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    used: float
    size: int
    path: str


class ShardCache:
    """The shards below a directory.

    Args:
        root: The directory, which is created if needed.
        budget: Most bytes that shards take; None leaves a twentieth of the disk free.
        share: Without a budget, the most that shards take of what would be free without them.

    Raises:
        ConfigError: Everybody may write to the directory.
        SourceError: The directory cannot be created.
    """

    def __init__(self, root: str, budget: int | None, *, share: float = 1) -> None:
        self.root = root
        self._share = share
        self._directory = os.path.join(root, "shards")
        self._budget = budget
        try:
            os.makedirs(self._directory, 0o700, exist_ok=True)
            mode = os.stat(self._directory).st_mode
        except OSError as error:
            raise SourceError(f"the cache {root} cannot be created: {error.strerror}", path=root) from error
        if mode & stat.S_IWOTH:
            message = (
                f"everybody may write to the cache {self._directory}: choose a directory that others cannot change"
            )
            raise ConfigError(message, key="remote.cache", value=root)

    @staticmethod
    def name(url: str, version: ObjectVersion) -> str:
        """Return the name of a shard's file, which is another for another version."""
        identity = hashlib.blake2b(f"{url}\0{version.tag}\0{version.size}".encode(), digest_size=10).hexdigest()
        return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', url.rpartition('/')[2])[-_LONGEST_NAME:].lstrip('.')}~{identity}"

    def find(self, name: str) -> Lease | None:
        """Return a lease of a shard if it is here."""
        path = os.path.join(self._directory, name)
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            if _lock(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, path):
                with suppress(OSError):
                    os.utime(path)  # the last use
                return Lease(path, descriptor)
            os.close(descriptor)  # evicted in between

    def names(self) -> set[str]:
        """Return the names of the shards that are here."""
        return {name for name in os.listdir(self._directory) if not name.startswith(".")}

    def holds(self, name: str) -> bool:
        """Return whether a shard is here."""
        return os.path.exists(os.path.join(self._directory, name))

    def is_arriving(self, name: str) -> bool:
        """Return whether somebody downloads a shard."""
        return os.path.exists(self._part(name))

    def evict(self, name: str) -> None:
        """Delete a shard, if it is here and nobody has a lease of it."""
        self._delete(os.path.join(self._directory, name))

    def limit(self) -> int:
        """Return the most bytes that all shards may take."""
        if self._budget is not None:
            return self._budget
        disk = os.statvfs(self._directory)
        used, free = self._used(), disk.f_bavail * disk.f_frsize
        spared = disk.f_blocks // _SPARED * disk.f_frsize
        return max(0, min(used + free - spared, int(self._share * (used + free))))

    def check_size(self, url: str, size: int) -> None:
        """Raise a ConfigError if a shard can never be in the cache."""
        if self._budget is not None and size > self._budget:
            raise self.too_small(url, size, self._budget)

    def too_small(self, url: str, size: int, budget: int) -> ConfigError:
        """Return the error of a shard that is larger than what the cache may take."""
        return ConfigError(
            f"{url} has {size} bytes, and the budget of the cache {self._directory} is {budget}: raise "
            "remote.budget to that of several shards, or choose remote.mode 'ranges' if the format can be read so",
            key="remote.budget",
            value=budget,
        )

    def fetch(
        self, url: str, version: ObjectVersion, download: Callable[[int], None], give_up: Callable[[], bool]
    ) -> Lease:
        """Return a lease of a shard, which this or another process downloads if it is not here.

        Args:
            url: The shard.
            version: Its version.
            download: Writes the shard to a descriptor.
            give_up: Drops one lease of this process that is not in use, and returns whether there was one.

        Raises:
            CacheFullError: There is no room, because other shards are being read.
            ConfigError: The shard is larger than the budget.
            SourceError: The disk is full, or the download fails.
        """
        self.check_size(url, version.size)
        name = self.name(url, version)
        path, part = os.path.join(self._directory, name), self._part(name)
        while (lease := self.find(name)) is None:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    # Wait for the download. The file has a lease afterwards, so no exclusive lock may be waited for.
                    _lock(descriptor, fcntl.LOCK_SH)
                    continue
                # Whoever had the lock may have published or evicted the file meanwhile.
                if _is_at(descriptor, part):
                    if not os.path.exists(path):
                        self._fill(descriptor, url, version.size, download, give_up)
                        os.rename(part, path)
                    else:
                        os.unlink(part)
                        continue
                    _lock(descriptor, fcntl.LOCK_SH)
                    if _is_at(descriptor, path):
                        lease = Lease(path, os.dup(descriptor))
                        break
            except BaseException:
                with suppress(OSError):
                    if _is_at(descriptor, part):
                        os.unlink(part)
                raise
            finally:
                os.close(descriptor)
        return lease

    def _fill(
        self, descriptor: int, url: str, size: int, download: Callable[[int], None], give_up: Callable[[], bool]
    ) -> None:
        while True:
            try:
                with self._deciding():
                    os.ftruncate(descriptor, 0)
                    self._make_room(url, size, give_up)
                    _allocate(descriptor, size)
                download(descriptor)
                # Otherwise a crash of the machine could leave a shard of zeros under its final name.
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not (self._evict_one() or (give_up() and self._evict_one())):
                    raise SourceError(
                        f"the disk of the cache {self._directory} is full: {url} needs {size} bytes, the budget is "
                        f"{self._budget or 'all of the disk'}, and nothing is left to be evicted",
                        path=url,
                    ) from error
            else:
                return

    @contextmanager
    def _deciding(self) -> Generator[None]:
        """Let one process at a time decide about room."""
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, url: str, size: int, give_up: Callable[[], bool]) -> None:
        while (excess := self._used() + size - self.limit()) > 0:
            if not self._evict_one() and not give_up():
                raise CacheFullError(
                    f"the cache {self._directory} has no room for {url}, which needs {size} bytes, {excess} more than "
                    "the budget leaves beside the shards that are being read: raise remote.budget",
                    path=url,
                )

    def _part(self, name: str) -> str:
        return os.path.join(self._directory, f".{name}.part")

    def _used(self) -> int:
        return sum(entry.size for entry in self._entries())

    def _entries(self) -> list[_Entry]:
        """Return all files, also parts, by their last use."""
        found: list[_Entry] = []
        with os.scandir(self._directory) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    found.append(_Entry(status.st_mtime, status.st_size, file.path))
        return sorted(found, key=lambda entry: entry.used)

    def _evict_one(self) -> bool:
        """Delete the file that has been unused for longest, and that nobody reads or writes."""
        return any(self._delete(entry.path) for entry in self._entries())

    def _delete(self, path: str) -> bool:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(descriptor, path):
                    os.unlink(path)
                    return True
            finally:
                os.close(descriptor)
        return False


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _allocate(descriptor: int, size: int) -> None:
    """Give a file its size, so that others count it, and a full disk shows now where the system can tell."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            return
    os.ftruncate(descriptor, size)
