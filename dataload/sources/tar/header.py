"""The tar format: headers parsed and built, archives scanned from header to header.

An archive is a sequence of members, each a header of 512 bytes and its data padded to a multiple of that. Two
blocks of zeros end it, or the end of the file. What does not fit into a header stands in a member before it:
PAX records (type ``x``, and ``g`` for all that follow) or GNU long names (``L``, and ``K`` for links).

Names are bytes throughout: the format does not say in which encoding they are.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from dataload.errors import CorruptFileError, UnsupportedFormatError

BLOCK = 512
END = bytes(2 * BLOCK)
"""What stands after the last member."""

OnDamage: TypeAlias = Literal["error", "stop"]

GREATEST_SIZE = 8**11 - 1
"""Bytes that the 11 octal digits of a header can count; PAX records tell more."""

REGULAR = frozenset((b"0", b"\0", b"7"))
_WITHOUT_DATA = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))  # links, devices, ...: whatever the size says
_POSIX_MAGIC = b"ustar\0"
_ZEROS = bytes(BLOCK)
_RECORD = 20 * BLOCK  # what archives are filled up to; longer ones of only zeros were never written
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
        name: Its path, as the archive spells it.
        offset: Where its data start, a multiple of 512.
        size: Bytes.
    """

    name: bytes
    offset: int
    size: int


class Header(NamedTuple):
    """What one header says.

    Attributes:
        name: Path, the prefix of a POSIX header included.
        size: Bytes of data.
        kind: The type flag, one byte.
    """

    name: bytes
    size: int
    kind: bytes


