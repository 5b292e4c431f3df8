"""WebDataset's pipeline over an order that is computed, so that it can resume, and its loader."""

import copy
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from dataload import errors
from dataload._util.fingerprint import fingerprint
from dataload._util.lazy import load_optional
from dataload.compat import _webdataset_stages as staged
from dataload.compat._webdataset_io import Opener, base, check_pipe, open_archives, wds, why_streams
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.loader.state import LoaderState
from dataload.samplers import Repeat, Sequential, ShardSequential, Subset
from dataload.sources.tar.reader import TarSource
from dataload.storage import Remote, is_url, local_path
from dataload.types import Sampler

_SAMPLES_AT_ONCE = 16  # that are read together


class WebDataset(staged.Resumable, base("WebDataset")):
    """WebDataset's pipeline of samples, which reads them at random and can resume.

    The arguments are WebDataset's, and those below. `seed` is 0 by default. `cache_dir` is dataload's cache of
    shards. Ranks divide the samples unless `nodesplitter` is None, and workers unless `workersplitter` is None.

    `allow_pipe` runs URLs ``pipe:COMMAND`` in a shell; `allow_pickle` lets `decode` and `xdecode` load pickles, which
    can run any code. `storage_options` and `remote` are as in `dataload.open`.
    """

    def __init__(
        self,
        urls: Any,
        *args: Any,
        allow_pipe: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        remote: Any = None,
        **kw: Any,
    ) -> None:
        urls = os.fspath(urls) if isinstance(urls, os.PathLike) else urls
        given = staged.arguments(wds.WebDataset, urls, *args, **kw)
        super().__init__(urls, *args, **kw)
        self.allow_pickle = allow_pickle
        self._remote = None if storage_options is None and remote is None else Remote.of(storage_options, remote)
        self._seed = 0 if given["seed"] is None else int(given["seed"])
        self._shuffles, self._checks_empty = bool(given["shardshuffle"]), given["empty_check"]
        self._urls: Sequence[str] = [os.fspath(url) for url in getattr(self.pipeline[0], "urls", ())]
        check_pipe(self._urls, allow_pipe)
        self._streams = why_streams(given, self.pipeline, self._urls)
        for position, stage in enumerate(self.pipeline):
            if isinstance(stage, wds.cache.FileCache):
                own = {"cache": stage.cache_dir, "budget": stage.cleaner.cache_size if stage.cleaner else None}
                self._remote = Remote.of(storage_options, own | dict(remote or {}))
            if isinstance(stage, (wds.cache.StreamingOpen, wds.cache.FileCache)):
                self.pipeline[position] = Opener(given["handler"], allow_pipe=allow_pipe, remote=self._remote)
        self._head, self._handler = tuple(self.pipeline), given["handler"]
        self._by_rank, self._by_worker = given["nodesplitter"] is not None, bool(given["workersplitter"])
        self._source: TarSource | None = None
        self._batch = 1  # values that a WebLoader puts in a batch

    def fed(self, batch: int) -> Self:
        """Return a copy for a `WebLoader`, which puts `batch` values in a batch."""
        made = self.compose()
        made._batch, made._knows_epoch = batch, True
        return made

    def compose(self, *args: Any) -> Self:
        """Return a copy of the pipeline with more stages."""
        made = super().compose(*args)
        made._source = copy.copy(self._source)  # so that closing one does not affect the other
        return made

    def open(self) -> TarSource | None:
        """Return the archives; None if they are read as streams."""
        if tuple(self.pipeline[: len(self._head)]) != self._head:
            self._streams = "the stages that read samples were changed"
        if self._source is None and self._streams is None:
            found = open_archives(self._urls, self._remote, self._handler)
            if isinstance(found, str):
                self._streams = found
                message = f"the archives are read as streams, in WebDataset's own order and without a state: {found}"
                warnings.warn(message, stacklevel=2)
            else:
                self._urls, self._source = found
        return None if self._streams is not None else self._source

    def archives(self) -> TarSource:
        """Return the archives, or raise a ConfigError if they are read as streams."""
        source = self.open()
        if source is None:
            raise ConfigError(f"the archives are read as streams, without a state: {self._streams}", key="urls")
        return source

    def plan(self) -> staged.PipelineSplit:
        """Return the stages after the samples are read."""
        return staged.plan(self.pipeline[len(self._head) :])

    def place(self) -> tuple[int, int, int, int]:
        """Return rank, number of ranks, worker and number of workers, as they divide the samples."""
        rank, world_size, worker, workers = wds.utils.pytorch_worker_info()
        if not self._by_rank:
            rank, world_size = 0, 1
        return (rank, world_size, worker, workers) if self._by_worker else (rank, world_size, 0, 1)

    def order(self) -> Sampler:
        lengths = self.archives().shard_lengths
        first: Sampler = ShardSequential(lengths, self._seed) if self._shuffles else Sequential(sum(lengths))
        return self.plan().order(first, self._seed)

    def epoch_order(self, order: Sampler) -> tuple[Sampler, int]:
        """Return the order of all passes of an epoch, and their number."""
        if (limit := self.limit) is not None and len(order):
            rows = limit * self.plan().rows * self.place()[1]
            passes = -(-rows // len(order))
            return Subset(Repeat(order, passes), slice(rows)), passes
        passes = 1 if self.repetitions == sys.maxsize else self.repetitions
        return (order if passes == 1 else Repeat(order, passes)), passes

    def share(self, order: Sampler, start: int, worker: int, workers: int) -> staged.Share:
        """Return the part of `order` that a worker reads, of all that follows the position `start`."""
        (rank, world_size, *_), found = self.place(), self.plan()
        even = world_size > 1 and found.batching is not None and not found.batching.partial
        start, chunk = start % max(1, len(order)), self._batch * found.rows
        return staged.Share(order, start, rank, world_size, worker, workers, chunk, even)

    def first_epoch(self) -> int:
        """Return the epoch of a new iteration; torch's DataLoader does not tell it to its workers."""
        info = sys.modules["torch"].utils.data.get_worker_info() if "torch" in sys.modules else None
        if info is None or self._knows_epoch or not (self._shuffles or self.plan().orders):
            return self._epoch
        self._knows_epoch = True
        if self.place()[1] == 1:
            return (info.seed - info.id) % 2**31  # the same in all workers, and another one in each epoch
        message = "every epoch has the same order, because workers of torch's DataLoader do not know the epoch: use the"
        warnings.warn(f"{message} WebLoader of this module, or call set_epoch(n) before each epoch", stacklevel=3)
        return self._epoch

    def one_pass(self, run: staged.PassState) -> Iterator[Any]:
        if self.open() is None:
            yield from self.iterator1()
            return
        order, found, workers = self.order(), self.plan(), self.place()[3]
        if not len(order) and self._checks_empty:
            raise ValueError(f"there are no samples in {self._urls}: empty_check=False allows that")
        epoch = run.epoch * self.epoch_order(order)[1] + run.passes
        if self.repetitions == sys.maxsize and self.limit is None:
            epoch = run.epoch + run.passes
            self._epoch = epoch + 1
        lane, begun = run.last, run.progress[run.last].used if run.resumed and run.offsets else 0
        meter = staged.Meter(begun)
        start = run.start(order, run.passes) if run.resumed else 0
        values: Any = meter.head(self._read(replace(self.share(order, start, lane, workers), begun=begun), epoch))
        for position, stage in enumerate(found.stages):
            batches = position == found.batch
            values = meter.batches(values, stage, found.rows) if batches else self.invoke(stage, values)
        for value in values:
            used = meter.read if meter.batched is None else meter.batched
            run.progress[lane] = staged.Progress(lane, run.passes, used, run.given + 1)
            yield value

    def _read(self, share: staged.Share, epoch: int) -> Iterator[dict[str, Any]]:
        if not len(share):
            return
        settings: Any = {"sampler": share, "batch_size": _SAMPLES_AT_ONCE, "rank": 0, "world_size": 1}
        with Loader(self.archives(), transform=self._named(), collate=list, epochs=epoch + 1, **settings) as loader:
            loader.set_epoch(epoch)
            try:
                for samples in loader:
                    yield from samples
            except errors.WorkerError as error:
                raise error.__cause__ or error from None

    def _named(self) -> staged.Named:
        paths = [(url, None if is_url(local_path(url)) else local_path(url)) for url in self._urls]
        return staged.Named(paths, list(itertools.accumulate(self.archives().shard_lengths)))

    def loader(self, **options: Any) -> Loader[Any]:
        """Return a `dataload.Loader` of the same batches, for its workers, statistics and bad records.

        States go from one to the other. With ``repeat(n)``, a batch may span two passes. Without ``batched``, batches
        are lists of one sample. A ConfigError if a stage does not work on single samples.
        """
        source, found = self.archives(), self.plan()
        if found.inexact is not None:
            raise ConfigError(f"{found.inexact} does not work on single samples, as a Loader does", key="loader")
        batching, (rank, world_size, *_) = found.batching, self.place()
        cut = len(found.stages) if found.batch is None else found.batch
        before, after = found.stages[:cut], found.stages[cut + 1 :]
        settings: dict[str, Any] = {
            "batch_size": found.rows,
            "sampler": self.epoch_order(self.order())[0],
            "tail": "partial" if batching is None or batching.partial else "drop",
            "seed": self._seed,
            "transform": [self._named(), *([staged.Single(before)] if before else [])],
            "collate": batching.collate if batching else list,
            "batch_transform": staged.Single(after) if after else None,
            "rank": rank,
            "world_size": world_size,
        }
        return Loader(source, **{**settings, **options})

    def dataset(self) -> "WebDataset":
        return self

    def state_at(
        self, epoch: int, position: int = 0, offsets: Sequence[staged.Progress] = (), **counts: int
    ) -> dict[str, Any]:
        """Return the state at a position; `counts` are what the position and `offsets` do not tell."""
        order, found = self.order(), self.plan()
        whole, passes = self.epoch_order(order)
        least = found.rows * self.place()[1] if found.batching and not found.batching.partial else 1  # for a value
        length, plain = len(order), not counts and not offsets
        if plain and passes == 1 and length:  # each pass of an endless epoch counts as one
            epoch, position = epoch + position // length, position % length
        if plain and position > length * passes - least:
            epoch, position = epoch + bool(position), 0
        source, own, reached = self.archives().fingerprint(), fingerprint(whole), min(position, len(whole))
        state = LoaderState(epoch=epoch, position=reached, length=len(whole), source=source, order=own).to_json()
        more = {"counts": {"position": position, **counts}, "parts": [list(offset) for offset in offsets]}
        return state if plain else {**state, "webdataset": more}

    def run_at(self, state: Mapping[str, Any]) -> staged.PassState:
        """Return the iteration that continues at a state, also one of a `dataload.Loader`."""
        values = dict(state)
        more = values.pop("webdataset", {"counts": {}, "parts": []})
        saved = LoaderState.from_json(values)
        saved.check(LoaderState.from_json(self.state_at(saved.epoch)))
        try:
            counts = {str(name): int(count) for name, count in more["counts"].items()}
            offsets = [staged.Progress(*map(int, offset)) for offset in more["parts"]]
            if min(itertools.chain((0,), counts.values(), *offsets)) < 0:
                raise ValueError
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            message = f"webdataset in the state must have counts and parts, found {more!r}"
            raise errors.StateMismatchError(message) from error
        return staged.PassState(saved.epoch, counts.get("position", saved.position), offsets, counts)

    def inexact(self) -> Any:
        return self.plan().inexact

    def counts(self, run: staged.PassState) -> dict[str, int]:
        return {} if self.limit is None else {"given": run.given}

    def enter(self, run: staged.PassState) -> None:
        _, world_size, worker, workers = self.place()
        run.last = worker
        run.check(workers)
        if run.offsets:
            offset = run.offsets[worker % len(run.offsets)]
            run.last, run.passes, run.given = offset.lane, offset.number, offset.given
        elif run.position:
            run.passes = run.position // max(1, len(self.order()))
            run.given = run.counts.get("given", run.position // (self.plan().rows * world_size))

    def close(self) -> None:
        """Close the archives, and the stages that can be closed."""
        if self._source is not None:
            self._source.close()
        super().close()


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


class WebLoader(staged.Resumable, base("DataPipeline")):
    """WebDataset's wrapper of torch's DataLoader, with all of its arguments.

    Over a `WebDataset` of this module whose stages work on single samples up to ``batched``, the batches are the same
    for any number of workers, and `state_dict` is exact.
    """

    def __init__(self, dataset: Any, *args: Any, **kw: Any) -> None:
        torch_data = load_optional("torch.utils.data", needed_by="WebLoader", extra="torch")
        given = staged.arguments(torch_data.DataLoader, dataset, *args, **kw)
        self.workers: int = max(1, given["num_workers"])
        self.data: WebDataset | None = None
        if isinstance(dataset, WebDataset):
            size = given["batch_size"]
            self.data = dataset.fed(1 if size is None else size)
            own = torch_data.default_convert if size is None else torch_data.default_collate
            collate = given["collate_fn"] or own
            given.update(dataset=_Feeder(self.data), collate_fn=_Collate(collate, is_batch=size is not None))
            self.allow_pickle: bool = dataset.allow_pickle
        super().__init__(torch_data.DataLoader(**given))

    def one_pass(self, run: staged.PassState) -> Iterator[Any]:
        loader: Any = self.pipeline[0]
        if (data := self.data) is not None:
            data.open()  # here, so that workers inherit it
            data.set_epoch(run.epoch)
            if run.resumed:
                data._next = staged.PassState(run.epoch, run.position, run.offsets, run.counts)
                loader._iterator = None  # workers that persist have begun elsewhere
            loader = _received(run, loader)
        values = iter(loader)
        for stage in self.pipeline[1:]:
            values = self.invoke(stage, values)
        yield from values

    def end_pass(self, run: staged.PassState) -> None:
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
        return inexact or next((stage for stage in self.pipeline[1:] if not staged.is_single(stage)), None)

    def counts(self, run: staged.PassState) -> dict[str, int]:
        own = {} if self.repetitions == 1 else {"loader_passes": run.passes, "loader_given": run.given}
        given = max((offset.given for offset in run.progress.values()), default=run.counts.get("given", 0))
        return own if self.dataset().limit is None else {**own, "given": given}

    def enter(self, run: staged.PassState) -> None:
        run.check(self.workers)
        run.passes, run.given = run.counts.get("loader_passes", 0), run.counts.get("loader_given", 0)


def _received(run: staged.PassState, values: Any) -> Iterator[Any]:
    """Yield the values of a loader, and keep their offsets."""
    for offset, value in values:
        if len(offset):
            found = staged.Progress(*map(int, offset))
            run.progress[found.lane], run.last = found, found.lane
        yield value
