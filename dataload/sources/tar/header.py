"""The tar format: parse and build headers, and scan archives from header to header.

An archive is a sequence of members, each a 512-byte header followed by data padded to a multiple of 512. It ends with
two blocks of zeros, or at the end of the file. Values that do not fit in a header are in an extra member before it:
PAX records (type ``x``, or ``g`` for all later members) or GNU long names (``L``, or ``K`` for links).

Names are bytes throughout, because the format does not define their encoding.
"""

import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from dataload.errors import CorruptFileError, StoreError, UnsupportedFormatError
from dataload.sources.tar import OnDamage

BLOCK = 512
END = bytes(2 * BLOCK)
"""The end-of-archive marker."""


GREATEST_SIZE = 8**11 - 1
"""Largest size that fits in the 11 octal digits of a header; larger ones need a PAX record."""

REGULAR = frozenset((b"0", b"\0", b"7"))
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, ...: their size field is ignored
_POSIX_MAGIC = b"ustar\0"
_ZEROS = bytes(BLOCK)
_RECORD = 20 * BLOCK  # tar pads archives to this size; a longer file of only zeros is not an archive
_GREATEST_EXTENSION = 1 << 20  # bytes of PAX records or of a long name; real ones have a few hundred
_COMPRESSIONS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class Member(NamedTuple):
    """A regular file of an archive: `offset` (a multiple of 512) and `size` of its data in bytes."""

    name: bytes
    offset: int
    size: int


class Header(NamedTuple):
    """The name, data size in bytes and one-byte type flag of a header; a POSIX prefix is part of the name."""

    name: bytes
    size: int
    kind: bytes


def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def parse_header(block: bytes, path: str, offset: int) -> Header:
    """Parse a POSIX, GNU or pre-POSIX (v7) header of 512 bytes, with octal or base-256 sizes."""
    if not is_tar(block):
        message = "expected a tar header here, found a block whose checksum is wrong"
        raise CorruptFileError(message, path=path, offset=offset)
    size = _number(block[124:136])
    if size is None:
        message = f"a tar header has the size {block[124:136]!r}, which is not a number"
        raise CorruptFileError(message, path=path, offset=offset)
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == _POSIX_MAGIC:  # GNU headers store times there
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return Header(name, size, block[156:157])


_HEADER = struct.Struct("100s 24x 12s 20x c 100x 5s 83x B")  # name, size, kind, magic, first byte of the prefix


def is_plainly(data: bytes, name: bytes, size: int) -> bool:
    """Return True for the usual header of a regular file with this name and size, whose checksum need not be read."""
    found, digits, kind, magic, prefix = _HEADER.unpack_from(data)
    plain = kind in REGULAR and magic == _POSIX_MAGIC[:5] and not prefix
    return plain and digits.rstrip(b"\0 ") == b"%011o" % size and found.startswith(name + b"\0")


