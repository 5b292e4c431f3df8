"""Syrah's interface: change ``from syrah import File`` and ``from syrah.utils.data import SyrahDataset``.

What differs from the original:

- Files and data sets can be pickled, and work in forked processes as they are: nothing has to be opened again.
- A file that is written shows at its path when it is closed, and an `add_item` that fails leaves nothing in it.
- Every number in a file is checked before use: one that contradicts itself is a `CorruptFileError`, a `ValueError`.
- Arrays that are returned can be written to. They are flat as ever, but a file keeps their shapes for `dataload.open`.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

from dataload.compat._syrah_file import File, FileError
from dataload.compat._syrah_values import check_position
from dataload.errors import ConfigError
from dataload.types import Array

__all__ = ["File", "FileError", "SyrahConcatDataset", "SyrahDataset"]


class SyrahDataset:
    """Items of a Syrah file as tuples, for torch's `DataLoader`.

    Args:
        file_path: The file.
        keys: Names of the arrays, in the order of the tuple.
        process_funcs: Name -> function that is applied to each of its arrays.
    """

    def __init__(
        self,
        file_path: str | os.PathLike[str],
        keys: Sequence[str],
        process_funcs: Mapping[str, Callable[[Array], Any]] | None = None,
    ) -> None:
        self.file_path = file_path
        self.keys = keys
        self.process_funcs = process_funcs or {}
        self.syr = File(file_path, "r")
        self.len = self.syr.num_items()

    def worker_init_fn(self, worker_id: int = -1) -> None:
        """Nothing: each process opens the file by itself."""

    def __len__(self) -> int:
        return self.len

    def __getitem__(self, item: SupportsIndex) -> tuple[Any, ...]:
        return tuple(self._processed(key, self.syr.get_array(item, key)) for key in self.keys)

    def __getitems__(self, items: Sequence[SupportsIndex]) -> list[tuple[Any, ...]]:
        """Several items in one read: the method that torch's fetcher looks for."""
        # A subclass that changes items changes them here, too.
        if type(self).__getitem__ is not SyrahDataset.__getitem__ or not self.keys:
            return [self[item] for item in items]
        columns = zip(self.keys, self.syr.get_columns(items, self.keys), strict=True)
        return list(zip(*([self._processed(key, value) for value in column] for key, column in columns), strict=True))

    def _processed(self, key: str, value: Array) -> Any:
        return self.process_funcs[key](value) if key in self.process_funcs else value

    def __add__(self, other: Any) -> SyrahConcatDataset:
        return SyrahConcatDataset([self, other])


class SyrahConcatDataset:
    """The items of several data sets, one after another.

    Args:
        datasets: At least one.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise ConfigError("a SyrahConcatDataset needs at least one data set, got none", key="datasets")
        self.cumulative_sizes = list(itertools.accumulate(map(len, self.datasets)))

    def worker_init_fn(self, worker_id: int = -1) -> None:
        """Nothing: see `SyrahDataset.worker_init_fn`."""

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, idx: SupportsIndex) -> Any:
        number = operator.index(idx)
        position = check_position(number + len(self) if number < 0 else number, len(self), "items")
        part = bisect.bisect_right(self.cumulative_sizes, position)
        return self.datasets[part][position - (self.cumulative_sizes[part - 1] if part else 0)]

    def __add__(self, other: Any) -> SyrahConcatDataset:
        return SyrahConcatDataset([self, other])
