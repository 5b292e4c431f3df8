"""A committed transaction of an LMDB file, read without locks, and walks of its B-trees, level by level.

Pages are copied before they are parsed, so they cannot change under the parser.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dataload._util.indexing import distinct
from dataload.errors import ChangedFileError, CorruptFileError, DataloadError, SourceError
from dataload.sources.lmdb.file import (
    BRANCH,
    DUPLICATES,
    LARGE,
    LEAF,
    OVERFLOW,
    RECORD_BYTES,
    SUBDATABASE,
    FileInfo,
    Refusal,
    Tree,
    find_key,
    is_unchanged,
    open_file,
    parse_pages,
    parse_tree,
    read_info,
)
from dataload.storage import RecordFile, Remote, storage_of
from dataload.types import Array, Int64Array

_BLOCK_BYTES = 1 << 21  # of pages that are parsed together
_MOST_NAMES = 1 << 16
_DTYPES = (np.int64, np.uint32, np.int64, np.uint16, np.uint8, np.int64)  # of the columns of `Nodes`, and of counts


@dataclass(frozen=True, slots=True)
class Nodes:
    """The records of a tree in LMDB's order: offsets (int64) and lengths (uint32) of values in bytes, (records,).

    `numbers` (int64) are keys that are decimal numbers below 10**18, -1 for others; `key_sizes` (uint16) are in bytes;
    `flags` (uint8) see `pages`. `branches` and `leaves` are int64 page numbers; `ends` (leaves,) count the records up
    to the end of each leaf.
    """

    offsets: Int64Array
    lengths: Array
    numbers: Int64Array
    key_sizes: Array
    flags: Array
    branches: Int64Array
    leaves: Int64Array
    ends: Int64Array

    def __len__(self) -> int:
        return len(self.offsets)


def read_tree(file: RecordFile, info: FileInfo, tree: Tree) -> Nodes:
    """Return the records of a tree. No page is read twice, because pages of a hostile file may point to each other."""
    pages = np.array([] if tree.root is None else [tree.root], np.int64)
    seen, branches = pages, pages[:0]
    for _ in range(1, tree.depth):
        branches = seen
        pages = np.concatenate([out[0] for out, _ in _parse(file, info, pages, BRANCH, info.pages)])
        seen = np.concatenate([seen, pages])
        if len(distinct(seen)) < len(seen):
            raise CorruptFileError(f"a page occurs twice in the tree of {tree.label}", path=info.path)
    blocks = [
        (*out[:3], out[3] & 0xFFFF, out[3] >> 16, counts)
        for out, counts in _parse(file, info, pages, LEAF, tree.entries)
    ]
    columns = zip(*blocks, strict=True) if blocks else [()] * 6
    joined = [_join(column, dtype) for column, dtype in zip(columns, _DTYPES, strict=True)]
    nodes = Nodes(*joined[:5], branches=branches, leaves=pages, ends=np.cumsum(joined[5]))
    size = int(nodes.lengths.sum(dtype=np.int64))
    if len(nodes) != tree.entries or size > info.size:
        message = f"{tree.label} claims {tree.entries} records; {len(nodes)} of {size} bytes were found"
        raise CorruptFileError(message, path=info.path)
    return nodes


def verify_pages(file: RecordFile, info: FileInfo, trees: Sequence[Tree]) -> None:
    """Check what reading does not depend on: numbers and lengths in page headers, and that no page is used twice."""
    pages: list[Int64Array] = []
    values: list[Int64Array] = []
    lengths: list[Int64Array] = []
    for tree in trees:
        nodes = read_tree(file, info, tree)
        large = nodes.flags & LARGE != 0
        pages += nodes.branches, nodes.leaves
        values.append(nodes.offsets[large] // info.page_size)
        lengths.append(nodes.lengths[large].astype(np.int64))
    single, first = np.concatenate(pages), np.concatenate(values)
    needed = -(-(np.concatenate(lengths) + info.header_size) // info.page_size)
    stored = _verify_headers(file, info, first, OVERFLOW)
    _refuse(info, first, (stored < needed) | (stored > info.pages - first), "holds a value of another length")
    _verify_headers(file, info, single, 0)
    starts, spans = np.concatenate([single, first]), np.concatenate([np.ones_like(single), stored])
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], (starts + spans)[order]
    _refuse(info, starts[1:], starts[1:] < stops[:-1], "is used twice")


def _verify_headers(file: RecordFile, info: FileInfo, pages: Int64Array, kind: int) -> Int64Array:
    """Check the page numbers in headers, and the kind of page unless it is 0; return (pages,) int64, their lengths."""
    if not len(pages):
        return pages
    heads = file.gather(pages * info.page_size, info.header_size)
    _refuse(info, pages, heads[:, :8].copy().view(np.int64)[:, 0] != pages, "has the number of another page")
    flags = heads[:, -6:-4].copy().view(np.uint16)[:, 0]
    _refuse(info, pages, (flags & kind) != kind, "is not the page of a value")
    return heads[:, -4:].copy().view(np.uint32)[:, 0].astype(np.int64)


def _refuse(info: FileInfo, pages: Int64Array, wrong: Array, reason: str) -> None:
    if wrong.any():
        page = int(pages[int(np.argmax(wrong))])
        raise CorruptFileError(f"page {page} {reason}", path=info.path, offset=page * info.page_size)


def subdatabases(file: RecordFile, info: FileInfo) -> list[Tree]:
    """Return the named databases in LMDB's order."""
    # A main database with more than 65,536 entries is assumed to contain plain records and is not searched.
    if info.main.entries > _MOST_NAMES or info.main.has_duplicates:  # LMDB allows no names beside duplicates
        return []
    nodes = read_tree(file, info, info.main)
    # The values of one key form a tree too.
    named = np.flatnonzero(nodes.flags & (SUBDATABASE | DUPLICATES) == SUBDATABASE)
    found: list[Tree] = []
    for node in named.tolist():
        key = read_key(file, info, nodes.leaves, nodes.ends, node)
        # LMDB 1.0 ends names with a zero byte.
        name = key.removesuffix(b"\0") if info.header_size == 24 else key
        if nodes.flags[node] & LARGE or nodes.lengths[node] != RECORD_BYTES:
            message = f"the entry {name!r} of the main database claims to be a sub-database but is not"
            raise CorruptFileError(message, path=info.path)
        record = file.read(int(nodes.offsets[node]), RECORD_BYTES)
        found.append(parse_tree(record, info.pages, info.size, name, info.path))
    return found


