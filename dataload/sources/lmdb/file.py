"""Checks of an LMDB file before LMDB maps it: whether it is complete, and which databases it has.

A file consists of pages of one size, with integers in the byte order of the machine. Pages 0 and 1 are meta pages, of
which the one with the higher transaction number is valid. It gives the last page and the roots of two B-trees: free
pages and the main database. A named sub-database is an entry of the main one, whose value describes another tree. The
page header has 16 bytes up to LMDB 0.9 (data version 1), and 24 in LMDB 1.0 (data version 3).

LMDB trusts the file: it maps as many pages as the meta page says, and a process that touches a page after the end of
the file is killed by SIGBUS. So this module reads these few pages, checks each number, and maps nothing.
"""

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

_DEEPEST = 32  # LMDB's limit
_MOST_NAMES = 1 << 16


@dataclass(frozen=True, slots=True)
class Tree:
    """A database.

    Attributes:
        has_duplicates: Whether keys may have several values, which `entries` counts.
        depth: Levels of pages, at most `_DEEPEST`.
        entries: Number of records.
        root: Page number, checked; None if there are no records.
    """

    has_duplicates: bool
    depth: int
    entries: int
    root: int | None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Contents of the newest meta page.

    Attributes:
        path: Path of the data file.
        header_size: Size of a page's header in bytes.
        page_size: Size of a page in bytes.
        size: Size of all pages in use, which the file has at least.
        main: The main database.
    """

    path: str
    header_size: int
    page_size: int
    size: int
    main: Tree


@dataclass(frozen=True, slots=True)
class Subdatabase:
    """A named database within the main one.

    Attributes:
        name: Key in the main database.
        entries: Number of records.
        has_duplicates: Whether keys may have several values, which `entries` counts.
    """

    name: bytes
    entries: int
    has_duplicates: bool


def data_file(path: str) -> str:
    """Return the data file of an LMDB environment, which is a directory or that file."""
    return join(path, DATA_FILE) if storage_of(path).is_directory(path) else path


def check_whole(path: str) -> FileInfo:
    """Check the meta pages against the size of the file.

    Args:
        path: A directory with data.mdb, or the file itself.

    Raises:
        OSError: The file cannot be read.
        SourceNotFoundError: The directory has no data.mdb.
        UnsupportedFormatError: The file is from another version of LMDB or kind of machine.
        CorruptFileError: The file is not an LMDB file, or is damaged or truncated.
    """
    with _open(path) as file:
        return _read_info(file)


def subdatabases(path: str) -> list[Subdatabase]:
    """Return the named databases in LMDB's order.

    A main database with more than 65,536 entries is assumed to contain plain records and is not searched.

    Raises:
        SourceError: See `check_whole`; or a page of the main database is damaged.
    """
    with _open(path) as file:
        info = _read_info(file)
        if info.main.entries > _MOST_NAMES:
            return []
        last_page = info.size // info.page_size - 1
        found: list[Subdatabase] = []
        for name, record in _subdatabase_nodes(file, info):
            tree = _parse_tree(record, last_page, info.size, f"the sub-database {name!r}", info.path)
            found.append(Subdatabase(name, tree.entries, tree.has_duplicates))
        return found


def is_lmdb(head: bytes) -> bool:
    """Return whether a file begins with a page header of 16 or 24 bytes and LMDB's magic number."""
    magic = _MAGIC.to_bytes(4, "little")
    return any(head[size : size + 4] == magic for size in _VERSIONS)


def is_torchrecord(path: str) -> bool:
    """Return whether the main database has a sub-database ``db0``; raise like `subdatabases`."""
    return any(found.name == b"db0" for found in subdatabases(path))


def _open(path: str) -> LocalFile:
    storage = storage_of(path)
    if storage.is_directory(path) and not storage.exists(join(path, DATA_FILE)):
        raise SourceNotFoundError(
            f"the directory {path} has no {DATA_FILE}, so it is not an LMDB environment", path=path
        )
    return storage.open(data_file(path))


def _read_info(file: LocalFile) -> FileInfo:
    path, size = file.path, file.size
    head = file.read(0, max(_VERSIONS) + _META_SIZE)
    header_size = _header_size(head, size, path)
    page_size: int = _DATABASE.unpack_from(head, header_size + _META.size)[0]
    if not 256 <= page_size <= 0x10000 or page_size & (page_size - 1):
        raise CorruptFileError(
            f"the first meta page gives an invalid page size of {page_size} bytes",
            path=path,
            offset=header_size + _META.size,
        )
    if size < 2 * page_size:
        raise CorruptFileError(
            f"the file has {size} bytes, but its two meta pages need {2 * page_size}: it is truncated",
            path=path,
            offset=size,
        )
    second = file.read(page_size, header_size + _META_SIZE)
    metas = [_parse_meta(meta, header_size, offset, path) for offset, meta in ((0, head), (page_size, second))]
    # If the numbers are equal, as in a new file, the first page is valid.
    _, last_page, record = max(metas, key=lambda meta: meta[0])
    needed = (last_page + 1) * page_size
    if needed > size:
        raise CorruptFileError(
            f"the newest meta page says that page {last_page} of {page_size} bytes is the last one in use; the file "
            f"has {size} bytes instead of {needed}: it is truncated",
            path=path,
            offset=size,
        )
    main = _parse_tree(record, last_page, needed, "the main database", path)
    return FileInfo(path, header_size, page_size, needed, main)


