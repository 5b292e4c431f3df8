"""Find the statistics that a manifest keeps of the data that a source reads, and the lengths of its records."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import DataSetFacts, is_same_content
from dataload.catalog.manifest import MANIFEST_NAME, read_manifest
from dataload.catalog.statistics import DataSetStatistics, FieldStatistics, LengthsFile
from dataload.codecs.npz import build_npy, parse_npy
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError
from dataload.sources.file_source import FileSource
from dataload.storage import Remote, base_name, join, parent, storage_of
from dataload.types import Array, Int64Array

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