def padded(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def parse_header(block: bytes, path: str, offset: int) -> Header:
    """Read a header: POSIX, GNU or of the time before both; sizes octal or base-256.

    Args:
        block: 512 bytes.
        path: For messages.
        offset: Where the block stands, for messages.

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
            f"a tar header has the size {block[124:136]!r}, which is no number", path=path, offset=offset
        )
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == _POSIX_MAGIC:  # GNU headers hold times in the place of the prefix
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return Header(name, size, block[156:157])


def _number(field: bytes) -> int | None:
    """An octal or base-256 number, None if it is neither or negative."""
    if field[0] & 0x80:
        return None if field[0] & 0x40 else int.from_bytes((field[0] & 0x3F, *field[1:]), "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits.translate(None, b"01234567"):
        return None
    return int(digits, 8) if digits else 0


def _checksum_fits(block: bytes, recorded: int) -> bool:
    blanked = b"".join((block[:148], b"        ", block[156:]))
    # The low half of Adler-32 is 1 + the sum of the bytes, modulo 65,521: in a tenth of the time of sum().
    if (zlib.adler32(blanked) & 0xFFFF) == (1 + recorded) % 65521:
        return True
    # Some old programs added signed bytes.
    return recorded == sum(blanked) - 256 * sum(byte > 127 for byte in blanked)


def build_header(name: bytes, size: int) -> bytes:
    """What stands before the data of a regular file: a POSIX header, with PAX records before it where it needs them.

    The same name and size give the same bytes: no times, no owner.

    Args:
        name: Path, without zero bytes.
        size: Bytes of data.

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
    """Prefix (155 bytes at most) and name (100), None if no slash stands where they could part."""
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
    """The regular files of an archive, in its order; directories, links and devices are passed over.

    Args:
        read: ``read(offset, length)`` gives these bytes, fewer at the end of the file.
        size: Bytes of the archive.
        path: For messages.
        on_damage: What a damaged or truncated member after good ones does: `stop` warns, and ends there.
        warn_without_end: Warn of an archive that the end of the file ends, and no blocks of zeros. That is allowed,
            and the only trace of an archive that was cut off between two members.

    Raises:
        CorruptFileError: The archive is damaged or cut off.
        UnsupportedFormatError: It is compressed, or holds a sparse file.
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
        warnings.warn(f"{path} ends without blocks of zeros: it may have been cut off", stacklevel=2)


class _Window:
    """Bytes from here and there, by few reads.

    Where members are small, the next headers lie in what was read already; where they are large, their data
    are never read.
    """

    _SMALL = 1 << 12
    _LARGE = 1 << 18

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._start = 0
        self._data = b""
        self._last = -self._LARGE  # where bytes were asked for last

    def bytes(self, position: int, length: int) -> bytes:
        """Bytes [position, position + length), fewer at the end of the file."""
        near, self._last = position - self._last < self._LARGE // 2, position
        skipped = position - self._start
        found = self._data[skipped : skipped + length] if skipped >= 0 else b""
        if len(found) == length:
            return found
        ahead = self._LARGE if near else self._SMALL
        self._start, self._data = position, self._read(position, max(ahead, length))
        return self._data[:length]


class _Scanner:
    """Goes from header to header, and keeps what extended headers say of the member to come."""

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
        """The next regular file; None at the end of the archive."""
        if self._position == 0:
            self._check_start()
        while self._position < self._size:
            start = self._position
            block = self._window.bytes(start, BLOCK)
            if block == _ZEROS[: len(block)]:
                following = self._window.bytes(start + BLOCK, BLOCK)
                if following == _ZEROS[: len(following)]:
                    if start == 0 and self._size > _RECORD:
                        raise self._damage(f"the archive ends where it starts, and has {self._size} bytes", 0)
                    self.ended = True
                    break
                self._position += BLOCK  # one block of zeros alone ends nothing
                continue
            if len(block) < BLOCK:
                raise self._damage(
                    f"the archive is cut off within a header, of which {len(block)} bytes are left", start
                )
            member = self._step(parse_header(block, self._path, start), start)
            if member is not None:
                self.members += 1
                return member
        if self._for_next:
            raise self._damage("an extended header at the end of the archive: its member is missing", self._position)
        return None

    def _check_start(self) -> None:
        head = self._window.bytes(0, BLOCK)
        if not head:
            raise self._damage("the file is empty: an archive ends with blocks of zeros", 0)
        for magic, name in _COMPRESSIONS.items():
            # An archive may begin with a member called "BZh...": then its checksum is right.
            if head.startswith(magic) and not (len(head) == BLOCK and _is_header(head)):
                raise UnsupportedFormatError(
                    f"{self._path}: the archive is compressed with {name} (it starts with {head[:4]!r}), which forbids "
                    "random access: decompress it first",
                    path=self._path,
                )

    def _step(self, header: Header, start: int) -> Member | None:
        """Pass the member whose header stands at `start`; it, if it is a regular file."""
        data = start + BLOCK
        if header.kind in (b"x", b"g", b"L", b"K"):
            self._extend(header.kind, self._extension(header.size, start), start)
            self._position = data + padded(header.size)
            return None
        name, size, kind = header
        said = self._for_all
        if self._for_next:
            said, self._for_next = {**self._for_all, **self._for_next}, {}
        if said:
            name = said.get(b"path", name)
            size = self._said_size(said[b"size"], start) if b"size" in said else size
        if kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in said):
            raise UnsupportedFormatError(
                f"{self._path}, byte {start}: {_text(name)} is stored as a sparse file: pack it without --sparse",
                path=self._path,
            )
        if kind in _WITHOUT_DATA or (kind == b"\0" and name.endswith(b"/")):  # old archives mark directories so
            self._position = data
            return None
        self._position = data + padded(size)
        if self._position > self._size:
            raise self._damage(
                f"{_text(name)} has {size} bytes in whole blocks of {BLOCK}, and the archive is cut off after "
                f"{self._size - data}",
                start,
            )
        return Member(name, data, size) if kind in REGULAR else None

    def _extension(self, size: int, start: int) -> bytes:
        left = self._size - start - BLOCK
        if size > min(left, _GREATEST_EXTENSION):
            raise self._damage(f"an extended header has {size} bytes, and {left} are left in the file", start)
        return self._window.bytes(start + BLOCK, size)

    def _extend(self, kind: bytes, data: bytes, start: int) -> None:
        if kind == b"L":
            self._for_next[b"path"] = data.partition(b"\0")[0]
        elif kind == b"K":
            self._for_next[b"linkpath"] = data.partition(b"\0")[0]
        else:
            records = _parse_pax(data)
            if records is None:
                raise self._damage("the PAX records of an extended header do not parse", start)
            (self._for_all if kind == b"g" else self._for_next).update(records)

    def _said_size(self, text: bytes, start: int) -> int:
        if not text.isdigit() or len(text) > 18:
            raise self._damage(f"a PAX record gives the size {text!r}, which is no number", start)
        return int(text)

    def _damage(self, message: str, offset: int) -> CorruptFileError:
        return CorruptFileError(message, path=self._path, offset=offset)


def _is_header(block: bytes) -> bool:
    recorded = _number(block[148:156])
    return recorded is not None and _checksum_fits(block, recorded)


def _parse_pax(data: bytes) -> dict[bytes, bytes] | None:
    """``length key=value`` records, None if they are none."""
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
