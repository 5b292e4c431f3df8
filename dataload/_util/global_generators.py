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

_STATE_BYTES = 4 * 624 + 4  # of numpy's MT19937: a key, and the position in it


@contextmanager
def global_generators_kept() -> Generator[None]:
    """Restore the global generators of `random`, numpy and torch on leaving."""
    torch = sys.modules.get("torch")
    python, restore_numpy = random.getstate(), _numpy_kept()
    of_torch = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
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


def _numpy_kept() -> Callable[[], None]:
    """Return a function that restores numpy's generator, from its memory: `get_state` takes 60 us, `set_state` 90."""
    functions: Any = np.random  # whose annotations lack some of them
    bits = functions.get_bit_generator()
    if type(bits) is not np.random.MT19937 or not _is_state_in_memory():
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

    restore()
    return restore


@cache
def _is_state_in_memory() -> bool:
    """Return whether this numpy has the state of MT19937 in memory as `_numpy_kept` expects."""
    bits = np.random.MT19937(5)
    found = np.frombuffer(ctypes.string_at(bits.ctypes.state_address, _STATE_BYTES), np.uint32)
    state = bits.state["state"]
    return np.array_equal(found, np.append(state["key"], np.uint32(state["pos"])))
