"""Shards whose records are stored as bytes, and records that lie anywhere in a file, for codecs that decode them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, TypeAlias

import numpy as np

from dataload._util.arrays import no_memory, pooled_empty
from dataload._util.caches import Memo
from dataload._util.clock import decoding, reading
from dataload._util.failures import mark_users
from dataload.catalog.facts import select_fields
from dataload.codecs.codec import decode_batch, decode_records, takes_views
from dataload.codecs.layout import Layout, Parse, RecordTable, mask_of, values_of
from dataload.collate import default_collate
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.shards import ShardReader
from dataload.storage import RecordFile
from dataload.storage.core import core
from dataload.storage.local.record_files import MappedFile
from dataload.storage.local.shard_maps import ShardMaps
from dataload.storage.record_file import RowLayout
from dataload.types import Array, Batch, BytesArray, BytesColumn, Codec, FieldSpec, Int64Array

Gather: TypeAlias = Callable[[RecordFile, Int64Array, Int64Array], Any]
"""Copies the ranges of a file at offsets and lengths, both (rows,) int64 in bytes."""


_NOTHING = nullcontext()


def copy_records(file: RecordFile, offsets: Int64Array, lengths: Int64Array) -> list[bytes]:
    """Return each record as bytes, for users and for codecs that may keep what they are given."""
    return file.copies(offsets, lengths)


class EncodedShard(ShardReader[Any]):
    """A shard whose records are stored as bytes, which a codec may decode. A format says where they lie in `_file`."""

    _file: RecordFile
    _fields: Mapping[str, FieldSpec]

    def __init__(self, path: str, codec: Codec | None) -> None:
        self._path = path
        self._codec = codec
        self._gather: Gather = partial(gather_records, last=LastLayout(1)) if takes_views(codec) else copy_records
        self._fields = {}

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The fields of the first record, as far as the format has looked."""
        return self._fields

    def _locations(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return offsets and lengths of records, both (rows,) int64 in bytes."""
        raise NotImplementedError

    def _stored(self, indices: Int64Array, gather: Gather) -> Any:
        """Return records as they are stored, in the form in which `gather` copies them."""
        return gather(self._file, *self._locations(indices))

    def _reading(self, indices: Int64Array) -> AbstractContextManager[Any]:  # noqa: ARG002 - for files that others write
        """Return the context of a read of these records, until they are decoded."""
        return _NOTHING

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Any]:
        with self._reading(indices):
            return self._decode(self._stored(indices, self._gather), indices, fields)

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        codec = self._codec
        with self._reading(indices):
            if codec is None and fields is None:
                return self._stored(indices, RecordFile.gather_ranges)  # plain bytes have no columns
            data = self._stored(indices, self._gather)
            batch = None if codec is None else decode_batch(codec, data, fields)
            return default_collate(self._decode(data, indices, fields)) if batch is None else batch

    def _decode(
        self, data: Sequence[bytes | memoryview], indices: Int64Array, fields: tuple[str, ...] | None
    ) -> list[Any]:
        """Return the records that are stored as `data`."""
        codec = self._codec
        records: list[Any] = [*data] if codec is None else decode_records(codec, data, indices.tolist(), self._path)
        return records if fields is None else [select_fields(record, fields) for record in records]

    def release(self) -> None:
        self._file.release()


LastLayout: TypeAlias = Memo[tuple[Layout, RowLayout]]
"""The layout of the records that a reader has seen last, so that it is not parsed in each batch."""


class GatheredTable(RecordTable):
    """Records of `length` bytes at `offsets`, (records,) int64, in a file; `last` belongs to its reader."""

    __slots__ = ("_all", "_file", "_last", "_length", "_offsets")

    def __init__(self, file: RecordFile, offsets: Int64Array, length: int, last: LastLayout) -> None:
        self._file = file
        self._offsets = offsets
        self._length = length
        self._last = last
        self._all: BytesArray | None = None

    @property
    def rows(self) -> BytesArray:
        """All records, (records, length) uint8."""
        if self._all is None:
            with reading():
                self._all = self._file.gather(self._offsets, self._length)
        return self._all

    def columns(self, fields: Sequence[str] | None, parse: Parse) -> Batch | None:
        """See `RecordTable.columns`: one pass over the records compares them, and copies the values."""
        key = self._length, None if fields is None else tuple(fields)
        known = self._last.recall(key)
        found = None if known is None else self._cut(known)
        if found is not None or self._length < _SHORTEST or self._all is not None:
            return found
        with reading():
            first = self._file.read(int(self._offsets[0]), self._length)
        layout = parse(first)
        if layout is None or not layout.keys() >= {*(fields or ())}:
            return None
        chosen = layout if fields is None else {name: layout[name] for name in fields}
        places: dict[str, Any] = {}
        for name, span in chosen.items():
            plain = span.dtype is not None and span.convert is None
            kind = (span.dtype, span.shape) if plain else (np.dtype(np.uint8), (span.stop - span.start,))
            places[name] = (span.start, *kind)
        plan = chosen, RowLayout(self._length, places, first, mask_of(layout, self._length))
        found = self._cut(plan)
        if found is not None:
            self._last.keep(key, plan)
        return found

    def _cut(self, plan: tuple[Layout, RowLayout]) -> Batch | None:
        with reading():
            stored = self._file.cut(self._offsets, plan[1])
        return None if stored is None else {name: values_of(span, stored[name]) for name, span in plan[0].items()}

    def __len__(self) -> int:
        return len(self._offsets)


_SHORTEST = 8  # bytes of records that the core compares


def gather_records(
    file: RecordFile, offsets: Int64Array, lengths: Int64Array, last: LastLayout
) -> RecordTable | BytesColumn:
    """Return records, at least one, in one block of memory: for codecs that copy what they keep."""
    length = int(lengths[0])
    if not length or not bool((lengths == length).all()):
        return file.gather_ranges(offsets, lengths)
    # Without a map, every gather reads the file again.
    if isinstance(file, (MappedFile, ShardMaps)):
        return GatheredTable(file, offsets, length, last)
    return RecordTable(file.gather(offsets, length))


def integers(contents: BytesColumn) -> Array | None:
    """Return decimal numbers, (rows,) int64; None if one of them has another form or too many digits."""
    (block,), _, starts, stops = contents.parts()
    numbers = np.empty(len(starts), np.int64)
    return numbers if core().integers(numbers, block, starts, stops - starts) < 0 else None


class LoadedRecords:
    """A block of memory from which parts of records are copied, with the methods of the file that they came from."""

    def __init__(self, block: BytesArray) -> None:
        self._block = block

    @classmethod
    def of(cls, file: RecordFile, offsets: Int64Array, lengths: Int64Array) -> tuple[Self, Int64Array]:
        """Copy ranges of a file; return them and the offset of each."""
        (block,), _, starts, _ = file.gather_ranges(offsets, lengths).parts()
        return cls(block), starts

    def gather(self, offsets: Int64Array, length: int) -> BytesArray:
        out = pooled_empty((len(offsets), length), np.uint8)
        core().gather(out, self._block, 0, 1, offsets, length, -1)
        return out

    def gather_ranges(self, offsets: Int64Array, lengths: Int64Array) -> BytesColumn:
        """Return views of ranges, which are inside the block."""
        return BytesColumn([self._block], None, offsets, offsets + lengths)


def decoded(values: Iterable[Any], rows: int, locate: Callable[[Exception, int], Exception]) -> list[Any]:
    """Return values of `rows` that are decoded one by one; `locate` makes the error of a row, see `located`."""
    found: list[Any] = []
    try:
        with decoding():
            found.extend(values)
        if len(found) < rows:
            raise RuntimeError("the decoder raised StopIteration")
    except Exception as error:  # `extend` keeps what it has appended
        cause = locate(error, len(found))
        if cause is error:
            raise
        raise cause from error
    return found


def located(
    error: Exception, path: str, index: int, what: str = "", offset: int | None = None, *, own: bool = False
) -> Exception:
    """Return a decoder's error, `own` of the user, with the location of the value added; `what` names it."""
    named = f"{what}: " if what else ""
    if own:
        mark_users(error)
    elif isinstance(error, MemoryError):
        return no_memory(path, index, named)
    elif isinstance(error, CorruptFileError):
        return CorruptFileError(f"{named}{error}", path=path, offset=offset, index=index)
    elif isinstance(error, UnsupportedFormatError):
        place = f"record {index}" if offset is None else f"byte {offset}"
        return UnsupportedFormatError(f"{path}, {place}: {named}{error}", path=path)
    place = "" if offset is None else f" at byte {offset}"
    error.add_note(f"while decoding {what}{place} of {path}" if what else f"while decoding {path}")
    return error
