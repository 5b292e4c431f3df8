"""Permutations in numpy, as in `_orders.h`."""

from typing import Any

import numpy as np

from dataload._util.randomness import ROUNDS, SMALL, hash64, rounds
from dataload.types import Int64Array


def put_keys(constants: Any, images: Any, ends: Any, starts: Any, numbers: Any, keys: Any, /) -> int:
    """Set permutations of some numbers to those that keys select, (numbers, 2) uint64."""
    ends, starts = _of_permutations(images, ends, starts, numbers, len(keys) == len(numbers))
    each = np.broadcast_to(np.arange(2 * ROUNDS), (len(keys), 2 * ROUNDS))
    words = hash64(keys[:, 1:], hash64(keys[:, :1], each)) & _masks(ends)[0][:, None]
    constants[numbers] = words | np.arange(2 * ROUNDS, dtype=np.uint64) % 2
    sizes = np.where(ends <= SMALL, ends, 0)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    hashed = hash64(keys[owners, 1], hash64(keys[owners, 0], places))
    images[starts[owners] + places] = places[np.lexsort((hashed, owners))]
    return 0


def permute(
    constants: Any, images: Any, ends: Any, starts: Any, passes: Any, firsts: Any, numbers: Any, draws: Any, out: Any, /
) -> int:
    """Fill `out` with the image of each draw in its pass, -1 where another pass is set; return how many are."""
    fit = len(numbers) == len(draws) == len(out) and len(passes) == len(firsts) == len(ends)
    ends, starts = _of_permutations(images, ends, starts, numbers, fit)
    turns = (draws / ends).astype(np.int64)
    values = draws - turns * ends
    is_late, is_small = passes[numbers] != turns + firsts[numbers], ends <= SMALL
    out[:] = np.where(is_late, -1, np.append(images, 0)[np.where(is_small, starts + values, -1)])
    rows = np.flatnonzero(~is_late & ~is_small)
    while rows.size:
        (mask, *shifts), words = _masks(ends[rows]), constants[numbers[rows]].T
        keys = [(words[2 * i], words[2 * i + 1], mask, shifts[i % 2]) for i in range(ROUNDS)]
        out[rows] = values[rows] = rounds(values[rows].astype(np.uint64), keys)
        rows = rows[values[rows] >= ends[rows]]
    return int(is_late.sum())


def _masks(ends: Int64Array) -> list[Any]:
    """Return the mask of each domain, and the shifts of even and odd rounds."""
    bits = np.maximum(1, np.frexp(ends - 1.0)[1]).astype(np.uint64)
    half, one = (bits + np.uint64(1)) // np.uint64(2), np.uint64(1)
    return [(one << bits) - one, half, half + one]


def _of_permutations(images: Any, ends: Int64Array, starts: Any, numbers: Any, fit: bool) -> tuple[Int64Array, Any]:
    """Return the ends and starts of permutations by number."""
    right = (numbers >= 0) & (numbers < len(ends)) & fit
    end, start = ends[numbers * right], starts[numbers * right]
    right &= (end > SMALL) | ((end > 0) & (start >= 0) & (start <= len(images) - end))
    if not right.all() or not fit:
        raise ValueError(f"row {int(np.argmin(right))} is of no permutation")
    return end, start