def _number(field: bytes) -> int | None:
    """Parse an octal or base-256 number; return None if it is neither, negative, or at least 2^88."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big") if field[0] == 0x80 else None
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.translate(None, b"01234567"):
        return None
    return int(digits, 8) if digits else 0


def is_tar(head: bytes) -> bool:
    """Return whether bytes begin with a tar header, by its checksum: v7 archives have no magic."""
    recorded = _number(head[148:156]) if len(head) >= BLOCK else None
    if recorded is None:
        return False
    blanked = b"".join((head[:148], b"        ", head[156:BLOCK]))
    # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65,521. It takes a tenth of the time of sum().
    if (zlib.adler32(blanked) & 0xFFFF) == (1 + recorded) % 65521:
        return True
    # Some old programs summed signed bytes.
    return recorded == sum(blanked) - 256 * sum(byte > 127 for byte in blanked)


def build_header(name: bytes, size: int) -> bytes:
    """Return the header of a regular file, in POSIX format, preceded by PAX records if it needs them."""
    # The same name and size always give the same bytes: the header contains no times and no owner.
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


def build_comment(text: bytes) -> bytes:
    """Return a header with a comment for all members, in whole blocks. No program shows or obeys it."""
    data = _pax_record(b"comment", text)
    return _ustar(b"", b"pax_global_header", len(data), b"g") + data.ljust(padded(len(data)), b"\0")


def parse_comment(head: bytes) -> bytes:
    """Return the comment for all members with which an archive begins; empty without one."""
    if not is_tar(head[:BLOCK]) or head[156:157] != b"g":
        return b""
    records = _parse_pax(head[BLOCK : BLOCK + (_number(head[124:136]) or 0)])
    return (records or {}).get(b"comment", b"")


def _split_for_prefix(name: bytes) -> tuple[bytes, bytes] | None:
    """Split a path at a slash into a prefix (at most 155 bytes) and a name (100); return None if none is possible."""
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


_MODE_AND_OWNER = b"%07o\0" % 0o644 + b"%07o\0" % 0 * 2
_TIME_AND_BLANKS = b"%011o\0" % 0 + b"        "  # the latter where the checksum will be
# No link, no names of owner and group, no device.
_LINK_TO_DEVICE = bytes(100) + _POSIX_MAGIC + b"00" + bytes(64) + b"%07o\0" % 0 * 2


def _ustar(prefix: bytes, name: bytes, size: int, kind: bytes) -> bytes:
    block = b"".join(
        (
            name.ljust(100, b"\0"),
            _MODE_AND_OWNER,
            b"%011o\0" % size,
            _TIME_AND_BLANKS,
            kind,
            _LINK_TO_DEVICE,
            prefix.ljust(155, b"\0"),
            bytes(12),
        )
    )
    # As in `is_tar`; the sum of ASCII names cannot reach the modulus.
    ascii_only = name.isascii() and prefix.isascii()
    checksum = (zlib.adler32(block) & 0xFFFF) - 1 if ascii_only else sum(block)
    return block[:148] + b"%06o\0 " % checksum + block[156:]


def scan(read: Callable[[int, int], bytes], size: int, path: str, *, on_damage: OnDamage = "error") -> Iterator[Member]:
    """Yield the regular files of an archive of `size` bytes; ``read(offset, length)`` gives fewer bytes at its end.

    With `on_damage` ``"stop"``, a damaged or truncated member after good ones ends the scan with a warning. An archive
    that no blocks of zeros end is allowed, with a warning: this is the only sign that it was cut off between members.
    """
    scanner, members = _Scanner(_Window(read), size, path), 0
    try:
        for member in scanner.members():
            members += 1
            yield member
    except CorruptFileError as error:
        if on_damage == "error" or not members or isinstance(error, StoreError):  # such as a file that has changed
            raise
        warnings.warn(f"{error}; reading ends here, after {members} members (on_damage='stop')", stacklevel=2)
        return
    if not scanner.ended:
        warnings.warn(f"{path} ends without blocks of zeros: it may have been cut off", stacklevel=2)


class _Window:
    """A read buffer: finds the next headers in one read if members are small, and skips the data of large ones.

    Positions never fall.
    """

    _SMALL = 1 << 12
    _LARGE = 1 << 18

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._start = 0
        self._data = b""
        self._last = -self._LARGE  # position of the last request

    def bytes(self, position: int, length: int) -> bytes:
        """Return the bytes in [position, position + length), fewer at the end of the file."""
        near, self._last = position - self._last < self._LARGE // 2, position
        skipped = position - self._start
        found = self._data[skipped : skipped + length]
        if len(found) == length:
            return found
        ahead = self._LARGE if near else self._SMALL
        self._start, self._data = position, self._read(position, max(ahead, length))
        return self._data[:length]


class _Scanner:
    """Moves from header to header, and applies extended headers to the members after them."""

    def __init__(self, window: _Window, size: int, path: str) -> None:
        self.ended = False  # with blocks of zeros
        self._window = window
        self._size = size
        self._path = path
        self._position = 0
        self._for_all: dict[bytes, bytes] = {}
        self._for_next: dict[bytes, bytes] = {}

    def members(self) -> Iterator[Member]:
        """Yield the regular files up to the end of the archive."""
        self._check_start()
        while self._position < self._size:
            start = self._position
            block = self._window.bytes(start, BLOCK)
            if block == _ZEROS[: len(block)]:
                following = self._window.bytes(start + BLOCK, BLOCK)
                if following == _ZEROS[: len(following)]:
                    if start == 0 and self._size > _RECORD:
                        raise self._damage(f"the archive begins with zeros, its end, but has {self._size} bytes", 0)
                    self.ended = True
                    break
                self._position += BLOCK  # a single block of zeros does not end an archive
                continue
            if len(block) < BLOCK:
                raise self._damage(f"the archive is cut off in a header: only {len(block)} bytes of it are left", start)
            member = self._step(parse_header(block, self._path, start), start)
            if member is not None:
                yield member
        if self._for_next:
            raise self._damage("the archive ends after an extended header, without its member", self._position)

    def _check_start(self) -> None:
        head = self._window.bytes(0, BLOCK)
        if not head:
            raise self._damage("the file is empty: even an empty archive has blocks of zeros", 0)
        for magic, name in _COMPRESSIONS.items():
            if head.startswith(magic) and not is_tar(head):  # the first member may be called "BZh..."
                raise UnsupportedFormatError(
                    f"{self._path}: the archive is compressed with {name} (it starts with {head[:4]!r}), so random "
                    "access is impossible: decompress it first",
                    path=self._path,
                )

    def _step(self, header: Header, start: int) -> Member | None:
        """Move past the member whose header is at `start`; return the member if it is a regular file."""
        data = start + BLOCK
        if header.kind in (b"x", b"g", b"L", b"K"):
            self._extend(header.kind, header.size, start)
            self._position = data + padded(header.size)
            return None
        name, size, kind = header
        records = self._for_all
        if self._for_next:
            records, self._for_next = {**self._for_all, **self._for_next}, {}
        if records:
            name = records.get(b"path", name)
            size = self._parse_size(records[b"size"], start) if b"size" in records else size
        if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in records):
            message = f"{self._path}, byte {start}: {_text(name)} is stored as a sparse file: pack it without --sparse"
            raise UnsupportedFormatError(message, path=self._path)
        if kind in _WITHOUT_DATA or (kind == b"\0" and name.endswith(b"/")):  # a directory in old archives
            self._position = data
            return None
        self._position = data + padded(size)
        if self._position > self._size:
            raise self._damage(
                f"{_text(name)} has {size} bytes in whole blocks of {BLOCK}, but the archive is cut off after "
                f"{self._size - data}",
                start,
            )
        return Member(name, data, size) if kind in REGULAR else None

    def _extend(self, kind: bytes, size: int, start: int) -> None:
        """Read the extended header at `start`."""
        left = self._size - start - BLOCK
        if padded(size) > left or size > _GREATEST_EXTENSION:
            raise self._damage(
                f"an extended header has {size} bytes, but {left} are left in the file, and at most "
                f"{_GREATEST_EXTENSION} are allowed, in whole blocks of {BLOCK}",
                start,
            )
        data = self._window.bytes(start + BLOCK, size)
        if kind in (b"L", b"K"):
            self._for_next[b"path" if kind == b"L" else b"linkpath"] = data.partition(b"\0")[0]
            return
        records = _parse_pax(data)
        if records is None:
            raise self._damage("the PAX records of an extended header are invalid", start)
        (self._for_all if kind == b"g" else self._for_next).update(records)

    def _parse_size(self, text: bytes, start: int) -> int:
        if not text.isdigit() or len(text) > 18:
            raise self._damage(f"a PAX record gives the size {text!r}, which is not a number", start)
        return int(text)

    def _damage(self, message: str, offset: int) -> CorruptFileError:
        return CorruptFileError(message, path=self._path, offset=offset)


def _parse_pax(data: bytes) -> dict[bytes, bytes] | None:
    """Parse ``length key=value`` records; return None if they are invalid."""
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
