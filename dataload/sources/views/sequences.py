"""Lengths of records, and of sequences, which are runs of consecutive records.

Manifests keep the lengths of records, with other statistics of the data that a source reads.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import DataSetFacts, is_same_content, select_fields
from dataload.catalog.manifest import MANIFEST_NAME, read_manifest
from dataload.catalog.statistics import DataSetStatistics, FieldStatistics, LengthsFile
from dataload.codecs.npz import build_npy, parse_npy
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.base import Source, SubsetSource
from dataload.sources.file_source import FileSource
from dataload.sources.shards import locate
from dataload.sources.views.adapt import columns_at, records_at
from dataload.sources.views.concat import ConcatSource
from dataload.sources.views.mapped import mapped_lengths
from dataload.storage import Remote, base_name, join, parent, storage_of
from dataload.types import Array, BatchReader, ColumnReader, Int64Array

_LONGEST_HEADER = 4096  # bytes, of a file of lengths
_RENEW = "run `dataload stats` again"


class Kept(NamedTuple):
    """Statistics of a data set, and numbers of shards, in its manifest's entry, that a source reads in this order."""

    directory: str
    entry: DataSetFacts
    statistics: DataSetStatistics
    shards: list[int]

    def lengths(self, field: str, remote: Remote | None) -> Int64Array | None:
        """Return the lengths of a field in the records that the source reads; None if they are not kept."""
        every = lengths_of(self.directory, self.entry, self.statistics, field, remote)
        if every is None:
            return None
        pieces = np.split(every, np.cumsum(self.entry.records)[:-1])
        return np.concatenate([pieces[shard] for shard in self.shards]).astype(np.int64)


def find_statistics(source: FileSource[Any]) -> tuple[Kept, ...]:
    """Return the statistics of the data sets whose shards a source reads, in its order; none if one has none."""
    found: list[Kept] = []
    listed: dict[str, dict[str, tuple[DataSetFacts, int]]] = {}
    marks: Sequence[ContentMark] = ()
    lengths = source.shard_lengths
    for shard, path in enumerate(source.paths):
        directory, name = parent(path), base_name(path)
        if directory not in listed:
            listed[directory] = _listed(directory, source.remote)
        if name not in listed[directory]:
            return ()
        entry, number = listed[directory][name]
        if not (found and (found[-1].directory, found[-1].entry) == (directory, entry)):
            kept = _of_data_set(directory, entry, source)
            if kept is None:
                return ()
            found.append(kept)
        marks = marks or source.shard_identities()
        mark = entry.contents[number] if entry.contents else None
        if mark is None or lengths[shard] != entry.records[number] or not is_same_content(marks[shard], mark):
            _warn(directory, entry, f"{name} is not the shard from which they were computed")
            return ()
        found[-1].shards.append(number)
    return tuple(found)


def lengths_of(
    directory: str, entry: DataSetFacts, statistics: DataSetStatistics, field: str, remote: Remote | None
) -> Array | None:
    """Return the lengths of a field in all records of a data set, (records,); None if they are not kept."""
    records, found = sum(entry.records), statistics.fields.get(field, FieldStatistics())
    if not records:
        return np.zeros(0, np.uint8)
    if found.length is None or found.records != records:
        return None
    if not found.varies_in_length:
        return np.broadcast_to(np.array(found.length.shortest, np.int64), records)
    file = statistics.lengths.get(field)
    if file is None:
        return None
    path = join(directory, file.name)
    try:
        lengths = _load(path, file, records, remote)
    except SourceNotFoundError:
        _warn(directory, entry, f"{file.name}, with the lengths of {field!r}, is missing")
        return None
    if (int(lengths.min()), int(lengths.max()), int(lengths.sum(dtype=np.uint64))) != found.length:
        raise CorruptFileError(f"the lengths differ from the statistics in {MANIFEST_NAME}: {_RENEW}", path=path)
    return lengths


def save_lengths(directory: str, lengths: Array, remote: Remote | None) -> LengthsFile:
    """Write a file of lengths beside the data, and return what a manifest says of it."""
    data = build_npy(lengths)
    file = LengthsFile.of(len(data), hashlib.sha256(data).hexdigest())
    with storage_of(directory, remote).create(join(directory, file.name), overwrite=True) as part:
        with part.create() as stream:
            stream.write(data)
        part.publish()
    return file


def _load(path: str, file: LengthsFile, records: int, remote: Remote | None) -> Array:
    storage = storage_of(path, remote)
    size = storage.size(path)
    if size != file.bytes or size > 8 * records + _LONGEST_HEADER:
        problem = f"has {size:,} bytes, and {file.bytes:,} in {MANIFEST_NAME}, for {records:,} records"
        raise CorruptFileError(f"the file of lengths {problem}: {_RENEW}", path=path)
    data = storage.read(path)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise CorruptFileError(f"the file of lengths has another SHA-256 than in {MANIFEST_NAME}: {_RENEW}", path=path)
    try:
        lengths = parse_npy(data)
    except CorruptFileError as error:
        raise CorruptFileError(f"not a file of lengths: {error}: {_RENEW}", path=path) from error
    if lengths.shape != (records,) or lengths.dtype.kind != "u":
        message = (
            f"a file of {records:,} lengths has one unsigned integer for each, not {lengths.dtype} {lengths.shape}"
        )
        raise CorruptFileError(f"{message}: {_RENEW}", path=path)
    return lengths


def _listed(directory: str, remote: Remote | None) -> dict[str, tuple[DataSetFacts, int]]:
    """Return the entries in the manifest of a directory, and numbers in them, by shard."""
    try:
        manifest = read_manifest(directory, remote)
    except CorruptFileError:  # opening the directory says so; the shards may be opened without it
        manifest = None
    entries = () if manifest is None else manifest.data_sets
    return {name: (entry, number) for entry in entries for number, name in enumerate(entry.names)}


def _of_data_set(directory: str, entry: DataSetFacts, source: FileSource[Any]) -> Kept | None:
    if entry.statistics is None:
        return None
    try:
        statistics = DataSetStatistics.parse(entry.statistics)
        alike = entry.format == source.format_name and source.reads_alike(statistics.options)
    except ConfigError as error:
        _warn(directory, entry, str(error))
        return None
    if not alike:
        _warn(directory, entry, f"they are of records read with the options {dict(statistics.options)}")
        return None
    return Kept(directory, entry, statistics, [])


def _warn(directory: str, entry: DataSetFacts, reason: str) -> None:
    path = join(directory, MANIFEST_NAME)
    warnings.warn(f"{path}: the statistics of {entry.pattern} are not used: {reason}; {_RENEW}", stacklevel=2)


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
        message = f"pass exactly one of field=, key= and shards=True, got {' and '.join(given) or 'none'}"
        raise ConfigError(message, key=given[-1] if given else None)
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
            read = source.read_batch if isinstance(source, Source) else partial(columns_at, source)
            column = read(indices, (field,))[field]
            if not isinstance(column, (dict, tuple)):
                return column
    if isinstance(source, Source):
        records = source.read(indices)
    else:
        records = records_at(source, indices.tolist(), many=isinstance(source, BatchReader), own=False)
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
        message = f"key {key!r} of record {index} does not {wanted}: pass another expression as key="
        raise ConfigError(message, key="key")
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
