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

import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dataload._util.limits import MAX_RECORD_BYTES, check_size
from dataload.codecs.npy import parse_npy, plain_array
from dataload.errors import ConfigError, CorruptFileError

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
        if offset != start or stop > directory or b"\0" in name or not (name.isascii() or flags):
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
    if "\0" in field or len(field) > _MAX_NAME:
        raise ConfigError(f"a name in a zip archive must have no NUL and at most {_MAX_NAME} characters")
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
