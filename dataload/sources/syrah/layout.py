"""The Syrah format: a header, the bytes of the arrays, and the metadata as a BSON document.

The header has 22 bytes: ``GS``, 4 version bytes, and the int64 offset and length of the metadata, little-endian. The
metadata are ``{key: {"offset": <n int64>, "size": <n int64, bytes>, "dtype": name}}``.

The original format supports neither shapes nor bytes. We add two entries to the document of a key, which the original
reader ignores:

- ``shape``: ``{"ndim": <1 or n int64>, "dims": <dims, concatenated>}``, where a single ndim applies to all records.
  Absent if every record is one-dimensional.
- ``kind``: ``"bytes"`` for uint8 arrays that were bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dataload.errors import CorruptFileError
from dataload.sources.syrah.format import SYRAH
from dataload.types import Int64Array

MAGIC = b"GS"
HEADER_SIZE = 22
_HEADER = struct.Struct("<2s4Bqq")
_VERSION = (0, 0, 2, 0)  # as written by the original, which does not check it

DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        [
            "bool",
            "int8",
            "uint8",
            "int16",
            "uint16",
            "int32",
            "uint32",
            "int64",
            "uint64",
            "float16",
            "float32",
            "float64",
        ]
        # 80-bit extended precision in 16 bytes: only where numpy has that type
        + (["float128"] if hasattr(np, "float128") else [])
    )
}

BSON_LIMIT = 2**31 - 1
"""Size limit of a BSON document in bytes; each record takes 16 bytes per key."""


class Shapes(NamedTuple):
    """Shapes of the records of one key.

    Attributes:
        ndim: (1,) or (n,) int64.
        dims: int64, concatenated dims of the records, or dims of all if `ndim` is a single number.
    """

    ndim: Int64Array
    dims: Int64Array


@dataclass(frozen=True, slots=True)
class Column:
    """Locations of the values of one key.

    Attributes:
        name: The key.
        dtype: A name in `DTYPES`, or ``"str"``.
        offsets: (n,) int64, byte offsets in the file.
        sizes: (n,) int64, sizes in bytes.
        shapes: Shapes; None if every record is one-dimensional.
        is_bytes: Whether the values were bytes.
    """

    name: str
    dtype: str
    offsets: Int64Array
    sizes: Int64Array
    shapes: Shapes | None = None
    is_bytes: bool = False


def build_header(offset: int, length: int) -> bytes:
    """Return the header of a file whose metadata are at `offset`."""
    return _HEADER.pack(MAGIC, *_VERSION, offset, length)


def parse_header(head: bytes, file_size: int, path: str) -> tuple[int, int]:
    """Return offset and length of the metadata.

    Raises:
        CorruptFileError: The header is invalid or points outside the file.
    """
    if len(head) < HEADER_SIZE:
        found = "it is empty (a writer that was never closed?)" if not head else f"the file has {len(head)}"
        raise CorruptFileError(f"a Syrah header has {HEADER_SIZE} bytes, {found}", path=path, offset=0)
    magic, *_, offset, length = _HEADER.unpack(head[:HEADER_SIZE])
    if magic != MAGIC:
        hint = " (a writer that was never closed?)" if not any(head) else ""
        raise CorruptFileError(f"expected the magic bytes {MAGIC!r}, found {magic!r}{hint}", path=path, offset=0)
    if not HEADER_SIZE <= offset <= file_size:
        raise CorruptFileError(
            f"the header says that the metadata start at byte {offset}; the file has {file_size}",
            path=path,
            offset=6,
        )
    if not 5 <= length <= file_size - offset:  # an empty BSON document has 5 bytes
        raise CorruptFileError(
            f"the header says that the metadata have {length} bytes; {file_size - offset} are left for them",
            path=path,
            offset=14,
        )
    return offset, length


def parse_metadata(data: bytes | memoryview, offset: int, file_size: int, path: str) -> list[Column]:
    """Return the columns of a file, after checking every number.

    Args:
        data: The BSON document.
        offset: Offset of the document in the file; no array may overlap it.
        file_size: Size of the file in bytes.
        path: Path of the file, for messages.

    Returns:
        One column per key, in file order.

    Raises:
        CorruptFileError: The document or a number in it is invalid.
        MissingDependencyError: pymongo is not installed.
    """
    bson = SYRAH.require("bson", package="pymongo")
    try:
        document: dict[str, Any] = bson.decode(data)
    except Exception as error:  # bson raises InvalidBSON, but also whatever struct and the C code raise
        raise CorruptFileError(f"the metadata are not a BSON document: {error}", path=path, offset=offset) from error
    if not document:
        raise CorruptFileError("the metadata have no keys", path=path, offset=offset)
    columns = [_parse_column(name, entry, path, offset) for name, entry in document.items()]
    first = columns[0]
    for column in columns:
        if len(column.offsets) != len(first.offsets):
            raise CorruptFileError(
                f"key {first.name!r} has {len(first.offsets)} records, key {column.name!r} has {len(column.offsets)}",
                path=path,
                offset=offset,
            )
        _check_offsets(column, (offset, offset + len(data)), file_size, path)
        _check_shapes(column, path, offset)
    return columns


def _parse_column(name: str, entry: Any, path: str, offset: int) -> Column:
    if not isinstance(entry, dict):
        raise CorruptFileError(f"key {name!r} has no document", path=path, offset=offset)
    for part in ("offset", "size", "dtype"):
        if part not in entry:
            raise CorruptFileError(f"key {name!r} has no entry {part!r}", path=path, offset=offset)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or (dtype != "str" and dtype not in DTYPES):
        raise CorruptFileError(
            f"key {name!r} has dtype {dtype!r}; the format supports {', '.join(DTYPES)}, str",
            path=path,
            offset=offset,
        )
    offsets, sizes = (_table(entry[part], f"{part} of key {name!r}", path, offset) for part in ("offset", "size"))
    if len(offsets) != len(sizes):
        raise CorruptFileError(
            f"key {name!r} has {len(offsets)} offsets and {len(sizes)} sizes", path=path, offset=offset
        )
    shapes = None
    if isinstance(entry.get("shape"), dict):
        shape = entry["shape"]
        ndim, dims = (_table(shape.get(part), f"shape of key {name!r}", path, offset) for part in ("ndim", "dims"))
        shapes = Shapes(ndim, dims)
    return Column(name, dtype, offsets, sizes, shapes, is_bytes=entry.get("kind") == "bytes" and dtype == "uint8")


def _table(data: Any, what: str, path: str, offset: int) -> Int64Array:
    if not isinstance(data, bytes) or len(data) % 8:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise CorruptFileError(f"{what} is not a table of int64: {found}", path=path, offset=offset)
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False)


def _check_offsets(column: Column, metadata: tuple[int, int], file_size: int, path: str) -> None:
    offsets, sizes = column.offsets, column.sizes
    item = 1 if column.dtype == "str" else DTYPES[column.dtype].itemsize

    def refuse(bad: Any, what: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            raise CorruptFileError(
                f"key {column.name!r} has {int(sizes[index])} bytes at {int(offsets[index])}: {what}",
                path=path,
                offset=int(offsets[index]),
                index=index,
            )

    refuse(sizes < 0, "a negative size")
    refuse(offsets < HEADER_SIZE, "inside the header")
    # Compared without adding, because sums of hostile numbers may overflow.
    refuse(
        (offsets > file_size) | (sizes > file_size - np.minimum(offsets, file_size)),
        f"the file has {file_size}",
    )
    refuse((offsets < metadata[1]) & (offsets + sizes > metadata[0]) & (sizes > 0), "inside the metadata")
    refuse(sizes % item != 0, f"not a multiple of the {item} bytes of {column.dtype}")


def _check_shapes(column: Column, path: str, offset: int) -> None:
    if column.shapes is None:
        return
    ndim, dims = column.shapes
    records = len(column.offsets)
    message = f"the shapes of key {column.name!r} do not fit its sizes"
    if len(ndim) not in (1, records) or (ndim < 0).any() or (ndim > 64).any() or int(ndim.sum()) != len(dims):
        raise CorruptFileError(message, path=path, offset=offset)
    if (dims < 0).any() or (dims > BSON_LIMIT).any():
        raise CorruptFileError(message, path=path, offset=offset)
    counts = np.ones(len(ndim), np.int64)
    ends = np.cumsum(ndim)
    # float64 products do not wrap, and are only inexact when far larger than any file.
    products = np.ones(len(ndim), np.float64)
    for axis in range(int(ndim.max(initial=0))):
        has = ndim > axis
        extent = dims[(ends - ndim)[has] + axis]
        counts[has] *= extent
        products[has] *= np.maximum(extent, 1)  # an extent of 0 must not hide others, which numpy multiplies too
    item = DTYPES[column.dtype].itemsize if column.dtype != "str" else 1
    if (products > 2.0**62).any() or (counts * item != column.sizes).any():
        raise CorruptFileError(message, path=path, offset=offset)


def build_metadata(columns: list[Column]) -> bytes:
    """Return the BSON document for `columns`.

    Raises:
        MissingDependencyError: pymongo is not installed.
    """
    bson = SYRAH.require("bson", package="pymongo")
    document: dict[str, Any] = {}
    for column in columns:
        entry: dict[str, Any] = {
            "offset": column.offsets.astype("<i8", copy=False).tobytes(),
            "size": column.sizes.astype("<i8", copy=False).tobytes(),
            "dtype": column.dtype,
        }
        if column.shapes is not None:
            entry["shape"] = {
                "ndim": column.shapes.ndim.astype("<i8", copy=False).tobytes(),
                "dims": column.shapes.dims.astype("<i8", copy=False).tobytes(),
            }
        if column.is_bytes:
            entry["kind"] = "bytes"
        document[column.name] = entry
    return bson.encode(document)
