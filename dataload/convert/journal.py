"""The journal of a conversion: a JSON file beside the destination from which an interrupted conversion resumes.

Each partition has its own journal, which becomes its receipt when it has finished. The journal of the whole names the
plan and, once merged, the shards that the partitions have finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dataload.catalog.checks import ShardIdentity, as_identity, is_count
from dataload.catalog.evidence import LOCK_FILE, shard_bytes
from dataload.convert.function_values import VALUES
from dataload.errors import ConfigError, SourceError
from dataload.storage import Remote, is_url, storage_of

_VERSION = 1


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """Size in bytes, hash and version of a complete shard: of its file, or of all files in its directory.

    In an object store, `mtime_ns` is 0 and `identity` known (see `ShardEntry.identity`). `records` is None for the
    planned number. `skipped` counts the bad records left out.
    """

    bytes: int
    sha256: str
    mtime_ns: int
    etag: str | None = None
    identity: ShardIdentity | None = None
    records: int | None = None
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.identity is not None:  # from a saved journal
            object.__setattr__(self, "identity", as_identity(self.identity))

    @classmethod
    def of(cls, path: str, hashed: tuple[int, str] | None = None) -> Self:
        files = _files(path)
        size = _size(files)
        sha256 = hashed[1] if hashed is not None and hashed[0] == size else _sha256(files)
        return cls(size, sha256, _mtime_ns(files))

    @classmethod
    def of_files(cls, files: Sequence[str]) -> Self:
        return cls(_size(files), _sha256(files), _mtime_ns(files))

    def as_uploaded(self, url: str, remote: Remote | None) -> Self:
        return dataclasses.replace(self, mtime_ns=0, etag=storage_of(url, remote).etag(url))

    def matches(self, path: str, remote: Remote | None = None) -> bool:
        """Return whether `path` is still this shard. Its content is read only if its mtime differs."""
        try:
            if is_url(path):
                storage = storage_of(path, remote)
                return shard_bytes(path, remote) == self.bytes and storage.etag(path) == self.etag
            files = _files(path)
            if _size(files) != self.bytes:
                return False
            return _mtime_ns(files) == self.mtime_ns or _sha256(files) == self.sha256
        except OSError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The identity of a conversion or one of its partitions, and its finished shards."""

    source: str  # fingerprint
    records: int
    format: str  # name of the format being written
    options: dict[str, str]  # everything else that decides the content: the writer's options, as text
    shards: tuple[tuple[str, int, int], ...]  # (file name, first record, last record + 1)
    finished: dict[str, FinishedShard] = dataclasses.field(default_factory=dict[str, FinishedShard])  # by file name
    version: int = _VERSION
    run: str = ""  # of a journal in an object store: random, so that the journals of two runs always differ
    parts: int = 0  # the number of parts; 0 if the conversion is one run
    part: int = 0  # its number, from 1; 0 for the whole

    def __post_init__(self) -> None:
        # A saved journal may have been damaged, or made up.
        if not isinstance(self.options, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("its options are not a table")
        for name, number in (("parts", self.parts), ("part", self.part)):
            if type(number) is not int or number < 0:
                raise TypeError(f"{name} is {number!r}")
        if unknown := self.finished.keys() - {name for name, _, _ in self.shards}:
            raise ValueError(f"it has no shard {min(unknown)!r}, and yet says that it is finished")
        for name, shard in self.finished.items():
            records = 0 if shard.records is None else shard.records
            for what, count in (
                ("size", shard.bytes),
                ("number of records", records),
                ("number skipped", shard.skipped),
            ):
                if not is_count(count):
                    raise TypeError(f"the {what} of the shard {name!r} is {count!r}")

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.shards)

    def differences(self, now: Journal) -> Iterator[str]:
        """Yield a line for each difference of the requested conversion, `now`, except partitions once complete."""
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in ("source", "records", "format")]
        options = sorted(self.options.keys() | now.options.keys())
        for name in [each for each in options if each.endswith(VALUES)]:
            function = name.removesuffix(VALUES)
            # Values of another function differ anyway, and 0.2 noted none.
            if name not in self.options or self.options.get(function) != now.options.get(function):
                options.remove(name)
        pairs += [(name, self.options.get(name, "not set"), now.options.get(name, "not set")) for name in options]
        numbers = () if self.complete else ("parts", "part")
        pairs += [(name, getattr(self, name) or "none", getattr(now, name) or "none") for name in numbers]
        for name, before, after in pairs:
            if before != after:
                yield f"{name}: {before} when it began, {after} now"
        if self.shards != now.shards:
            yield f"shards: {_summary(self.shards)} when it began, {_summary(now.shards)} now"

    def to_bytes(self) -> bytes:
        table = dataclasses.asdict(self)
        if not self.parts:  # as in releases before parts
            del table["parts"], table["part"]
        if not self.run:  # of local files, as in releases before URLs
            del table["run"]
        for shard in table["finished"].values():
            if not self.run and not self.parts:
                del shard["etag"], shard["identity"]
            if shard["records"] is None:
                del shard["records"], shard["skipped"]
        return json.dumps(table, indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        try:
            table: dict[str, Any] = json.loads(data)
            if table["version"] != _VERSION:
                raise ValueError(f"its version is {table['version']!r}, this release reads {_VERSION}")
            finished = {str(name): FinishedShard(**shard) for name, shard in table.pop("finished").items()}
            shards = tuple((str(name), int(start), int(stop)) for name, start, stop in table.pop("shards"))
            return cls(**table, shards=shards, finished=finished)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{path} is not a conversion journal ({error}): delete it, or pass overwrite=True to start over"
            raise ConfigError(message, key="resume", value=path) from error


class JournalFile:
    """The file of a journal at `path`; a newer version by another run is not replaced."""

    def __init__(self, path: str, remote: Remote | None = None) -> None:
        self.path = path
        self._storage = storage_of(path, remote)
        self._version: Any = None

    def load(self) -> Journal | None:
        found = self._storage.load(self.path)
        if found is None:
            return None
        self._version = found[1]
        return Journal.parse(found[0], self.path)

    def skip(self) -> None:
        """Prepare to replace the file, whatever it contains."""
        found = self._storage.load(self.path)
        self._version = None if found is None else found[1]

    def save(self, journal: Journal) -> None:
        """Replace the file in one step; a SourceError if another run has replaced or removed it since."""
        if not self.offer(journal):
            message = f"another conversion has taken over {self.path}: wait until it has ended"
            raise SourceError(message, path=self.path)

    def offer(self, journal: Journal) -> bool:
        """Save, but return False if another run has replaced or removed the file."""
        try:
            self._version = self._storage.replace(self.path, journal.to_bytes(), self._version)
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        found = self._storage.load(self.path)
        if found is not None and found[1] == self._version:
            self._storage.remove(self.path)


def _summary(shards: Sequence[tuple[str, int, int]]) -> str:
    return f"{len(shards)} ({shards[0][0]}, ...)" if shards else "0"


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    # Hidden files are leftovers of file systems and file managers, not LMDB's.
    names = [name for name in sorted(os.listdir(path)) if name != LOCK_FILE and not name.startswith(".")]
    return [os.path.join(path, name) for name in names]


def _size(files: Sequence[str]) -> int:
    return sum(os.stat(file).st_size for file in files)


def _mtime_ns(files: Sequence[str]) -> int:
    return max((os.stat(file).st_mtime_ns for file in files), default=0)


def _sha256(files: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
