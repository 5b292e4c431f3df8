"""Which records go into which file. Pure (no I/O)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dataload._util.indexing import even_split, expand_braces
from dataload.errors import ConfigError
from dataload.sources.registry import Format, by_suffix, format_names, get_format

__all__ = ["Shard", "destination_format", "manifest_path", "plan_shards", "summarize_paths"]

_PLACEHOLDER = re.compile(r"\{shards?(:\d*d)?\}")
_DEFAULT_NAME = "-{shard:05d}-of-{shards:05d}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write.

    Attributes:
        path: Its final name.
        start: First record of the source that goes into it.
        stop: The record behind the last.
    """

    path: str
    start: int
    stop: int


def destination_format(destination: str, name: str | None) -> Format:
    """The format called `name`, or the one that the end of `destination` means.

    Raises:
        ConfigError: There is none.
    """
    entry = get_format(name) if name is not None else by_suffix(destination)
    if entry is None:
        raise ConfigError(
            f"the end of {destination!r} names no format: pass format=, one of {', '.join(format_names())}",
            key="format",
            value=destination,
        )
    return entry


def plan_shards(
    destination: str, entry: Format, length: int, *, shards: int | None, records_per_shard: int | None
) -> tuple[Shard, ...]:
    """The files to write, in index order.

    Args:
        destination: A path; with ``{shard}`` and ``{shards}`` in its name, as ``"train-{shard:05d}.tar"``, the names
            of the shards, else ``-00000-of-00008`` goes before the suffix.
        entry: The format to write.
        length: Records of the source.
        shards: Number of files, whose lengths differ by one at most; None for one file of the very name.
        records_per_shard: Instead of `shards`: at most so many in each.

    Raises:
        ConfigError: Both are given, a number is less than 1, there are more shards than records, or all shards would
            have one name.
    """
    count = _count_shards(length, shards, records_per_shard)
    directory, name = os.path.split(os.path.normpath(destination))
    if count is None and not _PLACEHOLDER.search(name):
        return (Shard(os.path.join(directory, name), 0, length),)
    if not _PLACEHOLDER.search(name):
        suffix = next((s for s in entry.suffixes if name.lower().endswith(s)), "")
        stem = name[: len(name) - len(suffix)]
        name = f"{_literal(stem)}{_DEFAULT_NAME}{_literal(name[len(stem) :])}"
    names = [_fill(name, shard, count or 1) for shard in range(count or 1)]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{len(names)} shards would have the one name {names[0]!r}: put {{shard:05d}} into it",
            key="destination",
            value=destination,
        )
    spans = even_split(length, len(names))
    return tuple(Shard(os.path.join(directory, path), *span) for path, span in zip(names, spans, strict=True))


def _count_shards(length: int, shards: int | None, records_per_shard: int | None) -> int | None:
    if shards is not None and records_per_shard is not None:
        raise ConfigError(
            "shards and records_per_shard both say how many files: give one of them",
            key="records_per_shard",
            value=records_per_shard,
        )
    for key, value in (("shards", shards), ("records_per_shard", records_per_shard)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ConfigError(f"{key} must be an integer >= 1, got {value!r}", key=key, value=value)
    if shards is not None and shards > max(1, length):
        raise ConfigError(
            f"{shards} shards for {length} records: a shard holds at least one", key="shards", value=shards
        )
    return -(-max(1, length) // records_per_shard) if records_per_shard is not None else shards


def _literal(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _fill(name: str, shard: int, shards: int) -> str:
    try:
        return name.format(shard=shard, shards=shards)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"{name!r} is no pattern for names of shards ({error}): only {{shard}} and {{shards}} may stand in braces, "
            "as in 'train-{shard:05d}-of-{shards:05d}.tar'",
            key="destination",
            value=name,
        ) from None


def manifest_path(destination: str) -> str:
    """Where the manifest of a conversion lies: beside the destination, hidden, so that no pattern matches it."""
    directory, name = os.path.split(os.path.normpath(destination))
    return os.path.join(directory, f".{_PLACEHOLDER.sub('N', name)}.convert.json")


def summarize_paths(paths: Sequence[str]) -> str:
    """Paths as one text, with a brace range that `dataload.open` takes where they are numbered.

    Example:
        >>> summarize_paths(["a-000.tar", "a-001.tar", "a-002.tar"])
        'a-{000..002}.tar'
    """
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
