"""MosaicML Streaming on local MDS shards.

Set up as "Quick Start" and "Shuffling" of its documentation do: ``MDSWriter`` with typed columns, no compression, the
default shard size; ``StreamingDataset(local=...)`` told the batch size, behind its ``StreamingDataLoader``. The pool
order is its default ``py1e``, the global order its ``naive``. JPEG files are stored as bytes and decoded in
``__getitem__``, as its how-to guides do for transforms.
https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from benchmarks.peers.field import Field, decode_jpeg, load, tensor_columns, worker_options
from dataload.bench.task import Reading, Task

__all__ = ["loader", "write"]

_PACKAGE = "mosaicml-streaming"
_ALGORITHMS = {"global": "naive", "pool": "py1e"}


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write shards; returns their directory."""
    path = os.path.join(directory, "mds")
    shape = ",".join(map(str, field.shape))
    column = f"ndarray:{field.dtype}:{shape}" if field.kind == "array" else "bytes"
    with load("streaming", _PACKAGE).MDSWriter(out=path, columns={field.name: column}) as writer:
        for record in records:
            writer.write({field.name: record})
    return path


def loader(task: Task, field: Field) -> Reading:
    """Run StreamingDataset behind StreamingDataLoader."""
    streaming = load("streaming", _PACKAGE)
    # Shared memory that an earlier process left under the same names would refuse this one.
    streaming.base.util.clean_stale_shared_memory()
    algorithm = _ALGORITHMS.get(task.order)
    dataset = (_decoding(streaming, field.name) if field.kind == "image" else streaming.StreamingDataset)(
        local=task.path,
        batch_size=task.batch_size,
        shuffle=algorithm is not None,
        shuffle_algo=algorithm or "py1e",
        shuffle_seed=task.seed,
    )
    several = worker_options(task)
    made = streaming.StreamingDataLoader(dataset, batch_size=task.batch_size, **several)
    settings = {**several, "shuffle_algo": algorithm}
    return Reading(settings, lambda _: iter(made), tensor_columns)


def _decoding(streaming: Any, name: str) -> Any:
    class Decoded(streaming.StreamingDataset):
        """Its JPEG files decoded."""

        def __getitem__(self, at: Any) -> Any:
            return {name: decode_jpeg(super().__getitem__(at)[name])}

    return Decoded
