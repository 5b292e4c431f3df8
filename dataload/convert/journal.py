"""The journal of a conversion: a JSON file beside the destination from which an interrupted conversion resumes.

It names the plan when the conversion begins, and all shards when it ends. In between, a log notes the shards that the
conversion, or each of its partitions, has finished.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from dataload._util.fingerprint import digest
from dataload.catalog.checks import as_content, is_count
from dataload.catalog.facts import Evidence, ShardFacts
from dataload.catalog.ledger import Job
from dataload.convert.mapping import VALUES
from dataload.errors import ConfigError, SourceError
from dataload.storage import Remote, storage_of

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The identity of a conversion or one of its partitions, and its finished shards."""

    source: str  # fingerprint
    records: int
    format: str  # name of the format being written
    options: dict[str, str]  # everything else that decides the content: the writer's options, as text
    shards: tuple[tuple[str, int, int], ...]  # (file name, first record, last record + 1)
    finished: dict[str, ShardFacts] = dataclasses.field(default_factory=dict[str, ShardFacts])  # by file name
    run: str = ""  # random, so that the logs of two runs differ; not of complete local journals
    parts: int = 0  # the number of parts; 0 if the conversion is one run
    part: int = 0  # its number, from 1; 0 for the whole
    counted: bool = False  # whether the numbers of records may differ from the plan, so that the file has them

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
            counts = {"size": shard.bytes, "number of records": shard.records, "number skipped": shard.skipped}
            for what, count in counts.items():
                if not is_count(count):
                    raise TypeError(f"the {what} of the shard {name!r} is {count!r}")

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.shards)

    @property
    def job(self) -> Job:
        """The run and a hash of all that decides the content, for logs."""
        options = sorted(self.options.items())
        return Job(self.run, digest(self.source, self.records, self.format, options, self.shards))

    def with_finished(self, shards: Iterable[ShardFacts]) -> Journal:
        """Return the journal with these shards as far as they belong to it."""
        planned = {name for name, _, _ in self.shards}
        return replace(self, finished={**self.finished, **{each.name: each for each in shards if each.name in planned}})

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
        table = {name: getattr(self, name) for name in ("source", "records", "format", "options", "shards")}
        table |= {"finished": {name: self._to_json(shard) for name, shard in self.finished.items()}}
        table |= {"version": _VERSION}
        table |= {"run": self.run} if self.run else {}  # not of local files, as in releases before URLs
        table |= {"parts": self.parts, "part": self.part} if self.parts else {}  # as in releases before parts
        return json.dumps(table, indent=1).encode()

    def _to_json(self, shard: ShardFacts) -> dict[str, Any]:
        evidence = shard.evidence
        elsewhere = {"etag": evidence.etag, "identity": shard.content} if self.run or self.parts else {}
        counts = {"records": shard.records, "skipped": shard.skipped} if self.counted else {}
        return {"bytes": shard.bytes, "sha256": shard.sha256, "mtime_ns": evidence.mtime_ns, **elsewhere, **counts}

    @classmethod
    def parse(cls, data: bytes, path: str) -> Self:
        try:
            table: dict[str, Any] = json.loads(data)
            if (version := table.pop("version")) != _VERSION:
                raise ValueError(f"its version is {version!r}, this release reads {_VERSION}")
            shards = tuple((str(name), int(start), int(stop)) for name, start, stop in table.pop("shards"))
            planned = {name: stop - start for name, start, stop in shards}
            found: dict[str, dict[str, Any]] = table.pop("finished")
            finished = {name: _parse_shard(name, planned.get(name, 0), **shard) for name, shard in found.items()}
            counted = any("records" in shard for shard in found.values())
            return cls(**table, shards=shards, finished=finished, counted=counted)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            message = f"{path} is not a conversion journal ({error}): delete it, or pass overwrite=True to start over"
            raise ConfigError(message, key="resume", value=path) from error


def _parse_shard(
    name: str,
    planned: int,
    *,
    bytes: int,  # noqa: A002 - the key in the file
    sha256: str,
    mtime_ns: int,
    etag: str | None = None,
    identity: Any = None,
    records: int | None = None,
    skipped: int = 0,
) -> ShardFacts:
    content = None if identity is None else as_content(identity)
    count = planned if records is None else records
    return ShardFacts(name, bytes, count, sha256, content, Evidence(mtime_ns, etag), skipped)


class JournalFile:
    """The file of a journal at `path`; a newer version by another run is not replaced."""

    def __init__(self, path: str, remote: Remote | None = None) -> None:
        self.path: str = path
        self._storage = storage_of(path, remote)
        self._version: Any = None

    def load(self) -> Journal | None:
        found = self._storage.load(self.path)
        if found is None:
            return None
        self._version = found[1]
        return Journal.parse(found[0], self.path)

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
