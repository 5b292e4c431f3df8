"""The Syrah format: a header, the bytes of the arrays, and the metadata as a BSON document.

The header has 22 bytes: ``GS``, 4 version bytes, and the int64 offset and length of the metadata, little-endian. The
metadata are ``{key: {"offset": <n int64>, "size": <n int64, bytes>, "dtype": name}}``.

The original format supports neither shapes nor bytes. We add two entries to the document of a key, which the original
reader ignores:

- ``shape``: ``{"ndim": <1 or n int64>, "dims": <dims, concatenated>}``, where a single ndim applies to all records.
  Absent if every record is one-dimensional.
- ``kind``: ``"bytes"`` for uint8 arrays that were bytes.
"""

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from dataload._util.caches import Memo
from dataload.catalog.arrays import IndexKey, remember, require
from dataload.errors import CorruptFileError
from dataload.sources.syrah import SYRAH
from dataload.storage import RecordFile, Remote
from dataload.storage.kept import CachedTable
from dataload.types import Int64Array

MAGIC = b"GS"
HEADER_SIZE = 22
_HEADER = struct.Struct("<2s4Bqq")
_VERSION = (0, 0, 2, 0)  # as written by the original, which does not check it

_INTEGERS = [f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("int", "uint")]
# float128 is 80-bit extended precision in 16 bytes, which numpy lacks on some platforms.
_FLOATS = [name for name in ("float16", "float32", "float64", "float128") if hasattr(np, name)]

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<") for name in ("bool", *_INTEGERS, *_FLOATS)
}

BSON_LIMIT = 2**31 - 1
"""Size limit of a BSON document in bytes; each record takes 16 bytes per key."""

_TEXT, _DOCUMENT, _BINARY = 2, 3, 5  # kinds of BSON elements
_ENTRIES, _SHAPE_ENTRIES = ("offset", "size", "dtype", "shape", "kind"), ("ndim", "dims")
_MOST_ELEMENTS = 1 << 16  # of a document; an empty key has a thirteenth of the bytes that its Column takes
# Bytes of an element's content; of the kinds in `_SIZED`, bytes beside those that the int32 in front counts.
_FIXED = {1: 8, 6: 0, 7: 12, 8: 1, 9: 8, 10: 0, 16: 4, 17: 8, 18: 8, 19: 16, 127: 0, 255: 0}
_SIZED = {_TEXT: 4, _DOCUMENT: 0, 4: 0, _BINARY: 5, 13: 4, 14: 4, 15: 0}


class Shapes(NamedTuple):
    """Shapes of one key's records; `dims` hold for all records if `ndim`, (1,) or (n,), is a single number."""

    ndim: Int64Array
    dims: Int64Array


@dataclass(frozen=True, slots=True)
class Column:
    """Locations of the values of one key: byte offsets in the file and sizes in bytes, (n,) int64.

    `dtype` is a name in `DTYPES`, or ``"str"``; `shapes` is None if every record is one-dimensional.
    """

    name: str
    dtype: str
    offsets: Int64Array
    sizes: Int64Array
    shapes: Shapes | None = None
    is_bytes: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return 1 if self.dtype == "str" else DTYPES[self.dtype].itemsize


def build_header(offset: int, length: int) -> bytes:
    """Return the header of a file whose metadata are at `offset`."""
    return _HEADER.pack(MAGIC, *_VERSION, offset, length)


def parse_header(head: bytes, file_size: int, path: str) -> tuple[int, int]:
    """Return offset and length in bytes of the metadata, which are inside the file."""
    if len(head) < HEADER_SIZE:
        found = "it is empty (a writer that was never closed?)" if not head else f"the file has {len(head)}"
        raise CorruptFileError(f"a Syrah header has {HEADER_SIZE} bytes, {found}", path=path, offset=0)
    magic, *_, offset, length = _HEADER.unpack(head[:HEADER_SIZE])
    if magic != MAGIC:
        hint = " (a writer that was never closed?)" if not any(head) else ""
        raise CorruptFileError(f"expected the magic bytes {MAGIC!r}, found {magic!r}{hint}", path=path, offset=0)
    if not HEADER_SIZE <= offset <= file_size:
        message = f"the header says that the metadata start at byte {offset}; the file has {file_size}"
        raise CorruptFileError(message, path=path, offset=6)
    left = file_size - offset
    if not 5 <= length <= left:  # an empty BSON document has 5 bytes
        message = f"the header says that the metadata have {length} bytes; {left} are left for them"
        raise CorruptFileError(message, path=path, offset=14)
    return offset, length


