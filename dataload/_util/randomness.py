"""Random numbers by address: every random choice is a pure function of a seed, a purpose and an epoch or index.

Nothing computes ``seed + epoch``, which would make epoch 1 of seed 3 equal to epoch 0 of seed 4. Keys are BLAKE2b
hashes, and bits come from the 64-bit finalizer below, so an order does not depend on the numpy version.
"""

import ctypes
import hashlib
import operator
import random
import struct
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISeedSequence

from dataload.errors import ConfigError
from dataload.types import Int64Array

ORDER_VERSION = 1
"""Version of all orders, raised when any order changes for the same seed. States of other versions are refused."""

_PERSON = b"dataload"

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)


def check_seed(seed: Any) -> int:
    """Return `seed` as a Python int; floats and strings are refused."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ConfigError(f"seed must be an integer, got {seed!r} ({type(seed).__name__})", key="seed", value=seed)
    return int(seed.__index__())


def derive_key(seed: int, purpose: str, *address: int | str, words: int = 4) -> UInt64Array:
    """Return an independent key, (words <= 8,) uint64, for a purpose such as ``"shuffle"`` and an address."""
    return np.frombuffer(_digest(8 * words, seed, purpose, address), "<u8").astype(np.uint64)


def derive_keys(seeds: Iterable[int], purpose: str, addresses: Iterable[int], words: int) -> UInt64Array:
    """Return the key of each seed for one purpose and its address, (seeds, words) uint64: `derive_key`, faster."""
    begun, form, digests = _hash_of(8 * words), f"%d\x1f{purpose}\x1fint:%d".encode(), list[bytes]()
    for pair in zip(seeds, addresses, strict=True):
        hashed = begun.copy()  # half the time of a new one
        hashed.update(form % pair)
        digests.append(hashed.digest())
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, words)


def derive_word(seed: int, purpose: str, *address: int | str) -> np.uint64:
    """Return an independent word of 64 bits for a purpose and an address."""
    return np.uint64(int.from_bytes(_digest(8, seed, purpose, address), "little"))


def _digest(size: int, seed: int, purpose: str, address: tuple[int | str, ...]) -> bytes:
    if not address:
        return _hash_of(size, int(seed), purpose).digest()
    *first, last = map(_address_part, address)
    hashed = _hash_of(size, int(seed), purpose, *first).copy()
    hashed.update(f"\x1f{last}".encode())
    return hashed.digest()


@lru_cache(64)  # most keys of a loop differ only in the step or the index, which come last
def _hash_of(size: int, *parts: object) -> Any:
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=size, person=_PERSON)


def _address_part(part: int | str) -> str:
    # Values count, not types: numpy's 3 and Python's 3 are the same epoch.
    return f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}"


def hash64(key: np.uint64 | UInt64Array, values: npt.NDArray[Any]) -> UInt64Array:
    """Hash (n,) integers to (n,) uint64 by SplitMix64's output function, which is a bijection for a given key."""
    bits = values.astype(np.uint64)  # a copy: the steps below work in place
    bits *= _GOLDEN_GAMMA
    bits += key
    bits ^= bits >> _SHIFT_30
    bits *= _MIX_1
    bits ^= bits >> _SHIFT_27
    bits *= _MIX_2
    bits ^= bits >> _SHIFT_31
    return bits


KEY_WORDS = 2
"""Number of uint64 words in a key for `permute`."""

# Six is the fewest that pass. The differences of positions 2^k apart fail a chi-square test by up to 650 standard
# deviations with four rounds and 41 with five (n = 2^15, 2^17; 40-60 seeds); with six they match a true permutation.
ROUNDS = 6
SMALL = 1024

# Walking this many elements one by one is faster than thirty numpy calls.
FEW = 16


