"""Sources that are wrong on purpose in how they read batches of columns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dataload._util.indexing import as_indices
from dataload.collate import default_collate
from dataload.sources.base import SliceSource, select_fields
from dataload.testing.lines import LineSource
from dataload.types import Batch, Int64Array

__all__ = ["ClipsColumns", "CountsColumnsFromOne", "SharesOneBatch", "SlicesColumnsOfAll"]


class ClipsColumns(LineSource):
    """Takes the last record for one that does not exist, in batches of columns."""

    def read_batch(self, indices: Any, fields: Any = None) -> Batch:
        """By `np.take`, whose default in fast paths is to clip."""
        rows = np.asarray(list(indices))
        if rows.dtype.kind not in "iu":
            raise TypeError(f"no indices: {rows}")
        return super().read_batch(np.where(rows < 0, rows, np.minimum(rows, len(self) - 1)), fields)


class CountsColumnsFromOne(LineSource):
    """Takes -1 for the last but one, in batches of columns."""

    def read_batch(self, indices: Any, fields: Any = None) -> Batch:
        """One off where it counts from the end."""
        rows = as_indices(indices, len(self)) if not isinstance(indices, (list, np.ndarray)) else np.asarray(indices)
        if rows.dtype.kind == "i":
            rows = np.where((rows < 0) & (rows > -len(self)), rows - 1, rows)
        return super().read_batch(rows if rows.size else [], fields)


class SharesOneBatch(LineSource):
    """Collects every batch in the same list."""

    def __init__(self, paths: Any) -> None:
        super().__init__(paths)
        self._rows: list[Any] = []

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        self._rows.clear()
        for index in indices.tolist():
            self._rows += super()._read(np.array([index]))
            time.sleep(0)  # lets another thread in, as a slow disk would
        records = self._rows[: len(indices)]
        return default_collate(records if fields is None else [select_fields(r, fields) for r in records])


class SlicesColumnsOfAll(LineSource):
    """Its slices read their batches from the whole."""

    def __getitem__(self, index: Any, /) -> Any:
        return _Misplaced(self, range(len(self))[index]) if isinstance(index, slice) else super().__getitem__(index)


class _Misplaced(SliceSource[Any]):
    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        return self._parent._read_columns(indices, fields)
