"""One torch DataLoader for each group of rows that follow iterators.

The recipe of Speechmatics' eBook "How to build a streaming DataLoader with PyTorch": the rows are divided into groups,
each group is an ``IterableDataset`` that yields one item of each of its rows, and has a torch DataLoader of its own
with one worker (``num_workers=1``, ``batch_size=None``); a batch joins one part of each.
https://medium.com/speechmatics/how-to-build-a-streaming-dataloader-with-pytorch-a66dd891d9dd
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from benchmarks.peers.field import load
from dataload._util.indexing import even_split
from dataload.bench.readings import generators, stack_rows
from dataload.bench.task import Reading, Task

__all__ = ["loader"]


def loader(task: Task, _: None = None) -> Reading:
    """Run as many groups as workers; without workers, one group in this process."""
    data = load("torch.utils.data", "torch")
    groups = even_split(task.batch_size, max(1, min(task.workers, task.batch_size)))
    several: dict[str, Any] = {"num_workers": min(1, task.workers), "persistent_workers": task.workers > 0}

    class Group(data.IterableDataset):
        """One item of each of its rows at a time."""

        def __init__(self, rows: range) -> None:
            self._rows = rows

        def __iter__(self) -> Iterator[tuple[int, ...]]:
            return zip(*generators(task, self._rows), strict=True)

    loaders = [data.DataLoader(Group(range(*group)), batch_size=None, **several) for group in groups]

    def batches(_: int) -> Iterator[Any]:
        return stack_rows(chain.from_iterable(parts) for parts in zip(*loaders, strict=True))

    return Reading({**several, "loaders": len(loaders), "prefetch_factor": loaders[0].prefetch_factor}, batches)
