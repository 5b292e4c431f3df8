"""The journal of a conversion: a small JSON file beside the destination that lets an interrupted conversion resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dataload.errors import ConfigError
from dataload.sources.find import LOCK_FILE
from dataload.storage import storage_of
from dataload.storage.errors import file_errors
from dataload.storage.local.parts import write_errors
from dataload.storage.local.text import read_text

_VERSION = 1


@dataclass(frozen=True, slots=True)
class FinishedShard:
    """Size, hash and time of the last modification of a complete shard: of its file, or of all in its directory."""

    bytes: int
    sha256: str
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> Self:
        """Describe a shard that was just written."""
        return cls(_size(path), _sha256(path), _mtime_ns(path))

    def matches(self, path: str) -> bool:
        """Return whether `path` is still the shard described here. Its content is read only if its mtime differs."""
        try:
            if _size(path) != self.bytes:
                return False
            return _mtime_ns(path) == self.mtime_ns or _sha256(path) == self.sha256
        except OSError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The identity of a conversion and the shards it has finished."""

    source: str  # fingerprint
    records: int
    format: str  # name of the format being written
    options: dict[str, str]  # everything else that decides the content: the writer's options, as text
    shards: tuple[tuple[str, int, int], ...]  # (file name, first record, last record + 1)
    finished: dict[str, FinishedShard] = dataclasses.field(default_factory=dict[str, FinishedShard])  # by file name
    version: int = _VERSION

    def __post_init__(self) -> None:
        # A saved journal may have been damaged, or made up.
        if not isinstance(self.options, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError("its options are not a table")
        if unknown := self.finished.keys() - {name for name, _, _ in self.shards}:
            raise ValueError(f"it has no shard {min(unknown)!r}, and yet says that it is finished")
        for name, shard in self.finished.items():
            if type(shard.bytes) is not int:
                raise TypeError(f"the size of the shard {name!r} is {shard.bytes!r}")

    def differences(self, now: Journal) -> Iterator[str]:
        """Yield a line for each way in which the requested conversion, `now`, differs from this one."""
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in ("source", "records", "format")]
        options = sorted(self.options.keys() | now.options.keys())
        pairs += [(name, self.options.get(name, "not set"), now.options.get(name, "not set")) for name in options]
        for name, before, after in pairs:
            if before != after:
                yield f"{name}: {before} when it began, {after} now"
        if self.shards != now.shards:
            yield f"shards: {_summary(self.shards)} when it began, {_summary(now.shards)} now"

    def save(self, path: str) -> None:
        """Replace the file in one step: readers see either the old journal or the new one."""
        with write_errors(path), storage_of(path).create(path, overwrite=True) as part:
            with part.create() as stream:
                stream.write(json.dumps(dataclasses.asdict(self), indent=1).encode())
            part.publish()

    @classmethod
    def load(cls, path: str) -> Self | None:
        """Read a saved journal; return None if there is no such file.

        Raises:
            ConfigError: The file is not a journal, or its version is unknown.
            SourceError: The file cannot be read.
        """
        try:
            with file_errors(path):
                table: dict[str, Any] = json.loads(read_text(path))
            if table["version"] != _VERSION:
                raise ValueError(f"its version is {table['version']!r}, this release reads {_VERSION}")
            finished = {str(name): FinishedShard(**shard) for name, shard in table.pop("finished").items()}
            shards = tuple((str(name), int(start), int(stop)) for name, start, stop in table.pop("shards"))
            return cls(**table, shards=shards, finished=finished)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{path} is not a conversion journal ({error}): delete it, or pass overwrite=True to start over"
            raise ConfigError(message, key="resume", value=path) from error


def _summary(shards: Sequence[tuple[str, int, int]]) -> str:
    return f"{len(shards)} ({shards[0][0]}, ...)" if shards else "0"


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    # Hidden files are not LMDB's: what file systems and file managers leave behind.
    names = [name for name in sorted(os.listdir(path)) if name != LOCK_FILE and not name.startswith(".")]
    return [os.path.join(path, name) for name in names]


def _size(path: str) -> int:
    return sum(os.stat(file).st_size for file in _files(path))


def _mtime_ns(path: str) -> int:
    return max((os.stat(file).st_mtime_ns for file in _files(path)), default=0)


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    for file in _files(path):
        with open(file, "rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()
