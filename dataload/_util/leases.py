"""Memory lent as arrays and returned when the last view of it is dropped."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from dataload.types import BytesArray


class BufferLeases:
    """The blocks that are lent at present. Thread-safe."""

    def __init__(self) -> None:
        self._lent: dict[int, weakref.ref[Any]] = {}

    def __len__(self) -> int:
        """Return the number of blocks that are lent."""
        return len(self._lent)

    def lend(self, block: BytesArray, give_back: Callable[[], None]) -> BytesArray:
        """Return `block` as a new array, and call `give_back` once that array and all views of it are gone."""
        lent = np.frombuffer(block.data, np.uint8)
        # numpy puts a memoryview between the two arrays, and every view refers to it, whichever array of the chain is
        # the view's base. A callback on `lent` itself would depend on numpy's choice of the base.
        handle = lent.base
        key = id(handle)

        def gone(_: weakref.ref[Any]) -> None:
            self._lent.pop(key, None)
            give_back()

        self._lent[key] = weakref.ref(handle, gone)
        return lent
