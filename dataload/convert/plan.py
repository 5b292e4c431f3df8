"""The plan of a conversion: which records go into which file. Pure (no I/O)."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dataload._util.indexing import even_split, expand_braces
from dataload._util.settings import check_count
from dataload.errors import ConfigError
from dataload.sources.format import Format
from dataload.storage import base_name, is_url, join, parent

Item = TypeVar("Item")

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


def plan_shards(
    destination: str, entry: Format, length: int, *, shards: int | None, records_per_shard: int | None
) -> tuple[Shard, ...]:
    """Return the files to write, in index order; for the names, see `dataload.convert.convert`."""
    directory, name = _split(destination)
    listed = expand_braces(name) if not _PLACEHOLDER.search(name) else [name]
    if len(listed) > 1:
        if shards not in (None, len(listed)) or records_per_shard is not None:
            message = f"{name!r} names {len(listed)} shards: leave shards and records_per_shard out"
            raise ConfigError(message, key="shards", value=shards)
        _count_shards(length, len(listed), None)
        spans = even_split(length, len(listed))
        return tuple(Shard(join(directory, each), *span) for each, span in zip(listed, spans, strict=True))
    count = _count_shards(length, shards, records_per_shard)
    if not _PLACEHOLDER.search(name) and count is None:
        return (Shard(join(directory, name), 0, length),)
    name = _template(name, entry)
    names = [_fill(name, shard, count or 1) for shard in range(count or 1)]
    if len(set(names)) < len(names):
        message = f"all {len(names)} shards would be called {names[0]!r}: put {{shard:05d}} into the name"
        raise ConfigError(message, key="destination", value=destination)
    spans = even_split(length, len(names))
    return tuple(Shard(join(directory, path), *span) for path, span in zip(names, spans, strict=True))


def shard_names(destination: str, entry: Format, count: int | None) -> re.Pattern[str]:
    plan = plan_shards(destination, entry, count or 2, shards=count or 2, records_per_shard=None)
    if count is not None:
        return re.compile("|".join(re.escape(shard.name) for shard in plan))
    literals = _PLACEHOLDER.split(_template(_split(destination)[1], entry))
    return re.compile(r"\d+".join(re.escape(text.replace("{{", "{").replace("}}", "}")) for text in literals))


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


def _split(destination: str) -> tuple[str, str]:
    if is_url(destination):
        return parent(destination), base_name(destination)
    return os.path.split(os.path.normpath(destination))


def _literal(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _fill(name: str, shard: int, shards: int) -> str:
    try:
        return name.format(shard=shard, shards=shards)
    except (KeyError, IndexError, ValueError) as error:
        allowed = "only {shard} and {shards} may stand in braces, as in 'train-{shard:05d}-of-{shards:05d}.tar'"
        message = f"{name!r} is not a valid pattern for shard names ({error}): {allowed}"
        raise ConfigError(message, key="destination", value=name) from None


def journal_path(destination: str) -> str:
    """Return the path of the journal, a hidden file beside the destination that matches no shard pattern."""
    directory, name = _split(destination)
    return join(directory, f".{_PLACEHOLDER.sub('N', name)}.convert.json")


def log_path(journal: str, number: int | str = 0, count: int = 0) -> str:
    """Return the path of the log beside a journal, of the whole or of a partition; "*" stands for any partition."""
    return f"{journal.removesuffix('.json')}{f'.{number}-of-{count}' if count else ''}.log"


def receipt_path(journal: str, number: int, count: int) -> str:
    """Return the path of the file that a partition of version 0.2 has instead of a log."""
    return f"{log_path(journal, number, count).removesuffix('.log')}.json"


def select_part(plan: Sequence[Item], number: int, count: int) -> tuple[Item, ...]:
    """Return the contiguous shards of partition `number`, counted from 1, of `count`."""
    if check_count("the number of parts", count, least=1) > len(plan):
        message = (
            f"cannot split {len(plan)} shard{'' if len(plan) == 1 else 's'} into {count} parts: ask for fewer parts"
        )
        raise ConfigError(message, key="part", value=count)
    if check_count("the part", number, least=1) > count:
        raise ConfigError(f"there is no part {number} of {count}: parts are counted from 1", key="part", value=number)
    start, stop = even_split(len(plan), count)[number - 1]
    return tuple(plan[start:stop])


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
    if len(names) > 1 and " ... " in found:
        return typed or found
    return found
