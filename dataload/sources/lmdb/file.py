"""LMDB's file, as far as it must be looked at before LMDB maps it: is it whole, and which databases are in it.

A file is pages of one size, all integers in the byte order of the machine. Pages 0 and 1 are meta pages, of
which the one with the higher transaction number counts; it names the last page and the roots of two B-trees,
free pages and the main database. A named sub-database is an entry of the main one whose value is a record of
its own tree. The page header has 16 bytes up to LMDB 0.9 (data version 1), 24 in LMDB 1.0 (data version 3).

LMDB trusts the file: it maps as many pages as the meta page says, and a process that touches one behind the
end of the file is killed by SIGBUS. So these few pages are read here, each number checked, and nothing mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dataload.errors import CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.storage import LocalFile, join, storage_of

DATA_FILE = "data.mdb"

_MAGIC = 0xBEEFC0DE
_VERSIONS = {16: 1, 24: 3}  # bytes of the page header -> data version
_NO_PAGE = 2**64 - 1  # the root of an empty tree

_META = struct.Struct("=II16x")  # magic, version; an address, the size of the map
_DATABASE = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, three kinds of pages, entries, root
_META_SIZE = _META.size + 2 * _DATABASE.size + 16
_NODE = struct.Struct("=HHHH")  # low and high half of a number, flags, length of the key

_BRANCH, _LEAF, _IS_META = 1, 2, 8  # flags of a page
_LARGE, _SUBDATABASE, _DUPLICATES = 1, 2, 4  # flags of a node
_DUPSORT = 4  # flag of a database

_DEEPEST = 32  # LMDB's own limit
_MOST_NAMES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Tree:
    """A database.

    Attributes:
        flags: As LMDB stores them.
        depth: Levels of pages, at most `_DEEPEST`.
        entries: Records.
        root: Page number, checked; None if there are no records.
    """

    flags: int
    depth: int
    entries: int
    root: int | None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """What the newest meta page says.

    Attributes:
        path: The data file.
        header_size: Bytes of a page's header.
        page_size: Bytes.
        size: Bytes that the pages in use need; the file has at least these.
        main: The main database.
    """

    path: str
    header_size: int
    page_size: int
    size: int
    main: _Tree


@dataclass(frozen=True, slots=True)
class Subdatabase:
    """A named database within the main one.

    Attributes:
        name: Its key.
        entries: Records in it.
        has_duplicates: Keys may have several values, which `entries` counts.
    """

    name: bytes
    entries: int
    has_duplicates: bool


def data_file(path: str) -> str:
    """The file that holds the data of an LMDB environment, which is a directory or that file."""
    return join(path, DATA_FILE) if storage_of(path).is_directory(path) else path


def check_whole(path: str) -> FileInfo:
    """Compare what the meta pages promise with the size of the file.

    Args:
        path: A directory with data.mdb, or the file itself.

    Raises:
        OSError: It cannot be read.
        SourceNotFoundError: The directory holds no data.mdb.
        UnsupportedFormatError: It is an LMDB file of another version or machine.
        CorruptFileError: It is no LMDB file, damaged, or shorter than it should be.
    """
    with _open(path) as file:
        return _read_info(file)


def subdatabases(path: str) -> list[Subdatabase]:
    """The named databases, in LMDB's order.

    A main database with more than 65,536 entries is one of plain records, and not searched.

    Raises:
        OSError: As `check_whole`.
        UnsupportedFormatError: As `check_whole`.
        CorruptFileError: As `check_whole`; or a page of the main database is damaged.
    """
    with _open(path) as file:
        info = _read_info(file)
        if info.main.entries > _MOST_NAMES:
            return []
        return list(_named(file, info))


def is_lmdb(head: bytes) -> bool:
    """Return whether a file begins as LMDB's do: with a page header of 16 or 24 bytes and the magic number."""
    magic = _MAGIC.to_bytes(4, "little")
    return any(head[size : size + 4] == magic for size in _VERSIONS)


def is_torchrecord(path: str) -> bool:
    """Whether the main database names a sub-database ``db0``.

    Raises:
        OSError: As `subdatabases`.
        UnsupportedFormatError: As `subdatabases`.
        CorruptFileError: As `subdatabases`.
    """
    return any(found.name == b"db0" for found in subdatabases(path))


