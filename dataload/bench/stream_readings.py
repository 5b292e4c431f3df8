"""What reads the workload of streams: rows that follow generators of pure Python, which hold the GIL.

An epoch is the same for all: each row follows one generator to its end. The peer is the recipe of Speechmatics' eBook
"How to build a streaming DataLoader with PyTorch": the rows are divided into groups, each group is an
``IterableDataset`` that gives one item of each of its rows, and has a torch DataLoader of its own with one worker
(``num_workers=1``, ``batch_size=None``); batches are put together from one part of each.
https://medium.com/speechmatics/how-to-build-a-streaming-dataloader-with-pytorch-a66dd891d9dd
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from dataload._util.indexing import even_split
from dataload.bench.peers.reading import FunctionReading, load, versions
from dataload.bench.task import Task
from dataload.bench.workloads import busy_numbers
from dataload.streams import MultiStreamLoader

__all__ = ["bare_generators", "multistream", "torch_groups"]


def bare_generators(task: Task) -> FunctionReading:
    """All generators in turn, in one process: what the items themselves cost."""

    def batches(_: int) -> Iterator[Any]:
        return _stacked(zip(*_generators(range(task.batch_size), _steps(task)), strict=True))

    return FunctionReading({"processes": 1}, batches)


def multistream(task: Task) -> FunctionReading:
    """`dataload.streams.MultiStreamLoader` with worker processes."""
    loader = MultiStreamLoader(
        partial(busy_numbers, count=_steps(task)),
        range(task.batch_size),
        batch_size=task.batch_size,
        mode="split",
        shuffle=False,
        max_workers=task.workers,
        executor="processes",
    )
    held = ExitStack()
    held.callback(loader.close)
    settings = {"executor": "processes", "num_workers": loader.num_workers, "prefetch": 2}
    return FunctionReading(settings, lambda _: iter(loader), _items, held)


def torch_groups(task: Task) -> FunctionReading:
    """One torch DataLoader for each group of rows, as many groups as workers; without, one in this process."""
    data = load("torch.utils.data", "torch")
    groups = even_split(task.batch_size, max(1, min(task.workers, task.batch_size)))
    several: dict[str, Any] = {"num_workers": min(1, task.workers), "persistent_workers": task.workers > 0}
    loaders = [
        data.DataLoader(_group_class()(range(start, stop), _steps(task)), batch_size=None, **several)
        for start, stop in groups
    ]

    def batches(_: int) -> Iterator[Any]:
        return _stacked(chain.from_iterable(parts) for parts in zip(*loaders, strict=True))

    settings = {**versions("torch"), **several, "loaders": len(loaders), "prefetch_factor": loaders[0].prefetch_factor}
    return FunctionReading(settings, batches)


def _group_class() -> type[Any]:
    base = load("torch.utils.data", "torch").IterableDataset

    class Group(base):
        """One item of each of its rows at a time."""

        def __init__(self, rows: range, steps: int) -> None:
            self._rows = rows
            self._steps = steps

        def __iter__(self) -> Iterator[tuple[int, ...]]:
            return zip(*_generators(self._rows, self._steps), strict=True)

    return Group


def _generators(rows: range, steps: int) -> list[Iterator[int]]:
    return [busy_numbers(row, count=steps) for row in rows]


def _stacked(steps: Iterable[Iterable[int]]) -> Iterator[Mapping[str, Any]]:
    """A batch, ``"data"`` of (rows,) int64, for each step's items."""
    return ({"data": np.fromiter(items, np.int64)} for items in steps)


def _items(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The items of a batch alone: what else the loader says of its rows, others do not give."""
    return {"data": batch["data"]}


def _steps(task: Task) -> int:
    """Items of each row in an epoch: of all records, rounded up to whole batches."""
    return -(-int(task.options["open"]["records"]) // task.batch_size)