class _InvalidMetadata(Exception):
    """The metadata contradict themselves; `parse_metadata` adds the position."""


def parse_metadata(data: bytes, offset: int, file_size: int, path: str) -> list[Column]:
    """Return the columns of a file in file order, after checking every number in the BSON document `data`."""
    # The document is at `offset` in a file of `file_size` bytes, and no array may overlap it.
    try:
        columns = _parse_columns(data)
        check_columns(columns, (offset, offset + len(data)), file_size, path)
    except _InvalidMetadata as error:
        raise CorruptFileError(str(error), path=path, offset=offset) from error
    return columns


def check_columns(columns: Sequence[Column], metadata: tuple[int, int], file_size: int, path: str) -> None:
    """Check every number in columns of one length; `metadata` are start and end of the document in the file."""
    for column in columns:
        if not _are_plainly_inside(column, metadata[0]):
            _check_offsets(column, metadata, file_size, path)
        if column.shapes is not None and not _match_sizes(column.shapes, column):
            message = f"the shapes of key {column.name!r} do not fit its sizes"
            raise CorruptFileError(message, path=path, offset=metadata[0])


def _parse_columns(data: bytes) -> list[Column]:
    columns: dict[str, Column] = {}
    for name, kind, start, stop in _elements(data, 0, len(data)):
        columns[name] = _parse_column(name, _entries(data, start, stop) if kind == _DOCUMENT else None)
    if not columns:
        raise _InvalidMetadata("the metadata have no keys")
    first, records = next((name, len(column.offsets)) for name, column in columns.items())
    for name, column in columns.items():
        if len(column.offsets) != records:
            raise _InvalidMetadata(f"key {first!r} has {records} records, key {name!r} has {len(column.offsets)}")
    return [*columns.values()]


def _entries(data: bytes, start: int, stop: int, names: Collection[str] = _ENTRIES) -> dict[str, Any]:
    """Return the entries of a document with these names: texts, bytes, the shapes, and None for other values."""
    found: dict[str, Any] = {}
    for name, kind, at, end in _elements(data, start, stop):
        if name not in names:
            continue
        if kind == _BINARY:
            found[name] = data[at + 5 : end]
        elif kind == _DOCUMENT and name == "shape":
            found[name] = _entries(data, at, end, _SHAPE_ENTRIES)
        else:
            found[name] = _text(data[at + 4 : end - 1]) if kind == _TEXT else None
    return found


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _InvalidMetadata(f"the metadata are not a BSON document: {error}") from error


