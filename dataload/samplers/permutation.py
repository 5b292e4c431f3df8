"""A keyed bijection on [0, n): any element of a shuffled order without computing the others. Pure (no I/O)."""

from typing import Any

import numpy as np
import numpy.typing as npt

from dataload._util.randomness import hash64
from dataload.types import Int64Array

KEY_WORDS = 2
"""Number of uint64 words in a key for `permute`."""

MAX_LENGTH = 2**48

# Six is the fewest that pass. The differences of positions 2^k apart fail a chi-square test by up to 650 standard
# deviations with four rounds and 41 with five (n = 2^15, 2^17; 40-60 seeds); with six they match a true permutation.
_ROUNDS = 6
_SMALL = 1024

# Walking this many elements one by one is faster than thirty numpy calls.
_FEW = 16


def permute(positions: Int64Array, n: int, key: npt.NDArray[np.uint64]) -> Int64Array:
    """Return the image of `positions` under the permutation of [0, n) that `key` selects.

    Up to 1,024 elements are sorted by 64 random bits each, which reaches every order. Larger domains use six rounds of
    add, multiply by an odd number, and xor-shift, each a bijection on the next power of two. The rounds are repeated
    until the result is below n (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    `positions` are in [0, n), and n is at most `MAX_LENGTH`.
    """
    if n <= _SMALL:
        elements = np.arange(n, dtype=np.int64)
        order = np.argsort(hash64(key[1], hash64(key[0], elements)), kind="stable")
        return order.astype(np.int64, copy=False)[positions]
    bits = (n - 1).bit_length()
    # Arithmetic modulo 2^32 and 2^64 agrees on the low 32 bits, and the narrower type is twice as fast.
    kind = np.uint32 if bits <= 32 else np.uint64
    constants = _round_constants(key, bits, kind)
    found = _rounds(positions.astype(kind), constants)
    walking = np.flatnonzero(found >= n)
    while walking.size > _FEW:
        again = _rounds(found[walking], constants)
        found[walking] = again
        walking = walking[again >= n]
    found[walking] = _walk(found[walking].tolist(), n, constants)
    return found.astype(np.int64)


def unpermute(image: int, n: int, key: npt.NDArray[np.uint64]) -> int:
    """Return the position whose image under `permute` is `image`, in [0, n)."""
    if n <= _SMALL:
        return int(np.flatnonzero(permute(np.arange(n), n, key) == image)[0])
    bits = (n - 1).bit_length()
    constants = [tuple(map(int, constant)) for constant in _round_constants(key, bits, np.uint64)]
    inverses = [(add, pow(multiply, -1, 1 << bits), mask, shift) for add, multiply, mask, shift in reversed(constants)]
    while True:
        for add, inverse, mask, shift in inverses:
            image ^= image >> shift  # its own inverse, because a shift is at least half the width
            image = (image * inverse - add) & mask
        if image < n:
            return image


def _round_constants(key: npt.NDArray[np.uint64], bits: int, kind: Any) -> list[tuple[Any, Any, Any, Any]]:
    mask = (1 << bits) - 1
    words = hash64(key[1], hash64(key[0], np.arange(2 * _ROUNDS))).tolist()
    # At least half the width, so that the upper half reaches the lower; alternating, so that rounds differ.
    shifts = [(bits + 1) // 2 + r % 2 for r in range(_ROUNDS)]
    return [
        (kind(words[2 * r] & mask), kind(words[2 * r + 1] & mask | 1), kind(mask), kind(shifts[r]))
        for r in range(_ROUNDS)
    ]


def _rounds(values: npt.NDArray[Any], constants: list[tuple[Any, Any, Any, Any]]) -> npt.NDArray[Any]:
    """Apply all rounds to `values` in place."""
    scratch = np.empty_like(values)
    for add, multiply, mask, shift in constants:
        values += add
        values *= multiply
        values &= mask
        np.right_shift(values, shift, out=scratch)
        values ^= scratch
    return values


def _walk(values: list[int], n: int, constants: list[tuple[Any, Any, Any, Any]]) -> list[int]:
    """Repeat the rounds for each of a few elements until it is below n."""
    plain = [tuple(map(int, constant)) for constant in constants]
    for i, value in enumerate(values):
        while value >= n:
            for add, multiply, mask, shift in plain:
                value = (value + add) * multiply & mask
                value ^= value >> shift
        values[i] = value
    return values
