"""The plan of a conversion: where it writes, and which records go into which file."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from dataload._util.indexing import even_split, expand_braces
from dataload._util.settings import check_count
from dataload.errors import ConfigError, SourceNotFoundError
from dataload.sources.discover import find_destination
from dataload.sources.format import Format
from dataload.storage import Remote, Storage, base_name, is_url, join, parent, storage_of

_PLACEHOLDER = re.compile(r"\{shards?(?::\d*d)?\}")
_DEFAULT_NAME = "-{shard:05d}-of-{shards:05d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to write, with the records [start, stop) of the source; `path` is its final name."""

    path: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        return base_name(self.path)

    @property
    def key(self) -> tuple[str, str]:
        return self.name, ""

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a conversion; `remote` is None for a local path."""

    entry: Format
    path: str
    remote: Remote | None = None

    @classmethod
    def of(
        cls,
        destination: str | os.PathLike[str],
        format_name: str | None,
        storage_options: Any = None,
        remote: Any = None,
    ) -> Self:
        """Parse a destination; a ConfigError if the format's writer does not write there."""
        entry, path = find_destination(os.fspath(destination), format_name)
        if not is_url(path):
            return cls(entry, os.path.normpath(path))
        if "remote" not in entry.writer_options.names():
            message = f"the writer of format {entry.name!r} has no option 'remote': write to a local directory"
            raise ConfigError(message, key="destination", value=path)
        found = Remote.of(storage_options, remote)
        return cls(entry, path, Remote(found.store, found.options))  # known versions of objects may be out of date

    def __reduce__(self) -> Any:
        return type(self).of, (self.path, self.entry.name, None, self.remote)  # formats need not pickle

    @property
    def is_shared(self) -> bool:
        """Whether other machines may write here too. This one cannot see their locks."""
        return self.remote is not None

    @property
    def directory(self) -> str:
        return parent(self.path)

    def at(self, name: str) -> str:
        """Return the path of a file beside the destination, as short as that was given."""
        return join(self.directory, name) if self.is_shared else os.path.join(os.path.dirname(self.path), name)

    @property
    def storage(self) -> Storage:
        return storage_of(self.path, self.remote)

    @property
    def journal(self) -> str:
        """Path of the journal, a hidden file beside the destination that matches no shard pattern."""
        return self.at(f".{_PLACEHOLDER.sub('N', base_name(self.path))}.convert.json")

    def log(self, number: int | str = 0, count: int = 0) -> str:
        """Return the path of the log, of the whole or of a partition; "*" stands for any partition."""
        return f"{self.journal.removesuffix('.json')}{f'.{number}-of-{count}' if count else ''}.log"

    def receipt(self, number: int, count: int) -> str:
        """Return the path of the file that a partition of version 0.2 has instead of a log."""
        return f"{self.log(number, count).removesuffix('.log')}.json"

    def plan(self, length: int, *, shards: int | None, records_per_shard: int | None) -> tuple[Shard, ...]:
        """Return the files to write, in index order; for the names, see `dataload.convert.convert`."""
        name = base_name(self.path)
        listed = expand_braces(name) if not _PLACEHOLDER.search(name) else [name]
        if len(listed) > 1:
            if shards not in (None, len(listed)) or records_per_shard is not None:
                message = f"{name!r} names {len(listed)} shards: leave shards and records_per_shard out"
                raise ConfigError(message, key="shards", value=shards)
            _count_shards(length, len(listed), None)
            spans = even_split(length, len(listed))
            return tuple(Shard(self.at(each), *span) for each, span in zip(listed, spans, strict=True))
        count = _count_shards(length, shards, records_per_shard)
        if not _PLACEHOLDER.search(name) and count is None:
            return (Shard(self.at(name), 0, length),)
        name = _template(name, self.entry)
        names = [_fill(name, shard, count or 1) for shard in range(count or 1)]
        if len(set(names)) < len(names):
            message = f"all {len(names)} shards would be called {names[0]!r}: put {{shard:05d}} into the name"
            raise ConfigError(message, key="destination", value=self.path)
        spans = even_split(length, len(names))
        return tuple(Shard(self.at(each), *span) for each, span in zip(names, spans, strict=True))

    def names(self, count: int | None) -> re.Pattern[str]:
        """Return a pattern of the names of `count` shards, or of any number."""
        plan = self.plan(count or 2, shards=count or 2, records_per_shard=None)
        if count is not None:
            return re.compile("|".join(re.escape(shard.name) for shard in plan))
        literals = _PLACEHOLDER.split(_template(base_name(self.path), self.entry))
        return re.compile(r"\d+".join(re.escape(text.replace("{{", "{").replace("}}", "}")) for text in literals))

    def existing(self, plan: Sequence[Shard]) -> list[str]:
        """Return the paths of shards that exist."""
        if self.remote is None:
            return [shard.path for shard in plan if os.path.exists(shard.path)]
        names: set[str] = set()
        with suppress(SourceNotFoundError):
            names.update(self.storage.list(self.directory))  # one request, also for the versions
        return [shard.path for shard in plan if shard.name in names]


def _template(name: str, entry: Format) -> str:
    if _PLACEHOLDER.search(name):
        return name
    known = entry.suffixes or (os.path.splitext(name)[1].lower(),)
    suffix = next((s for s in known if name.lower().endswith(s)), "")
    stem = name[: len(name) - len(suffix)]
    return f"{_literal(stem)}{_DEFAULT_NAME}{_literal(name[len(stem) :])}"


def _count_shards(length: int, shards: int | None, records_per_shard: int | None) -> int | None:
    if shards is not None and records_per_shard is not None:
        message = "shards and records_per_shard both determine the number of files: pass only one of them"
        raise ConfigError(message, key="records_per_shard", value=records_per_shard)
    if records_per_shard is not None:
        return -(-max(1, length) // check_count("records_per_shard", records_per_shard, least=1))
    if shards is not None and check_count("shards", shards, least=1) > max(1, length):
        message = f"cannot split {length} records into {shards} shards: each needs at least one record"
        raise ConfigError(message, key="shards", value=shards)
    return shards


def _literal(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _fill(name: str, shard: int, shards: int) -> str:
    try:
        return name.format(shard=shard, shards=shards)
    except (KeyError, IndexError, ValueError) as error:
        allowed = "only {shard} and {shards} may stand in braces, as in 'train-{shard:05d}-of-{shards:05d}.tar'"
        message = f"{name!r} is not a valid pattern for shard names ({error}): {allowed}"
        raise ConfigError(message, key="destination", value=name) from None


def summarize_paths(paths: Sequence[str]) -> str:
    """Return numbered paths as one string, the range ``a-{000..002}.tar``, which `dataload.open` takes."""
    first, last = paths[0], paths[-1]
    if len(paths) == 1:
        return first
    for number in re.finditer(r"\d+", first):
        head, tail = first[: number.start()], first[number.end() :]
        end = last[len(head) : len(last) - len(tail)]
        pattern = f"{head}{{{number.group()}..{end}}}{tail}"
        if end.isdigit() and expand_braces(pattern) == list(paths):
            return pattern
    return f"{first} ... {last} ({len(paths)} files)"


def pattern_of(names: Sequence[str], typed: str = "") -> str:
    """Return the names as a range if they are numbered, else as `typed` by the user."""
    found = summarize_paths(names)
    return typed or found if " ... " in found else found
