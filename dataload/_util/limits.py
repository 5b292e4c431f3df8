"""Checks before something large is made."""

import math
from collections.abc import Sequence

import numpy as np

from dataload.errors import CorruptFileError, MachineError
from dataload.types import Int64Array

MAX_RECORD_BYTES = 1 << 30
"""Default of the option `max_record_bytes`."""

FIELD_BYTES = 512
"""Approximate size of a field's Python objects without its values."""

MOST_BYTES = 1 << 48
"""Larger sizes are cut to this limit, so that their sums fit into int64."""

_MOST_AXES = 63  # numpy allows 64, and a batch adds one
_MOST_ITEMS = 1 << 40  # of an empty array: numpy multiplies the other extents and the rows into an int64


def no_memory(path: str | None, index: int, what: str = "") -> MachineError:
    """Return the error for a record that cannot be decoded for lack of memory; `what` names a part of it."""
    return MachineError(
        f"{path}, record {index}: {what}decoding it needs more memory than this process may have: use fewer workers, "
        "or lower max_record_bytes to refuse such records",
        path=path,
    )


def fits(shape: Sequence[int], items: int) -> bool:
    """Return whether an array of `shape` (any integers) has that many items, and numpy can hold a batch of them."""
    known = len(shape) <= _MOST_AXES and min(shape, default=0) >= 0 and math.prod(shape) == items
    return known and (items > 0 or math.prod(filter(None, shape)) < _MOST_ITEMS)


def check_size(size: int, limit: int, what: str, *, path: str | None = None, index: int | None = None) -> None:
    """Raise if `what` takes more than `limit` bytes. Call it before allocation; codecs do not know the path."""
    if size > limit:
        raise CorruptFileError(
            f"{what} takes {size:,} bytes of memory, and max_record_bytes is {limit:,}: the file is damaged or "
            "malicious, unless you expect such records and set a higher max_record_bytes",
            path=path,
            index=index,
        )


def check_lengths(lengths: Int64Array, limit: int, indices: Int64Array, path: str) -> None:
    """Raise for the first of the records `indices`, (rows,) int64, stored in more than `limit` bytes."""
    if int(lengths.max()) > limit:
        row = int(np.argmax(lengths > limit))
        check_size(int(lengths[row]), limit, "the record", path=path, index=int(indices[row]))


class Claims:
    """Memory claimed by the records `indices`, (rows,) int64, of one read, at most `limit` bytes each."""

    def __init__(self, indices: Int64Array, limit: int, path: str) -> None:
        self.indices: Int64Array = indices
        self.limit: int = limit
        self.path: str = path
        self._each, self._more, self._most = 0, np.zeros(len(indices), np.int64), 0

    def add(self, sizes: int | Int64Array, rows: Int64Array | None = None) -> None:
        """Claim bytes for each record; or for those at `rows`, which may repeat, separately."""
        if isinstance(sizes, int) and rows is None:
            self._each += sizes
        else:
            if rows is not None:
                weights = None if isinstance(sizes, int) else sizes
                sizes = np.bincount(rows, weights, len(self._more)) * (sizes if isinstance(sizes, int) else 1)
            self._more += np.minimum(sizes, MOST_BYTES).astype(np.int64, copy=False)
            self._most = int(self._more.max(initial=0))
        self._check()

    def add_to(self, rows: Int64Array, sizes: int | Int64Array) -> None:
        """Claim bytes for the records at `rows`, which must be distinct."""
        more = self._more[rows] + np.minimum(sizes, MOST_BYTES)
        self._more[rows] = more
        self._most = max(self._most, int(more.max(initial=0)))
        self._check()

    def _check(self) -> None:
        if self._each + self._most > self.limit:
            check_lengths(self._more + self._each, self.limit, self.indices, self.path)
