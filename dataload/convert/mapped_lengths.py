"""Measure the lengths of what a transform makes of records, in worker processes, and keep them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dataload._util.machine import usable_cpus
from dataload.loader.failures import OnError
from dataload.loader.loader import Loader
from dataload.sources.base import Source
from dataload.sources.views.mapped_lengths import (
    keep_lengths,
    key_of,
    lengths_of,
    measured_transform,
    recall_lengths,
)
from dataload.transforms import NamedTransform, SampleContext
from dataload.types import Int64Array

_ROWS = 256


class MappedLengths(NamedTuple):
    """Lengths by field, 0 for bad records; the number of these; and whether the lengths are kept, and were before."""

    fields: dict[str, Int64Array]
    bad: int
    kept: bool
    known: bool = False


def _measure(functions: tuple[NamedTransform, ...], sample: Any, context: SampleContext) -> dict[str, Any]:
    return {"index": context.index, "lengths": lengths_of(sample, functions)}


def measure_mapped(
    source: Source[Any],
    transform: Any,
    *,
    on_error: OnError = "raise",
    max_bad: int | float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> MappedLengths:
    """Return the lengths of the fields that a transform makes of each record; see `mapped_lengths`."""
    functions, key = measured_transform(transform), key_of(source, transform)
    if (known := recall_lengths(key, len(source))) is not None:
        return MappedLengths(known, 0, kept=True, known=True)
    found: dict[str, Int64Array] = {}
    workers = usable_cpus() if usable_cpus() > 1 else 0
    settings: dict[str, Any] = {"num_workers": workers, "executor": "processes" if workers else "threads"}
    settings |= {"on_error": on_error, "max_bad": max_bad, "epochs": 1}
    with Loader(source, batch_size=_ROWS, transform=partial(_measure, functions), **settings) as loader:
        for step, batch in enumerate(loader, 1):
            for name, lengths in batch["lengths"].items():
                found.setdefault(name, np.zeros(len(source), np.int64))[batch["index"]] = lengths
            if progress is not None:
                progress(min(step * _ROWS, len(source)), len(source))
        bad = loader.statistics().bad
    return MappedLengths(found, bad, kept=keep_lengths(key, found))
