"""bagz: a format with an index, and batches of records read by threads of its own.

Set up with what its README documents: ``Reader.read_indices`` of a batch, with the limits of the records in memory
(``LimitsStorage.IN_MEMORY``, which saves a read for each record) and the default parallelism. The file is a ``.bag``,
which is not compressed, as the other formats here are not. It is no loader: nothing is read ahead between two batches.
https://github.com/google-deepmind/bagz
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dataload.bench.peers.reading import Field, FunctionReading, load, refuse_order, versions
from dataload.bench.task import Task

__all__ = ["loader", "write"]


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write one file; returns its path."""
    path = os.path.join(directory, f"{field.name}.bag")
    with load("bagz", "bagz").Writer(path) as writer:
        for record in records:
            writer.write(field.stored(record))
    return path


def loader(task: Task) -> FunctionReading:
    """Batches by ``read_indices``."""
    refuse_order(task, "global", "sequential")
    bagz = load("bagz", "bagz")
    field = Field.of(task)
    options = bagz.Reader.Options(limits_storage=bagz.LimitsStorage.IN_MEMORY)
    reader = bagz.Reader(task.path, options)

    def batches(epoch: int) -> Iterator[Any]:
        order = np.arange(len(reader))
        if task.order == "global":
            np.random.default_rng((task.seed, epoch)).shuffle(order)
        for start in range(0, len(order), task.batch_size):
            yield {field.name: field.column(reader.read_indices(order[start : start + task.batch_size]))}

    settings = {
        **versions("bagz"),
        "max_parallelism": options.max_parallelism,
        "limits_storage": "in memory",
        "compression": "none",
    }
    return FunctionReading(settings, batches)
