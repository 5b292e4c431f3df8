"""NVIDIA DALI on the CPU, on tar archives with its index.

Set up as "Data Loading: Webdataset" of its documentation does: ``fn.readers.webdataset`` with ``index_paths``,
``random_shuffle`` with the default ``initial_fill`` of 1,024, decoding by ``fn.decoders``, as many threads as workers,
the default prefetch of two batches. DALI has only threads (``py_num_workers`` is for sources written in Python), and
no order over all records.
https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/general/data_loading/dataloading_webdataset.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers.field import Field, expand_files, load
from dataload.bench.task import Reading, Task

__all__ = ["loader"]

_PACKAGE = "nvidia-dali-cuda120"
_FILL = 1024


def loader(task: Task, field: Field) -> Reading:
    """Run a pipeline that reads and, if needed, decodes."""
    pipeline = _pipeline(task, field)
    count = pipeline.epoch_size("reader")

    def batches(_: int) -> Iterator[Any]:
        # The last batch of an epoch is filled up with its last record.
        for start in range(0, count, task.batch_size):
            (output,) = pipeline.run()
            yield output, min(task.batch_size, count - start)

    def columns(batch: Any) -> dict[str, Any]:
        output, rows = batch
        if field.kind == "bytes":
            return {field.name: [np.asarray(output.at(row)).data for row in range(rows)]}
        return {field.name: np.asarray(output.as_tensor())[:rows]}

    fill = _FILL if task.order == "pool" else 0
    settings = {"num_threads": max(1, task.workers), "prefetch_queue_depth": 2, "initial_fill": fill}
    return Reading(settings, batches, columns)


def _pipeline(task: Task, field: Field) -> Any:
    dali, fn = load("nvidia.dali", _PACKAGE), load("nvidia.dali.fn", _PACKAGE)
    archives = expand_files(task.path)
    pipeline = dali.Pipeline(
        batch_size=task.batch_size,
        num_threads=max(1, task.workers),
        device_id=None,
        seed=task.seed,
        prefetch_queue_depth=2,
    )
    with pipeline:
        data = fn.readers.webdataset(
            paths=archives,
            index_paths=[f"{path.removesuffix('.tar')}.idx" for path in archives],
            ext=[field.component],
            random_shuffle=task.order == "pool",
            initial_fill=_FILL,
            pad_last_batch=True,
            missing_component_behavior="error",
            name="reader",
        )
        if field.kind == "array":
            data = fn.decoders.numpy(data)
        elif field.kind == "image":
            # The upsampling that libjpeg, and so the other loaders here, have by default.
            data = fn.decoders.image(data, device="cpu", jpeg_fancy_upsampling=True)
        pipeline.set_outputs(data)
    pipeline.build()
    return pipeline