def permute(positions: Int64Array, n: int, key: UInt64Array) -> Int64Array:
    """Return the image of `positions` in [0, n) under the permutation of [0, n) that `key` selects."""
    # Up to 1,024 elements are sorted by 64 random bits each, which reaches every order. Larger domains use six rounds
    # of add, multiply by an odd number, and xor-shift, each a bijection on the next power of two. The rounds are
    # repeated until the result is below n (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    # 2002).
    if n <= SMALL:
        elements = np.arange(n, dtype=np.int64)
        order = np.argsort(hash64(key[1], hash64(key[0], elements)), kind="stable")
        return order.astype(np.int64, copy=False)[positions]
    bits = (n - 1).bit_length()
    # Arithmetic modulo 2^32 and 2^64 agrees on the low 32 bits, and the narrower type is twice as fast.
    kind = np.uint32 if bits <= 32 else np.uint64
    constants = _round_constants(key.tobytes(), bits, kind)
    found = rounds(positions.astype(kind), constants)
    walking = np.flatnonzero(found >= n)
    while walking.size > FEW:
        again = rounds(found[walking], constants)
        found[walking] = again
        walking = walking[again >= n]
    found[walking] = walk(found[walking].tolist(), n, constants)
    return found.astype(np.int64)


def unpermute(image: int, n: int, key: UInt64Array) -> int:
    """Return the position whose image under `permute` is `image`, in [0, n)."""
    if n <= SMALL:
        return int(np.flatnonzero(permute(np.arange(n), n, key) == image)[0])
    bits = (n - 1).bit_length()
    constants = [tuple(map(int, constant)) for constant in _round_constants(key.tobytes(), bits, np.uint64)]
    inverses = [(add, pow(multiply, -1, 1 << bits), mask, shift) for add, multiply, mask, shift in reversed(constants)]
    while True:
        for add, inverse, mask, shift in inverses:
            image ^= image >> shift  # its own inverse, because a shift is at least half the width
            image = (image * inverse - add) & mask
        if image < n:
            return image


