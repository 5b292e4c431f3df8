"""Records as `numpy.savez` writes them: a zip archive with a ``.npy`` member for each field.

| value | member | comes back as |
|---|---|---|
| array | ``name.npy`` | the same array, in C order |
| int, float, bool, numpy scalar | ``name.npy`` | array of no dimensions |
| bytes | ``name.bin`` | bytes; `numpy.load` gives them under that name |
| str | ``name.txt``, UTF-8 | str; `numpy.load` gives bytes under that name |

A member with another name comes back as bytes under it. Archives of `numpy.savez_compressed` are read too.
"""

from __future__ import annotations

import ast
import functools
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from dataload.codecs.dtypes import parse_dtype, plain_array
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array

__all__ = ["decode", "encode"]

# signature, version, flags, method, time, date, CRC, compressed size, size, lengths of name and extra
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
# signature, disks, entries on this disk, entries, size and offset of the central directory, comment
_END = struct.Struct("<4s4H2IH")
_DATE = 1 << 5 | 1  # 1 January 1980, the first that the format knows: the same record, the same bytes
_UTF8 = 0x800
_MAX_BYTES = 2**32 - 2
_MAX_FIELDS = 2**16 - 2
_MAX_NAME = 16_000
_MAX_HEADER = 10_000  # of a .npy; as numpy's own
_MAX_RATIO = 1032  # of deflate
_MAGIC = b"\x93NUMPY"


class _Entry(NamedTuple):
    """`_CENTRAL`, an entry of the central directory."""

    magic: bytes
    made_by: int
    version: int
    flags: int
    method: int
    time: int
    date: int
    crc: int
    packed: int
    length: int
    name_length: int
    extra_length: int
    comment_length: int
    disk: int
    internal: int
    external: int
    offset: int


def decode(data: bytes | memoryview) -> dict[str, Any]:
    """The fields of an archive, in its order.

    Raises:
        CorruptFileError: The bytes are no such archive, a checksum is wrong, or an array holds objects.
    """
    data = bytes(data)
    members = _stored(data)
    record: dict[str, Any] = {}
    for name, content in _any_members(data) if members is None else members:
        field, value = _field(name, content)
        if field in record:
            raise CorruptFileError(f"the archive has two members for field {field!r}")
        record[field] = value
    return record


def _field(name: str, content: bytes | memoryview) -> tuple[str, Any]:
    stem, _, suffix = name.rpartition(".")
    try:
        if suffix == "npy":
            return stem, _parse_npy(memoryview(content))
        if suffix == "txt":
            return stem, str(content, "utf-8")
    except (CorruptFileError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"member {name!r} of the archive: {error}") from error
    return stem if suffix == "bin" else name, bytes(content)


def _stored(data: bytes) -> list[tuple[str, memoryview]] | None:
    """Names and contents of an archive as `numpy.savez` writes it; None for any other, valid or not.

    The standard library's reader takes ten times longer than all the rest of decoding.
    """
    if len(data) < _END.size:
        return None
    magic, _, _, _, count, size, directory, comment = _END.unpack_from(data, len(data) - _END.size)
    end = directory + size
    if magic != b"PK\5\6" or comment or end != len(data) - _END.size:
        return None
    members: list[tuple[str, memoryview]] = []
    place, left = directory, directory
    for _ in range(count):
        if place + _CENTRAL.size > end:
            return None
        entry = _Entry._make(_CENTRAL.unpack_from(data, place))
        place += _CENTRAL.size
        name = _stored_name(data[place : place + entry.name_length], entry)
        place += entry.name_length + entry.extra_length + entry.comment_length
        content = _stored_content(data, directory, entry)
        left -= entry.length  # members that overlap could claim any sum
        if name is None or content is None or left < 0:
            return None
        members.append((name, content))
    return members if place == end else None


def _stored_name(name: bytes, entry: _Entry) -> str | None:
    if b"\0" in name or entry.flags not in (0, _UTF8) or not (name.isascii() or entry.flags):
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def _stored_content(data: bytes, end: int, entry: _Entry) -> memoryview | None:
    """What stands behind the local header, if all of it lies before `end`, is not compressed and has its checksum."""
    if entry.magic != b"PK\1\2" or entry.method or entry.packed != entry.length or entry.offset + _LOCAL.size > end:
        return None
    magic, *_, name_length, extra_length = _LOCAL.unpack_from(data, entry.offset)
    start = entry.offset + _LOCAL.size + name_length + extra_length
    content = memoryview(data)[start : start + entry.length]
    whole = magic == b"PK\3\4" and start + entry.length <= end
    return content if whole and zlib.crc32(content) == entry.crc else None