def _open(path: str) -> LocalFile:
    storage = storage_of(path)
    if storage.is_directory(path) and not storage.exists(join(path, DATA_FILE)):
        raise SourceNotFoundError(
            f"the directory {path} holds no {DATA_FILE}, so it is not an LMDB environment", path=path
        )
    return storage.open(data_file(path))


def _read_info(file: LocalFile) -> FileInfo:
    path, size = file.path, file.size
    head = file.read(0, max(_VERSIONS) + _META_SIZE)
    header_size = _header_size(head, size, path)
    page_size: int = _DATABASE.unpack_from(head, header_size + _META.size)[0]
    if not 256 <= page_size <= 0x10000 or page_size & (page_size - 1):
        raise CorruptFileError(
            f"the first meta page says that pages have {page_size} bytes", path=path, offset=header_size + _META.size
        )
    if size < 2 * page_size:
        raise CorruptFileError(
            f"the file has {size} bytes, its two meta pages alone {2 * page_size}: it is truncated",
            path=path,
            offset=size,
        )
    second = file.read(page_size, header_size + _META_SIZE)
    metas = [_parse_meta(meta, header_size, place, path) for place, meta in ((0, head), (page_size, second))]
    # of equal numbers, as in a new file, the first counts
    _, last_page, flags, depth, entries, root = max(metas, key=lambda meta: meta[0])
    needed = (last_page + 1) * page_size
    if needed > size:
        raise CorruptFileError(
            f"the newest meta page says that page {last_page} of {page_size} bytes is the last one in use; the file "
            f"has {size} bytes instead of {needed}: it is truncated",
            path=path,
            offset=size,
        )
    main = _tree(flags, depth, entries, root, (last_page, needed), "the main database", path)
    return FileInfo(path, header_size, page_size, needed, main)


def _header_size(head: bytes, size: int, path: str) -> int:
    if not size:
        raise CorruptFileError("the file is empty, an LMDB file has at least two pages", path=path, offset=0)
    for header_size, version in _VERSIONS.items():
        if len(head) < header_size + _META_SIZE:
            continue
        magic, found = _META.unpack_from(head, header_size)
        if magic == _MAGIC:
            if found != version:
                raise UnsupportedFormatError(
                    f"{path} is an LMDB file of data version {found}; {version} would be understood", path=path
                )
            return header_size
    if _MAGIC.to_bytes(4, "big") in head[:32] or _MAGIC.to_bytes(4, "little") in head[:16]:
        raise UnsupportedFormatError(
            f"{path} is an LMDB file of a machine with another word size or byte order: copy it there with mdb_dump, "
            "and here with mdb_load",
            path=path,
        )
    raise CorruptFileError(
        f"no LMDB file: expected the magic number {_MAGIC:#x} at byte 16, found {head[16:20].hex(' ') or 'the end'}",
        path=path,
        offset=16,
    )


def _parse_meta(meta: bytes, header_size: int, place: int, path: str) -> tuple[int, int, int, int, int, int]:
    """Transaction, last page, and of the main database flags, depth, entries and root."""
    version = _VERSIONS[header_size]
    if len(meta) < header_size + _META_SIZE:
        raise CorruptFileError("the file ends in a meta page", path=path, offset=place)
    flags = struct.unpack_from("=H", meta, header_size - 6)[0]
    if not flags & _IS_META or _META.unpack_from(meta, header_size) != (_MAGIC, version):
        raise CorruptFileError("this should be a meta page and is none", path=path, offset=place)
    at = header_size + _META.size + _DATABASE.size
    _, db_flags, depth, _, _, _, entries, root = _DATABASE.unpack_from(meta, at)
    last_page, transaction = struct.unpack_from("=QQ", meta, at + _DATABASE.size)
    return transaction, last_page, db_flags, depth, entries, root


