"""LitData on its optimized format.

Set up as its README does: chunks of 64 MB, as ``optimize`` writes them, ``StreamingDataset`` on the directory, with
``shuffle`` (chunks, and the records within a chunk), behind ``StreamingDataLoader``; JPEG files are stored as bytes and
decoded by ``transform``. It has no order over all records.
https://github.com/Lightning-AI/litData
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from dataload.bench.peers.reading import Field, FunctionReading, decode_jpeg, load, refuse_order, versions
from dataload.bench.peers.torch_loader import tensor_columns
from dataload.bench.task import Task

__all__ = ["loader", "write"]

_CHUNK = "64MB"


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write chunks; returns their directory."""
    path = os.path.join(directory, "litdata")
    # What `optimize` runs in its processes, in this one: records are made by an iterator, which cannot be sent.
    writer = load("litdata.streaming.writer", "litdata").BinaryWriter(path, chunk_bytes=_CHUNK)
    for index, record in enumerate(records):
        writer.add_item(index, {field.name: record})
    writer.done()
    writer.merge()
    return path


def loader(task: Task) -> FunctionReading:
    """StreamingDataset behind StreamingDataLoader."""
    refuse_order(task, "pool", "sequential")
    litdata = load("litdata", "litdata")
    field = Field.of(task)
    options: dict[str, Any] = {"shuffle": task.order == "pool", "drop_last": False}
    transform = _Decode(field.name) if field.kind == "image" else None
    dataset = litdata.StreamingDataset(task.path, seed=task.seed, transform=transform, **options)
    several: dict[str, Any] = {"num_workers": task.workers, "persistent_workers": task.workers > 0}
    made = litdata.StreamingDataLoader(dataset, batch_size=task.batch_size, **several)
    settings = {**versions("litdata", "torch"), **several, **options, "chunk_bytes": _CHUNK}
    return FunctionReading(settings, lambda _: iter(made), tensor_columns)


class _Decode:
    """Picklable, for worker processes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {self._name: decode_jpeg(sample[self._name])}
