"""The meta pages of an LMDB file: whether it is complete, and where its databases begin.

A file consists of pages of one size, with integers in the byte order of the machine. Pages 0 and 1 are meta pages, of
which the one with the higher transaction number is valid. It gives the last page and the roots of two B-trees: free
pages and the main database. A named sub-database is an entry of the main one, whose value describes another tree. The
page header has 16 bytes up to LMDB 0.9 (data version 1), and 24 in LMDB 1.0 (data version 3).

A transaction T writes new pages, and then its meta page over the meta page of T - 2. Even if LMDB knows of no reader,
T + 3 is the first to reuse pages of T (pages that T + 1 replaced), after T + 2 has overwritten the meta page of T.
So a reader that finds the meta page of T unchanged after reading has read T, even if others wrote to the file.
"""

import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dataload.errors import CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.lmdb import DATA_FILE
from dataload.sources.options import MOST_RECORDED_BYTES, parse_recorded
from dataload.storage import RecordFile, Remote, absolute, join, storage_of
from dataload.storage.core import core
from dataload.types import BytesArray, Int64Array

BRANCH, LEAF, OVERFLOW = 1, 2, 4
"""Flags of a page."""

LARGE, SUBDATABASE, DUPLICATES = 1, 2, 4
"""Flags of a node."""

_NODE_BYTES = 8

