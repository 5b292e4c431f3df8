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

from dataload.bench.peers.reading import Field, FunctionReading, decode_jpeg, load, refuse_order, versions
from dataload.bench.peers.torch_loader import tensor_columns, torch_reading
from dataload.bench.task import Task

__all__ = ["loader", "write"]

_PACKAGE = "datasets"
_BUFFER = 1000
_SHARDS = 8


def write(records: Iterable[Any], field: Field, directory: str, count: int) -> str:  # noqa: ARG001 - of all writers
    """Write Arrow files; returns their directory."""
    datasets = load("datasets", _PACKAGE)
    path, cache = os.path.join(directory, "arrow"), os.path.join(directory, "cache")
    if field.kind == "array":
        length = math.prod(field.shape)
        kind = datasets.List(datasets.Value(field.dtype), length=length)
    else:
        kind = datasets.Value("large_binary")
    made = datasets.Dataset.from_generator(
        lambda: ({field.name: value.ravel() if field.kind == "array" else value} for value in records),
        features=datasets.Features({field.name: kind}),
        cache_dir=cache,
        fingerprint="dataload-bench",  # else it would pickle the records to make one
    )
    made.save_to_disk(path)
    shutil.rmtree(cache)
    return path


def loader(task: Task) -> FunctionReading:
    """Batches of the data set itself, or of torch's DataLoader where there are workers."""
    refuse_order(task, "global", "pool", "sequential")
    datasets = load("datasets", _PACKAGE)
    field = Field.of(task)
    dataset = datasets.load_from_disk(task.path)
    if task.order == "pool":
        return _iterable(task, dataset, field)
    if task.workers:
        dataset = _decoded(dataset, field, "torch")
        reading = torch_reading(task, dataset)
        reading.settings = {**versions(_PACKAGE), **reading.settings, "format": "torch"}
        return reading
    dataset = _decoded(dataset, field, "numpy")

    def batches(epoch: int) -> Iterator[Any]:
        shuffled = dataset.shuffle(seed=task.seed + epoch) if task.order == "global" else dataset
        return shuffled.iter(task.batch_size)

    return FunctionReading({**versions(_PACKAGE), "format": "numpy"}, batches, tensor_columns)


def _decoded(dataset: Any, field: Field, form: str) -> Any:
    if field.kind == "array":
        return dataset.with_format(form)
    return dataset.with_transform(_Decode(field.name)) if field.kind == "image" else dataset


def _iterable(task: Task, dataset: Any, field: Field) -> FunctionReading:
    stream = dataset.to_iterable_dataset(num_shards=_SHARDS).shuffle(seed=task.seed, buffer_size=_BUFFER)
    form = "torch" if task.workers else "numpy"
    if field.kind == "array":
        stream = stream.with_format(form)
    elif field.kind == "image":
        stream = stream.map(_Decode(field.name), batched=True, batch_size=task.batch_size)

    several: dict[str, Any] = {"num_workers": task.workers, "persistent_workers": task.workers > 0}
    made: Any = None
    if task.workers:
        made = load("torch.utils.data", "torch").DataLoader(stream, batch_size=task.batch_size, **several)

    def batches(epoch: int) -> Iterator[Any]:
        stream.set_epoch(epoch)  # workers that live on see it
        return iter(made) if task.workers else stream.iter(task.batch_size)

    settings = {
        **versions(_PACKAGE),
        **several,
        "num_shards": _SHARDS,
        "buffer_size": _BUFFER,
        "format": form,
    }
    return FunctionReading(settings, batches, tensor_columns)


class _Decode:
    """Picklable, for worker processes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {self._name: [decode_jpeg(data) for data in batch[self._name]]}
