"""The tar format: parsing and building of headers, and scanning of archives.

An archive is a sequence of members, each a header of 512 bytes followed by its data, padded to a multiple of that. Two
blocks of zeros, or the end of the file, end it. Whatever does not fit into a header is stored in a preceding member:
PAX records (type ``x``, or ``g`` for all following members) or GNU long names (``L``, or ``K`` for links).

Names are bytes throughout, because the format does not define their encoding.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from dataload.errors import CorruptFileError, UnsupportedFormatError

BLOCK = 512
END = bytes(2 * BLOCK)
"""The blocks after the last member."""

OnDamage: TypeAlias = Literal["error", "stop"]

GREATEST_SIZE = 8**11 - 1
"""Largest size that the 11 octal digits of a header can express; PAX records express larger ones."""

REGULAR = frozenset((b"0", b"\0", b"7"))
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, ..., whatever their size
_POSIX_MAGIC = b"ustar\0"
_ZEROS = bytes(BLOCK)
_RECORD = 20 * BLOCK  # archives are padded to this; a longer file of zeros was never written
_GREATEST_EXTENSION = 1 << 20  # bytes of PAX records or of a long name; real ones have a few hundred
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class Member(NamedTuple):
    """A regular file of an archive.

    Attributes:
        name: Path, as spelled in the archive.
        offset: Where its data start, a multiple of 512.
        size: Bytes.
    """

    name: bytes
    offset: int
    size: int


class Header(NamedTuple):
    """A parsed header.

    Attributes:
        name: Path, including the prefix of a POSIX header.
        size: Size of the data in bytes.
        kind: Type flag, one byte.
    """

    name: bytes
    size: int
    kind: bytes


def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def parse_header(block: bytes, path: str, offset: int) -> Header:
    """Parse a POSIX, GNU or older header, with octal or base-256 numbers.

    Args:
        block: 512 bytes.
        path: Path of the archive, for messages.
        offset: Offset of the block, for messages.

    Raises:
        CorruptFileError: The checksum or a number is wrong.
    """
    recorded = _number(block[148:156])
    if recorded is None or not _checksum_fits(block, recorded):
        raise CorruptFileError(
            "expected a tar header here, found a block whose checksum is wrong", path=path, offset=offset
        )
    size = _number(block[124:136])
    if size is None:
        raise CorruptFileError(
            f"a tar header has the size {block[124:136]!r}, which is not a number", path=path, offset=offset
        )
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == _POSIX_MAGIC:  # GNU headers have times instead of the prefix
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return Header(name, size, block[156:157])


def _number(field: bytes) -> int | None:
    """Parse an octal or base-256 number; None if it is neither, or negative."""
    if field[0] & 0x80:
        return None if field[0] & 0x40 else int.from_bytes((field[0] & 0x3F, *field[1:]), "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.translate(None, b"01234567"):
        return None
    return int(digits, 8) if digits else 0


def _checksum_fits(block: bytes, recorded: int) -> bool:
    blanked = b"".join((block[:148], b"        ", block[156:]))
    # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65,521, in a tenth of the time of sum().
    if (zlib.adler32(blanked) & 0xFFFF) == (1 + recorded) % 65521:
        return True
    # Some old programs added signed bytes.
    return recorded == sum(blanked) - 256 * sum(byte > 127 for byte in blanked)


def build_header(name: bytes, size: int) -> bytes:
    """Return the header of a regular file: POSIX, preceded by PAX records if needed.

    The header contains neither times nor an owner, so it only depends on the arguments.

    Args:
        name: Path, without zero bytes.
        size: Size of the data in bytes.

    Returns:
        A multiple of 512 bytes.
    """
    split = _split_for_prefix(name)
    records: list[bytes] = []
    if split is None:
        records.append(_pax_record(b"path", name))
        split = b"", name[:100]
    if size > GREATEST_SIZE:
        records.append(_pax_record(b"size", b"%d" % size))
        size = 0
    header = _ustar(*split, size, b"0")
    if not records:
        return header
    data = b"".join(records)
    extension = _ustar(b"", b"PaxHeaders/" + split[1][:80], len(data), b"x")
    return extension + data.ljust(padded(len(data)), b"\0") + header


def _split_for_prefix(name: bytes) -> tuple[bytes, bytes] | None:
    """Split into prefix (at most 155 bytes) and name (100); None if no slash allows that."""
    if len(name) <= 100:
        return b"", name
    slash = name.find(b"/", len(name) - 101)
    return (name[:slash], name[slash + 1 :]) if 0 < slash <= 155 and slash + 1 < len(name) else None


def _pax_record(key: bytes, value: bytes) -> bytes:
    rest = b" %s=%s\n" % (key, value)
    length = len(rest) + 1
    while length != len(rest) + len(b"%d" % length):  # the length counts its own digits
        length = len(rest) + len(b"%d" % length)
    return b"%d" % length + rest


def _ustar(prefix: bytes, name: bytes, size: int, kind: bytes) -> bytes:
    parts = (
        name.ljust(100, b"\0"),
        b"%07o\0" % 0o644,
        b"%07o\0" % 0 * 2,  # owner and group
        b"%011o\0" % size,
        b"%011o\0" % 0,  # time
        b"        ",
        kind,
        bytes(100),  # link
        _POSIX_MAGIC + b"00",
        bytes(64),  # names of owner and group
        b"%07o\0" % 0 * 2,  # device
        prefix.ljust(155, b"\0"),
        bytes(12),
    )
    block = b"".join(parts)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def scan(
    read: Callable[[int, int], bytes],
    size: int,
    path: str,
    *,
    on_damage: OnDamage = "error",
    warn_without_end: bool = False,
) -> Iterator[Member]:
    """Yield the regular files of an archive in order, skipping directories, links and devices.

    Args:
        read: ``read(offset, length)`` returns these bytes, or fewer at the end of the file.
        size: Size of the archive in bytes.
        path: Path of the archive, for messages.
        on_damage: `stop` warns and ends at a damaged or truncated member that follows intact ones.
        warn_without_end: Warn if the archive does not end with blocks of zeros. That is allowed, but also the only sign
            of an archive truncated between two members.

    Raises:
        CorruptFileError: The archive is damaged or truncated.
        UnsupportedFormatError: The archive is compressed or contains a sparse file.
    """
    scanner = _Scanner(_Window(read), size, path)
    while True:
        try:
            member = scanner.next()
        except CorruptFileError as error:
            if on_damage == "error" or not scanner.members:
                raise
            message = f"{error}; reading ends here, after {scanner.members} members (on_damage='stop')"
            warnings.warn(message, stacklevel=2)
            return
        if member is None:
            break
        yield member
    if warn_without_end and not scanner.ended:
        warnings.warn(f"{path} ends without blocks of zeros: it may have been truncated", stacklevel=2)


class _Window:
    """Reads headers with few calls.

    Small members are read ahead, so that the next headers are in memory. The data of large members are never read.
    """

    _SMALL = 1 << 12
    _LARGE = 1 << 18

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._start = 0
        self._data = b""
        self._last = -self._LARGE  # the last requested position

    def bytes(self, position: int, length: int) -> bytes:
        """Return the bytes [position, position + length), or fewer at the end of the file."""
        near, self._last = position - self._last < self._LARGE // 2, position
        skipped = position - self._start
        found = self._data[skipped : skipped + length] if skipped >= 0 else b""
        if len(found) == length:
            return found
        ahead = self._LARGE if near else self._SMALL
        self._start, self._data = position, self._read(position, max(ahead, length))
        return self._data[:length]


class _Scanner:
    """Walks from header to header, and keeps the records of extended headers for the members they apply to."""

    def __init__(self, window: _Window, size: int, path: str) -> None:
        self.members = 0
        self.ended = False  # by blocks of zeros
        self._window = window
        self._size = size
        self._path = path
        self._position = 0
        self._for_all: dict[bytes, bytes] = {}
        self._for_next: dict[bytes, bytes] = {}

    def next(self) -> Member | None:
        """Return the next regular file; None at the end of the archive."""
        if self._position == 0:
            self._check_start()
        while self._position < self._size:
            start = self._position
            block = self._window.bytes(start, BLOCK)
            if block == _ZEROS[: len(block)]:
                following = self._window.bytes(start + BLOCK, BLOCK)
                if following == _ZEROS[: len(following)]:
                    if start == 0 and self._size > _RECORD:
                        raise self._damage(f"the archive begins with its end, but has {self._size} bytes", 0)
                    self.ended = True
                    break
                self._position += BLOCK  # a single block of zeros is not an end
                continue
            if len(block) < BLOCK:
                raise self._damage(f"the archive is truncated in a header, of which {len(block)} bytes are left", start)
            member = self._step(parse_header(block, self._path, start), start)
            if member is not None:
                self.members += 1
                return member
        if self._for_next:
            raise self._damage("the archive ends with an extended header, whose member is missing", self._position)
        return None

    def _check_start(self) -> None:
        head = self._window.bytes(0, BLOCK)
        if not head:
            raise self._damage("the file is empty, but an archive ends with blocks of zeros", 0)
        for magic, name in _COMPRESSIONS.items():
            # An archive may begin with a member called "BZh...", whose checksum is then correct.
            if head.startswith(magic) and not (len(head) == BLOCK and _is_header(head)):
                raise UnsupportedFormatError(
                    f"{self._path}: the archive is compressed with {name} (it starts with {head[:4]!r}): decompress it "
                    "first, to allow random access",
                    path=self._path,
                )

    def _step(self, header: Header, start: int) -> Member | None:
        """Move past the member whose header is at `start`; return the member if it is a regular file."""
        data = start + BLOCK
        if header.kind in (b"x", b"g", b"L", b"K"):
            self._extend(header.kind, self._extension(header.size, start), start)
            self._position = data + padded(header.size)
            return None
        name, size, kind = header
        records = self._for_all
        if self._for_next:
            records, self._for_next = {**self._for_all, **self._for_next}, {}
        if records:
            name = records.get(b"path", name)
            size = self._pax_size(records[b"size"], start) if b"size" in records else size
        if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in records):
            raise UnsupportedFormatError(
                f"{self._path}, byte {start}: {_text(name)} is stored as a sparse file: repack it without --sparse",
                path=self._path,
            )
        if kind in _WITHOUT_DATA or (kind == b"\0" and name.endswith(b"/")):  # how old archives mark directories
            self._position = data
            return None
        self._position = data + padded(size)
        if self._position > self._size:
            raise self._damage(
                f"{_text(name)} has {size} bytes in whole blocks of {BLOCK}, but the archive is truncated after "
                f"{self._size - data}",
                start,
            )
        return Member(name, data, size) if kind in REGULAR else None

    def _extension(self, size: int, start: int) -> bytes:
        left = self._size - start - BLOCK
        if size > min(left, _GREATEST_EXTENSION):
            raise self._damage(f"an extended header has {size} bytes, but {left} are left in the file", start)
        return self._window.bytes(start + BLOCK, size)

    def _extend(self, kind: bytes, data: bytes, start: int) -> None:
        if kind == b"L":
            self._for_next[b"path"] = data.partition(b"\0")[0]
        elif kind == b"K":
            self._for_next[b"linkpath"] = data.partition(b"\0")[0]
        else:
            records = _parse_pax(data)
            if records is None:
                raise self._damage("the PAX records of an extended header are invalid", start)
            (self._for_all if kind == b"g" else self._for_next).update(records)

    def _pax_size(self, text: bytes, start: int) -> int:
        if not text.isdigit() or len(text) > 18:
            raise self._damage(f"a PAX record gives the size {text!r}, which is not a number", start)
        return int(text)

    def _damage(self, message: str, offset: int) -> CorruptFileError:
        return CorruptFileError(message, path=self._path, offset=offset)


def _is_header(block: bytes) -> bool:
    recorded = _number(block[148:156])
    return recorded is not None and _checksum_fits(block, recorded)


def _parse_pax(data: bytes) -> dict[bytes, bytes] | None:
    """Parse ``length key=value`` records; None if they are invalid."""
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(data) and data[position]:  # some programs pad with zeros
        space = data.find(b" ", position, position + 12)
        digits = data[position:space] if space > 0 else b""
        end = position + int(digits) if digits.isdigit() else -1
        if not space < end <= len(data) or data[end - 1] != 0x0A:
            return None
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals:
            return None
        records[key] = value
        position = end
    return records


def _text(name: bytes) -> str:
    return repr(name.decode("utf-8", "replace"))


def is_tar(head: bytes) -> bool:
    """Return whether a file begins with a tar header: its checksum fits, for v7 archives have no magic."""
    if len(head) < 512 or not any(head):
        return False
    try:
        stated = int(head[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return stated == sum(head[:512]) - sum(head[148:156]) + 8 * ord(" ")