_REFUSALS = (
    "is not a page of a tree",
    "has wrong bounds",
    "points outside itself",
    "has an entry that exceeds it",
    "points outside the file",
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A page that is not valid: its row among those parsed, and the fault as the predicate of a sentence."""

    row: int
    reason: str


def parse_pages(
    pages: BytesArray, numbers: Int64Array, header_size: int, size: int, kind: int
) -> tuple[Int64Array, Int64Array] | Refusal:
    """Parse branch or leaf pages, (pages, page_size) uint8, contiguous; see `dataload.storage._core_numpy.lmdb_nodes`.

    Returns (4, nodes) int64, what the nodes say, and (pages,) int64, the number of nodes in each. `numbers` are the
    pages' int64 numbers, `header_size` is 16 or 24, `size` the bytes of the file that are in use.
    """
    page_size = pages.shape[1]
    out = np.empty((4, len(numbers) * (page_size // (_NODE_BYTES + 2))), np.int64)
    counts = np.empty(len(numbers), np.int64)
    found = core().lmdb_nodes(out, counts, pages, numbers, page_size, header_size, size, kind)
    if found < 0:
        return Refusal(-found // 8, _REFUSALS[-found % 8 - 1])
    return out[:, :found].copy(), counts


def find_key(page: bytes, node: int, header_size: int) -> bytes | None:
    """Return the key of a node of a leaf page, whose first node is number 0; None if it has none."""
    base = header_size if header_size == 24 else 0
    at = base + int.from_bytes(page[header_size + 2 * node : header_size + 2 * node + 2], sys.byteorder)
    start = at + _NODE_BYTES
    stop = start + int.from_bytes(page[start - 2 : start], sys.byteorder)
    return page[start:stop] if len(page) >= stop else None


RECORDED_OFFSET = 512
"""Offset of the recorded reader options: in the first page, whose end LMDB leaves unwritten."""

_MAGIC = 0xBEEFC0DE
_VERSIONS = {16: 1, 24: 3}  # bytes of the page header -> data version
_NO_PAGE = 2**64 - 1  # the root of an empty tree

_META = struct.Struct("=II16x")  # magic, version; an address, the size of the map
_DATABASE = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, three kinds of pages, entries, root
RECORD_BYTES = _DATABASE.size
"""Length of the value that describes a sub-database."""

_META_SIZE = _META.size + 2 * _DATABASE.size + 16

_IS_META = 8  # flag of a page
_DUPSORT = 4  # flag of a database

_DEEPEST = 32  # LMDB's limit
_MOST_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Tree:
    """A database; `name` is its key in the main database, None for the main database itself.

    With `has_duplicates`, `entries` counts every value of a key. `depth` is at most `_DEEPEST`; `root` has been
    checked, and is None if there are no records.
    """

    name: bytes | None
    has_duplicates: bool
    depth: int
    entries: int
    root: int | None

    @property
    def label(self) -> str:
        """The database in messages."""
        return _label(self.name)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Contents of the newest meta page; sizes in bytes, `pages` in use.

    `meta` are the bytes, at `offset` in the file, of the page that each transaction overwrites; `transaction` wrote it.
    """

    path: str
    header_size: int
    page_size: int
    pages: int
    main: Tree
    transaction: int
    offset: int
    meta: bytes

    @property
    def size(self) -> int:
        """Size of all pages in use, which the file has at least."""
        return self.pages * self.page_size


def data_file(path: str, remote: Remote | None = None) -> str:
    """Return the data file of an LMDB environment, which is a directory or that file."""
    storage, inside = storage_of(path, remote), join(path, DATA_FILE)
    # A web server does not tell directories.
    is_environment = storage.is_directory(path) or (not storage.exists(path) and storage.exists(inside))
    return inside if is_environment else path


def open_file(path: str, *, mapped: bool = True, remote: Remote | None = None) -> RecordFile:
    """Open the data file of an environment, a directory with data.mdb or the file; mapped if that is safe."""
    storage = storage_of(path, remote)
    if storage.is_directory(path) and not storage.exists(join(path, DATA_FILE)):
        message = f"the directory {path} has no {DATA_FILE}, so it is not an LMDB environment"
        raise SourceNotFoundError(message, path=path)
    file = storage.map(absolute(data_file(path, remote)), mapped=mapped, whole=True)
    file.may_be_written = True  # by LMDB; see `Snapshot`
    return file


def find_recorded(path: str, remote: Remote | None) -> Mapping[str, Any] | None:
    """Return the reader options that our writer recorded in an environment; None if it is empty."""
    file = data_file(path, remote)
    with storage_of(file, remote).open(file) as opened:
        found = parse_recorded(opened.read(RECORDED_OFFSET, MOST_RECORDED_BYTES), ("codec",))
        return found if found or read_info(cast("RecordFile", opened)).main.entries else None


def is_lmdb(head: bytes) -> bool:
    """Return whether a file begins with a page header of 16 or 24 bytes and LMDB's magic number."""
    magic = _MAGIC.to_bytes(4, "little")
    return any(head[size : size + 4] == magic for size in _VERSIONS)


def read_info(file: RecordFile) -> FileInfo:
    """Read the meta pages, and check them against the size of the file."""
    path, size = file.path, file.size
    head = _read(file, 0, max(_VERSIONS) + _META_SIZE)
    header_size = _header_size(head, size, path)
    page_size: int = _DATABASE.unpack_from(head, header_size + _META.size)[0]
    if not 256 <= page_size <= 0x10000 or page_size & (page_size - 1):
        message = f"the first meta page gives an invalid page size of {page_size} bytes"
        raise CorruptFileError(message, path=path, offset=header_size + _META.size)
    if size < 2 * page_size:
        message = f"the file has {size} bytes, but its two meta pages need {2 * page_size}: it is truncated"
        raise CorruptFileError(message, path=path, offset=size)
    # If the numbers are equal, as in a new file, the first page is valid.
    number, transaction, last_page, meta = max(_read_metas(file, header_size, page_size), key=lambda found: found[1])
    needed = (last_page + 1) * page_size
    if needed > size:
        raise CorruptFileError(
            f"the newest meta page says that page {last_page} of {page_size} bytes is the last one in use; the file "
            f"has {size} bytes instead of {needed}: it is truncated",
            path=path,
            offset=size,
        )
    main = parse_tree(meta[_DATABASE.size : 2 * _DATABASE.size], last_page + 1, needed, None, path)
    offset = number * page_size + header_size + _META.size
    return FileInfo(path, header_size, page_size, last_page + 1, main, transaction, offset, meta)


def is_unchanged(file: RecordFile, info: FileInfo) -> bool:
    """Return whether the file still has the meta page, so that all that was read belongs to its transaction."""
    return _read(file, info.offset, len(info.meta)) == info.meta


def _read(file: RecordFile, offset: int, length: int) -> bytes:
    return file.read(offset, max(0, min(length, file.size - offset)))


def _header_size(head: bytes, size: int, path: str) -> int:
    if not size:
        raise CorruptFileError("the file is empty, but an LMDB file has at least two pages", path=path, offset=0)
    for header_size, version in _VERSIONS.items():
        if len(head) < header_size + _META_SIZE:
            continue
        magic, found = _META.unpack_from(head, header_size)
        if magic == _MAGIC:
            if found != version:
                message = f"{path} is an LMDB file of data version {found}, expected {version}"
                raise UnsupportedFormatError(message, path=path)
            return header_size
    if _MAGIC.to_bytes(4, "big") in head[:32] or _MAGIC.to_bytes(4, "little") in head[:16]:
        raise UnsupportedFormatError(
            f"{path} is an LMDB file of a machine with another word size or byte order: export it there with "
            "mdb_dump, and import it here with mdb_load",
            path=path,
        )
    message = f"not an LMDB file: expected the magic {_MAGIC:#x} at byte 16, found {head[16:20].hex(' ') or 'the end'}"
    raise CorruptFileError(message, path=path, offset=16)


def _read_metas(file: RecordFile, header_size: int, page_size: int) -> list[tuple[int, int, int, bytes]]:
    """Return number, transaction, last page and `FileInfo.meta` of both meta pages."""
    # A page that is just being written may be a mixture, so they are read until they stay the same.
    length = header_size + _META_SIZE
    before: list[bytes] = []
    for _ in range(_MOST_LOOKS):
        found = [_read(file, number * page_size, length) for number in (0, 1)]
        if found == before:
            break
        before = found
    metas: list[tuple[int, int, int, bytes]] = []
    for number, page in enumerate(before):
        if len(page) < length:
            raise CorruptFileError("the file ends in a meta page", path=file.path, offset=number * page_size)
        flags = struct.unpack_from("=H", page, header_size - 6)[0]
        if not flags & _IS_META or _META.unpack_from(page, header_size) != (_MAGIC, _VERSIONS[header_size]):
            message = "expected a meta page, found something else"
            raise CorruptFileError(message, path=file.path, offset=number * page_size)
        last_page, transaction = struct.unpack_from("=QQ", page, length - 16)
        metas.append((number, transaction, last_page, page[header_size + _META.size :]))
    return metas


def parse_tree(record: bytes, pages: int, size: int, name: bytes | None, path: str) -> Tree:
    """Parse the record of a database; the number and the size of all pages limit its numbers."""
    _, flags, depth, _, _, _, entries, root = _DATABASE.unpack(record)
    has_duplicates = bool(flags & _DUPSORT)
    if root == _NO_PAGE:
        if entries:
            raise CorruptFileError(f"{_label(name)} has {entries} records but no pages", path=path)
        return Tree(name, has_duplicates, 0, 0, None)
    if not 2 <= root < pages or not 1 <= depth <= _DEEPEST or entries > size:
        message = f"{_label(name)} claims {entries} records in a tree of depth {depth} at page {root}"
        raise CorruptFileError(f"{message}; the last page is {pages - 1}", path=path)
    return Tree(name, has_duplicates, depth, entries, root)


def _label(name: bytes | None) -> str:
    return "the main database" if name is None else f"the sub-database {name!r}"
