"""Files of a folder or of a zip archive."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import TypeAlias

import numpy as np

from dataload._util.arrays import check_size
from dataload._util.fingerprint import digest
from dataload.catalog.evidence import ends_of_file
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.sources.folder import FolderOptions
from dataload.storage import Listing, RecordFile, is_url, join, list_folder, read_files, storage_of
from dataload.storage.paths import leads_elsewhere
from dataload.types import Int64Array

_MACOS_FOLDER = "__MACOSX"  # in which macOS packs attributes of files


class FolderFiles:
    """The files in a folder that are `wanted`, by relative path; their values in `listing` are their sizes in bytes."""

    def __init__(self, root: str, wanted: Callable[[str], object], limit: int) -> None:
        self._root = root
        self._limit = limit
        self.listing: Listing
        self.listing, self._newest = list_folder(root, wanted)

    def sizes(self, values: Int64Array) -> Int64Array:
        """Return the sizes of files in bytes, (n,) int64."""
        return values

    def identity(self, names: Sequence[str], values: Int64Array) -> str:  # noqa: ARG002 - for archives
        """Return a hash of the contents: of all in an archive, else of the ends of the given files."""
        return digest(*(ends_of_file(join(self._root, name), None) for name in names))

    def read(self, names: Sequence[str], values: Int64Array, indices: Int64Array) -> Sequence[bytes]:
        """Return the content of files; `indices` of their records are for messages."""
        paths = [join(self._root, name) for name in names]
        sizes, records = values.tolist(), indices.tolist()
        for path, size, index in zip(paths, sizes, records, strict=True):
            check_size(size, self._limit, "the file", path=path, index=index)
        return read_files(paths, sizes, records, self._newest)

    def ranges(self, values: Int64Array) -> None:
        """Return offsets and lengths in bytes, (n,) int64, of what `read` reads of an archive; None for a folder."""

    def locate(self, name: str) -> tuple[str, str]:
        """Return the path of the file that has the bytes, and what they are in it, for messages."""
        return join(self._root, name), ""

    def release(self) -> None:
        """Close the archive, if it is one."""


class ZipFiles:
    """The members of a ZIP archive that are `wanted`, by name; their values are their numbers. See `FolderFiles`."""

    def __init__(self, file: RecordFile, wanted: Callable[[str], object], limit: int) -> None:
        self._file = file
        self._limit = limit
        self._members = read_members(file.read, file.size, file.path)
        self.listing: dict[str, dict[str, int]] = {}
        for number, name in enumerate(self._members.names):
            if wanted(name) and not name.startswith((".", f"{_MACOS_FOLDER}/")) and "/." not in name:
                folder, _, base = name.rpartition("/")
                self.listing.setdefault(folder, {})[base] = number
        self._members.names.clear()  # the table has them

    def sizes(self, values: Int64Array) -> Int64Array:
        return self._members.sizes[values]

    def identity(self, names: Sequence[str], values: Int64Array) -> str:  # noqa: ARG002 - for folders
        return hashlib.blake2b(self._members.checksums.tobytes(), digest_size=16).hexdigest()

    def read(self, names: Sequence[str], values: Int64Array, indices: Int64Array) -> list[bytes | memoryview]:
        members, path = self._members, self._file.path
        starts, sizes = members.starts[values], members.sizes[values].tolist()
        for name, size, index in zip(names, sizes, indices.tolist(), strict=True):
            check_size(size, self._limit, f"the member {name!r}", path=path, index=index)
        contents = self._file.gather_ranges(starts, members.spans[values]).views()
        unpacked: list[bytes | memoryview] = []
        for row, (value, content) in enumerate(zip(values.tolist(), contents, strict=True)):
            stored, checksum = int(members.stored[value]), int(members.checksums[value])
            try:
                deflated = bool(members.deflated[value])
                unpacked.append(unpack(content, stored, sizes[row], checksum, deflated=deflated))
            except CorruptFileError as error:
                message = f"the member {names[row]!r}: {error}"
                raise CorruptFileError(message, path=path, offset=int(starts[row]), index=int(indices[row])) from error
        return unpacked

    def ranges(self, values: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._members.starts[values], self._members.spans[values]

    def locate(self, name: str) -> tuple[str, str]:
        return self._file.path, f"the member {name!r}"

    def release(self) -> None:
        self._file.release()


Files: TypeAlias = FolderFiles | ZipFiles
"""The files of a data set."""


def open_files(root: str, wanted: Callable[[str], object], options: FolderOptions) -> Files:
    """Return the files of a folder or an archive; a folder at a URL is refused."""
    storage = storage_of(root, options.remote_settings)
    if not storage.is_directory(root):
        file = storage.map(root, mapped=options.map)
        return ZipFiles(file, wanted, options.max_record_bytes)
    if is_url(root):
        message = f"{root} is a folder of single files at a URL, and each file would be a request: convert a copy of it"
        raise UnsupportedFormatError(
            f"{message} (`dataload convert`), or pack it as a .zip, and upload that", path=root
        )
    return FolderFiles(root, wanted, options.max_record_bytes)


END_BYTES = 22 + 0xFFFF + 20
"""Bytes at the end of an archive in which its end record lies: with the longest comment, and the locator of ZIP64."""

_LOCAL_BYTES = 30  # of a member's header, before its name
_LONGEST_HEADER = _LOCAL_BYTES + 2 * 0xFFFF

_END, _END64, _LOCATOR = b"PK\5\6", b"PK\6\6", b"PK\6\7"
_END_RECORD = Struct("<4s4H2IH")
_LOCATOR_RECORD = Struct("<4sIQI")
_END64_RECORD = Struct("<4sQ2H2I4Q")
_ENTRY = Struct("<4s6H3I5H2I")
_STORED, _DEFLATED = 0, 8
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF
_ENCRYPTED, _UTF8 = 1, 0x800


@dataclass(frozen=True, slots=True)
class Members:
    """The members of an archive, in its order; arrays are (members,) int64, `deflated` is bool.

    `spans` are the bytes from the header's offset (`starts`) that hold header and stored bytes. `stored` and `sizes`
    are bytes in the archive and of the content, `checksums` its CRC-32.
    """

    names: list[str]
    starts: Int64Array
    spans: Int64Array
    stored: Int64Array
    sizes: Int64Array
    checksums: Int64Array
    deflated: np.ndarray[tuple[int], np.dtype[np.bool_]]


def read_members(read: Callable[[int, int], bytes], size: int, path: str) -> Members:
    """Read the directory of an archive of `size` bytes, whatever is unsafe in it refused."""
    start, length, count = _find_directory(read, size, path)
    data = read(start, length)
    names: list[str] = []
    numbers: list[tuple[int, int, int, int, int]] = []
    at = 0
    while at < length:
        if length - at < _ENTRY.size or data[at : at + 4] != b"PK\1\2":
            raise CorruptFileError(f"expected the entry of member {len(numbers)}", path=path, offset=start + at)
        fields = _ENTRY.unpack_from(data, at)
        flags, method, checksum, stored, content, *lengths = fields[3], fields[4], *fields[7:13]
        name_at = at + _ENTRY.size
        extra_at = name_at + lengths[0]
        stop = extra_at + lengths[1] + lengths[2]
        if stop > length:
            raise CorruptFileError(f"the entry of member {len(numbers)} ends outside", path=path, offset=start + at)
        name = _decode_name(data[name_at:extra_at], flags, path, start + at)
        header = fields[16]
        if _FULL in (content, stored, header):
            extra = data[extra_at : extra_at + lengths[1]]
            content, stored, header = _large_numbers(extra, (content, stored, header), path, start + at)
        if not name.endswith("/"):  # a folder
            _check_method(flags, method, name, path)
            if header + _LOCAL_BYTES + stored > start or (method == _STORED and stored != content):
                message = f"the sizes or the offset of {name!r} are impossible: {stored} bytes at {header}"
                raise CorruptFileError(message, path=path, offset=start + at)
            names.append(name)
            numbers.append((header, stored, content, checksum, method))
        count -= 1
        at = stop
    if count:
        raise CorruptFileError("the number of members differs from the end record", path=path, offset=start)
    if len({*names}) < len(names):
        raise CorruptFileError(f"two members are called {Counter(names).most_common(1)[0][0]!r}", path=path)
    table = np.array(numbers, np.int64).reshape(-1, 5)
    starts, stored_sizes, sizes, checksums, methods = (np.ascontiguousarray(column) for column in table.T)
    order = np.argsort(starts, kind="stable")
    spans = np.empty_like(starts)
    spans[order] = np.diff(starts[order], append=start)  # only the header itself says how long it is
    spans = np.minimum(spans, stored_sizes + _LONGEST_HEADER)
    return Members(names, starts, spans, stored_sizes, sizes, checksums, methods == _DEFLATED)


def _find_directory(read: Callable[[int, int], bytes], size: int, path: str) -> tuple[int, int, int]:
    """Return the offset and the length in bytes of the directory, and the number of its entries."""
    tail_at = max(0, size - END_BYTES)
    tail = read(tail_at, size - tail_at)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_RECORD.size:
        raise CorruptFileError("no ZIP archive ends here: the file is truncated, or no archive", path=path, offset=size)
    end_at = tail_at + at
    _, disk, first_disk, here, count, length, start, _ = _END_RECORD.unpack_from(tail, at)
    if count == _FULL16 or _FULL in (length, start):
        locator = tail[max(0, at - _LOCATOR_RECORD.size) : at]
        if len(locator) == _LOCATOR_RECORD.size and locator.startswith(_LOCATOR):
            end_at = _LOCATOR_RECORD.unpack(locator)[2]
            if end_at + _END64_RECORD.size > size:
                raise CorruptFileError("the end record of ZIP64 lies outside", path=path, offset=tail_at + at)
            record = _END64_RECORD.unpack(read(end_at, _END64_RECORD.size))
            if record[0] != _END64:
                raise CorruptFileError("expected the end record of ZIP64", path=path, offset=end_at)
            disk, first_disk, here, count, length, start = record[4:]
    if disk or first_disk or here != count:
        raise UnsupportedFormatError(f"{path} is one of several parts of a ZIP archive: join them first", path=path)
    if start + length > end_at or count > length // _ENTRY.size:
        message = f"a directory of {count} members in {length} bytes at {start} is impossible: the file is truncated"
        raise CorruptFileError(message, path=path, offset=end_at)
    return start, length, count


def _large_numbers(extra: bytes, found: tuple[int, int, int], path: str, offset: int) -> tuple[int, int, int]:
    """Return content size, stored size and offset of a member, those that do not fit from the field of ZIP64."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = int.from_bytes(extra[at : at + 2], "little"), int.from_bytes(extra[at + 2 : at + 4], "little")
        if kind == 1:
            values = extra[at + 4 : at + 4 + length]
            large = [int.from_bytes(values[i : i + 8], "little") for i in range(0, len(values) - 7, 8)]
            if len(large) >= found.count(_FULL) and all(number < 1 << 62 for number in large):
                rest = iter(large)
                first, second, third = (next(rest) if number == _FULL else number for number in found)
                return first, second, third
        at += 4 + length
    raise CorruptFileError("a member lacks its sizes of ZIP64", path=path, offset=offset)


