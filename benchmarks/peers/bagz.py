"""bagz: a format with an index, and batches of records read by threads of its own.

Set up with what its README documents: ``Reader.read_indices`` of a batch, with the limits of the records in memory
(``LimitsStorage.IN_MEMORY``, which saves a read for each record) and the default parallelism. The file is a ``.bag``,
not compressed, as the other formats here. bagz is not a loader: nothing is read ahead between two batches.
https://github.com/google-deepmind/bagz
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from benchmarks.peers.field import Field, batches_of_rows, load
from dataload.bench.task import Reading, Task

__all__ = ["loader", "write"]


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write one file; returns its path."""
    path = os.path.join(directory, f"{field.name}.bag")
    with load("bagz", "bagz").Writer(path) as writer:
        for record in records:
            writer.write(field.stored(record))
    return path


def loader(task: Task, field: Field) -> Reading:
    """Read batches by ``read_indices``."""
    bagz = load("bagz", "bagz")
    options = bagz.Reader.Options(limits_storage=bagz.LimitsStorage.IN_MEMORY)
    reader = bagz.Reader(task.path, options)
    settings = {"max_parallelism": options.max_parallelism, "limits_storage": "in memory", "compression": "none"}
    return Reading(
        settings,
        lambda epoch: (
            {field.name: field.column(reader.read_indices(rows))} for rows in batches_of_rows(task, len(reader), epoch)
        ),
    )
