"""Sources as map-style datasets."""

from collections.abc import Callable
from typing import Any, SupportsIndex

from torch.utils.data import Dataset

from dataload.types import RandomAccessSource


class SourceDataset(Dataset[Any]):
    """A source as a map-style dataset for PyTorch's own `DataLoader`.

    `DataLoader` also takes built-in sources directly. This class adds a transform, and serves code that requires a
    `Dataset`. Each batch is read with one call of ``__getitems__``.

    Args:
        source: Anything with ``__len__`` and ``__getitem__``.
        transform: A function applied to each record.
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
