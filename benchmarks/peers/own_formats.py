"""Peers that read a format of their own: MosaicML Streaming, LitData, Hugging Face datasets, Lance and bagz."""

import math
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.peers.blends import hide_torchvision
from benchmarks.peers.field import Field, batches_of_rows, load, tensor_columns, worker_options
from benchmarks.peers.torch_loader import torch_reading
from dataload.bench.task import Reading, Task
from dataload.sources.base import Source

_BUFFER = 1000
_SHARDS = 8
_LITDATA_CHUNK = "64MB"
_MDS_RECORD_BYTES, _MDS_HEADER_BYTES = 8, 256  # about, beside the values
_LANCE_WRITTEN_AT_ONCE = 64
_MOSAICML_ALGORITHMS = {"global": "naive", "pool": "py1e"}


def mds(task: Task, _: Field) -> Reading:
    """Run MosaicML Streaming on local MDS shards."""
    streaming = _streaming()
    # Shared memory that an earlier process left under the same names would refuse this one.
    streaming.base.util.clean_stale_shared_memory()
    algorithm = _MOSAICML_ALGORITHMS.get(task.order)
    dataset = streaming.StreamingDataset(
        local=task.path,
        batch_size=task.batch_size,
        shuffle=algorithm is not None,
        shuffle_algo=algorithm or "py1e",
        shuffle_seed=task.seed,
    )
    several = worker_options(task)
    made = streaming.StreamingDataLoader(dataset, batch_size=task.batch_size, **several)
    return Reading({**several, "shuffle_algo": algorithm}, lambda _: iter(made), tensor_columns)


def _streaming() -> Any:
    hide_torchvision()
    return load("streaming", "mosaicml-streaming")