def read_key(file: RecordFile, info: FileInfo, leaves: Array, ends: Array, node: int) -> bytes:
    """Return the key of a record, by its place in LMDB's order; see `Nodes` for the leaves and their ends."""
    leaf = int(np.searchsorted(ends, node, side="right"))
    before = int(ends[leaf - 1]) if leaf else 0
    page = file.read(int(leaves[leaf]) * info.page_size, info.page_size)
    key = find_key(page, node - before, info.header_size)
    if key is None:
        message = f"page {leaves[leaf]} has changed"
        raise CorruptFileError(message, path=info.path, offset=int(leaves[leaf]) * info.page_size)
    return key


def _parse(
    file: RecordFile, info: FileInfo, pages: Int64Array, kind: int, most: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the nodes of blocks of pages and their counts, see `parse_pages`, until there are more than `most`."""
    rows = max(1, _BLOCK_BYTES // info.page_size)
    for start in range(0, len(pages), rows):
        numbers = pages[start : start + rows]
        block = file.gather(numbers * info.page_size, info.page_size)
        found = parse_pages(block, numbers, info.header_size, info.size, kind)
        if isinstance(found, Refusal):
            number = int(numbers[found.row])
            raise CorruptFileError(f"page {number} {found.reason}", path=info.path, offset=number * info.page_size)
        yield found
        most -= found[0].shape[1]
        if most < 0:
            break


def _join(parts: Sequence[Array], dtype: type) -> Array:
    return np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.empty(0, dtype)


T = TypeVar("T")

_ATTEMPTS = 5
_SAMPLES, _SAMPLE_BYTES = 8, 256


class Snapshot:
    """An open file, and the meta page of the transaction to read."""

    def __init__(self, file: RecordFile, info: FileInfo) -> None:
        self.file = file
        self.info = info
        self._ranges = np.empty((2, 0), np.int64)
        self._samples: list[bytes] = []

    def sample(self, offsets: Int64Array, lengths: Array | int) -> None:
        """Remember some values: an environment that is copied over this one may have the same meta page."""
        rows = np.flatnonzero(offsets >= 0)  # others are missing
        rows = rows[:: len(rows) // _SAMPLES + 1]
        sizes = np.minimum(np.broadcast_to(lengths, offsets.shape)[rows], _SAMPLE_BYTES)
        self._ranges = np.stack([offsets[rows], sizes.astype(np.int64)])
        self._samples = self.file.copies(*self._ranges)

    @contextmanager
    def reading(self) -> Generator[RecordFile]:
        """Check after reads that they belong to the transaction; a ChangedFileError takes the place of other errors."""
        # Otherwise two later transactions have been committed, so that the next may have overwritten what was read, or
        # something else than LMDB has written to the file.
        try:
            yield self.file
        finally:
            overwritten = self.file.is_written() and self.file.copies(*self._ranges) != self._samples
            if overwritten or not is_unchanged(self.file, self.info):
                message = "the file has been written to since it was opened, so its records may be overwritten"
                raise ChangedFileError(f"{message}: open the data set again", path=self.info.path)


def open_snapshot(
    path: str, parse: Callable[[RecordFile, FileInfo], T], *, mapped: bool = True, remote: Remote | None = None
) -> tuple[Snapshot, T]:
    """Open an environment and parse it by `parse`; start again if a writer overtakes that."""
    for _ in range(_ATTEMPTS):
        file, info = open_file(path, mapped=mapped, remote=remote), None
        try:
            info = read_info(file)
            result = parse(file, info)
        except DataloadError:
            if _is_unchanged(file, info, remote):
                raise
        else:
            if is_unchanged(file, info):
                return Snapshot(file, info), result
    message = f"{path} was written to {_ATTEMPTS} times while it was being opened"
    raise SourceError(f"{message}: open it when its writer has finished, or a copy of it (mdb_copy)", path=path)


def _is_unchanged(file: RecordFile, info: FileInfo | None, remote: Remote | None) -> bool:
    """Return whether no writer can have caused an error. Without a meta page, the size of the file decides."""
    if info is not None:
        return is_unchanged(file, info)
    return storage_of(file.path, remote).identity(file.path).size == file.size


def list_subdatabases(path: str, remote: Remote | None = None) -> list[Tree]:
    """Return the named databases of an environment in LMDB's order; raise like `open_snapshot`."""
    return open_snapshot(path, subdatabases, remote=remote)[1]


def is_torchrecord(path: str, remote: Remote | None = None) -> bool:
    """Return whether the main database has a sub-database ``db0``; raise like `open_snapshot`."""
    return any(found.name == b"db0" for found in list_subdatabases(path, remote))
