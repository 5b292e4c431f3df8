"""PyTorch: batches as tensors that share their memory, and sources as map-style data sets.

The only module that imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex, cast

import numpy as np

from dataload.collate import Ragged
from dataload.errors import ConfigError, MissingDependencyError
from dataload.types import RandomAccessSource

try:
    import torch
    from torch.utils.data import Dataset
except ImportError as error:
    raise MissingDependencyError("dataload.torch needs torch: pip install 'dataload[torch]'", name="torch") from error

__all__ = ["SourceDataset", "to_tensors"]


def to_tensors(batch: Any) -> Any:
    """Arrays of a batch as tensors, without copying; text, bytes and other objects stay as they are.

    Meant as ``Loader(..., batch_transform=to_tensors)``, or from a config as ``"dataload.torch:to_tensors"``.

    Args:
        batch: An array, or a dict, tuple or `Ragged` of such.

    Returns:
        The same structure. A tensor and the array it came from share memory.

    Raises:
        ConfigError: torch has no dtype for an array.
    """
    return _convert(batch, "the batch")


def _convert(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _convert(item, f"field {key!r}") for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, Ragged):
        return Ragged(_convert(value.values, name), _convert(value.offsets, name))
    if isinstance(value, tuple):
        items = [_convert(item, name) for item in cast("tuple[Any, ...]", value)]
        return getattr(type(value), "_make", tuple)(items)
    if isinstance(value, np.ndarray):
        return _tensor(cast("np.ndarray[Any, Any]", value), name)
    return value


def _tensor(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    if not array.flags.writeable:
        # torch would share it and write through; a read-only array is somebody else's.
        array = array.copy()
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"{name}: torch has no dtype for {array.dtype}; cast it in a transform") from error


class SourceDataset(Dataset[Any]):
    """A source as a map-style data set for torch's own `DataLoader`.

    Built-in sources can be given to `DataLoader` directly; this adds a transform, and serves code that asks for a
    `Dataset`. Batches are read with one call of ``__getitems__``.

    Args:
        source: Anything with ``__len__`` and ``__getitem__``.
        transform: Applied to each record.
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
        """Records at `indices`, in that order: the method that torch's fetcher looks for."""
        read: Any = getattr(self.source, "__getitems__", None)
        records = read(indices) if read is not None else [self.source[index] for index in indices]
        return records if self.transform is None else [self.transform(record) for record in records]

    def __repr__(self) -> str:
        return f"SourceDataset({self.source!r})"