def write_mds(source: Source[Any], field: Field, directory: str) -> str:
    path = os.path.join(directory, "mds")
    column = f"ndarray:{field.dtype}:{','.join(map(str, field.shape))}"
    limit = (_MDS_RECORD_BYTES + field.nbytes) * -(-len(source) // field.shards) + _MDS_HEADER_BYTES
    size = {} if field.shards == 1 else {"size_limit": limit}
    with _streaming().MDSWriter(out=path, columns={field.name: column}, **size) as writer:
        for value in field.values(source):
            writer.write({field.name: value})
    return path


def litdata(task: Task, field: Field) -> Reading:
    """Run LitData on its optimized format."""
    package = load("litdata", "litdata")
    options: dict[str, Any] = {"shuffle": task.order == "pool", "drop_last": False}
    dataset = package.StreamingDataset(task.path, seed=task.seed, **options)
    several = worker_options(task)
    made = package.StreamingDataLoader(dataset, batch_size=task.batch_size, **several)
    settings = {**several, **options, **({"chunk_bytes": _LITDATA_CHUNK} if field.shards == 1 else {})}
    return Reading(settings, lambda _: iter(made), tensor_columns)


def write_litdata(source: Source[Any], field: Field, directory: str) -> str:
    path = os.path.join(directory, "litdata")
    chunk = {"chunk_bytes": _LITDATA_CHUNK} if field.shards == 1 else {"chunk_size": -(-len(source) // field.shards)}
    # `optimize` runs this in processes of its own, which an iterator cannot be sent to.
    writer = load("litdata.streaming.writer", "litdata").BinaryWriter(path, **chunk)
    for index, value in enumerate(field.values(source)):
        writer.add_item(index, {field.name: value})
    writer.done()
    writer.merge()
    return path


def arrow(task: Task, _: Field) -> Reading:
    """Run Hugging Face datasets on Arrow files."""
    dataset = load("datasets", "datasets").load_from_disk(task.path)
    form = "torch" if task.workers else "numpy"
    if task.order == "pool":
        dataset = dataset.to_iterable_dataset(num_shards=_SHARDS).shuffle(seed=task.seed, buffer_size=_BUFFER)
    dataset = dataset.with_format(form)
    if task.workers and task.order != "pool":
        reading = torch_reading(task, dataset)
        reading.settings = {**reading.settings, "format": form}
        return reading
    several, made = worker_options(task), dataset
    if task.workers:
        made = load("torch.utils.data", "torch").DataLoader(dataset, batch_size=task.batch_size, **several)

    def batches(epoch: int) -> Iterator[Any]:
        if task.order == "pool":
            dataset.set_epoch(epoch)  # reaches persistent workers, too
            return iter(made) if task.workers else made.iter(task.batch_size)
        shuffled = dataset.shuffle(seed=task.seed + epoch) if task.order == "global" else dataset
        return shuffled.iter(task.batch_size)

    pool = {**several, "num_shards": _SHARDS, "buffer_size": _BUFFER} if task.order == "pool" else {}
    return Reading({**pool, "format": form}, batches, tensor_columns)


def write_arrow(source: Source[Any], field: Field, directory: str) -> str:
    datasets = load("datasets", "datasets")
    path, cache = os.path.join(directory, "arrow"), os.path.join(directory, "cache")
    kind = datasets.List(datasets.Value(field.dtype), length=math.prod(field.shape))
    made = datasets.Dataset.from_generator(
        lambda: ({field.name: value.ravel()} for value in field.values(source)),
        features=datasets.Features({field.name: kind}),
        cache_dir=cache,
        fingerprint="dataload-bench",  # else it would pickle the records to make one
    )
    made.save_to_disk(path, num_shards=field.shards)
    shutil.rmtree(cache)
    return path


def lance(task: Task, field: Field) -> Reading:
    """Run Lance: a columnar format with random access, and threads of its own."""
    dataset = load("lance", "pylance").dataset(task.path)

    def batches(epoch: int) -> Iterator[Any]:
        if task.order == "sequential":
            tables = dataset.to_batches(batch_size=task.batch_size)
        else:
            rows = batches_of_rows(task, dataset.count_rows(), epoch)
            tables = (dataset.take(taken.tolist()) for taken in rows)
        return ({field.name: _lance_column(table.column(field.name), field)} for table in tables)

    return Reading({}, batches)


def _lance_column(values: Any, field: Field) -> Any:
    """Return a column of pyarrow, whole or in chunks, as numpy."""
    chunks = values.chunks if hasattr(values, "chunks") else [values]
    parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(-1, *field.shape)


def write_lance(source: Source[Any], field: Field, directory: str) -> str:
    pa = load("pyarrow", "pylance")
    path = os.path.join(directory, f"{field.name}.lance")
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(field.dtype)), math.prod(field.shape))
    schema = pa.schema([pa.field(field.name, kind)])

    def batches() -> Iterator[Any]:
        iterator = field.values(source)
        while values := list(islice(iterator, _LANCE_WRITTEN_AT_ONCE)):
            flat = pa.array(np.concatenate([value.ravel() for value in values]))
            column = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            yield pa.record_batch([column], schema=schema)

    stream, most = pa.RecordBatchReader.from_batches(schema, batches()), -(-len(source) // field.shards)
    load("lance", "pylance").write_dataset(stream, path, max_rows_per_file=most, max_rows_per_group=min(most, 1024))
    return path


def bagz(task: Task, field: Field) -> Reading:
    """Run bagz: a format with an index, and batches of records read by threads of its own."""
    package = load("bagz", "bagz")
    options = package.Reader.Options(limits_storage=package.LimitsStorage.IN_MEMORY)
    reader = package.Reader(task.path, options)

    def batches(epoch: int) -> Iterator[Any]:
        for rows in batches_of_rows(task, len(reader), epoch):
            yield {field.name: field.column(reader.read_indices(rows))}

    settings = {"max_parallelism": options.max_parallelism, "limits_storage": "in memory", "compression": "none"}
    return Reading(settings, batches)


def write_bagz(source: Source[Any], field: Field, directory: str) -> str:
    path = os.path.join(directory, f"{field.name}.bag")
    with load("bagz", "bagz").Writer(path) as writer:
        for value in field.values(source):
            writer.write(value.tobytes())
    return path
