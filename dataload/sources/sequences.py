"""Sequences as runs of consecutive records: how long each is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.base import Source, locate, select_fields
from dataload.types import BatchReader, ColumnReader, Int64Array

SequenceKey: TypeAlias = "str | re.Pattern[str] | Literal[True]"
"""What of a key names the sequence; see `sequence_lengths`."""

_BLOCK = 1024  # records
_KEY = "__key__"
_NUMBERED = re.compile(r"(.*)[/_.-]\d+\Z", re.DOTALL)


def sequence_lengths(
    source: Any, *, field: str | None = None, key: SequenceKey | None = None, shards: bool = False
) -> Int64Array:
    r"""How long the sequences of a source are, for `StreamSampler` and whatever else keeps records in their order.

    A sequence is a run of consecutive records; what comes again after another one is another sequence. Exactly one
    of `field`, `key` and `shards` says where they end. Records are read in blocks, and of them only `field`; keys of
    built-in sources cost no record. For large data, count once and keep the lengths in a file.

    Args:
        source: Anything with ``__len__`` and ``__getitem__``.
        field: Name of the field that changes from one sequence to the next: numbers, text, bytes or arrays, compared
            to the bit and by shape and dtype.
        key: What of the records' keys (the field ``"__key__"``, or what `Source.locate` tells) stays the same within
            a sequence: a regular expression that is searched, whose first group, or else the whole match, is
            compared. True takes what stands before the last ``/``, ``_``, ``-`` or ``.`` with digits behind it up to
            the end: ``"ep"`` of ``"ep_0017"``.
        shards: Each shard is a sequence.

    Returns:
        (sequences,) int64, in index order; the sum is the number of records. None is 0, except of an empty shard.

    Raises:
        ConfigError: Not exactly one way was given; records have no such field, no keys or none that fit the
            expression; or the source tells of no shards.

    Example:
        >>> from dataload import MemorySource
        >>> sequence_lengths(MemorySource({"episode": [7, 7, 7, 8, 8]}), field="episode")
        array([3, 2])
    """
    given = [name for name, on in (("field", field is not None), ("key", key is not None), ("shards", shards)) if on]
    if len(given) != 1:
        raise ConfigError(
            f"give one of field=, key= and shards=True, got {' and '.join(given) or 'none'}",
            key=given[-1] if given else None,
        )
    if field is not None:
        return _lengths(_columns(source, field))
    if key is not None:
        return _lengths(_names(source, key))
    lengths = getattr(source, "shard_lengths", None)
    if lengths is None:
        raise ConfigError(f"{type(source).__name__} tells of no shards: it has no shard_lengths", key="shards")
    return np.array(lengths, np.int64)


def _lengths(columns: Iterator[Any]) -> Int64Array:
    """The lengths of runs of equal values, from the values of all records in blocks."""
    starts: list[Int64Array] = []
    records, last = 0, None
    for values in columns:
        changes = np.empty(len(values), np.bool_)
        changes[0] = records == 0 or not _equal(last, values[0])
        changes[1:] = _differences(values)
        starts.append(np.flatnonzero(changes) + records)
        records, last = records + len(values), values[-1]
    return np.diff(np.concatenate([*starts, [records]])).astype(np.int64) if records else np.empty(0, np.int64)


def _differences(values: Any) -> Any:
    """Whether each value but the first is another than the one before."""
    if not isinstance(values, np.ndarray) or values.dtype.hasobject:
        return [not _equal(one, other) for one, other in pairwise(values)]
    if not values.size:
        return False
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    return (rows[1:] != rows[:-1]).any(axis=1)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (str, bytes)) or isinstance(other, (str, bytes)):
        return one == other
    first, second = np.asarray(one), np.asarray(other)
    if first.dtype.hasobject or second.dtype.hasobject:
        return bool(one == other)
    return (first.dtype, first.shape) == (second.dtype, second.shape) and first.tobytes() == second.tobytes()


def _columns(source: Any, field: str) -> Iterator[Any]:
    """The values of a field in blocks: arrays of one row per record, or lists."""
    for start in range(0, len(source), _BLOCK):
        yield _column(source, field, np.arange(start, min(start + _BLOCK, len(source)), dtype=np.int64))


def _column(source: Any, field: str, indices: Int64Array) -> Any:
    if isinstance(source, ColumnReader):
        # Shapes may differ from record to record; and what else is wrong with the field, the records tell.
        with suppress(ConfigError):
            return source.read_batch(indices, (field,))[field]
    wanted = indices.tolist()
    every: Any = source
    records = every.__getitems__(wanted) if isinstance(every, BatchReader) else [every[index] for index in wanted]
    return [select_fields(record, (field,))[field] for record in records]


def _names(source: Any, key: Any) -> Iterator[list[str]]:
    """What of the records' keys names their sequence, in blocks."""
    pattern = _NUMBERED if key is True else _compiled(key)
    first = 0
    for keys in _keys(source):
        yield [_name(name, pattern, first + place) for place, name in enumerate(keys)]
        first += len(keys)


def _keys(source: Any) -> Iterator[list[str | None]]:
    if not isinstance(source, Source) or _KEY in source.fields:
        yield from _columns(source, _KEY)
        return
    for start in range(0, len(source), _BLOCK):
        yield [locate(source, index).key for index in range(start, min(start + _BLOCK, len(source)))]


def _name(key: str | None, pattern: re.Pattern[str], index: int) -> str:
    if key is None:
        raise ConfigError(f"record {index} has no key: name the sequences by field=", key="key")
    match = pattern.search(key)
    name = None if match is None else match[1 if pattern.groups else 0]
    if name is None:
        wanted = "end in digits behind one of / _ - ." if pattern is _NUMBERED else f"match {pattern.pattern!r}"
        raise ConfigError(f"key {key!r} of record {index} does not {wanted}: give key= another expression", key="key")
    return name


def _compiled(key: Any) -> re.Pattern[str]:
    if not isinstance(key, (str, re.Pattern)):
        raise ConfigError(f"key must be a regular expression or True, got {key!r}", key="key", value=key)
    try:
        return re.compile(key)
    except re.error as error:
        raise ConfigError(f"key {key!r} is no regular expression: {error}", key="key", value=key) from error
