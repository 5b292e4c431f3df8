"""Records in the format of `numpy.savez`: a zip archive with a ``.npy`` member per field.

| value | member | decoded as |
|---|---|---|
| array | ``name.npy`` | the same array, in C order |
| int, float, bool, numpy scalar | ``name.npy`` | 0-d array |
| bytes | ``name.bin`` | bytes; `numpy.load` gives them under that name |
| str | ``name.txt``, UTF-8 | str; `numpy.load` gives bytes under that name |

A member with any other name is decoded as bytes under that name. Archives of `numpy.savez_compressed` are read too.

Members must fill an archive up to its directory, with headers that agree with the directory: otherwise other programs
could see other members.
"""

import ast
import functools
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np

from dataload._util.arrays import MASKED, MAX_RECORD_BYTES, check_size, fits, is_masked
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array

_NAME = re.compile(r"[<>|=][biufcmMSU]\d{1,9}(\[\w{1,9}\])?")
"""Values of `dtype.str`, except objects, which would have to be unpickled, and structures."""
MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000  # bytes, as in numpy: parsing time grows faster than the length
_KEYS = {"descr", "fortran_order", "shape"}
_PREFIX = 12  # longest prefix: magic, version and length of the header


@dataclass(frozen=True, slots=True)
class NpyLayout:
    """The header of a .npy file."""

    dtype: np.dtype[Any]  # never of objects
    shape: tuple[int, ...]
    fortran: bool  # whether the items are in Fortran order, with the first axis varying fastest
    start: int  # offset of the items in the file, in bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, items: Array) -> Array:
        """Return a (rows, *shape) array that shares memory with `items`, (rows, nbytes) uint8, contiguous."""
        if not self.nbytes:
            return np.empty((len(items), *self.shape), self.dtype)
        flat = items.view(self.dtype)
        if not self.fortran:
            return flat.reshape(len(items), *self.shape)
        return np.moveaxis(flat.reshape(len(items), *self.shape[::-1]).T, -1, 0)


def npy_layout(data: bytes | memoryview) -> NpyLayout:
    """Parse the header of `data`, a .npy file or at least its header. Errors have no path yet."""
    prefix = bytes(data[:_PREFIX])
    if prefix[:6] != MAGIC or len(prefix) < 10:
        raise CorruptFileError(f"a .npy file must start with {MAGIC!r}, found {prefix[:8]!r}")
    version, width = prefix[6], 2 if prefix[6] == 1 else 4
    if version not in (1, 2, 3) or prefix[7]:
        raise CorruptFileError(f"a .npy file of version {version}.{prefix[7]}; supported are 1.0, 2.0 and 3.0")
    start = 8 + width + int.from_bytes(prefix[8 : 8 + width], "little")
    if start > min(len(data), _LONGEST_HEADER + _PREFIX):
        raise CorruptFileError(f"the header of a .npy file claims to end at byte {start} of {len(data)}")
    return _parse_header(bytes(data[8 + width : start]), start, version)


@lru_cache(maxsize=256)  # the records of a data set have few distinct headers
def _parse_header(text: bytes, start: int, version: int) -> NpyLayout:
    try:
        header: Any = ast.literal_eval(text.decode("utf-8" if version == 3 else "latin-1").strip(" \n"))
        if header.keys() != _KEYS:
            raise CorruptFileError(f"the header of a .npy file has the keys {sorted(map(str, header))!s:.80}")
        descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
        dtype = np.lib.format.descr_to_dtype(descr) if isinstance(descr, list) else parse_dtype(descr)
        np.empty((0, *shape), dtype)  # refuses too many dimensions and too large extents
    except CorruptFileError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, SyntaxError, MemoryError, RecursionError) as error:
        raise CorruptFileError(f"the header of a .npy file is invalid: {error}") from error
    if dtype.hasobject or not dtype.itemsize:
        raise CorruptFileError(f"a .npy file of {dtype}: objects would have to be unpickled")
    if type(shape) is not tuple or type(fortran) is not bool or not fits(shape, math.prod(shape)):
        raise CorruptFileError(f"the header of a .npy file gives the shape {shape!s:.80}, order {fortran!s:.80}")
    return NpyLayout(dtype, shape, fortran, start)


def parse_npy(data: bytes | memoryview) -> Array:
    """Return a copy of the array in a .npy file. Errors have no path yet."""
    layout = npy_layout(data)
    found = len(data) - layout.start
    if found != layout.nbytes:
        raise CorruptFileError(
            f"a .npy file of {layout.dtype} {layout.shape} has {layout.nbytes} bytes of items, found {found}"
        )
    items = np.frombuffer(data, np.uint8)[layout.start :].copy()
    return layout.rows(items[np.newaxis]).squeeze(0)


