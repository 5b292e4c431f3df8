"""Randomness has an address: every random choice is a function of a key, and a key of what it is for.

There is no generator that is carried along and no ``seed + epoch`` (with which seed 3, epoch 1 would equal
seed 4, epoch 0). Keys come from BLAKE2b, bits from a 64-bit finalizer, both written out here, so that an order
does not change with the version of numpy.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError

__all__ = ["ORDER_VERSION", "check_seed", "derive_key", "generator", "hash64"]

ORDER_VERSION = 1
"""Raised whenever any order changes for the same seed; a saved state refuses another version."""

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def check_seed(seed: Any) -> int:
    """`seed` as a Python int.

    Raises:
        ConfigError: It is no integer; a float or a string would be rounded or hashed behind the user's back.
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ConfigError(f"seed must be an integer, got {seed!r} ({type(seed).__name__})", key="seed", value=seed)
    return int(seed.__index__())


def derive_key(seed: int, purpose: str, *address: int | str, words: int = 4) -> UInt64Array:
    """Key for one purpose at one address, independent of every other.

    Args:
        seed: The user's seed, any integer.
        purpose: What the randomness is for, for example ``"shuffle"``.
        address: The rest of the address, for example the epoch.
        words: Length of the key, at most 8.

    Returns:
        (words,) uint64.
    """
    text = "\x1f".join([repr(int(seed)), purpose, *map(_address_part, address)])
    digest = hashlib.blake2b(text.encode(), digest_size=8 * words, person=b"dataload").digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _address_part(part: int | str) -> str:
    # By value, not by type: epoch 3 of an array is epoch 3.
    return f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}"


def hash64(key: np.uint64, values: npt.NDArray[Any]) -> UInt64Array:
    """64 well-mixed bits for each value: the output function of SplitMix64 (Steele, Lea, Flood 2014).

    Args:
        key: One word of a key.
        values: (n,) integers.

    Returns:
        (n,) uint64; a bijection of the values for each key.
    """
    bits = values.astype(np.uint64)  # a copy: the steps below work in place
    bits *= _GOLDEN_GAMMA
    bits += key
    bits ^= bits >> _SHIFT_30
    bits *= _MIX_1
    bits ^= bits >> _SHIFT_27
    bits *= _MIX_2
    bits ^= bits >> _SHIFT_31
    return bits


def generator(seed: int, purpose: str, *address: int | str) -> np.random.Generator:
    """A numpy generator at an address, for what users do with random numbers (augmentation)."""
    # Philox takes the key as it is; SeedSequence would hash it once more.
    return np.random.Generator(np.random.Philox(key=derive_key(seed, purpose, *address, words=2)))
