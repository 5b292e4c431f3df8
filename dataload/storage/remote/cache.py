"""A node's cache of whole shards, shared by its processes through nothing but files and locks.

``<root>/shards/<name>~<version>~<size>`` are complete files that never change; ``~<MD5>`` follows if the ETag is one.
The hidden ``.<same name>.part`` is being downloaded by the process that holds its exclusive lock; others wait for its
end. Whoever reads a shard holds a shared lock on it, its lease; only files whose exclusive lock is free are evicted,
the longest unused first. Locks end with their processes, so what a killed one leaves is an unlocked part, which the
next download or eviction takes.
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
from typing import Any, Literal, cast

from dataload.errors import ConfigError, SourceError
from dataload.storage.remote.settings import ObjectVersion

_LONGEST_NAME = 80
_NAME = re.compile(r"[^~]*~[0-9a-f]{20}~(\d+)(?:~([0-9a-f]{32}))?")
_MD5 = re.compile(r"[0-9a-f]{32}")  # that of several parts ends with their number
_WITH_MD5 = ("s3://", "gs://")
_SPARED = 20  # without a budget, one part in so many of the disk stays free


class Lease:
    """The right to read a shard, until the last reference is dropped.

    Attributes:
        path: Its file.
    """

    __slots__ = ("__weakref__", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path: str = path
        weakref.finalize(self, os.close, descriptor).atexit = False


class CacheFullError(SourceError):
    """There is no room for a shard: others are being read."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A file of the cache.

    Attributes:
        path: Its path.
        size: Size in bytes.
        used: Time of its last use, in seconds since the epoch.
    """

    path: str
    size: int
    used: float

    @property
    def name(self) -> str:
        """Its name, as `ShardCache.name` returns it."""
        return os.path.basename(self.path)

    @property
    def is_part(self) -> bool:
        """True for a download that is under way, or was when its process was killed."""
        return self.name.startswith(".")

    def is_used(self) -> bool:
        """Return whether a process reads or writes it now."""
        with _opened(self.path) as descriptor:
            return descriptor is not None and not _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of comparing a shard with what is known about it.

    Attributes:
        path: Its file.
        by: The evidence: "sha256", "md5" or "length"; None if the name of the file tells nothing.
        problem: The difference; None if there is none.
    """

    path: str
    by: Literal["sha256", "md5", "length"] | None
    problem: str | None = None


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
            problem = f"everybody may write to the cache {self._directory}"
            raise ConfigError(
                f"{problem}: choose a directory that others cannot change", key="remote.cache", value=root
            )

    @staticmethod
    def name(url: str, version: ObjectVersion) -> str:
        """Return the name of a shard's file, which is another for another version."""
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
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            intact = os.fstat(descriptor).st_size == int(name.split("~")[2])
            if intact and _lock(descriptor, fcntl.LOCK_SH) and _is_at(descriptor, path):
                with suppress(OSError):
                    os.utime(path)  # the last use
                return Lease(path, descriptor)
            os.close(descriptor)  # evicted in between
            if not intact:
                with suppress(FileNotFoundError):
                    os.unlink(path)  # somebody has cut it: it is downloaded again

    def names(self) -> set[str]:
        """Return the names of the shards that are here."""
        return {name for name in os.listdir(self._directory) if not name.startswith(".")}

    def holds(self, name: str) -> bool:
        """Return whether a shard is here."""
        return os.path.exists(os.path.join(self._directory, name))

    def is_arriving(self, name: str) -> bool:
        """Return whether somebody downloads a shard."""
        return os.path.exists(os.path.join(self._directory, f".{name}.part"))

    def evict(self, name: str) -> None:
        """Delete a shard, if it is here and nobody has a lease of it."""
        _evict(os.path.join(self._directory, name))

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
        path, part = os.path.join(self._directory, name), os.path.join(self._directory, f".{name}.part")
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
                _lock(descriptor, fcntl.LOCK_UN)  # a thread that still writes may hold a duplicate of the descriptor
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

    def _used(self) -> int:
        return sum(file.size for file in self.files())

    def files(self) -> list[CachedFile]:
        """Return all files, also parts, by their last use."""
        found: list[CachedFile] = []
        with os.scandir(self._directory) as files:
            for file in files:
                with suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    found.append(CachedFile(file.path, status.st_size, status.st_mtime))
        return sorted(found, key=lambda file: file.used)

    def prune(self, budget: int = 0) -> list[CachedFile]:
        """Delete files that nobody reads or writes, the longest unused first, until the others fit into `budget`.

        Returns:
            The deleted files.
        """
        with self._deciding():
            files, gone = self.files(), list[CachedFile]()
            used = sum(file.size for file in files)
            # A part that nobody writes is of no use to anybody.
            for file in sorted(files, key=lambda file: not file.is_part):
                if (file.is_part or used > budget) and _evict(file.path):
                    gone.append(file)
                    used -= file.size
        return gone

    def check(self, file: CachedFile, sha256: str | None = None, *, md5: bool = True) -> Checked | None:
        """Compare a shard with its recorded length, and with a hash if one is known; None if it has gone meanwhile.

        Args:
            file: The shard.
            sha256: Its SHA-256, if known; used in place of the MD5.
            md5: Whether to compare with the MD5 in its name. The ETags of encrypted objects may only look like one.
        """
        with _opened(file.path) as descriptor:
            # The lease keeps it from being evicted, but tells nobody that the shard is in use.
            if descriptor is None or not _lock(descriptor, fcntl.LOCK_SH) or not _is_at(descriptor, file.path):
                return None
            named = _NAME.fullmatch(file.name)
            if named is None:
                return Checked(file.path, None)
            size = os.fstat(descriptor).st_size
            if size != int(named[1]):
                return Checked(file.path, "length", f"it has {size} bytes, and the object has {named[1]}")
            by, expected = ("sha256", sha256) if sha256 else ("md5", named[2] if md5 else None)
            if expected is None:
                return Checked(file.path, "length")
            found = _digest(descriptor, by)
            differs = f"its {by.upper()} is {found}, and that of the object is {expected}"
            return Checked(file.path, cast("Any", by), None if found == expected else differs)

    def remove(self, file: CachedFile) -> None:
        """Delete a file, even if processes read it: they keep it, and the next one to open it downloads it again."""
        with self._deciding(), suppress(FileNotFoundError):
            os.unlink(file.path)

    def _evict_one(self) -> bool:
        """Delete the file that has been unused for longest, and that nobody reads or writes."""
        return any(_evict(file.path) for file in self.files())


def _evict(path: str) -> bool:
    """Delete a file unless somebody reads or writes it; return whether it was deleted."""
    with _opened(path) as descriptor, suppress(OSError):
        if descriptor is not None and _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(descriptor, path):
            os.unlink(path)
            return True
    return False


@contextmanager
def _opened(path: str) -> Generator[int | None]:
    """Open a file whose lock is asked for; None if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _digest(descriptor: int, algorithm: str) -> str:
    with open(descriptor, "rb", closefd=False) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def _lock(descriptor: int, kind: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, kind)
        return True
    return False


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