def _header_size(head: bytes, size: int, path: str) -> int:
    if not size:
        raise CorruptFileError("the file is empty, but an LMDB file has at least two pages", path=path, offset=0)
    for header_size, version in _VERSIONS.items():
        if len(head) < header_size + _META_SIZE:
            continue
        magic, found = _META.unpack_from(head, header_size)
        if magic == _MAGIC:
            if found != version:
                raise UnsupportedFormatError(
                    f"{path} is an LMDB file of data version {found}, expected {version}", path=path
                )
            return header_size
    if _MAGIC.to_bytes(4, "big") in head[:32] or _MAGIC.to_bytes(4, "little") in head[:16]:
        raise UnsupportedFormatError(
            f"{path} is an LMDB file of a machine with another word size or byte order: export it there with "
            "mdb_dump, and import it here with mdb_load",
            path=path,
        )
    raise CorruptFileError(
        f"not an LMDB file: expected the magic {_MAGIC:#x} at byte 16, found {head[16:20].hex(' ') or 'the end'}",
        path=path,
        offset=16,
    )


def _parse_meta(meta: bytes, header_size: int, offset: int, path: str) -> tuple[int, int, bytes]:
    """Return the transaction, the last page and the record of the main database."""
    if len(meta) < header_size + _META_SIZE:
        raise CorruptFileError("the file ends in a meta page", path=path, offset=offset)
    flags = struct.unpack_from("=H", meta, header_size - 6)[0]
    if not flags & _IS_META or _META.unpack_from(meta, header_size) != (_MAGIC, _VERSIONS[header_size]):
        raise CorruptFileError("expected a meta page, found something else", path=path, offset=offset)
    start = header_size + _META.size + _DATABASE.size
    stop = start + _DATABASE.size
    last_page, transaction = struct.unpack_from("=QQ", meta, stop)
    return transaction, last_page, meta[start:stop]


def _parse_tree(record: bytes, last_page: int, size: int, what: str, path: str) -> Tree:
    """Parse the record of a database; the last page and the size of all pages limit its numbers."""
    _, flags, depth, _, _, _, entries, root = _DATABASE.unpack(record)
    has_duplicates = bool(flags & _DUPSORT)
    if root == _NO_PAGE:
        if entries:
            raise CorruptFileError(f"{what} has {entries} records but no pages", path=path)
        return Tree(has_duplicates, 0, 0, None)
    if not 2 <= root <= last_page or not 1 <= depth <= _DEEPEST or entries > size:
        raise CorruptFileError(
            f"{what} claims {entries} records in a tree of depth {depth} at page {root}; the last page is {last_page}",
            path=path,
        )
    return Tree(has_duplicates, depth, entries, root)


def _subdatabase_nodes(file: LocalFile, info: FileInfo) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of the main database's entries that are sub-databases.

    Each page is visited at most once, because pages of a hostile file may point to each other.
    """
    waiting = [] if info.main.root is None else [(info.main.root, 1)]
    seen: set[int] = set()
    while waiting:
        number, level = waiting.pop()
        if number in seen or level > info.main.depth:
            raise _damaged(info, number, "occurs twice in the tree of the main database, or too deep")
        seen.add(number)
        page = file.read(number * info.page_size, info.page_size)
        leaf, nodes = _parse_page(page, number, info)
        if leaf:
            yield from _subdatabases_of(page, nodes, number, info)
        else:
            parsed = [_NODE.unpack_from(page, node) for node in nodes]
            children = [low | high << 16 | flags << 32 for low, high, flags, _ in parsed]
            if any(not 2 <= child < info.size // info.page_size for child in children):
                raise _damaged(info, number, "points outside the file")
            waiting += [(child, level + 1) for child in reversed(children)]


def _parse_page(page: bytes, number: int, info: FileInfo) -> tuple[bool, list[int]]:
    """Return whether a page is a leaf, and the offsets of its nodes, which lie inside the page."""
    header = info.header_size
    flags, lower, upper = struct.unpack_from("=HHH", page, header - 6) if len(page) == info.page_size else (0, 0, 0)
    if flags & (_BRANCH | _LEAF) not in (_BRANCH, _LEAF):
        raise _damaged(info, number, "is not a page of a tree")
    base = header if header == 24 else 0  # since LMDB 1.0, offsets do not count the header
    count = (lower + base - header) // 2
    if not header <= lower + base <= upper + base <= info.page_size:
        raise _damaged(info, number, "has wrong bounds")
    nodes = [node + base for node in struct.unpack_from(f"={count}H", page, header)]
    if any(not header <= node <= info.page_size - _NODE.size for node in nodes):
        raise _damaged(info, number, "points outside itself")
    return bool(flags & _LEAF), nodes


def _subdatabases_of(page: bytes, nodes: list[int], number: int, info: FileInfo) -> Iterator[tuple[bytes, bytes]]:
    for node in nodes:
        low, high, flags, key_size = _NODE.unpack_from(page, node)
        if not flags & _SUBDATABASE or flags & _DUPLICATES:  # values of one key form a tree too
            continue
        key, value_size = node + _NODE.size, low | high << 16
        value = key + key_size
        if info.header_size == 24:  # LMDB 1.0 aligns values to two bytes
            value += key_size % 2
        if value_size != _DATABASE.size or value + value_size > len(page) or flags & _LARGE:
            raise _damaged(info, number, "has an entry that claims to be a sub-database but is not")
        # LMDB 1.0 ends names with a zero byte
        name = page[key : key + key_size].removesuffix(b"\0" if info.header_size == 24 else b"")
        yield name, page[value : value + value_size]


def _damaged(info: FileInfo, number: int, what: str) -> CorruptFileError:
    return CorruptFileError(f"page {number} {what}", path=info.path, offset=number * info.page_size)