def _elements(data: bytes, start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, kind, start and stop of the elements of a BSON document; see bsonspec.org."""
    # pymongo would build all values, which take up to eight times the bytes of a hostile document.
    end = stop - 1
    if end < start + 4 or int.from_bytes(data[start : start + 4], "little") != stop - start or data[end]:
        raise _InvalidMetadata(f"the metadata are not a BSON document: wrong length or end of document {start}")
    at, count = start + 4, 0
    while at < end:
        count += 1
        if count > _MOST_ELEMENTS:
            raise _InvalidMetadata(f"a document of the metadata has more than {_MOST_ELEMENTS} elements")
        kind, name_end = data[at], data.find(b"\0", at + 1, end)
        begin = name_end + 1
        size = _FIXED.get(kind, -1)
        if kind in _SIZED and end - begin >= 4:
            size = int.from_bytes(data[begin : begin + 4], "little") + _SIZED[kind]
        if name_end < 0 or not 0 <= size <= end - begin:
            raise _InvalidMetadata(f"the metadata are not a BSON document: element {at} of kind {kind} is invalid")
        yield _text(data[at + 1 : name_end]), kind, begin, begin + size
        at = begin + size


def _parse_column(name: str, entry: Mapping[str, Any] | None) -> Column:
    if entry is None:
        raise _InvalidMetadata(f"key {name!r} has no document")
    for part in ("offset", "size", "dtype"):
        if part not in entry:
            raise _InvalidMetadata(f"key {name!r} has no entry {part!r}")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or (dtype != "str" and dtype not in DTYPES):
        raise _InvalidMetadata(f"key {name!r} has dtype {dtype!r}; the format supports {', '.join(DTYPES)}, str")
    offsets, sizes = (_parse_table(entry[part], f"{part} of key {name!r}") for part in ("offset", "size"))
    if len(offsets) != len(sizes):
        raise _InvalidMetadata(f"key {name!r} has {len(offsets)} offsets and {len(sizes)} sizes")
    shape, shapes = entry.get("shape"), None
    if isinstance(shape, dict):
        shapes = Shapes(*(_parse_table(shape.get(part), f"shape of key {name!r}") for part in ("ndim", "dims")))
    return Column(name, dtype, offsets, sizes, shapes, is_bytes=entry.get("kind") == "bytes" and dtype == "uint8")


def _parse_table(data: Any, what: str) -> Int64Array:
    if not isinstance(data, bytes) or len(data) % 8:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise _InvalidMetadata(f"{what} is not a table of int64: {found}")
    return np.asarray(np.frombuffer(data, "<i8"), np.int64)


def _are_plainly_inside(column: Column, metadata: int) -> bool:
    """Return True if `_check_offsets` cannot fail, as in files whose arrays have one size and precede the metadata."""
    offsets, sizes = column.offsets, column.sizes
    if not len(offsets):
        return True
    size, first, last = int(sizes[0]), int(offsets.min()), int(offsets.max())
    alike = size >= 0 and size % column.itemsize == 0 and not np.count_nonzero(sizes != size)
    return alike and first >= HEADER_SIZE and last <= metadata - size


def _check_offsets(column: Column, metadata: tuple[int, int], file_size: int, path: str) -> None:
    offsets, sizes, item = column.offsets, column.sizes, column.itemsize

    def refuse(bad: Any, what: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            offset = int(offsets[index])
            message = f"key {column.name!r} has {int(sizes[index])} bytes at {offset}: {what}"
            raise CorruptFileError(message, path=path, offset=offset, index=index)

    refuse(sizes < 0, "a negative size")
    refuse(offsets < HEADER_SIZE, "inside the header")
    # Compared without adding, because sums of hostile numbers may overflow.
    beyond = (offsets > file_size) | (sizes > file_size - np.minimum(offsets, file_size))
    refuse(beyond, f"the file has {file_size}")
    refuse((offsets < metadata[1]) & (offsets + sizes > metadata[0]) & (sizes > 0), "inside the metadata")
    refuse(sizes % item != 0, f"not a multiple of the {item} bytes of {column.dtype}")


def _match_sizes(shapes: Shapes, column: Column) -> bool:
    ndim, dims = shapes
    if len(ndim) not in (1, len(column.offsets)) or (ndim < 0).any() or (ndim > 63).any():
        return False
    if int(ndim.sum()) != len(dims) or (dims < 0).any() or (dims > BSON_LIMIT).any():
        return False
    counts = np.ones(len(ndim), np.int64)
    ends = np.cumsum(ndim)
    # float64 products do not wrap, and are only inexact when far larger than any file.
    products = np.ones(len(ndim), np.float64)
    for axis in range(int(ndim.max(initial=0))):
        has = ndim > axis
        extent = dims[(ends - ndim)[has] + axis]
        counts[has] *= extent
        products[has] *= np.maximum(extent, 1)  # an extent of 0 must not hide others, which numpy multiplies too
    return not (products > 2.0**40).any() and bool((counts * column.itemsize == column.sizes).all())


def load_bson() -> Any:
    """Return the package that metadata need, or raise a MissingDependencyError."""
    return SYRAH.require("bson", package="pymongo")


def build_metadata(columns: list[Column]) -> bytes:
    """Return the BSON document for `columns`."""
    document: dict[str, Any] = {}
    for column in columns:
        entry: dict[str, Any] = {"offset": _table(column.offsets), "size": _table(column.sizes), "dtype": column.dtype}
        if column.shapes is not None:
            entry["shape"] = {"ndim": _table(column.shapes.ndim), "dims": _table(column.shapes.dims)}
        if column.is_bytes:
            entry["kind"] = "bytes"
        document[column.name] = entry
    return load_bson().encode(document)


def _table(numbers: Int64Array) -> bytes:
    return np.asarray(numbers, "<i8").tobytes()


T = TypeVar("T")

_BYTES_PER_RECORD = 16  # at least, of the metadata
_LEAST_CACHED = 100_000  # records; parsing the metadata of fewer takes a few milliseconds


def load_columns(
    file: RecordFile, make: Callable[[list[Column]], T], last: Memo[T], *, cache: bool, remote: Remote | None
) -> T:
    """Return what `make` makes of the columns of a file, after checking every number; raises as `parse_metadata`.

    Shards often have equal metadata: then they share what was made `last`.
    """
    path, size = file.path, file.size
    offset, length = parse_header(file.read(0, min(HEADER_SIZE, size)), size, path)
    if length < _LEAST_CACHED * _BYTES_PER_RECORD:
        key = data, _, _ = file.read(offset, length), offset, size
        return last.recall(key) or last.keep(key, make(parse_metadata(data, offset, size, path)))

    def unpack(found: CachedTable) -> list[Column]:
        columns = _unpack(found, length // _BYTES_PER_RECORD)
        check_columns(columns, (offset, offset + length), size, path)
        return columns

    columns = remember(
        IndexKey.of("syrah", (path,), remote=remote) if cache else None,
        unpack,
        lambda: parse_metadata(file.read(offset, length), offset, size, path),
        pack=_pack,
    )
    return make(columns)


def _pack(columns: list[Column]) -> CachedTable | None:
    records = len(columns[0].offsets)
    described = [_describe(column) for column in columns] if records >= _LEAST_CACHED else [None]
    return None if None in described else CachedTable({}, {"records": records, "columns": described})


def _describe(column: Column) -> list[Any] | None:
    """Return a column as values for JSON; None if its records differ in distance, size or shape."""
    offsets, sizes, shapes = column.offsets, column.sizes, column.shapes
    stride = int(offsets[1] - offsets[0])
    if bool((np.diff(offsets) != stride).any() or (sizes != sizes[0]).any()):
        return None
    shape = None
    if shapes is not None:
        rows = shapes.dims.reshape(len(shapes.ndim), -1) if len(shapes.dims) % len(shapes.ndim) == 0 else None
        if rows is None or bool((shapes.ndim != shapes.ndim[0]).any() or (rows != rows[:1]).any()):
            return None
        shape = rows[0].tolist()
    return [column.name, column.dtype, column.is_bytes, int(offsets[0]), stride, int(sizes[0]), shape]


def _unpack(found: CachedTable, most: int) -> list[Column]:
    """Return the columns from the cache, which must be valid, with at most `most` records."""
    records, described = found.extras["records"], found.extras["columns"]
    require(type(records) is int, 0 < records <= most, isinstance(described, list), described != [])
    columns: list[Column] = []
    for name, dtype, is_bytes, start, stride, size, shape in cast("list[Any]", described):
        numbers = [start, stride, size, *(shape or [])]
        require(all(type(number) is int and 0 <= number < 1 << 48 for number in numbers), isinstance(name, str))
        require(dtype in ("str", *DTYPES), start + stride * records < 1 << 62)
        offsets = np.arange(records) * stride
        offsets += start
        shapes = None if shape is None else Shapes(np.array([len(shape)]), np.array(shape, np.int64))
        columns.append(Column(name, dtype, offsets, np.full(records, size), shapes, is_bytes=bool(is_bytes)))
    return columns
