"""WebDataset's pipeline over an order that is computed, so that it can resume."""

import copy
import inspect
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from dataload._util.fingerprint import fingerprint
from dataload.compat._webdataset_io import Opener, base, check_pipe, is_remote, wds
from dataload.compat._webdataset_stages import (
    Meter,
    Named,
    PassState,
    PipelineSplit,
    Progress,
    Resumable,
    Share,
    Single,
    plan,
)
from dataload.errors import (
    ConfigError,
    CorruptFileError,
    SourceError,
    SourceNotFoundError,
    StateMismatchError,
    StoreError,
    WorkerError,
)
from dataload.loader.loader import Loader
from dataload.loader.state import LoaderState
from dataload.samplers import Repeat, Sequential, ShardSequential, Subset
from dataload.sources.tar.reader import TarSource
from dataload.storage import Remote, is_url, local_path
from dataload.types import Sampler

_SAMPLES_AT_ONCE = 16  # that are read together


class WebDataset(Resumable, base("WebDataset")):
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
        bound = inspect.signature(wds.WebDataset.__init__).bind(self, urls, *args, **kw)
        bound.apply_defaults()
        given = bound.arguments
        super().__init__(urls, *args, **kw)
        self.allow_pickle = allow_pickle
        self._remote = None if storage_options is None and remote is None else Remote.of(storage_options, remote)
        self._seed = 0 if given["seed"] is None else int(given["seed"])
        self._shuffles, self._checks_empty = bool(given["shardshuffle"]), given["empty_check"]
        self._urls = [os.fspath(url) for url in getattr(self.pipeline[0], "urls", ())]
        check_pipe(self._urls, allow_pipe)
        self._streams = _why_streams(given, self.pipeline, self._urls)
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
            found = _open_archives(self._urls, self._remote, self._handler)
            if isinstance(found, str):
                self._streams = found
                warnings.warn(
                    f"the archives are read as streams, in WebDataset's own order and without a state: {found}",
                    stacklevel=2,
                )
            else:
                self._urls, self._source = found
        return None if self._streams is not None else self._source

    def archives(self) -> TarSource:
        """Return the archives, or raise a ConfigError if they are read as streams."""
        source = self.open()
        if source is None:
            raise ConfigError(f"the archives are read as streams, without a state: {self._streams}", key="urls")
        return source

    def plan(self) -> PipelineSplit:
        """Return the stages after the samples are read."""
        return plan(self.pipeline[len(self._head) :])

    def place(self) -> tuple[int, int, int, int]:
        """Return rank, number of ranks, worker and number of workers, as they divide the samples."""
        rank, world_size, worker, workers = wds.utils.pytorch_worker_info()
        if not self._by_rank:
            rank, world_size = 0, 1
        return (rank, world_size, worker, workers) if self._by_worker else (rank, world_size, 0, 1)

    def order(self) -> Sampler:
        """Return the order of a pass."""
        lengths = self.archives().shard_lengths
        first: Sampler = ShardSequential(lengths, self._seed) if self._shuffles else Sequential(sum(lengths))
        return self.plan().order(first, self._seed)

    def epoch_order(self, order: Sampler) -> tuple[Sampler, int]:
        """Return the order of all passes of an epoch, and their number."""
        batching, limit = self.plan().batching, self.limit
        if limit is not None and len(order):
            rows = limit * (batching.size if batching else 1) * self.place()[1]
            passes = -(-rows // len(order))
            return Subset(Repeat(order, passes), slice(rows)), passes
        passes = 1 if self.repetitions == sys.maxsize else self.repetitions
        return (order if passes == 1 else Repeat(order, passes)), passes

    def share(self, order: Sampler, start: int, worker: int, workers: int) -> Share:
        """Return the part of `order` that a worker reads, of all that follows the position `start`."""
        rank, world_size = self.place()[:2]
        batching = self.plan().batching
        return Share(
            order,
            start=start % max(1, len(order)),
            rank=rank,
            world_size=world_size,
            worker=worker,
            workers=workers,
            chunk=self._batch * (batching.size if batching else 1),
            even=world_size > 1 and batching is not None and not batching.partial,
        )

    def first_epoch(self) -> int:
        """Return the epoch of a new iteration; torch's DataLoader does not tell it to its workers."""
        info = sys.modules["torch"].utils.data.get_worker_info() if "torch" in sys.modules else None
        if info is None or self._knows_epoch or not (self._shuffles or self.plan().orders):
            return self._epoch
        self._knows_epoch = True
        if self.place()[1] == 1:
            return (info.seed - info.id) % 2**31  # the same in all workers, and another one in each epoch
        warnings.warn(
            "every epoch has the same order, because workers of torch's DataLoader do not know the epoch: use the "
            "WebLoader of this module, or call set_epoch(n) before each epoch",
            stacklevel=3,
        )
        return self._epoch

    def one_pass(self, run: PassState) -> Iterator[Any]:
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
        meter = Meter(begun)
        start = run.start(order, run.passes) if run.resumed else 0
        values: Any = meter.head(self._read(replace(self.share(order, start, lane, workers), begun=begun), epoch))
        for position, stage in enumerate(found.stages):
            if found.batching is not None and position == found.batch:
                values = meter.batches(values, stage, found.batching.size)
            else:
                values = self.invoke(stage, values)
        for value in values:
            run.progress[lane] = Progress(lane, run.passes, meter.used, run.given + 1)
            yield value

    def _read(self, share: Share, epoch: int) -> Iterator[dict[str, Any]]:
        if not len(share):
            return
        loader: Loader[list[Any]] = Loader(
            self.archives(),
            batch_size=_SAMPLES_AT_ONCE,
            sampler=share,
            transform=self._named(),
            collate=list,
            epochs=epoch + 1,
            rank=0,
            world_size=1,
        )
        loader.set_epoch(epoch)
        with loader:
            try:
                for samples in loader:
                    yield from samples
            except WorkerError as error:
                raise error.__cause__ or error from None

    def _named(self) -> Named:
        paths = [(url, None if is_url(local_path(url)) else local_path(url)) for url in self._urls]
        return Named(paths, list(itertools.accumulate(self.archives().shard_lengths)))

    def loader(self, **options: Any) -> Loader[Any]:
        """Return a `dataload.Loader` of the same batches, for its workers, statistics and bad records.

        States go from one to the other. With ``repeat(n)``, a batch may span two passes. Without ``batched``, batches
        are lists of one sample. A ConfigError if a stage does not work on single samples.
        """
        source, found = self.archives(), self.plan()
        if found.inexact is not None:
            raise ConfigError(f"{found.inexact} does not work on single samples, as a Loader does", key="loader")
        batching = found.batching
        cut = len(found.stages) if found.batch is None else found.batch
        rank, world_size = self.place()[:2]
        settings: dict[str, Any] = {
            "batch_size": batching.size if batching else 1,
            "sampler": self.epoch_order(self.order())[0],
            "tail": "partial" if batching is None or batching.partial else "drop",
            "seed": self._seed,
            "transform": [self._named(), *([Single(found.stages[:cut])] if cut else [])],
            "collate": batching.collate if batching else list,
            "batch_transform": Single(found.stages[cut + 1 :]) if found.stages[cut + 1 :] else None,
            "rank": rank,
            "world_size": world_size,
        }
        return Loader(source, **{**settings, **options})

    def dataset(self) -> "WebDataset":
        return self

    def state_at(
        self, epoch: int, position: int = 0, offsets: Sequence[Progress] = (), **counts: int
    ) -> dict[str, Any]:
        """Return the state at a position; `counts` are what the position and `offsets` do not tell."""
        order = self.order()
        whole, passes = self.epoch_order(order)
        batching, world_size = self.plan().batching, self.place()[1]
        least = batching.size * world_size if batching and not batching.partial else 1  # samples that make a value
        length, plain = len(order), not counts and not offsets
        if plain and passes == 1 and length:  # each pass of an endless epoch counts as one
            epoch, position = epoch + position // length, position % length
        if plain and position > length * passes - least:
            epoch, position = epoch + bool(position), 0
        state = LoaderState(
            epoch=epoch,
            position=min(position, len(whole)),
            length=len(whole),
            source=self.archives().fingerprint(),
            order=fingerprint(whole),
        ).to_json()
        more = {"counts": {"position": position, **counts}, "parts": [list(offset) for offset in offsets]}
        return state if plain else {**state, "webdataset": more}

    def run_at(self, state: Mapping[str, Any]) -> PassState:
        """Return the iteration that continues at a state, also one of a `dataload.Loader`."""
        values = dict(state)
        more = values.pop("webdataset", {"counts": {}, "parts": []})
        saved = LoaderState.from_json(values)
        saved.check(LoaderState.from_json(self.state_at(saved.epoch)))
        try:
            counts = {str(name): int(count) for name, count in more["counts"].items()}
            offsets = [Progress(*map(int, offset)) for offset in more["parts"]]
            if min(itertools.chain((0,), counts.values(), *offsets)) < 0:
                raise ValueError
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StateMismatchError(f"webdataset in the state must have counts and parts, found {more!r}") from error
        return PassState(saved.epoch, counts.get("position", saved.position), offsets, counts)

    def inexact(self) -> Any:
        return self.plan().inexact

    def counts(self, run: PassState) -> dict[str, int]:
        return {} if self.limit is None else {"given": run.given}

    def enter(self, run: PassState) -> None:
        _, world_size, worker, workers = self.place()
        run.last = worker
        run.check(workers)
        if run.offsets:
            offset = run.offsets[worker % len(run.offsets)]
            run.last, run.passes, run.given = offset.lane, offset.number, offset.given
        elif run.position:
            batching = self.plan().batching
            run.passes = run.position // max(1, len(self.order()))
            run.given = run.counts.get("given", run.position // ((batching.size if batching else 1) * world_size))

    def close(self) -> None:
        """Close the archives, and the stages that can be closed."""
        if self._source is not None:
            self._source.close()
        super().close()


def _why_streams(given: Mapping[str, Any], pipeline: Sequence[Any], urls: Sequence[str]) -> str | None:
    """Return why archives cannot be read at random, as far as the arguments tell."""
    if type(pipeline[0]) is not wds.SimpleShardList:
        return f"{type(pipeline[0]).__name__} chooses them"
    for name in ("select_files", "rename_files"):
        if given[name] is not None:
            return f"{name} works on files"
    for name, known in (
        ("nodesplitter", (None, wds.split_by_node, wds.single_node_only)),
        ("workersplitter", (None, False, wds.split_by_worker)),
    ):
        if given[name] not in known:
            return f"{name} chooses them"
    if "GOPEN_REWRITE" in os.environ:
        return "GOPEN_REWRITE is set"
    for url in urls:
        if url == "-" or url.startswith("pipe:") or (is_url(local_path(url)) and not is_remote(url)):
            return f"{url} is a stream"
    return None


def _open_archives(urls: Sequence[str], remote: Remote | None, handler: Any) -> tuple[Sequence[str], TarSource] | str:
    """Return the archives, without those that are missing if `handler` continues; or why they can only be streams."""
    options: dict[str, Any] = {} if remote is None else {"remote": remote}
    bad_index, index = None, None
    while True:
        source = TarSource([local_path(url) for url in urls], case_sensitive=False, index=index, **options)
        try:
            oddity = source.oddity()
        except SourceNotFoundError as error:
            there = [url for url in urls if local_path(url) != error.path]
            if not 0 < len(there) < len(urls) or not _continues(handler, error):
                return str(error)
            urls = there
        except CorruptFileError as error:
            if index is False:
                return str(error)
            bad_index, index = error, False
        except StoreError:
            raise  # later it may answer, and the order must not depend on that
        except (SourceError, ConfigError) as error:
            return str(error)
        else:
            if oddity is None and bad_index is not None:
                warnings.warn(f"archives are scanned, because an index beside them is bad: {bad_index}", stacklevel=2)
            return oddity or (urls, source)


def _continues(handler: Any, error: Exception) -> bool:
    try:
        return bool(handler(error))
    except Exception:
        return False  # it is raised when its turn comes
