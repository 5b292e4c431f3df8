"""Lance: a columnar format with random access, and threads of its own.

Set up as its documentation does: ``LanceDataset.take`` of the rows of a batch for a shuffled order ("Random access"),
``to_batches`` with its default readahead for a sequential one. A process that has used Lance must not be forked, so no
worker processes are put around it.
https://lancedb.github.io/lance-python-doc/random-access.html, https://lancedb.github.io/lance/integrations/pytorch
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.peers.field import Field, batches_of_rows, load
from dataload.bench.task import Reading, Task

__all__ = ["loader", "write"]

_WRITTEN_AT_ONCE = 64


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write one data set; returns its path."""
    pa = load("pyarrow", "pylance")
    path = os.path.join(directory, f"{field.name}.lance")
    kind = pa.large_binary()
    if field.kind == "array":
        kind = pa.list_(pa.from_numpy_dtype(np.dtype(field.dtype)), math.prod(field.shape))
    schema = pa.schema([pa.field(field.name, kind)])

    def batches() -> Iterator[Any]:
        iterator = iter(records)
        while values := list(islice(iterator, _WRITTEN_AT_ONCE)):
            if field.kind == "array":
                flat = pa.array(np.concatenate([value.ravel() for value in values]))
                column = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            else:
                column = pa.array(values, kind)
            yield pa.record_batch([column], schema=schema)

    load("lance", "pylance").write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), path)
    return path


def loader(task: Task, field: Field) -> Reading:
    """Read batches by ``take``, or by a scan."""
    dataset = load("lance", "pylance").dataset(task.path)

    def batches(epoch: int) -> Iterator[Any]:
        if task.order == "sequential":
            tables = dataset.to_batches(batch_size=task.batch_size)
        else:
            rows = batches_of_rows(task, dataset.count_rows(), epoch)
            tables = (dataset.take(taken.tolist()) for taken in rows)
        return ({field.name: _column(table.column(field.name), field)} for table in tables)

    return Reading({}, batches)


def _column(values: Any, field: Field) -> Any:
    """Return a column of pyarrow, whole or in chunks, as numpy or as a list of bytes."""
    if field.kind != "array":
        return field.column(values.to_pylist())
    chunks = values.chunks if hasattr(values, "chunks") else [values]
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(-1, *field.shape)
