"""WebDataset's loader, which knows how far its workers are."""

import inspect
from collections.abc import Iterator
from typing import Any

from dataload._util.lazy import load_optional
from dataload.compat._webdataset_io import base, wds
from dataload.compat._webdataset_pipeline import WebDataset
from dataload.compat._webdataset_stages import PassState, Progress, Resumable, is_single
from dataload.errors import ConfigError


class _Feeder(wds.pytorch.IterableDataset):
    """Gives the values of a pipeline, each with the offset of its worker; in a worker, or in the consumer's process."""

    def __init__(self, data: WebDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        for value in self.data:
            run = self.data.run
            yield (tuple(run.progress[run.last]) if run and run.progress else ()), value


class _Collate:
    """Collates values, and keeps the last one's offset."""

    def __init__(self, collate: Any, *, is_batch: bool) -> None:
        self._collate, self._is_batch = collate, is_batch

    def __call__(self, given: Any) -> Any:
        if not self._is_batch:
            return given[0], self._collate(given[1])
        return given[-1][0], self._collate([value for _, value in given])


class WebLoader(Resumable, base("DataPipeline")):
    """WebDataset's wrapper of torch's DataLoader, with all of its arguments.

    Over a `WebDataset` of this module whose stages work on single samples up to ``batched``, the batches are the same
    for any number of workers, and `state_dict` is exact.
    """

    def __init__(self, dataset: Any, *args: Any, **kw: Any) -> None:
        torch_data = load_optional("torch.utils.data", needed_by="WebLoader", extra="torch")
        bound = inspect.signature(torch_data.DataLoader.__init__).bind(self, dataset, *args, **kw)
        bound.apply_defaults()
        given = bound.arguments
        del given["self"]
        self.workers: int = max(1, given["num_workers"])
        self.data: WebDataset | None = None
        if isinstance(dataset, WebDataset):
            size = given["batch_size"]
            self.data = dataset.fed(1 if size is None else size)
            collate = given["collate_fn"] or (
                torch_data.default_convert if size is None else torch_data.default_collate
            )
            given.update(dataset=_Feeder(self.data), collate_fn=_Collate(collate, is_batch=size is not None))
            self.allow_pickle: bool = dataset.allow_pickle
        loader = torch_data.DataLoader(**{name: value for name, value in given.items() if name != "kw"})
        super().__init__(loader)

    def one_pass(self, run: PassState) -> Iterator[Any]:
        if self.data is None:
            yield from self.iterator1()
            return
        data, loader = self.data, self.pipeline[0]
        data.open()  # here, so that workers inherit it
        data.set_epoch(run.epoch)
        if run.resumed:
            data.begin(PassState(run.epoch, run.position, run.offsets, run.counts))
            loader._iterator = None  # workers that persist have begun elsewhere
        values: Any = _received(run, loader)
        for stage in self.pipeline[1:]:
            values = self.invoke(stage, values)
        yield from values

    def end_pass(self, run: PassState) -> None:
        """Move to the next pass, an epoch of the data set."""
        super().end_pass(run)
        run.epoch, run.position, run.offsets, run.progress = run.epoch + 1, 0, (), {}
        self._epoch = run.epoch

    def dataset(self) -> WebDataset:
        if self.data is None:
            raise ConfigError("only a WebLoader of a WebDataset of this module has a state", key="state_dict")
        return self.data

    def inexact(self) -> Any:
        inexact = None if self.data is None else self.data.inexact()
        return inexact or next((stage for stage in self.pipeline[1:] if not is_single(stage)), None)

    def counts(self, run: PassState) -> dict[str, int]:
        own = {} if self.repetitions == 1 else {"loader_passes": run.passes, "loader_given": run.given}
        given = max((offset.given for offset in run.progress.values()), default=run.counts.get("given", 0))
        return own if self.dataset().limit is None else {**own, "given": given}

    def enter(self, run: PassState) -> None:
        run.check(self.workers)
        run.passes, run.given = run.counts.get("loader_passes", 0), run.counts.get("loader_given", 0)


def _received(run: PassState, loader: Any) -> Iterator[Any]:
    """Yield the values of a loader, and keep their offsets."""
    for offset, value in loader:
        if len(offset):
            found = Progress(*map(int, offset))
            run.progress[found.lane], run.last = found, found.lane
        yield value
