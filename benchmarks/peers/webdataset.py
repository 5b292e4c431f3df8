"""WebDataset on tar archives.

Set up as its author's example of training does: shards shuffled, then a shuffle buffer of 1,000 samples, decoding,
batches made in the workers, and a ``WebLoader`` around it with ``batch_size=None``. It has no order over all records,
and the seed of the task is not used: by default each epoch is shuffled anew.
https://github.com/tmbdev/wds-distributed
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import dataload
from benchmarks.peers.field import Field, decode_jpeg, expand_files, load, tensor_columns, worker_options
from dataload.bench.task import Reading, Task
from dataload.errors import ConfigError

__all__ = ["loader", "write"]

_SHARDS = 8
_BUFFER = 1000


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:
    """Write archives for several workers, which do not share an archive; returns a pattern of their names."""
    each = -(-count // _SHARDS)
    iterator = iter(records)
    for shard in range(_SHARDS):
        with dataload.create(os.path.join(directory, f"{shard:03}.tar")) as writer:
            for _ in range(min(each, count - shard * each)):
                writer.write({field.name: next(iterator)})
    return os.path.join(directory, "*.tar")


def loader(task: Task, field: Field) -> Reading:
    """Run WebDataset behind a WebLoader."""
    wds = load("webdataset", "webdataset")
    shards = expand_files(task.path)
    if len(shards) < task.workers:
        raise ConfigError(
            f"webdataset deals shards to its workers: {task.workers} workers need as many archives, {task.path} is "
            f"{len(shards)}",
            key="workers",
            value=task.workers,
        )
    shuffled = task.order == "pool"
    dataset = wds.WebDataset(shards, shardshuffle=len(shards) if shuffled else False)
    if shuffled:
        dataset = dataset.shuffle(_BUFFER)
    if field.kind == "array":
        dataset = dataset.decode(wds.handle_extension("npy", field.decoder()))  # its own parses each header anew
    elif field.kind == "image":
        dataset = dataset.decode(wds.handle_extension("jpg", decode_jpeg))
    dataset = dataset.to_tuple(field.component).batched(task.batch_size)
    several = worker_options(task)
    made = wds.WebLoader(dataset, batch_size=None, **several)
    settings = {**several, "shards": len(shards), "shuffle": _BUFFER if shuffled else 0}
    return Reading(settings, lambda _: iter(made), lambda batch: tensor_columns({field.name: batch[0]}))
