"""Sources as torch data sets, and torch data sets as sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from dataload._util.arrays import pooled_empty
from dataload.sources.base import Source
from dataload.torch.device import to_tensors
from dataload.types import BytesColumn, Int64Array, RandomAccessSource


class SourceDataset(Dataset[Any]):
    """A source as a map-style dataset for PyTorch's own `DataLoader`.

    `DataLoader` also accepts built-in sources directly. This class adds a transform of records and works with code that
    requires a `Dataset`. Each batch is read with one call of ``__getitems__``.
    """

    def __init__(self, source: RandomAccessSource[Any], transform: Callable[[Any], Any] | None = None) -> None:
        self.source = source
        self.transform = transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: SupportsIndex) -> Any:
        record = self.source[index]
        return record if self.transform is None else self.transform(record)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the records at `indices`, in that order. PyTorch's `DataLoader` calls this."""
        read: Any = getattr(self.source, "__getitems__", None)
        records = read(indices) if read is not None else [self.source[index] for index in indices]
        return records if self.transform is None else [self.transform(record) for record in records]

    def __repr__(self) -> str:
        return f"SourceDataset({self.source!r})"


class Rows:
    """Rows of arrays or tensors in memory or memory-mapped; `make` builds a record or batch from a list of columns."""

    def __init__(
        self, columns: Sequence[Any], make: Callable[[list[Any]], Any], owner: TensorDataset | None = None
    ) -> None:
        self._columns = columns
        self._arrays = [*map(_as_array, columns)]
        self._make = make
        self._owner = owner

    def _now(self) -> Sequence[Any]:
        """Return the columns, which the owner may have replaced."""
        if self._owner is not None and self._owner.tensors is not self._columns:
            self._columns = self._owner.tensors
            self._arrays = [*map(_as_array, self._columns)]
        return self._columns

    def __len__(self) -> int:
        return len(self._now()[0])

    def __getitem__(self, index: int) -> Any:
        return self._make([column[index] for column in self._now()])

    def read_batch(self, indices: Int64Array, fields: Sequence[str] | None = None) -> Any:  # noqa: ARG002 - no names
        self._now()
        return self._make([_take(column, indices) for column in self._arrays])

    def __repr__(self) -> str:
        return f"{type(self._columns[0]).__name__} of {len(self)} rows"


def _as_array(column: Any) -> Any:
    """Return a tensor as an array, whose rows are copied to memory that is reused, if numpy has its dtype."""
    try:
        return column.numpy() if isinstance(column, torch.Tensor) else column
    except (TypeError, RuntimeError):
        return column


def _take(column: Any, indices: Int64Array) -> Any:
    if isinstance(column, torch.Tensor):
        return column.index_select(0, torch.from_numpy(indices))
    out = pooled_empty((len(indices), *column.shape[1:]), column.dtype)
    return np.take(column, indices, axis=0, out=out, mode="clip")  # mode "raise" makes numpy buffer the output


def columns_of(dataset: Any) -> Any:
    """Return a source that reads columns of a source, array, tensor or `TensorDataset`; None for anything else."""
    if isinstance(dataset, Source):
        return cast("Any", dataset)
    if type(dataset) in (np.ndarray, np.memmap):  # not a masked array
        array = cast("np.ndarray[Any, Any]", dataset)
        return Rows([array], itemgetter(0)) if array.ndim and array.dtype.kind in "biufc" else None
    tensors = dataset.tensors if type(dataset) is TensorDataset else [dataset]
    plain = all(type(tensor) is torch.Tensor and tensor.ndim and _is_plain(tensor) for tensor in tensors)
    if not plain or not tensors:
        return None
    return Rows(tensors, tuple, dataset) if type(dataset) is TensorDataset else Rows(tensors, itemgetter(0))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad


def as_torch_collates(batch: Any) -> Any:
    """Convert our collated batch to what torch's `default_collate` returns, without copying arrays."""
    if isinstance(batch, (np.ndarray, torch.Tensor)):
        return to_tensors(batch)
    if isinstance(batch, BytesColumn):
        return list(batch)
    if isinstance(batch, Mapping):
        return {name: as_torch_collates(column) for name, column in cast("Mapping[str, Any]", batch).items()}
    if isinstance(batch, tuple):
        parts = [as_torch_collates(column) for column in cast("Sequence[Any]", batch)]
        return getattr(type(batch), "_make", list)(parts)
    return default_collate(batch)  # a list is a column of values
