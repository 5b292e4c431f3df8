"""Fields that lie at the same places in all rows, copied to columns in one pass over the rows."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from dataload._util.arrays import pooled_empty
from dataload.storage.core import core
from dataload.types import Array, BytesArray, Int64Array

Cut: TypeAlias = Callable[[BytesArray, Array, Array, Array, Any, Any], int]
"""Fills a block with columns, given starts, lengths and targets of fields, a record and a mask; see `core().cut`."""

_ALIGNMENT = 64


def cut_loaded(data: BytesArray, offsets: Int64Array, length: int, out: BytesArray, *fields: Any) -> int:
    """Fill `out` with columns of rows of `length` bytes at `offsets` of plain memory; see `Cut`."""
    function: Any = core().cut
    return function(out, data, offsets, length, *fields, -1)


class RowLayout:
    """The places of fields in rows of `length` bytes: name -> (start, dtype, shape of a value).

    With a record and a mask, all rows must equal `first` in the bits of `mask`, both of `length` bytes.
    """

    __slots__ = ("_first", "_groups", "_lengths", "_mask", "_names", "_starts", "length")

    def __init__(
        self,
        length: int,
        fields: Mapping[str, tuple[int, np.dtype[Any], tuple[int, ...]]],
        first: bytes | None = None,
        mask: BytesArray | None = None,
    ) -> None:
        self.length: int = length
        self._names = tuple(fields)
        self._first, self._mask = first, mask
        groups: dict[tuple[np.dtype[Any], tuple[int, ...]], list[str]] = {}
        for name, (_, dtype, shape) in fields.items():
            groups.setdefault((dtype, shape), []).append(name)
        sizes = {kind: kind[0].itemsize * int(np.prod(kind[1], dtype=np.int64)) for kind in groups}
        self._groups = [(names, *kind, sizes[kind]) for kind, names in groups.items()]
        self._starts = np.array([fields[name][0] for names, *_ in self._groups for name in names], np.int64)
        self._lengths = np.repeat([size for *_, size in self._groups], [len(names) for names, *_ in self._groups])

    def columns(self, rows: int, cut: Cut) -> dict[str, Array] | None:
        """Return the fields of rows, arrays of (rows, *shape) in one block; None if a row is not as it must be."""
        edges, targets = [0], list[Array]()
        for names, _, _, size in self._groups:
            start = -(-edges[-1] // _ALIGNMENT) * _ALIGNMENT
            targets.append(start + np.arange(len(names)) * (rows * size))
            edges.append(start + len(names) * rows * size)
        block = pooled_empty((edges[-1],), np.uint8)
        joined = targets[0] if len(targets) == 1 else np.concatenate(targets)
        if cut(block, self._starts, self._lengths, joined, self._first, self._mask) >= 0:
            return None
        found: dict[str, Array] = {}
        for (names, dtype, shape, _), start, stop in zip(self._groups, targets, edges[1:], strict=True):
            values = block[int(start[0]) : stop].view(dtype).reshape(len(names), rows, *shape)
            found.update(zip(names, values, strict=True))
        return found if len(self._groups) == 1 else {name: found[name] for name in self._names}
