"""Random numbers by address: every random choice is a pure function of a seed, a purpose and an epoch or index.

Nothing computes ``seed + epoch``, which would make epoch 1 of seed 3 equal to epoch 0 of seed 4. Keys are BLAKE2b
hashes, and bits come from the 64-bit finalizer below, so an order does not depend on the numpy version.
"""

import ctypes
import hashlib
import operator
import random
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.errors import ConfigError

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
    pairs = zip(seeds, addresses, strict=True)
    texts = (f"{seed}\x1f{purpose}\x1fint:{address}".encode() for seed, address in pairs)
    digests = [hashlib.blake2b(text, digest_size=8 * words, person=_PERSON).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64).reshape(-1, words)


def derive_word(seed: int, purpose: str, *address: int | str) -> np.uint64:
    """Return an independent word of 64 bits for a purpose and an address."""
    return np.uint64(int.from_bytes(_digest(8, seed, purpose, address), "little"))


def _digest(size: int, seed: int, purpose: str, address: tuple[int | str, ...]) -> bytes:
    if not address:
        return _hash_of(size, int(seed), purpose).digest()
    hashed = _hash_of(size, int(seed), purpose, *map(_address_part, address[:-1])).copy()
    hashed.update(f"\x1f{_address_part(address[-1])}".encode())
    return hashed.digest()


@lru_cache(64)  # most keys of a loop differ only in the step or the index, which come last
def _hash_of(size: int, seed: int, *parts: str) -> Any:
    return hashlib.blake2b("\x1f".join((repr(seed), *parts)).encode(), digest_size=size, person=_PERSON)


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


def generator(seed: int, purpose: str, *address: int | str) -> np.random.Generator:
    """Return a numpy generator for an address, for use in transforms (augmentation)."""
    # Philox uses the key directly; SeedSequence would hash it again.
    return np.random.Generator(np.random.Philox(key=derive_key(seed, purpose, *address, words=2)))


_STATE_BYTES = 4 * 624 + 4  # of a Mersenne Twister: its key and the position in it


@contextmanager
def global_generators_kept() -> Generator[None]:
    """Restore the global generators of `random`, numpy and torch on leaving. Numpy's are moved on entering."""
    torch = sys.modules.get("torch")
    restore_python, restore_numpy = _python_kept(), _numpy_kept()
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        restore_python()
        restore_numpy()
        if torch is not None:
            torch.set_rng_state(of_torch)


def seed_global_generators(seed: int, epoch: int, step: int) -> None:
    """Seed the global generators of `random`, numpy and torch for a step."""
    word = int(derive_word(seed, "global generators", epoch, step))
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002 - the generator to be made harmless
    torch = sys.modules.get("torch")  # code that uses its generator has imported it
    if torch is not None:
        # Only the CPU's: workers have no other. Its seed must fit in a tensor, and the highest bit changes no number.
        torch.default_generator.manual_seed(word & (1 << 63) - 1)


def _python_kept() -> Callable[[], None]:
    """Return a function that restores the generator of `random`, from its memory: `getstate` takes 15 us."""
    own: Any = getattr(random.getstate, "__self__", None)
    if type(own) is not random.Random or not _are_states_in_memory():
        return partial(random.setstate, random.getstate())
    address, normal = id(own) + object.__basicsize__, vars(own)["gauss_next"]
    before = ctypes.string_at(address, _STATE_BYTES)

    def restore() -> None:
        ctypes.memmove(address, before, _STATE_BYTES)
        vars(own)["gauss_next"] = normal

    return restore


def _numpy_kept() -> Callable[[], None]:
    """Return a function that restores numpy's generator, from its memory: `get_state` takes 60 us, `set_state` 90."""
    functions: Any = np.random  # whose annotations lack some of them
    bits = functions.get_bit_generator()
    if type(bits) is not np.random.MT19937 or not _are_states_in_memory():
        return partial(functions.set_state, functions.get_state(legacy=False))
    address = bits.ctypes.state_address
    before = ctypes.string_at(address, _STATE_BYTES)
    # Normal numbers are drawn in pairs. If this does not change the state, it is the second of a pair.
    normal = functions.standard_normal()
    has_normal = ctypes.string_at(address, _STATE_BYTES) == before

    def restore() -> None:
        functions.seed(0)  # forgets the second of a pair
        ctypes.memmove(address, before, _STATE_BYTES)
        if has_normal:
            functions.set_state((*functions.get_state()[:3], 1, normal))

    return restore


@cache
def _are_states_in_memory() -> bool:
    """Return whether this Python and this numpy have the states of Mersenne Twisters in memory as expected here."""
    bits, own = np.random.MT19937(5), random.Random(5)
    found = np.frombuffer(ctypes.string_at(bits.ctypes.state_address, _STATE_BYTES), np.uint32)
    state, (*key, at) = bits.state["state"], own.getstate()[1]
    if not np.array_equal(found, np.append(state["key"], np.uint32(state["pos"]))):
        return False
    if sys.implementation.name != "cpython" or own.__sizeof__() < object.__basicsize__ + _STATE_BYTES:
        return False
    return ctypes.string_at(id(own) + object.__basicsize__, _STATE_BYTES) == np.array([at, *key], np.uint32).tobytes()
