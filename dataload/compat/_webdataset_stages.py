"""The stages of WebDataset pipelines, the orders in them, and the positions and states of iterations."""

from __future__ import annotations

import bisect
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from dataload._util.randomness import derive_word
from dataload.compat._webdataset_io import FluidInterface, wds
from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, Subset
from dataload.transforms import SampleContext
from dataload.types import Int64Array, Sampler

_FILTER = wds.filters.FilterFunction
_NAMES = "associate decode extract_keys map map_dict map_tuple rename rename_keys to_tuple xdecode"
_SINGLE = frozenset(getattr(wds.filters, name).f for name in _NAMES.split())
_DROPPING = frozenset((wds.filters.select.f, wds.filters.rsample.f))


def arguments(function: Callable[..., Any], *args: Any, **kw: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults."""
    bound = inspect.signature(function).bind(*args, **kw)
    bound.apply_defaults()
    return bound.arguments


def _arguments(stage: Any) -> dict[str, Any]:
    return arguments(stage.f, None, *stage.args, **stage.kw)


class Batching(NamedTuple):
    """The arguments of ``batched``."""

    size: int
    collate: Callable[[Sequence[Any]], Any]
    partial: bool


@dataclass(frozen=True, slots=True)
class PipelineSplit:
    """A pipeline after its samples are read: stages that change the order, and the others."""

    orders: tuple[Any, ...] = ()
    stages: tuple[Any, ...] = ()
    batch: int | None = None  # the position in `stages` of the first ``batched``
    batching: Batching | None = None
    inexact: Any = None  # the first stage that holds samples back or counts them

    @property
    def rows(self) -> int:
        """Samples in a value."""
        return self.batching.size if self.batching else 1

    def order(self, order: Sampler, seed: int) -> Sampler:
        """Return `order` after the stages that change it."""
        for number, stage in enumerate(self.orders):
            if _is(stage, wds.filters.slice):
                order = Subset(order, slice(*stage.args))
                continue
            given = vars(stage) if isinstance(stage, wds.detshuffle) else _arguments(stage)
            own = given["seed"]
            if own is None:  # pools with equal seeds would draw the same slots
                own = int(derive_word(seed, "webdataset", number))
            order = PoolShuffle(order, given["bufsize"], int(own))
        return order


def plan(stages: Iterable[Any]) -> PipelineSplit:
    """Sort the stages of a pipeline. What works on single samples may change places with a shuffle."""
    found, keeps_all = PipelineSplit(), True
    for stage in stages:
        early = found.batch is None and found.inexact is None
        if early and (_is_pool(stage) or (keeps_all and _is_slice(stage))):
            found = replace(found, orders=(*found.orders, stage))
            continue
        if early and _is(stage, wds.filters.batched):
            given = _arguments(stage)
            batching = Batching(given["batchsize"], given["collation_fn"] or list, given["partial"])
            found = replace(found, batch=len(found.stages), batching=batching)
        elif found.inexact is None and not is_single(stage):
            found = replace(found, inexact=stage)
        keeps_all = keeps_all and _keeps(stage)
        found = replace(found, stages=(*found.stages, stage))
    return found


def is_single(stage: Any) -> bool:
    """Return whether a stage makes at most one sample of each, independently of the others."""
    return isinstance(stage, _FILTER) and stage.f in _SINGLE | _DROPPING


def _keeps(stage: Any) -> bool:
    """Return whether a stage makes exactly one sample of each."""
    if not is_single(stage) or stage.f in _DROPPING:
        return False
    handler = _arguments(stage).get("handler")
    raises = handler is None or handler in (wds.reraise_exception, wds.filters.reraise_exception)
    return raises and (stage.f is not wds.filters.map.f or isinstance(stage.args[0], wds.Decoder))


def _is(stage: Any, filter_: Any) -> bool:
    return isinstance(stage, _FILTER) and stage.f is filter_.f


def _is_pool(stage: Any) -> bool:
    if isinstance(stage, wds.detshuffle):
        return stage.bufsize > 0
    return _is(stage, wds.filters.shuffle) and _arguments(stage)["rng"] is None and _arguments(stage)["bufsize"] > 0


def _is_slice(stage: Any) -> bool:
    return _is(stage, wds.filters.slice) and all(bound is None or bound >= 0 for bound in stage.args)


class Meter:
    """Counts the samples that a pass has read, and the samples from which its results were made."""

    def __init__(self, begun: int) -> None:
        self.read = begun
        self.batched: int | None = None  # samples read up to the end of the last batch; None without ``batched``

    def head(self, samples: Iterable[Any]) -> Iterator[Any]:
        for sample in samples:
            self.read += 1
            yield sample

    def batches(self, samples: Iterable[Any], stage: Callable[[Any], Iterable[Any]], size: int) -> Iterator[Any]:
        """Run ``batched``, which reads one sample more than it gives."""
        entered: deque[int] = deque()

        def entering() -> Iterator[Any]:
            for sample in samples:
                entered.append(self.read)
                yield sample

        for batch in stage(entering()):
            for _ in range(min(size, len(entered))):
                self.batched = entered.popleft()
            yield batch


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an order that one worker of one rank reads: every `workers`-th chunk of what the rank reads.

    Chunks (`chunk` samples) are batches, and torch takes the batches of its workers in turn, so the order of the
    batches is the same for any number of workers. All ranks have read `start` positions of `parent`; this part has read
    `begun` samples. With `even`, every rank reads the same number of samples.
    """

    parent: Sampler
    start: int = 0
    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1
    chunk: int = 1
    even: bool = False
    begun: int = 0

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return getattr(self.parent, "records", len(self.parent))

    def __len__(self) -> int:
        left = max(0, len(self.parent) - self.start)
        of_rank = left // self.world_size if self.even else -(-(left - self.rank) // self.world_size)
        chunks, rest = divmod(max(0, of_rank), self.chunk)
        own = max(0, -(-(chunks - self.worker) // self.workers)) * self.chunk
        return own + (rest if chunks % self.workers == self.worker else 0) - self.begun

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        chunk, offset = np.divmod(positions + self.begun, self.chunk)
        of_rank = (chunk * self.workers + self.worker) * self.chunk + offset
        return self.parent.indices(self.start + of_rank * self.world_size + self.rank, epoch=epoch)


class Single:
    """Stages that work on single samples, as one function. It pickles if the user's functions do."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        self.__qualname__ = " | ".join(stage.f.__name__.strip("_") for stage in stages)

    def __call__(self, sample: Any) -> Any:
        made: Iterable[Any] = iter((sample,))
        for stage in self._stages:
            made = stage(made)
        for value in made:
            return value
        raise ConfigError(
            "a stage has left out a sample, and batches of a Loader have fixed samples: iterate over the pipeline "
            "itself, or over a WebLoader, which fill their batches with the next samples",
            key="loader",
        )


class Named:
    """Makes of a record the sample that WebDataset reads; `ends` are cumulative numbers of samples in the archives."""

    def __init__(self, urls: Sequence[tuple[str, str | None]], ends: Sequence[int]) -> None:
        self._urls, self._ends = urls, ends

    def __call__(self, sample: dict[str, Any], context: SampleContext) -> dict[str, Any]:
        """Return the sample, with its names in WebDataset's order."""
        url, path = self._urls[bisect.bisect_right(self._ends, context.index)]
        names = iter(sample.items())
        made = dict((next(names), ("__url__", url), *itertools.islice(names, 1)))
        return {**made, **({} if path is None else {"__local_path__": path}), **dict(names)}


class Progress(NamedTuple):
    """The position of a worker."""

    lane: int  # which worker's share it reads; see `Share`
    number: int = 0  # of the pass
    used: int = 0  # samples of the share
    given: int = 0  # values in all passes


@dataclass(eq=False)
class PassState:
    """An iteration over a data set, or over a loader of it."""

    epoch: int
    position: int = 0  # where it begins: samples of all ranks in that epoch, over all passes
    # How far each worker is from there, if that differs; the one first that gives the next value.
    offsets: Sequence[Progress] = ()
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    passes: int = 0
    given: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.resumed: bool = self.position > 0 or len(self.offsets) > 0
        self.progress: dict[int, Progress] = {offset.lane: offset for offset in self.offsets}  # that gave a value
        self.last: int = self.offsets[0].lane - 1 if self.offsets else 0  # the lane of the last value

    def check(self, workers: int) -> None:
        """Raise a ConfigError unless there are as many workers as have offsets."""
        if self.offsets and (saved := self.counts.get("workers", 0)) != workers:
            raise ConfigError(
                f"the state is of {saved} workers at different positions (since samples were left out, or because of "
                f"repeat() or with_epoch() before WebLoader), and here are {workers}: use as many as before",
                key="num_workers",
            )

    def start(self, order: Sampler, number: int) -> int:
        """Return the position where a pass begins."""
        before, start = divmod(self.position, max(1, len(order)))
        return start if number == before else 0

    def reached(self, data: Any, workers: int) -> tuple[int, Sequence[Progress]]:
        """Return the position of the consumer; and how far each worker is from there, if that differs."""
        if not self.progress:
            return self.position, ()
        if data.place()[3] > 1:  # in a worker of torch's, which knows only its own lane
            return self.position, [self.progress[self.last]]
        order, lanes = data.order(), [(self.last + 1 + turn) % workers for turn in range(workers)]
        offsets = [self.progress.get(lane, Progress(lane)) for lane in lanes]
        shares = [data.share(order, self.start(order, offset.number), offset.lane, workers) for offset in offsets]
        number, chunk, used = offsets[0].number, shares[0].chunk, offsets[0].used
        if workers > 1:
            chunks = sum(-(-offset.used // chunk) for offset in offsets)
            expected = [min(chunk * -(-(chunks - share.worker) // workers), len(share)) for share in shares]
            if data.repetitions != 1 or [offset.used for offset in offsets] != expected:
                return self.position, offsets
            used = chunks * chunk
        reached = self.start(order, number) + used * shares[0].world_size
        return number * len(order) + min(reached, len(order)), ()


class Resumable(FluidInterface):
    """The iterations and the state of a `WebDataset` and of a `WebLoader`.

    Each has `dataset`, which gives the samples; `enter`, which sets where a run begins; `one_pass`; `counts`, what the
    position does not tell; and `inexact`, the first stage that does not work on single samples.
    """

    workers = 1
    run: PassState | None = None  # the last iteration
    _next: PassState | None = None  # where the next one begins, if that was set
    _epoch = 0  # of the next one
    _knows_epoch = False  # in a worker, too

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`."""
        run = self.run = self._next or PassState(self.first_epoch())
        self._next, self._epoch = None, run.epoch + 1
        self.enter(run)
        return self._values(run)

    def _values(self, run: PassState) -> Iterator[Any]:
        limit = self.limit
        while run.passes < self.repetitions and (limit is None or run.given < limit):
            before = run.given
            for value in self.one_pass(run):
                run.given += 1
                yield value
                if run.given == limit:
                    break
            if run.given == before and not run.resumed:
                break
            self.end_pass(run)
        run.over = True

    def end_pass(self, run: PassState) -> None:
        run.passes, run.resumed = run.passes + 1, False

    def first_epoch(self) -> int:
        return self._epoch

    @property
    def limit(self) -> int | None:
        """Values of an epoch, if ``with_epoch`` or ``repeat(nbatches=)`` says so."""
        return self.nsamples if self.repetitions != 1 and self.nsamples > 0 else None

    def compose(self, *args: Any) -> Self:
        """Return a copy of the pipeline with more stages."""
        made = super().compose(*args)
        made.run = made._next = None
        return made

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration serve `epoch`, unless it was set to a position of it."""
        if self._next is None or self._next.epoch != epoch:
            self._next, self._epoch = None, epoch
        self._knows_epoch = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer, for JSON; a ConfigError says why if it is not exact or unknown."""
        data, run = self.dataset(), self._next or self.run
        if run is None or run.over:
            return data.state_at(self._epoch)
        if self.limit is not None and run.given >= self.limit:
            return data.state_at(run.epoch + 1)
        inexact = self.inexact()
        if inexact is not None and run.progress:
            raise ConfigError(
                f"{inexact} holds samples back or counts them, so there is no exact position within an epoch: take "
                "the state between epochs, or use shuffle() before batched(), and stages that work on single samples",
                key="state_dict",
            )
        position, offsets = run.reached(data, self.workers)
        workers = {"workers": max(self.workers, data.place()[3])} if offsets else {}
        return data.state_at(run.epoch, position, offsets, **self.counts(run), **workers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, with the same stages. Reads no sample."""
        run = self._next = self.dataset().run_at(state)
        self.enter(run)
