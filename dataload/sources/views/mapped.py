"""Lengths and samples that a transform makes of records, kept under the digest of the transform and the data.

Samples are kept of transforms with `compact` and `restore`, such as `dataload.text.Chat`. A loader that applies such a
transform to the same records restores the samples instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from dataload._util.fingerprint import code_digest
from dataload.catalog.arrays import MOST_BYTES, IndexKey, recall, store_cached
from dataload.errors import ConfigError, DataloadError, closest
from dataload.sources.base import Source, SubsetSource
from dataload.sources.shards import locate
from dataload.sources.views.concat import ConcatSource
from dataload.sources.views.select import identity_of
from dataload.storage import storage_of
from dataload.storage.kept import CachedTable
from dataload.storage.record_file import RecordFile
from dataload.transforms import NamedTransform, SampleContext, compose
from dataload.types import Array, Int64Array

_ROW = np.dtype([("file", np.uint32), ("start", np.int64), ("size", np.uint32), ("sum", np.uint32)])
_LENGTH = "length of "


def measured_transform(transform: Any) -> tuple[NamedTransform, ...]:
    """Return the transforms whose output is measured; transforms that draw random numbers are refused."""
    functions = compose(transform)
    for each in functions:
        if each.takes_context:
            message = f"the transform {each.name!r} takes a context, so lengths may change with the epoch"
            raise ConfigError(f"{message}: apply it by `dataload convert --map`, or pack within steps", key="transform")
    return functions


def measure_sample(functions: tuple[NamedTransform, ...], sample: Any) -> tuple[dict[str, int], bytes]:
    """Return the lengths of the fields of what transforms have made, and its bytes for a transform that restores it."""
    if not isinstance(sample, Mapping):
        message = f"a transform whose output is measured must return a dict of fields, got {type(sample).__name__}"
        raise ConfigError(message)
    lengths = {name: len(value) for name, value in sample.items() if hasattr(value, "__len__")}
    last: Any = functions[-1].function
    return lengths, last.compact(sample) if _restores(functions) else b""


def _restores(functions: tuple[NamedTransform, ...]) -> bool:
    return len(functions) == 1 and hasattr(functions[0].function, "restore")


class Measured:
    """Gathers what a transform makes of records, in their order."""

    def __init__(self, records: int) -> None:
        self.lengths: dict[str, Int64Array] = {}
        self.sizes: Array = np.zeros(records, np.uint32)  # of compact samples in bytes; 0 without one
        self.sums: Array = np.zeros(records, np.uint32)
        self.data: bytearray = bytearray()

    def add(self, indices: Int64Array, lengths: Mapping[str, Any], samples: Iterable[bytes]) -> None:
        """Add records by index, with the lengths of each field and compact samples, as far as there is room."""
        if lengths and self.lengths and lengths.keys() != self.lengths.keys():
            differing = ", ".join(sorted(lengths.keys() ^ self.lengths.keys()))
            raise ConfigError(f"the transform returns different fields: {differing} only for some records")
        for name, each in lengths.items():
            self.lengths.setdefault(name, np.zeros(len(self.sizes), np.int64))[indices] = each
        for index, sample in zip(indices.tolist(), samples, strict=True):
            if len(self.data) + len(sample) <= MOST_BYTES:
                self.data += sample
                self.sizes[index], self.sums[index] = len(sample), zlib.crc32(sample)

    def samples(self) -> Iterator[bytes]:
        """Yield the compact sample of each record, b"" if there is none."""
        stop = 0
        for size in self.sizes.tolist():
            start, stop = stop, stop + size
            yield bytes(self.data[start:stop])

    def keep(self, key: IndexKey) -> None:
        lengths = {f"{_LENGTH}{name}": each.astype(np.uint32) for name, each in self.lengths.items()}
        store_cached(key, CachedTable({"sizes": self.sizes, "sums": self.sums, **lengths}, {}, self.data))


class Mapped(NamedTuple):
    """Lengths by field, the place of each sample that is kept (size 0 if it is not), and the files."""

    lengths: dict[str, Int64Array]
    rows: Array
    files: tuple[str, ...]


def key_of(source: Source[Any], transform: Any) -> IndexKey | None:
    """Return the key of the results; None if the data are not in files, or what decides the results is unknown."""
    files = source._files()  # pyright: ignore[reportPrivateUsage] # for sources
    try:
        options = "mapped", code_digest([each.function for each in compose(transform)]), *identity_of(source)
    except ValueError:
        return None
    return IndexKey.of_filter(files, options) if files else None


def recall_mapped(source: Source[Any], transform: Any) -> Mapped | None:
    """Return what is kept of a source, or of the sources that it consists of."""

    def unpack(table: CachedTable) -> Mapped | None:
        arrays, (path, start) = dict(table.arrays), table.tail
        rows = np.zeros(len(source), _ROW)
        rows["size"], rows["sum"] = arrays.pop("sizes"), arrays.pop("sums")
        rows["start"] = start + np.cumsum(rows["size"]) - rows["size"]
        found = {name.removeprefix(_LENGTH): each.astype(np.int64) for name, each in arrays.items()}
        return Mapped(found, rows, (path,)) if {*map(len, found.values())} <= {len(rows)} else None

    found = recall(key_of(source, transform), unpack)
    if found is None and isinstance(source, SubsetSource):
        parent, chosen = recall_mapped(source.parent, transform), source.indices
        if parent is not None:
            lengths = {name: each[chosen] for name, each in parent.lengths.items()}
            found = Mapped(lengths, parent.rows[chosen], parent.files)
    elif found is None and isinstance(source, ConcatSource):
        parts = [recall_mapped(each, transform) for each in source.sources]
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            found = _joined(known)
    return found


def _joined(parts: list[Mapped]) -> Mapped:
    files = tuple(file for part in parts for file in part.files)
    rows, before = np.concatenate([part.rows for part in parts]), np.cumsum([0, *(len(part.files) for part in parts)])
    rows["file"] += np.repeat(before[:-1].astype(np.uint32), [len(part.rows) for part in parts])
    names = set.intersection(*({*part.lengths} for part in parts if len(part.rows)))
    return Mapped(
        {name: np.concatenate([p.lengths[name] for p in parts if len(p.rows)]) for name in names}, rows, files
    )


def mapped_lengths(source: Source[Any], field: str, transform: Any) -> Int64Array:
    """Return the lengths of a field of what a transform makes of each record, from where they are kept."""
    functions, known = measured_transform(transform), recall_mapped(source, transform)
    lengths = None if known is None else known.lengths
    if lengths is None and isinstance(source, ConcatSource):  # each is kept for itself
        return np.concatenate([mapped_lengths(each, field, transform) for each in source.sources])
    if lengths is None:
        measured = Measured(len(source))
        for index, record in enumerate(source):
            try:
                sample = reduce(lambda made, each: each.function(made), functions, record)
                of_fields, compact = measure_sample(functions, sample)
            except Exception as error:
                error.add_note(f"The transform failed on index {index} ({locate(source, index)}).")
                raise
            measured.add(np.array([index]), of_fields, [compact])
        lengths, key = measured.lengths, key_of(source, transform)
        if key is not None:
            measured.keep(key)
    if field not in lengths and len(source):
        message = f"the transform makes no field {field!r}: {closest(field, lengths)}"
        raise ConfigError(message, key="field", value=field)
    return lengths.get(field, np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class KeptSamples:
    """A transform that restores the samples that are kept, and makes the others."""

    transform: Any
    rows: Array
    files: tuple[str, ...]

    def __call__(self, sample: Any, context: SampleContext) -> Any:
        file, start, size, checksum = self.rows[context.index].item()
        with suppress(DataloadError):  # the file is gone
            if size and zlib.crc32(compact := self._opened[file].read(start, size)) == checksum:
                return self.transform.restore(compact)
        return self.transform(sample)

    @cached_property
    def _opened(self) -> tuple[RecordFile, ...]:
        return tuple(storage_of(path).map(path) for path in self.files)

    def __reduce__(self) -> Any:
        return type(self), (self.transform, self.rows, self.files)


def with_kept(source: Any, transform: Any, fields: Sequence[str] | None) -> tuple[NamedTransform, ...]:
    """Return transforms of a source's records, or what restores the samples that they have made of all `fields`."""
    functions = compose(transform)
    if fields is not None or not _restores(functions) or not isinstance(source, Source):
        return functions
    found = recall_mapped(source, functions[0].function)
    if found is None or not found.rows["size"].any():
        return functions
    kept = KeptSamples(functions[0].function, found.rows, found.files)
    return (NamedTransform(kept, functions[0].name, takes_context=True),)
