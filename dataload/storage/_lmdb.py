"""Pages of LMDB's B-trees parsed in numpy; `_lmdb.h` has the same in C."""

import numpy as np

from dataload.types import Array, BytesArray, Int64Array

_BRANCH, _PAGE_KINDS, _LARGE, _NODE_BYTES, _DECIMAL_LIMIT = 1, 0x6F, 1, 8, 10**18
_BAD_KIND, _BAD_BOUNDS, _BAD_POSITION, _BAD_ENTRY, _BAD_PAGE = range(1, 6)


def lmdb_nodes(
    out: Int64Array,
    counts: Int64Array,
    pages: BytesArray,
    numbers: Int64Array,
    page_size: int,
    header_size: int,
    size: int,
    kind: int,
) -> int:
    """Parse branch pages or leaf pages of LMDB, check all that they say, and return the number of nodes.

    `kind` is the flag of the pages, 1 for branch pages and 2 for leaf pages; see `dataload.sources.lmdb.pages`. `pages`
    is (pages, page_size) uint8, contiguous, and `numbers`, (pages,) int64, are their numbers. `page_size` is a multiple
    of 8 from 256 to 65,536, `header_size` 16 or 24, and `size` the bytes of the file that are in use.

    `counts`, (pages,) int64, is filled with the nodes in each page, at most ``page_size // 10``. `out`, (4, capacity)
    int64 with room for all, is filled by node: the number of the child page; or for leaf pages the value's offset in
    the file, its length, the decimal number below 10**18 that the key is (-1 for other keys), and the size of the key
    plus 65,536 times the flags.

    For the first page that is refused, the result is -(8 * its row + a number from 1): it is not of this kind, its
    bounds are wrong, a node or an entry lies outside it, or it points outside the file.
    """
    fit = header_size in (16, 24) and 256 <= page_size <= 65536 and page_size % 8 == 0
    fit = fit and pages.size == len(numbers) * page_size and len(counts) == len(numbers)
    if not fit or out.shape[1] < len(numbers) * (page_size // (_NODE_BYTES + 2)):
        raise ValueError("the pages and the buffers do not fit each other")
    outside = (numbers < 0) | (numbers >= size // page_size)
    if outside.any():
        raise ValueError(f"row {int(np.argmax(outside))}: a page outside the {size} bytes")
    words = pages.reshape(-1).view(np.uint16)
    good, refusal = _check_headers(words.reshape(len(numbers), -1), counts, page_size, header_size, kind)
    per_page = counts[:good]
    total = int(per_page.sum())
    pages_of = np.repeat(np.arange(good), per_page)
    places = np.arange(total) - np.repeat(np.cumsum(per_page) - per_page, per_page)
    nodes = words[pages_of * (page_size // 2) + header_size // 2 + places].astype(np.int64)
    nodes += header_size if header_size == 24 else 0  # since LMDB 1.0, positions do not count the header
    bad = np.zeros(total, np.uint8)
    outside = (nodes < header_size) | (nodes > page_size - _NODE_BYTES) | (nodes % 2 != 0)
    if outside.any():
        bad[outside] = _BAD_POSITION
        nodes[outside] = header_size
    starts = pages_of * page_size + nodes
    if kind == _BRANCH:
        _fill_branches(out, bad, words, starts // 2, size // page_size)
    else:
        values = _fill_entries(out, bad, words, starts, page_size - nodes, header_size)
        out[0, :total] = numbers[pages_of] * page_size + (values - pages_of * page_size)
        _fill_large(out, bad, pages.reshape(-1), values, page_size, header_size, size)
        _fill_decimals(out, bad, pages.reshape(-1), starts + _NODE_BYTES)
    first = np.flatnonzero(bad)[:1]
    if first.size:
        return -int(8 * pages_of[first[0]] + bad[first[0]])
    return -(8 * good + refusal) if refusal else total


def _check_headers(words: Array, counts: Int64Array, page_size: int, header_size: int, kind: int) -> tuple[int, int]:
    """Fill `counts`; return the number of pages before the first that is refused, and why, 0 if none is."""
    flags, lower, upper = words[:, header_size // 2 - 3 : header_size // 2].T.astype(np.int64)
    base = header_size if header_size == 24 else 0
    counts[:] = (lower + base - header_size) // 2
    wrong_kind = flags & _PAGE_KINDS != kind
    in_order = (header_size <= lower + base) & (lower <= upper) & (upper + base <= page_size)
    wrong_bounds = ~in_order | (counts > page_size // (_NODE_BYTES + 2))
    first = np.flatnonzero(wrong_kind | wrong_bounds)[:1]
    if not first.size:
        return len(words), 0
    return int(first[0]), _BAD_KIND if wrong_kind[first[0]] else _BAD_BOUNDS


def _fill_branches(out: Int64Array, bad: BytesArray, words: Array, at: Int64Array, pages: int) -> None:
    """Fill in the children of nodes, (nodes,) at these words; `pages` limits their numbers."""
    low, high, top = (words[at + place].astype(np.int64) for place in range(3))
    children = low | high << 16 | top << 32
    out[0, : len(at)] = children
    bad[((children < 2) | (children >= pages)) & (bad == 0)] = _BAD_PAGE


def _fill_entries(
    out: Int64Array, bad: BytesArray, words: Array, starts: Int64Array, room: Int64Array, header_size: int
) -> Int64Array:
    """Fill in lengths, sizes of keys and flags; return (nodes,) the places of values, or of the numbers of pages."""
    at = starts // 2
    low, high, flags, keys = (words[at + place].astype(np.int64) for place in range(4))
    length = low | high << 16
    before = _NODE_BYTES + keys
    if header_size == 24:  # LMDB 1.0 aligns values to two bytes
        before += keys & 1
    stored = np.where(flags & _LARGE, 8, length)
    bad[(before + stored > room) & (bad == 0)] = _BAD_ENTRY
    out[1, : len(at)] = length
    out[3, : len(at)] = keys | flags << 16
    return starts + before


def _fill_large(
    out: Int64Array, bad: BytesArray, data: BytesArray, values: Int64Array, page_size: int, header_size: int, size: int
) -> None:
    """Fill in the offsets of values in overflow pages."""
    rows = np.flatnonzero((out[3, : len(values)] >> 16 & _LARGE != 0) & (bad == 0))
    found = data[values[rows, None] + np.arange(8)].view(np.uint64).ravel()
    inside = (found >= 2) & (found < size // page_size)
    offsets = np.where(inside, found, 0).astype(np.int64) * page_size + header_size
    inside &= offsets + out[1, rows] <= size
    out[0, rows] = offsets
    bad[rows[~inside]] = _BAD_PAGE


def _fill_decimals(out: Int64Array, bad: BytesArray, data: BytesArray, keys: Int64Array) -> None:
    """Fill in the numbers that keys are, which begin at these places."""
    sizes = out[3, : len(keys)] & 0xFFFF
    numbers = out[2, : len(keys)]
    numbers[:] = -1
    candidates = np.flatnonzero((sizes > 0) & (bad == 0))
    for size in np.unique(sizes[candidates]).tolist():
        rows = candidates[sizes[candidates] == size]
        value = np.zeros(len(rows), np.int64)
        for place in range(size):
            digits = data[keys[rows] + place] - np.uint8(ord("0"))  # wraps around
            decimal = (digits <= 9) & (value < _DECIMAL_LIMIT // 10)
            if not decimal.all():
                rows, value, digits = rows[decimal], value[decimal], digits[decimal]
                if not len(rows):
                    break
            value = value * 10 + digits
        numbers[rows] = value