def build_npy(array: Array) -> bytes:
    """Return the .npy file of an array, which must not hold objects."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return stream.getvalue()


def parse_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = "objects would have to be unpickled" if "O" in str(name) else "not a plain dtype"
        raise CorruptFileError(f"an array of dtype {str(name)[:80]!r}: {what}")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"an array of dtype {name!r}: {error}") from error
    if not dtype.itemsize:  # any number of items would fit
        raise CorruptFileError(f"an array of dtype {name!r}: items of zero bytes")
    return dtype


def plain_array(value: Any) -> Array:
    """Return `value` as a C-order array with a dtype that `parse_dtype` supports; ConfigError otherwise."""
    if is_masked(value):
        raise ConfigError(MASKED)
    try:
        array = np.asarray(value, order="C")
    except (TypeError, ValueError, RuntimeError) as error:  # such as lists of different lengths, or torch's bfloat16
        raise ConfigError(f"{type(value).__name__} is not an array: {error}") from error
    is_foreign = array.dtype.isbuiltin == 2  # such as float8_e5m2 of ml_dtypes, whose kind is "f"
    if array.dtype.kind not in "biufcmMSU" or not array.dtype.itemsize or is_foreign:
        reason = "would have to be pickled" if array.dtype.hasobject else "is not supported"
        raise ConfigError(f"an array of {array.dtype} {reason}; store its parts in separate fields")
    return array


# signature, version, flags, method, time, date, CRC, compressed size, size, lengths of name and extra
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
# signature, disks, entries on this disk, entries, size and offset of the central directory, comment
_END = struct.Struct("<4s4H2IH")
_DATE = 1 << 5 | 1  # 1 January 1980, the earliest date: equal records give equal bytes
_UTF8 = 0x800
_MAX_BYTES = 2**32 - 2
_MAX_FIELDS = 2**16 - 2
_MAX_NAME = 16_000
_SIZES_FOLLOW = 8  # flag: CRC and sizes follow the content, in one of these numbers of bytes
_DESCRIPTORS = (12, 16, 20, 24)
_IN_EXTRA = 2**32 - 1  # stands for a size that the extra data contain; numpy puts all sizes there
_MAX_RATIO = 1032  # compression ratio of deflate


def decode(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Decode an archive to its fields, in order, if its members have at most `limit` bytes."""
    data = bytes(data)
    members = _stored(data)
    record: dict[str, Any] = {}
    for name, content in _any_members(data, limit) if members is None else members:
        field, value = _field(name, content)
        if field in record:
            raise CorruptFileError(f"the archive has two members for field {field!r}")
        record[field] = value
    return record


def _field(name: str, content: bytes | memoryview) -> tuple[str, Any]:
    stem, _, suffix = name.rpartition(".")
    try:
        if suffix == "npy":
            array = parse_npy(content)
            if array.dtype.names:
                raise CorruptFileError(f"a structured array, {array.dtype}, which is not supported")
            return stem, array if array.flags.c_contiguous else array.copy()
        if suffix == "txt":
            return stem, str(content, "utf-8")
    except (CorruptFileError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"member {name!r} of the archive: {error}") from error
    return stem if suffix == "bin" else name, bytes(content)


def _stored(data: bytes) -> list[tuple[str, memoryview]] | None:
    """Return names and contents of an archive by `numpy.savez`, else None; `zipfile` takes ten times longer."""
    if len(data) < _END.size:
        return None
    magic, _, _, _, count, size, directory, comment = _END.unpack_from(data, len(data) - _END.size)
    end = directory + size
    if magic != b"PK\5\6" or comment or end != len(data) - _END.size:
        return None
    members: list[tuple[str, memoryview]] = []
    position, start = directory, 0
    for _ in range(count):
        if position + _CENTRAL.size > end:
            return None
        magic, _, _, flags, method, _, _, crc, packed, length, *tail = _CENTRAL.unpack_from(data, position)
        if magic != b"PK\1\2" or flags not in (0, _UTF8) or method or packed != length:
            return None
        name_length, extra_length, comment_length, *_, offset = tail
        position += _CENTRAL.size
        name = data[position : position + name_length]
        position += name_length + extra_length + comment_length
        stop = _end_of_header(data, offset, name, (flags, method, crc, length)) + length
        if offset != start or b"\0" in name or not (name.isascii() or flags):
            return None
        content = memoryview(data)[stop - length : stop]
        if zlib.crc32(content) != crc:
            return None
        start = stop
        try:
            members.append((name.decode(), content))
        except UnicodeDecodeError:
            return None
    return members if position == end and start == directory else None


