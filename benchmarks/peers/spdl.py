"""SPDL's pipeline of threads over records of our formats.

Set up as "Building High-Performance DataLoaders" of its documentation does: the source yields the indices of a batch,
one stage with the concurrency of the workers reads and decodes them, a sink holds 3 batches (the default). Batches come
in the order of completion, as by default, and the source is continuous, so the pipeline survives the end of an epoch.
SPDL reads no record format itself; `torch_loader` reads for it, one batch at a time.
https://facebookresearch.github.io/spdl/latest/getting_started/pytorch.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any

from benchmarks.peers.field import Field, batches_of_rows, load
from benchmarks.peers.torch_loader import ArrayRecords, LmdbRecords, Stored, TarRecords
from dataload.bench.task import Reading, Task

__all__ = ["array_record", "lmdb", "tar"]

_BUFFER = 3


def _over(records_class: type[Stored], task: Task, field: Field) -> Reading:
    builder = load("spdl.pipeline", "spdl-core").PipelineBuilder
    records = records_class(task.path, field)
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
    settings = {"num_threads": threads, "concurrency": threads, "buffer_size": _BUFFER, "continuous": True}
    return Reading(settings, lambda _: iter(pipeline), held=held)


lmdb, tar, array_record = (partial(_over, records) for records in (LmdbRecords, TarRecords, ArrayRecords))


class _Batches:
    """The indices of each batch of an epoch; the next epoch each time it is iterated."""

    def __init__(self, records: int, task: Task) -> None:
        self._records = records
        self._task = task
        self._epochs = count()

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in batches_of_rows(self._task, self._records, next(self._epochs)))
