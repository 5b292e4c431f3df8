"""Lengths of records, and of sequences, which are runs of consecutive records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np

from dataload.catalog.fields import select_fields
from dataload.errors import ConfigError
from dataload.sources.base import Source, SubsetSource
from dataload.sources.file_source import FileSource
from dataload.sources.kept_statistics import find_statistics
from dataload.sources.shards import locate
from dataload.sources.views.concat import ConcatSource
from dataload.sources.views.mapped import mapped_lengths
from dataload.types import BatchReader, ColumnReader, Int64Array

SequenceKey: TypeAlias = "str | re.Pattern[str] | Literal[True]"
"""The part of a key that names the sequence; see `sequence_lengths`."""

_BLOCK = 1024  # records
_KEY = "__key__"
_NUMBERED = re.compile(r"(.*)[/_.-]\d+\Z", re.DOTALL)


def sequence_lengths(
    source: Any, *, field: str | None = None, key: SequenceKey | None = None, shards: bool = False
) -> Int64Array:
    r"""Return the lengths of the sequences of a source, for `StreamSampler` and others that keep records in order.

    A sequence is a run of consecutive records with the same field value or key, or a shard; pass one of `field`, `key`
    and `shards`, or none for windows and tokens, which know their sequences. Only that field is read, and the keys of
    built-in sources are found without reading. For large data, compute the lengths once and keep them in a file.

    Args:
        source: Any object with ``__len__`` and ``__getitem__``.
        field: Name of a field that is constant within a sequence: numbers, text, bytes or arrays, compared by bits,
            shape and dtype.
        key: The part of the records' keys (the field ``"__key__"``, or from `Source.locate`) that is constant within a
            sequence: a regular expression to search for; its first group, or else the whole match, is
            compared. True means everything before a final ``/``, ``_``, ``-`` or ``.`` followed by digits: ``"ep"`` of
            ``"ep_0017"``.
        shards: Whether each shard is a sequence.

    Returns:
        (sequences,) int64, in index order; the sum is the number of records. Only an empty shard has length 0.

    Raises:
        ConfigError: Several were given, or none and the source does not know its sequences; records lack the field or
            key, or a key does not match; or the source has no `shard_lengths`.

    Examples:
        >>> from dataload import MemorySource
        >>> sequence_lengths(MemorySource({"episode": [7, 7, 7, 8, 8]}), field="episode")
        array([3, 2])
    """
    given = [name for name, on in (("field", field is not None), ("key", key is not None), ("shards", shards)) if on]
    known = getattr(source, "sequence_lengths", None)
    if not given and known is not None:
        return known
    if len(given) != 1:
        raise ConfigError(
            f"pass exactly one of field=, key= and shards=True, got {' and '.join(given) or 'none'}",
            key=given[-1] if given else None,
        )
    if field is not None:
        return _lengths(_columns(source, field))
    if key is not None:
        return _lengths(_names(source, key))
    lengths = getattr(source, "shard_lengths", None)
    if lengths is None:
        raise ConfigError(f"{type(source).__name__} has no shards: shard_lengths is missing", key="shards")
    return np.array(lengths, np.int64)


def _lengths(columns: Iterator[Any]) -> Int64Array:
    """Return the lengths of runs of equal values, which are given in blocks."""
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
    """Return for each value but the first whether it differs from the previous one."""
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
    """Yield the values of a field in blocks: arrays with a row per record, or lists."""
    for start in range(0, len(source), _BLOCK):
        yield _column(source, field, np.arange(start, min(start + _BLOCK, len(source)), dtype=np.int64))


def _column(source: Any, field: str, indices: Int64Array) -> Any:
    if isinstance(source, ColumnReader):
        # Shapes may differ between records; reading them one by one reports any other problem.
        with suppress(ConfigError):
            return source.read_batch(indices, (field,))[field]
    wanted = indices.tolist()
    every: Any = source
    records = every.__getitems__(wanted) if isinstance(every, BatchReader) else [every[index] for index in wanted]
    return [select_fields(record, (field,))[field] for record in records]


def _names(source: Any, key: Any) -> Iterator[list[str]]:
    """Yield the part of the records' keys that names their sequence, in blocks."""
    pattern = _NUMBERED if key is True else _compiled(key)
    first = 0
    for keys in _keys(source):
        yield [_name(found, pattern, index) for index, found in enumerate(keys, first)]
        first += len(keys)