def _decode_name(name: bytes, flags: int, path: str, offset: int) -> str:
    """Return the name of a member, which must be a relative path inside: it may become one elsewhere."""
    try:
        text = name.decode("utf-8" if flags & _UTF8 or name.isascii() else "cp437")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"the name {name[:80]!r} is not UTF-8", path=path, offset=offset) from error
    if reason := leads_elsewhere(text.removesuffix("/").removesuffix("\r")):  # as macOS calls icons of folders
        raise CorruptFileError(f"the name of a member: {reason}", path=path, offset=offset)
    return text


def _check_method(flags: int, method: int, name: str, path: str) -> None:
    if flags & _ENCRYPTED:
        raise UnsupportedFormatError(f"{path}: {name!r} is encrypted: pack the files without a password", path=path)
    if method not in (_STORED, _DEFLATED):
        message = f"{path}: {name!r} is compressed by method {method}: pack the files stored or deflated"
        raise UnsupportedFormatError(message, path=path)


def unpack(data: memoryview, stored: int, size: int, checksum: int, *, deflated: bool) -> bytes | memoryview:
    """Return the content of a member from its header and `stored` bytes; its `size` was compared with the limit."""
    if bytes(data[:4]) != b"PK\3\4" or len(data) < _LOCAL_BYTES:
        raise CorruptFileError("it has no header")
    at = _LOCAL_BYTES + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    content: bytes | memoryview = data[at : at + stored]
    if deflated:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            content = inflater.decompress(content, size + 1)
        except zlib.error as error:
            raise CorruptFileError(f"it cannot be inflated: {error}") from error
    if len(content) != size:
        more = "more" if len(content) > size else f"{len(content):,}"
        raise CorruptFileError(f"it should have {size:,} bytes and has {more}")
    if zlib.crc32(content) != checksum:
        raise CorruptFileError("its checksum is wrong: it is damaged")
    return content
