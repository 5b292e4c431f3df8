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

from benchmarks.peers.field import DecodeJpeg, Field, load, tensor_columns, worker_options
from dataload.bench.task import Reading, Task

__all__ = ["loader", "write"]

_CHUNK = "64MB"


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write chunks; returns their directory."""
    path = os.path.join(directory, "litdata")
    # `optimize` would run this in processes, but an iterator cannot be sent to them.
    writer = load("litdata.streaming.writer", "litdata").BinaryWriter(path, chunk_bytes=_CHUNK)
    for index, record in enumerate(records):
        writer.add_item(index, {field.name: record})
    writer.done()
    writer.merge()
    return path


def loader(task: Task, field: Field) -> Reading:
    """Run StreamingDataset behind StreamingDataLoader."""
    litdata = load("litdata", "litdata")
    options: dict[str, Any] = {"shuffle": task.order == "pool", "drop_last": False}
    transform = DecodeJpeg(field.name) if field.kind == "image" else None
    dataset = litdata.StreamingDataset(task.path, seed=task.seed, transform=transform, **options)
    several = worker_options(task)
    made = litdata.StreamingDataLoader(dataset, batch_size=task.batch_size, **several)
    settings = {**several, **options, "chunk_bytes": _CHUNK}
    return Reading(settings, lambda _: iter(made), tensor_columns)
