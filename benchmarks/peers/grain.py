"""Grain's DataLoader on ArrayRecord files.

Set up as the guide to the DataLoader in its documentation does: ``ArrayRecordDataSource``, ``IndexSampler``, a map that
parses, ``Batch`` last, so that batches are made in the workers; the default read options, 16 threads and 500 elements
ahead in each process. Its workers live for one iterator, so they start anew in each epoch.
https://google-grain.readthedocs.io
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers.field import Field, expand_files, load
from dataload.bench.task import Reading, Task

__all__ = ["loader"]


@dataclass(frozen=True)
class _Stack:
    """The function of `Batch`. Grain's default makes an array of bytes, which cuts off zeros at their ends."""

    field: Field

    def __call__(self, values: Sequence[Any]) -> dict[str, Any]:
        return {self.field.name: list(values) if self.field.kind == "bytes" else np.stack(values)}


def loader(task: Task, field: Field) -> Reading:
    """Run Grain's DataLoader, with worker processes or with its threads alone."""
    grain = load("grain", "grain")
    flags = load("absl.flags", "grain").FLAGS
    if not flags.is_parsed():  # worker processes ask for Grain's flags, which absl.app would have parsed
        flags.mark_as_parsed()
    source = grain.sources.ArrayRecordDataSource(expand_files(task.path))
    held = ExitStack()
    held.push(source.__exit__)
    options = grain.ReadOptions()
    decode = field.decoder()

    class Parse(grain.transforms.Map):
        """Bytes of a record -> value."""

        def map(self, element: bytes) -> Any:
            return decode(element)

    def batches(epoch: int) -> Iterator[Any]:
        # One epoch for each loader: a sampler of several epochs would make batches across their ends.
        sampler = grain.samplers.IndexSampler(
            len(source), shuffle=task.order == "global", seed=task.seed + epoch, num_epochs=1
        )
        return iter(
            grain.DataLoader(
                data_source=source,
                sampler=sampler,
                operations=[Parse(), grain.transforms.Batch(task.batch_size, batch_fn=_Stack(field))],
                worker_count=task.workers,
                read_options=options,
            )
        )

    settings = {
        "worker_count": task.workers,
        "num_threads": options.num_threads,
        "prefetch_buffer_size": options.prefetch_buffer_size,
    }
    return Reading(settings, batches, held=held)
