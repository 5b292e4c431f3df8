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
from typing import Any

import numpy as np

from dataload.bench.peers.reading import Field, FunctionReading, load, refuse_order, versions
from dataload.bench.task import Task

__all__ = ["loader", "write"]

_WRITTEN_AT_ONCE = 64


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write one data set; returns its path."""
    pa = load("pyarrow", "pylance")
    path = os.path.join(directory, f"{field.name}.lance")
    if field.kind == "array":
        item = pa.from_numpy_dtype(np.dtype(field.dtype))
        kind = pa.list_(item, math.prod(field.shape))
    else:
        kind = pa.large_binary()
    schema = pa.schema([pa.field(field.name, kind)])

    def batches() -> Iterator[Any]:
        for values in _groups(records, _WRITTEN_AT_ONCE):
            if field.kind == "array":
                flat = pa.array(np.concatenate([value.ravel() for value in values]))
                column = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            else:
                column = pa.array(values, kind)
            yield pa.record_batch([column], schema=schema)

    load("lance", "pylance").write_dataset(pa.RecordBatchReader.from_batches(schema, batches()), path)
    return path


def loader(task: Task) -> FunctionReading:
    """Batches by ``take``, or by a scan."""
    refuse_order(task, "global", "sequential")
    lance = load("lance", "pylance")
    field = Field.of(task)
    dataset = lance.dataset(task.path)
    count = dataset.count_rows()

    def column(table: Any) -> dict[str, Any]:
        return {field.name: _column(table.column(field.name), field)}

    def batches(epoch: int) -> Iterator[Any]:
        if task.order == "sequential":
            yield from map(column, dataset.to_batches(batch_size=task.batch_size))
            return
        order = np.random.default_rng((task.seed, epoch)).permutation(count)
        for start in range(0, count, task.batch_size):
            yield column(dataset.take(order[start : start + task.batch_size].tolist()))

    return FunctionReading(versions("pylance", "pyarrow"), batches)


def _column(values: Any, field: Field) -> Any:
    """A column of pyarrow, whole or in chunks, as numpy or as a list of bytes."""
    if field.kind != "array":
        return field.column(values.to_pylist())
    chunks = values.chunks if hasattr(values, "chunks") else [values]
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(-1, *field.shape)


def _groups(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    group: list[Any] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