def _end_of_header(data: bytes, offset: int, name: bytes, expected: tuple[int, int, int, int]) -> int:
    """Return the offset after a local header, or beyond all data if it differs from `expected`, the directory's."""
    if offset + _LOCAL.size <= len(data):
        magic, _, flags, method, _, _, crc, packed, size, name_length, extra_length = _LOCAL.unpack_from(data, offset)
        start = offset + _LOCAL.size
        stop = start + name_length
        same = (flags, method, crc, expected[3] if size == _IN_EXTRA else size) == expected and packed == size
        if magic == b"PK\3\4" and same and data[start:stop] == name:
            return stop + extra_length
    return len(data)


def _check_headers(data: bytes, members: list[zipfile.ZipInfo], directory: int) -> None:
    """Raise unless the members fill the bytes before the directory, and their headers agree with it."""
    members = sorted(members, key=lambda info: info.header_offset)
    starts = [info.header_offset for info in members]
    position = 0
    for info, start, stop in zip(members, starts, [*starts, directory][1:], strict=True):
        _, _, flags, method, _, _, crc, packed, size, *lengths = _LOCAL.unpack_from(data, start)
        said = (info.CRC, info.compress_size, info.file_size)
        later = bool(flags & _SIZES_FOLLOW)
        sizes = packed in (said[1], _IN_EXTRA) and size in (said[2], _IN_EXTRA)
        if position != start or method != info.compress_type or not (later or (crc == said[0] and sizes)):
            break
        left = stop - (start + _LOCAL.size + sum(lengths) + info.compress_size)
        if left not in (_DESCRIPTORS if later else (0,)):
            break
        position = stop
    if position != directory:
        raise CorruptFileError(
            f"the directory of the archive contradicts the header of a member at byte {position}: other programs would "
            "read other members"
        )


def _any_members(data: bytes, limit: int = MAX_RECORD_BYTES) -> Iterator[tuple[str, bytes]]:
    left = len(data) * _MAX_RATIO
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            for info in members:
                left -= info.file_size
                if left < 0 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise CorruptFileError(
                        f"member {info.filename!r:.80} of the archive claims {info.file_size} bytes by compression "
                        f"method {info.compress_type}; the record has {len(data)}"
                    )
            check_size(sum(info.file_size for info in members), limit, f"an archive of {len(members)} members")
            _check_headers(data, members, archive.start_dir)
            for info in members:
                with archive.open(info) as member:
                    yield info.filename, member.read(info.file_size)  # without a size, it expands everything
    except CorruptFileError:
        raise
    # A damaged archive raises any of these.
    except (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, RuntimeError) as error:
        raise CorruptFileError(f"not an .npz archive ({len(data)} bytes): {str(error)[:200]}") from error


def encode(record: Mapping[str, Any]) -> bytes:
    """Encode `record` as an uncompressed archive, below 4 GiB, that `numpy.load` reads."""
    if len(record) > _MAX_FIELDS:
        raise ConfigError(f"a record of {len(record)} fields; codec 'npz' supports {_MAX_FIELDS}")
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
            raise ConfigError(f"a record of more than {_MAX_BYTES} bytes, the limit of codec 'npz'", key=field)
        local = _LOCAL.pack(b"PK\3\4", 20, *common, len(name), 0)
        directory += _CENTRAL.pack(b"PK\1\2", 20, 20, *common, len(name), 0, 0, 0, 0, 0, offset), name
        parts += local, name, content
        offset += len(local) + len(name) + len(content)
    size = sum(map(len, directory))
    end = _END.pack(b"PK\5\6", 0, 0, len(record), len(record), size, offset, 0)
    return b"".join((*parts, *directory, end))


def _member(field: str, value: Any) -> tuple[bytes, bytes]:
    if not isinstance(field, str):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass numbers
        raise ConfigError("field names must be text")
    if "\0" in field or len(field) > _MAX_NAME:
        raise ConfigError(f"a name in a zip archive must have no NUL and at most {_MAX_NAME} characters")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{field}.bin".encode(), bytes(value)
    if isinstance(value, str):
        return f"{field}.txt".encode(), value.encode()
    array = plain_array(value)
    if array.dtype.kind in "SU" and isinstance(value, (list, tuple)) and array.tolist() != _plain_list(value):
        message = "numpy makes text of numbers among text, and cuts zeros off the ends of text and bytes"
        raise ConfigError(f"{type(value).__name__} is not an array: {message}; store its parts in separate fields")
    return f"{field}.npy".encode(), _build_header(array.dtype.str, array.shape) + array.tobytes()


def _plain_list(value: Any) -> Any:
    return [*map(_plain_list, cast("list[Any]", value))] if isinstance(value, (list, tuple)) else value


@functools.lru_cache(256)
def _build_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()
