"""What a conversion has finished, so that a killed one can go on: a small JSON file beside the destination."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dataload.convert.plan import Shard
from dataload.errors import ConfigError

__all__ = ["Finished", "Manifest", "examine", "is_intact", "remove_temporaries"]

_VERSION = 1
_HASH_BLOCK = 1 << 20
_LOCK_FILE = "lock.mdb"  # LMDB's, rewritten by whoever opens the environment


@dataclass(frozen=True, slots=True)
class Finished:
    """A shard that is in its place.

    Attributes:
        bytes: Its size; of a directory, of the files in it.
        sha256: Of its content; of a directory, of the files in it, in order of name.
        mtime_ns: When it was last written to.
    """

    bytes: int
    sha256: str
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Identifies a conversion, and says how far it got.

    Attributes:
        source: Fingerprint of the source.
        records: Records of the source.
        format: Name of the format that is written.
        options: What else decides the content: the writer's options, as text.
        shards: (name of the file, first record, record behind the last) for each.
        finished: Name of the file -> what is known of it.
    """

    source: str
    records: int
    format: str
    options: dict[str, str]
    shards: tuple[tuple[str, int, int], ...]
    finished: dict[str, Finished] = dataclasses.field(default_factory=dict[str, Finished])
    version: int = _VERSION

    @classmethod
    def of(cls, plan: Sequence[Shard], *, source: str, records: int, format: str, options: dict[str, str]) -> Self:  # noqa: A002
        """The manifest of a conversion that has finished nothing."""
        shards = tuple((os.path.basename(shard.path), shard.start, shard.stop) for shard in plan)
        return cls(source=source, records=records, format=format, options=options, shards=shards)

    def with_finished(self, name: str, shard: Finished) -> Manifest:
        """The same with one more shard."""
        return dataclasses.replace(self, finished={**self.finished, name: shard})

    def differences(self, now: Manifest) -> Iterator[str]:
        """What distinguishes the conversion that was begun from the one asked for, a line each."""
        if self.source != now.source:
            yield f"source: fingerprint {self.source} when it was begun, {now.source} now"
        for name in ("records", "format"):
            if getattr(self, name) != getattr(now, name):
                yield f"{name}: {getattr(self, name)} when it was begun, {getattr(now, name)} now"
        for name in sorted(self.options.keys() | now.options.keys()):
            if self.options.get(name) != now.options.get(name):
                yield f"{name}: {self.options.get(name)} when it was begun, {now.options.get(name)} now"
        if self.shards != now.shards:
            yield f"shards: {_describe(self.shards)} when it was begun, {_describe(now.shards)} now"

    def save(self, path: str) -> None:
        """Write it in one step: a reader sees the old one or the new one."""
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(dataclasses.asdict(self), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: str) -> Self | None:
        """Read what `save` wrote; None if there is nothing.

        Raises:
            ConfigError: It is something else.
        """
        try:
            with open(path, encoding="utf-8") as stream:
                table: dict[str, Any] = json.load(stream)
            if table["version"] != _VERSION:
                raise ValueError(f"it is of version {table['version']!r}, this release reads {_VERSION}")
            finished = {str(name): Finished(**shard) for name, shard in table.pop("finished").items()}
            shards = tuple((str(name), int(start), int(stop)) for name, start, stop in table.pop("shards"))
            return cls(**table, shards=shards, finished=finished)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no manifest of a conversion ({error}): delete it, or pass overwrite=True to start anew",
                key="resume",
                value=path,
            ) from error


def _describe(shards: Sequence[tuple[str, int, int]]) -> str:
    return f"{len(shards)} ({shards[0][0]}, ...)" if shards else "0"


def examine(path: str) -> Finished:
    """Size, content and time of a shard that was just finished."""
    return Finished(_size(path), _sha256(path), _mtime_ns(path))


def is_intact(path: str, finished: Finished) -> bool:
    """Whether a shard is still what was finished. Its content is read only if the time says it was touched."""
    try:
        if _size(path) != finished.bytes:
            return False
        return _mtime_ns(path) == finished.mtime_ns or _sha256(path) == finished.sha256
    except OSError:
        return False


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    return [os.path.join(path, name) for name in sorted(os.listdir(path)) if name != _LOCK_FILE]


def _size(path: str) -> int:
    return sum(os.stat(file).st_size for file in _files(path))


def _mtime_ns(path: str) -> int:
    return max((os.stat(file).st_mtime_ns for file in _files(path)), default=0)


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    for file in _files(path):
        with open(file, "rb") as stream:
            while block := stream.read(_HASH_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def remove_temporaries(path: str) -> None:
    """Delete what killed writers of `path` left behind."""
    directory, name = os.path.split(path)
    index = f"{os.path.splitext(name)[0]}.idx"  # of a tar archive
    patterns = [os.path.join(glob.escape(directory), f".{glob.escape(n)}.*.tmp") for n in (name, index)]
    for leftover in (found for pattern in patterns for found in glob.glob(pattern)):
        if os.path.isdir(leftover):
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(leftover)
