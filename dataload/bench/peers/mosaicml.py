"""MosaicML Streaming on MDS shards that lie on this machine.

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

from dataload.bench.peers.reading import Field, FunctionReading, decode_jpeg, load, refuse_order, versions
from dataload.bench.peers.torch_loader import tensor_columns
from dataload.bench.task import Task

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


def loader(task: Task) -> FunctionReading:
    """StreamingDataset behind StreamingDataLoader."""
    refuse_order(task, "global", "pool", "sequential")
    streaming = load("streaming", _PACKAGE)
    # What an earlier process left in shared memory under these names refuses a new one.
    streaming.base.util.clean_stale_shared_memory()
    field = Field.of(task)
    algorithm = _ALGORITHMS.get(task.order)
    dataset = (_decoding(streaming, field.name) if field.kind == "image" else streaming.StreamingDataset)(
        local=task.path,
        batch_size=task.batch_size,
        shuffle=algorithm is not None,
        shuffle_algo=algorithm or "py1e",
        shuffle_seed=task.seed,
    )
    several: dict[str, Any] = {"num_workers": task.workers, "persistent_workers": task.workers > 0}
    made = streaming.StreamingDataLoader(dataset, batch_size=task.batch_size, **several)
    settings = {**versions(_PACKAGE, "torch"), **several, "shuffle_algo": algorithm}
    return FunctionReading(settings, lambda _: iter(made), tensor_columns)


def _decoding(streaming: Any, name: str) -> Any:
    class Decoded(streaming.StreamingDataset):
        """Its JPEG files decoded."""

        def __getitem__(self, at: Any) -> Any:
            return {name: decode_jpeg(super().__getitem__(at)[name])}

    return Decoded
