"""Pages of the B-trees of an LMDB file. Pure (no I/O).

A branch or leaf page begins with a header, which ends in its flags and the bounds of its free space, 2 bytes each. Then
come the positions of its nodes, 2 bytes each, in the order of their keys. A node is two halves of a number, flags and
the size of the key, 2 bytes each, the key, and in a leaf the value. In a branch page, the number and the flags are the
number of a child page; in a leaf, the number is the size of the value. A large value lies in overflow pages of its own,
after one header, which ends in the number of these pages, and its node has the number of the first in its place.
"""

import sys
from dataclasses import dataclass

import numpy as np

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
    """Parse branch or leaf pages, (pages, page_size) uint8, contiguous; see `dataload.storage._lmdb.lmdb_nodes`.

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
    """Return the key of a node of a leaf page, whose first node is number 0; None if there is none."""
    base = header_size if header_size == 24 else 0
    at = base + int.from_bytes(page[header_size + 2 * node : header_size + 2 * node + 2], sys.byteorder)
    start = at + _NODE_BYTES
    stop = start + int.from_bytes(page[start - 2 : start], sys.byteorder)
    return page[start:stop] if len(page) >= stop else None