def _keys(source: Any) -> Iterator[list[str | None]]:
    if not isinstance(source, Source) or _KEY in source.fields:
        yield from _columns(source, _KEY)
        return
    for start in range(0, len(source), _BLOCK):
        yield [locate(source, index).key for index in range(start, min(start + _BLOCK, len(source)))]


def _name(key: str | None, pattern: re.Pattern[str], index: int) -> str:
    if key is None:
        raise ConfigError(f"record {index} has no key: pass field= instead", key="key")
    match = pattern.search(key)
    name = None if match is None else match[1 if pattern.groups else 0]
    if name is None:
        wanted = "end in / _ - or . and digits" if pattern is _NUMBERED else f"match {pattern.pattern!r}"
        raise ConfigError(
            f"key {key!r} of record {index} does not {wanted}: pass another expression as key=", key="key"
        )
    return name


def _compiled(key: Any) -> re.Pattern[str]:
    if not isinstance(key, (str, re.Pattern)):
        raise ConfigError(f"key must be a regular expression or True, got {key!r}", key="key", value=key)
    try:
        return re.compile(key)
    except re.error as error:
        raise ConfigError(f"key {key!r} is not a regular expression: {error}", key="key", value=key) from error


def record_lengths(source: Source[Any], field: str, *, transform: Any = None) -> Int64Array:
    """Return the length of each record's field: the extent of its first axis, or its number of bytes or characters.

    Lengths that ``dataload stats`` has kept beside the data are read from there. Otherwise, this reads every record
    once, in blocks.

    With a `transform`, these are lengths of what it makes of each record, as ``dataload stats --map`` keeps them. They
    are measured again if the data, the transform or its tokenizer have changed.

    Args:
        source: A source of records with fields.
        field: Name of the field.
        transform: A function of a sample, or a list of functions, as of a loader; without random numbers.

    Returns:
        (records,) int64, in index order.

    Raises:
        ConfigError: A record lacks the field, its value has no length, or the transform takes a context.
        CorruptFileError: The file that keeps the lengths is damaged.

    Examples:
        >>> from dataload import MemorySource
        >>> record_lengths(MemorySource([{"text": "to be"}, {"text": "or not"}]), "text")
        array([5, 6])
    """
    if transform is not None:
        return mapped_lengths(source, field, transform)
    if isinstance(source, ConcatSource):
        return np.concatenate([record_lengths(each, field) for each in source.sources])
    kept = _kept_lengths(source, field)
    if kept is not None:
        return kept
    lengths = np.empty(len(source), np.int64)
    for index, record in enumerate(source):
        value = select_fields(record, (field,))[field]
        try:
            lengths[index] = len(value)
        except TypeError:
            message = (
                f"field {field!r} of record {index} has no length: expected an array, bytes or text, got {value!r}"
            )
            raise ConfigError(message, key="field", value=field) from None
    return lengths


def _kept_lengths(source: Source[Any], field: str) -> Int64Array | None:
    if isinstance(source, SubsetSource):
        kept = _kept_lengths(source.parent, field)
        return None if kept is None else kept[source.indices]
    if not isinstance(source, FileSource) or (source.fields and field not in source.fields):
        return None
    found = [each.lengths(field, source.remote) for each in find_statistics(source)]
    known = [each for each in found if each is not None]
    return np.concatenate(known) if known and len(known) == len(found) else None