@lru_cache(256)  # making them takes as long as a block of an order does, and the next block has the same
def _round_constants(key: bytes, bits: int, kind: Any) -> list[tuple[Any, Any, Any, Any]]:
    mask = (1 << bits) - 1
    first, second = np.frombuffer(key, np.uint64)
    words = hash64(second, hash64(first, np.arange(2 * ROUNDS))).tolist()
    # At least half the width, so that the upper half reaches the lower; alternating, so that rounds differ.
    shifts = [(bits + 1) // 2 + r % 2 for r in range(ROUNDS)]
    return [
        (kind(words[2 * r] & mask), kind(words[2 * r + 1] & mask | 1), kind(mask), kind(shifts[r]))
        for r in range(ROUNDS)
    ]


def rounds(values: npt.NDArray[Any], constants: Iterable[tuple[Any, Any, Any, Any]]) -> npt.NDArray[Any]:
    """Apply all rounds to `values` in place."""
    scratch = np.empty_like(values)
    for add, multiply, mask, shift in constants:
        values += add
        values *= multiply
        values &= mask
        np.right_shift(values, shift, out=scratch)
        values ^= scratch
    return values


def walk(values: list[int], n: int, constants: list[tuple[Any, Any, Any, Any]]) -> list[int]:
    """Repeat the rounds for each of a few elements until it is below n."""
    plain = [tuple(map(int, constant)) for constant in constants]
    for i, value in enumerate(values):
        while value >= n:
            for add, multiply, mask, shift in plain:
                value = (value + add) * multiply & mask
                value ^= value >> shift
        values[i] = value
    return values


def generator(seed: int, purpose: str, *address: int | str) -> np.random.Generator:
    """Return a numpy generator for an address, for use in transforms (augmentation)."""
    key = derive_key(seed, purpose, *address, words=2)
    return np.random.Generator(np.random.Philox(cast("Any", _Key(key))))


class _Key(ISeedSequence):
    """The key of a Philox generator as its seed: with ``key=``, numpy takes 20 us to draw a seed that it drops."""

    def __init__(self, words: UInt64Array) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> UInt64Array:  # noqa: ARG002 - numpy calls it
        return self._words


_BLOCK = 32
_STATE_BYTES = 4 * 624 + 4  # of a Mersenne Twister: its key and the position in it


def keep_global_generators() -> Callable[[], None]:
    """Return a function that restores the global generators of `random`, numpy and torch to their states now."""
    own, functions = getattr(random.getstate, "__self__", None), cast("Any", np.random)
    torchs = getattr(sys.modules.get("torch"), "default_generator", None)
    kept = [(put, get()) for get, put in _states_of(own, functions.get_bit_generator(), torchs)]

    def restore() -> None:
        for put, state in kept:
            put(state)

    return restore


def seed_global_generators(seed: int, epoch: int, step: int) -> None:
    """Seed the global generators of `random`, numpy and torch for a step."""
    word = _words(seed, epoch, step // _BLOCK)[step % _BLOCK]
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002 - the generator to be made harmless
    torch = sys.modules.get("torch")  # code that uses its generator has imported it
    if torch is not None:
        # Only the CPU's: workers have no other. Its seed must fit in a tensor, and the highest bit changes no number.
        torch.default_generator.manual_seed(word & (1 << 63) - 1)


@lru_cache(4)
def _words(seed: int, epoch: int, block: int) -> list[int]:
    """Return the words that seed the steps of a block; many at once, while the code for it is in the CPU's cache."""
    begun, words = _hash_of(8, seed, "global generators", _address_part(epoch)), list[int]()
    for step in range(block * _BLOCK, (block + 1) * _BLOCK):  # as `derive_word`
        hashed = begun.copy()
        hashed.update(b"\x1fint:%d" % step)
        words.append(int.from_bytes(hashed.digest(), "little"))
    return words


@lru_cache(1)
def _states_of(own: Any, bits: Any, torchs: Any) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return functions that get and set the states of generators, in memory: numpy's own take 60 and 90 us a step."""
    functions: Any = np.random
    numpys = getattr(functions.get_state, "__self__", None)
    found = [] if torchs is None else [(torchs.get_state, torchs.set_state)]
    kinds = type(own), type(bits), type(numpys)
    if kinds != (random.Random, np.random.MT19937, np.random.RandomState) or not _normal_at():
        numpy_now = partial(functions.get_state, legacy=False)
        return [*found, (random.getstate, random.setstate), (numpy_now, functions.set_state)]
    for address, size in (
        (id(own) + object.__basicsize__, _STATE_BYTES),
        (bits.ctypes.state_address, _STATE_BYTES),
        (id(numpys) + _normal_at(), 16),
    ):
        memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        found.append((memory.tobytes, partial(memory.__setitem__, slice(None))))
    return [*found, (partial(getattr, own, "gauss_next"), partial(setattr, own, "gauss_next"))]


@cache
def _normal_at() -> int:
    """Return where numpy's generator object keeps whether a normal number is left, and that number 8 bytes later.

    0 if this Python or this numpy has it, or the states of Mersenne Twisters, elsewhere than expected here.
    """
    numpys, own = np.random.RandomState(5), random.Random(5)
    numpys.standard_normal()  # the first of a pair
    _, key, at, *_, normal = numpys.get_state()
    state, (*words, index) = np.append(key, np.uint32(at)).tobytes(), own.getstate()[1]
    if sys.implementation.name != "cpython" or own.__sizeof__() < object.__basicsize__ + _STATE_BYTES:
        return 0
    if ctypes.string_at(numpys._bit_generator.ctypes.state_address, _STATE_BYTES) != state:
        return 0
    if ctypes.string_at(id(own) + object.__basicsize__, _STATE_BYTES) != np.array([index, *words], np.uint32).tobytes():
        return 0
    memory = ctypes.string_at(id(numpys), type(numpys).__basicsize__)
    return max(0, memory.find(struct.pack("=qd", 1, normal)))
