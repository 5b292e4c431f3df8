"""Memory that is lent as arrays and comes back when the last view of it goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from dataload.types import BytesArray

__all__ = ["BufferLeases"]


class BufferLeases:
    """What is lent at present. Used by several threads at once."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        """How many are lent."""
        return len(self._lent)

    def lend(self, block: BytesArray, give_back: Callable[[], None]) -> BytesArray:
        """`block` as another array, and a call of `give_back` when nothing refers to that or to a view of it."""
        lent = np.frombuffer(block.data, np.uint8)
        # numpy puts a memoryview of its own between the two. Every view keeps that, whichever array of the chain it
        # has as its base; a callback on `lent` would rely on numpy's choice of that.
        handle = lent.base
        key = id(handle)

        def gone(_: weakref.ref[Any]) -> None:
            self._lent.pop(key, None)
            give_back()

        self._lent[key] = weakref.ref(handle, gone)
        return lent
