"""Syrah's datasets: torch datasets where torch is installed. `dataload.compat.syrah` imports them on first use."""

from __future__ import annotations

import bisect
import importlib
import importlib.util
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from dataload.compat._syrah_file import File, check_position
from dataload.errors import ConfigError
from dataload.types import Array


class _ConcatDataset:
    """The parts of torch's `ConcatDataset` that `SyrahConcatDataset` needs, for use without torch."""

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise ConfigError("a SyrahConcatDataset needs at least one dataset, got none", key="datasets")
        self.cumulative_sizes = list(itertools.accumulate(map(len, self.datasets)))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, idx: SupportsIndex) -> Any:
        number = operator.index(idx)
        position = check_position(number + len(self) if number < 0 else number, len(self), "items")
        part = bisect.bisect_right(self.cumulative_sizes, position)
        return self.datasets[part][position - (self.cumulative_sizes[part - 1] if part else 0)]


_torch: Any = importlib.import_module("torch.utils.data") if importlib.util.find_spec("torch") is not None else None
if TYPE_CHECKING:
    from torch.utils.data import ConcatDataset, Dataset

    _Dataset, _Concat = Dataset[Any], ConcatDataset[Any]
elif _torch is not None:
    _Dataset, _Concat = _torch.Dataset, _torch.ConcatDataset
else:
    _Dataset, _Concat = object, _ConcatDataset


class SyrahDataset(_Dataset):
    """The items of a Syrah file as tuples of the arrays `keys`, for PyTorch's `DataLoader`.

    `process_funcs` has functions by name that are applied to each array of that name.
    """

    def __init__(
        self,
        file_path: str | os.PathLike[str],
        keys: Sequence[str],
        process_funcs: Mapping[str, Callable[[Array], Any]] | None = None,
    ) -> None:
        self.file_path = file_path
        self.keys = keys
        self.process_funcs: Mapping[str, Callable[[Array], Any]] = process_funcs or {}
        self.syr: File = File(file_path, "r")
        self.len: int = self.syr.num_items()

    def worker_init_fn(self, worker_id: int = -1) -> None:
        """Do nothing: each process opens the file itself."""

    def __len__(self) -> int:
        return self.len

    def __getitem__(self, item: SupportsIndex) -> tuple[Any, ...]:
        return tuple(self._process(key, self.syr.get_array(item, key)) for key in self.keys)

    def __getitems__(self, items: Sequence[SupportsIndex]) -> list[tuple[Any, ...]]:
        """Return several items in one read. PyTorch's `DataLoader` calls this."""
        # Respect subclasses that override __getitem__.
        if type(self).__getitem__ is not SyrahDataset.__getitem__ or not self.keys:
            return [self[item] for item in items]
        columns = zip(self.keys, self.syr.get_columns(items, self.keys), strict=True)
        return list(zip(*([self._process(key, value) for value in column] for key, column in columns), strict=True))

    def _process(self, key: str, value: Array) -> Any:
        return self.process_funcs[key](value) if key in self.process_funcs else value

    def __add__(self, other: Any) -> SyrahConcatDataset:
        return SyrahConcatDataset([self, other])


class SyrahConcatDataset(_Concat):
    """The items of one or more datasets, one dataset after another."""

    def worker_init_fn(self, worker_id: int = -1) -> None:
        """Do nothing: each process opens its files itself."""

    def __add__(self, other: Any) -> SyrahConcatDataset:
        return SyrahConcatDataset([self, other])
