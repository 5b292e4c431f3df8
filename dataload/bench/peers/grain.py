"""Grain's DataLoader on ArrayRecord files.

Set up as the guide to the DataLoader in its documentation does: ``ArrayRecordDataSource``, ``IndexSampler``, a map that
parses, ``Batch`` last, so that batches are made in the workers; the default read options, 16 threads and 500 elements
ahead in each process. Its workers live for one iterator, so they start anew in each epoch.
https://google-grain.readthedocs.io
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from dataload.bench.peers.reading import Field, FunctionReading, expand_files, load, refuse_order, versions
from dataload.bench.task import Task

__all__ = ["loader"]


class _Stack:
    """What `Batch` calls. Grain's own way makes an array of bytes, which cuts zeros off at their ends."""

    def __init__(self, field: Field) -> None:
        self._field = field

    def __call__(self, values: Sequence[Any]) -> dict[str, Any]:
        return {self._field.name: list(values) if self._field.kind == "bytes" else np.stack(values)}


def loader(task: Task) -> FunctionReading:
    """Grain's DataLoader, with worker processes or with its threads alone."""
    refuse_order(task, "global", "sequential")
    grain = load("grain", "grain")
    flags = load("absl.flags", "grain").FLAGS
    if not flags.is_parsed():  # worker processes ask for Grain's flags, which absl.app would have parsed
        flags.mark_as_parsed()
    field = Field.of(task)
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
        **versions("grain", "array-record"),
        "worker_count": task.workers,
        "num_threads": options.num_threads,
        "prefetch_buffer_size": options.prefetch_buffer_size,
    }
    return FunctionReading(settings, batches, held=held)
