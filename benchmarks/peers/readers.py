"""Peers that read tar archives and files of bytes: Grain, DALI, WebDataset, SPDL and tf.data."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np

import dataload
from benchmarks.peers.field import (
    Field,
    batches_of_rows,
    expand_files,
    load,
    tensor_columns,
    tuned,
    worker_options,
)
from benchmarks.peers.torch_loader import ArrayRecords, LmdbRecords, Stored, TarRecords
from dataload._util.system import usable_cpus
from dataload.bench.task import Reading, Task
from dataload.errors import ConfigError
from dataload.sources.base import Source

_DALI = "nvidia-dali-cuda120"
_DALI_FILL = 1024
_WEBDATASET_SHARDS = 8
_WEBDATASET_BUFFER = 1000
_SPDL_BUFFER = 3
_GRAIN_BATCHES_AHEAD = 16
_TF_BUFFER = 1000


def grain(task: Task, field: Field) -> Reading:
    """Run Grain's Dataset API on ArrayRecord files: batches ahead in threads, or in worker processes."""
    package = load("grain", "grain")
    flags = load("absl.flags", "grain").FLAGS
    if not flags.is_parsed():  # worker processes ask for Grain's flags, which absl.app would have parsed
        flags.mark_as_parsed()
    source = package.sources.ArrayRecordDataSource(expand_files(task.path))
    held = ExitStack()
    held.push(source.__exit__)
    threads = 0 if task.workers else usable_cpus()
    dataset = package.MapDataset.source(source).seed(task.seed)
    if task.order == "global":
        dataset = dataset.shuffle()
    dataset = dataset.map(field.decoder()).batch(task.batch_size, batch_fn=partial(_stack, field.name))
    steps = len(dataset)
    ahead = {"num_threads": threads, "prefetch_buffer_size": _GRAIN_BATCHES_AHEAD if threads else 0}
    options = package.ReadOptions(**{**ahead, **(tuned(task) if threads else {})})
    iterated = dataset.repeat().to_iter_dataset(options)
    if task.workers:
        iterated = iterated.mp_prefetch(package.MultiprocessingOptions(num_workers=task.workers))
    batches = iter(iterated)
    held.callback(_close, batches)
    read = {"num_threads": options.num_threads, "prefetch_buffer_size": options.prefetch_buffer_size}
    return Reading({"num_workers": task.workers, **read}, lambda _: islice(batches, steps), held=held)


