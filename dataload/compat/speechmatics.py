"""The names of the Speechmatics eBook "How to build a streaming DataLoader with PyTorch", by David MacLeod.

Its samples run as printed with `MultiStreamDataLoader` and `plot_timings` from here, and `DataLoader` from
`dataload.torch`. The native way is `dataload.streams.MultiStreamLoader`, which needs no data set class, shuffles by a
seed, and resumes in each row.
"""

import importlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from dataload.analysis.pictures import timeline_figure
from dataload.analysis.timeline import record_timeline

__all__ = ["MultiStreamDataLoader", "plot_timings", "split_datasets"]


def split_datasets(make: Callable[..., Any], data_list: Sequence[Any], batch_size: int, max_workers: int) -> list[Any]:
    """Return data sets that share the rows of a batch: as many as divide it, at most `max_workers`, at least one.

    ``make(data_list, batch_size=rows)`` returns one. In its class, write
    ``split_datasets = classmethod(split_datasets)``.
    """
    parts = max(parts for parts in range(1, max(1, max_workers) + 1) if not batch_size % parts)
    return [make(data_list, batch_size=batch_size // parts) for _ in range(parts)]


class MultiStreamDataLoader:
    """Joins the rows of several data sets, of `split_datasets`, into batches; each runs in a worker process."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = datasets
        make: Any = importlib.import_module("dataload.torch").DataLoader
        self.loaders: list[Any] = [make(dataset, num_workers=1, batch_size=None) for dataset in datasets]

    def get_stream_loaders(self) -> Any:
        """Return an iterator of the parts of each batch."""
        return zip(*self.loaders, strict=False)

    def __iter__(self) -> Generator[list[Any]]:
        for parts in self.get_stream_loaders():
            yield list(chain(*parts))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each data set."""
        return {"loaders": [loader.state_dict() for loader in self.loaders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was saved."""
        for loader, part in zip(self.loaders, state["loaders"], strict=True):
            loader.load_state_dict(part)


def plot_timings(loader: Any, model_time: float, n_batches: int) -> Any:
    """Return a figure of who worked when, while a model that takes `model_time` seconds received `n_batches`."""
    loaders = getattr(loader, "loaders", [loader])
    with ExitStack() as stack:
        timeline, *others = [stack.enter_context(record_timeline(each)) for each in loaders]
        for _ in islice(loader, n_batches):
            time.sleep(model_time)
    for number, other in enumerate(others, start=1):
        timeline.steps += [replace(step, worker=f"dataload-{number}") for step in other.steps]
    return timeline_figure(timeline, loaders[0].statistics().verdict, f"{n_batches} batches, {model_time} s of model")
