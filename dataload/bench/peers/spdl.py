"""SPDL's pipeline of threads over records of our formats.

Set up as "Building High-Performance DataLoaders" of its documentation does: the source gives the indices of a batch,
one stage with the concurrency of the workers reads and decodes them, a sink holds 3 batches (the default). Batches come
in the order of completion, as by default, and the source is continuous, so that the pipeline lives on between epochs.
SPDL reads no format of records itself, so the reading is that of
`torch_loader`, one batch at a time.
https://facebookresearch.github.io/spdl/latest/getting_started/pytorch.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from dataload.bench.peers.reading import Field, FunctionReading, load, refuse_order, versions
from dataload.bench.peers.torch_loader import ArrayRecords, LmdbRecords, Stored, TarRecords
from dataload.bench.task import Task

__all__ = ["array_record", "lmdb", "tar"]

_BUFFER = 3


def lmdb(task: Task) -> FunctionReading:
    """Values of an LMDB environment."""
    return _over(task, LmdbRecords(task.path, Field.of(task)))


def tar(task: Task) -> FunctionReading:
    """Components of tar archives with an index."""
    return _over(task, TarRecords(task.path, Field.of(task)))


def array_record(task: Task) -> FunctionReading:
    """Records of ArrayRecord files."""
    return _over(task, ArrayRecords(task.path, Field.of(task)))


def _over(task: Task, records: Stored) -> FunctionReading:
    refuse_order(task, "global", "sequential")
    builder = load("spdl.pipeline", "spdl-core").PipelineBuilder
    field = Field.of(task)
    threads = max(1, task.workers)
    held = ExitStack()
    held.callback(records.close)

    def read(indices: list[int]) -> dict[str, Any]:
        return {field.name: field.column(list(records.read(indices)))}

    pipeline = (
        builder()
        .add_source(_Batches(len(records), task), continuous=True)
        .pipe(read, concurrency=threads)
        .add_sink(_BUFFER)
        .build(num_threads=threads, max_failures=0)
    )
    held.enter_context(pipeline.auto_stop())
    settings = {
        **versions("spdl-core"),
        "num_threads": threads,
        "concurrency": threads,
        "buffer_size": _BUFFER,
        "continuous": True,
    }
    return FunctionReading(settings, lambda _: iter(pipeline), held=held)


class _Batches:
    """The indices of each batch of an epoch; another one each time it is iterated."""

    def __init__(self, count: int, task: Task) -> None:
        self._count = count
        self._batch_size = task.batch_size
        self._generator = np.random.default_rng(task.seed) if task.order == "global" else None

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(self._count)
        if self._generator is not None:
            self._generator.shuffle(order)
        for start in range(0, self._count, self._batch_size):
            yield order[start : start + self._batch_size].tolist()