def _any_members(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of any archive whose members are stored or deflated."""
    left = len(data) * _MAX_RATIO
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                left -= info.file_size
                if left < 0 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise CorruptFileError(
                        f"member {info.filename!r:.80} of the archive claims {info.file_size} bytes by compression "
                        f"method {info.compress_type}; the record has {len(data)}"
                    )
                yield info.filename, archive.read(info)
    except CorruptFileError:
        raise
    # Damaged archives end in all of these, depending on where the damage is.
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CorruptFileError(f"no .npz archive ({len(data)} bytes): {str(error)[:200]}") from error


def _parse_npy(view: memoryview) -> Array:
    magic = bytes(view[:10])
    if not magic.startswith(_MAGIC) or len(magic) < 10:
        raise CorruptFileError(f"expected an array, which starts with {_MAGIC!r} and its header; found {magic!r}")
    width = 2 if view[6] == 1 else 4
    start = 8 + width + int.from_bytes(view[8 : 8 + width], "little")
    if start > min(len(view), _MAX_HEADER):
        raise CorruptFileError(f"the header of the array claims to end at byte {start} of {len(view)}")
    dtype, shape, order = _parse_header(bytes(view[8 + width : start]))
    if dtype.itemsize * math.prod(shape) != len(view) - start:
        raise CorruptFileError(f"{len(view) - start} bytes for an array of {dtype} {str(shape)[:80]}")
    try:
        return np.ndarray(shape, dtype, view, start, order=order).copy()
    except ValueError as error:  # more dimensions, or larger ones beside one of 0, than numpy has
        raise CorruptFileError(f"an array of shape {str(shape)[:80]}: {error}") from error


@functools.lru_cache(256)  # all records of a field mostly share one
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    try:
        found = ast.literal_eval(header.decode("latin-1").strip())
        dtype, shape = parse_dtype(found["descr"]), found["shape"]
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"shape {shape!r:.80}")
        return dtype, shape, "F" if found["fortran_order"] else "C"
    except CorruptFileError:
        raise
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CorruptFileError(f"the header of the array is none ({what}): {header[:80]!r}") from error


def encode(record: Mapping[str, Any]) -> bytes:
    """`record` as an archive that `numpy.load` reads, without compression.

    Raises:
        ConfigError: A value is none of the above, or the archive would have 4 GiB.
    """
    if len(record) > _MAX_FIELDS:
        raise ConfigError(f"a record of {len(record)} fields; codec 'npz' holds {_MAX_FIELDS}")
    parts: list[bytes] = []
    directory: list[bytes] = []
    offset = 0
    for field, value in record.items():
        try:
            name, content = _member(field, value)
        except (ConfigError, UnicodeEncodeError) as error:
            raise ConfigError(f"field {field!r:.80}: {error}", key=field) from error
        common = (0 if name.isascii() else _UTF8, 0, 0, _DATE, zlib.crc32(content), len(content), len(content))
        if offset + len(content) > _MAX_BYTES:
            raise ConfigError(f"a record of more than {_MAX_BYTES} bytes; codec 'npz' holds less", key=field)
        local = _LOCAL.pack(b"PK\3\4", 20, *common, len(name), 0)
        directory += _CENTRAL.pack(b"PK\1\2", 20, 20, *common, len(name), 0, 0, 0, 0, 0, offset), name
        parts += local, name, content
        offset += len(local) + len(name) + len(content)
    size = sum(map(len, directory))
    end = _END.pack(b"PK\5\6", 0, 0, len(record), len(record), size, offset, 0)
    return b"".join((*parts, *directory, end))


def _member(field: str, value: Any) -> tuple[bytes, bytes]:
    """Name and content of the member that holds a value."""
    if "\0" in field or len(field) > _MAX_NAME:
        raise ConfigError(f"a name in a zip archive has no NUL, and {_MAX_NAME} characters at most")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{field}.bin".encode(), bytes(value)
    if isinstance(value, str):
        return f"{field}.txt".encode(), value.encode()
    array = plain_array(value)
    return f"{field}.npy".encode(), _build_header(array.dtype.str, array.shape) + array.tobytes()


@functools.lru_cache(256)
def _build_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()