def _tree(flags: int, depth: int, entries: int, root: int, bounds: tuple[int, int], what: str, path: str) -> _Tree:
    """A database; `bounds` are the last page and the bytes of all pages, more than which no number can be."""
    last_page, size = bounds
    if root == _NO_PAGE:
        if entries:
            raise CorruptFileError(f"{what} has {entries} records and no pages", path=path)
        return _Tree(flags, 0, 0, None)
    if not 2 <= root <= last_page or not 1 <= depth <= _DEEPEST or entries > size:
        raise CorruptFileError(
            f"{what} says that it has {entries} records and starts at page {root}, {depth} pages deep; the last page "
            f"is {last_page}",
            path=path,
        )
    return _Tree(flags, depth, entries, root)


def _named(file: LocalFile, info: FileInfo) -> Iterator[Subdatabase]:
    last_page = info.size // info.page_size - 1
    for name, value in _subdatabase_nodes(file, info):
        _, flags, depth, _, _, _, entries, root = _DATABASE.unpack(value)
        tree = _tree(flags, depth, entries, root, (last_page, info.size), f"the sub-database {name!r}", info.path)
        yield Subdatabase(name, tree.entries, bool(flags & _DUPSORT))


def _subdatabase_nodes(file: LocalFile, info: FileInfo) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of the entries of the main database that are sub-databases.

    A page is looked at once at most: pages that point to each other would keep a reader forever.
    """
    waiting = [] if info.main.root is None else [(info.main.root, 1)]
    seen: set[int] = set()
    while waiting:
        number, level = waiting.pop()
        if number in seen or level > info.main.depth:
            raise _damaged(info, number, "stands in the tree of the main database twice, or too deep")
        seen.add(number)
        page = file.read(number * info.page_size, info.page_size)
        leaf, nodes = _parse_page(page, number, info)
        if leaf:
            yield from _subdatabases_of(page, nodes, number, info)
        else:
            parsed = [_NODE.unpack_from(page, place) for place in nodes]
            children = [low | high << 16 | flags << 32 for low, high, flags, _ in parsed]
            if any(not 2 <= child < info.size // info.page_size for child in children):
                raise _damaged(info, number, "points outside the file")
            waiting += [(child, level + 1) for child in reversed(children)]


def _parse_page(page: bytes, number: int, info: FileInfo) -> tuple[bool, list[int]]:
    """Whether a page of the tree is a leaf, and where its nodes start, all within the page."""
    header = info.header_size
    flags, lower, upper = struct.unpack_from("=HHH", page, header - 6) if len(page) == info.page_size else (0, 0, 0)
    if flags & (_BRANCH | _LEAF) not in (_BRANCH, _LEAF):
        raise _damaged(info, number, "is no page of a tree")
    base = header if header == 24 else 0  # from LMDB 1.0 on, places are counted from behind the header
    count = (lower + base - header) // 2
    if not header <= lower + base <= upper + base <= info.page_size:
        raise _damaged(info, number, "has wrong bounds")
    places = [place + base for place in struct.unpack_from(f"={count}H", page, header)]
    if any(not header <= place <= info.page_size - _NODE.size for place in places):
        raise _damaged(info, number, "points outside itself")
    return bool(flags & _LEAF), places


def _subdatabases_of(page: bytes, nodes: list[int], number: int, info: FileInfo) -> Iterator[tuple[bytes, bytes]]:
    for place in nodes:
        low, high, flags, key_size = _NODE.unpack_from(page, place)
        if not flags & _SUBDATABASE or flags & _DUPLICATES:  # values of one key form a tree too
            continue
        key, value_size = place + _NODE.size, low | high << 16
        value = key + key_size
        if info.header_size == 24:  # LMDB 1.0 aligns values to two bytes
            value += key_size % 2
        if value_size != _DATABASE.size or value + value_size > len(page) or flags & _LARGE:
            raise _damaged(info, number, "has an entry that is no sub-database though it says so")
        # LMDB 1.0 ends names with a zero byte
        name = page[key : key + key_size].removesuffix(b"\0" if info.header_size == 24 else b"")
        yield name, page[value : value + value_size]


def _damaged(info: FileInfo, number: int, what: str) -> CorruptFileError:
    return CorruptFileError(f"page {number} {what}", path=info.path, offset=number * info.page_size)
