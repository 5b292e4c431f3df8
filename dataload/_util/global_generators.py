"""The global random generators of `random`, numpy and torch, from which the functions of users draw."""

import ctypes
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from dataload._util.randomness import derive_word

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
