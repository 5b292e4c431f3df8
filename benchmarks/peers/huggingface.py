"""Hugging Face datasets on Arrow files.

Set up as "Use with NumPy", "Use with PyTorch" and "Differences between Dataset and IterableDataset" of its
documentation do. Without workers: ``shuffle``, which makes a mapping of indices, then ``iter`` by batches, with the
format numpy for arrays. With workers: torch's DataLoader over the data set in the format torch. The pool order is
``to_iterable_dataset().shuffle(buffer_size=1000)``. JPEG files are stored as bytes and decoded by ``with_transform``,
or by ``map`` where the data set is iterable.
https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.peers.field import DecodeJpeg, Field, load, tensor_columns, worker_options
from benchmarks.peers.torch_loader import torch_reading
from dataload.bench.task import Reading, Task

__all__ = ["loader", "write"]

_BUFFER = 1000
_SHARDS = 8


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write Arrow files; returns their directory."""
    datasets = load("datasets", "datasets")
    path, cache = os.path.join(directory, "arrow"), os.path.join(directory, "cache")
    kind = datasets.Value("large_binary")
    if field.kind == "array":
        kind = datasets.List(datasets.Value(field.dtype), length=math.prod(field.shape))
    made = datasets.Dataset.from_generator(
        lambda: ({field.name: value.ravel() if field.kind == "array" else value} for value in records),
        features=datasets.Features({field.name: kind}),
        cache_dir=cache,
        fingerprint="dataload-bench",  # else it would pickle the records to make one
    )
    made.save_to_disk(path)
    shutil.rmtree(cache)
    return path


def loader(task: Task, field: Field) -> Reading:
    """Read batches of the data set itself or, with workers, of torch's DataLoader."""
    dataset = load("datasets", "datasets").load_from_disk(task.path)
    form = "torch" if task.workers else "numpy"
    if task.order == "pool":
        return _iterable(task, dataset, field, form)
    if field.kind == "array":
        dataset = dataset.with_format(form)
    elif field.kind == "image":
        dataset = dataset.with_transform(DecodeJpeg(field.name))
    if task.workers:
        reading = torch_reading(task, dataset)
        reading.settings = {**reading.settings, "format": form}
        return reading

    def batches(epoch: int) -> Iterator[Any]:
        shuffled = dataset.shuffle(seed=task.seed + epoch) if task.order == "global" else dataset
        return shuffled.iter(task.batch_size)

    return Reading({"format": form}, batches, tensor_columns)


def _iterable(task: Task, dataset: Any, field: Field, form: str) -> Reading:
    stream = dataset.to_iterable_dataset(num_shards=_SHARDS).shuffle(seed=task.seed, buffer_size=_BUFFER)
    if field.kind == "array":
        stream = stream.with_format(form)
    elif field.kind == "image":
        stream = stream.map(DecodeJpeg(field.name), batched=True, batch_size=task.batch_size)
    several = worker_options(task)
    made: Any = None
    if task.workers:
        made = load("torch.utils.data", "torch").DataLoader(stream, batch_size=task.batch_size, **several)

    def batches(epoch: int) -> Iterator[Any]:
        stream.set_epoch(epoch)  # reaches persistent workers, too
        return iter(made) if task.workers else stream.iter(task.batch_size)

    settings = {**several, "num_shards": _SHARDS, "buffer_size": _BUFFER, "format": form}
    return Reading(settings, batches, tensor_columns)