def _stack(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {name: np.stack(values)}


def _close(batches: Any) -> None:
    """Close an iterator of Grain, and wait for its threads, which would open the files again."""
    batches.close()
    for thread in threading.enumerate():
        if thread.name.startswith("grain-prefetch"):
            thread.join()


def tf_data(task: Task, field: Field) -> Reading:
    """Run tf.data on TFRecord files of Examples, with threads of its own."""
    tf = load("tensorflow", "tensorflow-cpu")
    features = {field.name: tf.io.FixedLenFeature(field.shape, tf.dtypes.as_dtype(field.dtype))}
    data = tf.data.TFRecordDataset(expand_files(task.path))
    if task.order == "pool":
        data = data.shuffle(_TF_BUFFER, seed=task.seed)
    data = data.batch(task.batch_size)
    data = data.map(lambda records: tf.io.parse_example(records, features), num_parallel_calls=tf.data.AUTOTUNE)
    data = data.prefetch(tf.data.AUTOTUNE)
    settings = {"shuffle_buffer": _TF_BUFFER} if task.order == "pool" else {}
    return Reading(settings, lambda _: data.as_numpy_iterator())


def dali(task: Task, field: Field) -> Reading:
    """Run NVIDIA DALI on the CPU, on tar archives with its index."""
    return dali_reading(task, field.component, load("nvidia.dali.fn", _DALI).decoders.numpy, task.order == "pool")


def dali_reading(task: Task, component: str, decode: Callable[[Any], Any], shuffled: bool) -> Reading:
    """Run DALI on the components of tar archives, which `decode` decodes."""
    fn, archives = load("nvidia.dali.fn", _DALI), expand_files(task.path)
    options = {"num_threads": max(1, task.workers), "prefetch_queue_depth": 2, **tuned(task)}
    pipeline = load("nvidia.dali", _DALI).Pipeline(task.batch_size, **options, device_id=None, seed=task.seed)
    with pipeline:
        data = fn.readers.webdataset(
            paths=archives,
            index_paths=[f"{path.removesuffix('.tar')}.idx" for path in archives],
            ext=[component],
            random_shuffle=shuffled,
            initial_fill=_DALI_FILL,
            pad_last_batch=True,
            missing_component_behavior="error",
            name="reader",
        )
        pipeline.set_outputs(decode(data))
    pipeline.build()
    records = pipeline.epoch_size("reader")

    def batches(_: int) -> Iterator[Any]:
        # The last batch of an epoch is filled up with its last record.
        for start in range(0, records, task.batch_size):
            yield pipeline.run()[0], min(task.batch_size, records - start)

    def columns(batch: Any) -> dict[str, Any]:
        output, rows = batch
        return {component.partition(".")[0]: np.asarray(output.as_tensor())[:rows]}

    return Reading({**options, "initial_fill": _DALI_FILL if shuffled else 0}, batches, columns)


def tar_shards(task: Task, field: Field) -> Reading:
    """Run WebDataset on tar archives, behind a WebLoader."""
    wds = load("webdataset", "webdataset")
    shards = expand_files(task.path)
    if len(shards) < task.workers:
        raise ConfigError(
            f"webdataset gives each worker archives of its own: {task.workers} workers need as many archives, "
            f"{task.path} is {len(shards)}",
            key="workers",
            value=task.workers,
        )
    shuffled = task.order == "pool"
    dataset = wds.WebDataset(shards, shardshuffle=len(shards) if shuffled else False)
    if shuffled:
        dataset = dataset.shuffle(_WEBDATASET_BUFFER)
    dataset = dataset.decode(wds.handle_extension("npy", field.decoder()))  # its own parses each header anew
    dataset = dataset.to_tuple(field.component).batched(task.batch_size)
    several = worker_options(task)
    made = wds.WebLoader(dataset, batch_size=None, **several)
    settings = {**several, "shards": len(shards), "shuffle": _WEBDATASET_BUFFER if shuffled else 0}
    return Reading(settings, lambda _: iter(made), lambda batch: tensor_columns({field.name: batch[0]}))


def write_tar_shards(source: Source[Any], field: Field, directory: str) -> str:
    """Write archives for several workers, which cannot share one."""
    values = field.values(source)
    shards = max(_WEBDATASET_SHARDS, field.shards)
    for shard in range(shards):
        with dataload.create(os.path.join(directory, f"{shard:04}.tar")) as writer:
            for value in islice(values, -(-len(source) // shards)):
                writer.write({field.name: value})
    return os.path.join(directory, "*.tar")


def _spdl(records_class: type[Stored], task: Task, field: Field) -> Reading:
    """Run SPDL's pipeline of threads over records of our formats."""
    records = records_class(task.path, field)
    return spdl_reading(task, records, lambda indices: {field.name: field.column(list(records.read(indices)))})


def spdl_reading(task: Task, records: Stored, read: Callable[[list[int]], Any]) -> Reading:
    """Run SPDL's pipeline of threads, each of which makes batches from indices of records."""
    builder = load("spdl.pipeline", "spdl-core").PipelineBuilder
    threads, buffered = max(1, task.workers), tuned(task).get("buffer_size", _SPDL_BUFFER)
    held = ExitStack()
    held.callback(records.close)

    class Batches:
        """The indices of each batch of an epoch; the next epoch each time it is iterated."""

        epochs = count()

        def __iter__(self) -> Iterator[list[int]]:
            return (rows.tolist() for rows in batches_of_rows(task, len(records), next(self.epochs)))

    pipeline = (
        builder()
        .add_source(Batches(), continuous=True)
        .pipe(read, concurrency=threads)
        .add_sink(buffered)
        .build(num_threads=threads, max_failures=0)
    )
    held.enter_context(pipeline.auto_stop())
    settings = {"num_threads": threads, "concurrency": threads, "buffer_size": buffered, "continuous": True}
    return Reading(settings, lambda _: iter(pipeline), held=held)


SPDL: Mapping[str, Callable[[Task, Field], Reading]] = {
    "lmdb": partial(_spdl, LmdbRecords),
    "tar": partial(_spdl, TarRecords),
    "array_record": partial(_spdl, ArrayRecords),
}
