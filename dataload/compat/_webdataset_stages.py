"""Which stages of a WebDataset pipeline are an order, which work on single samples, and where its position is exact."""

import bisect
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dataload._util.randomness import derive_key
from dataload.compat._webdataset_io import wds
from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, Subset
from dataload.transforms import SampleContext
from dataload.types import Int64Array, Sampler

_FILTER = wds.filters.FilterFunction
_NAMES = "associate decode extract_keys map map_dict map_tuple rename rename_keys to_tuple xdecode"
_SINGLE = frozenset(getattr(wds.filters, name).f for name in _NAMES.split())
_DROPPING = frozenset((wds.filters.select.f, wds.filters.rsample.f))


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
    inexact: Any = None  # the first stage that holds samples back or counts them

    @property
    def batching(self) -> Batching | None:
        """The arguments of ``batched``."""
        if self.batch is None:
            return None
        given = _arguments(self.stages[self.batch])
        return Batching(given["batchsize"], given["collation_fn"] or list, given["partial"])

    def order(self, order: Sampler, seed: int) -> Sampler:
        """Return `order` after the stages that change it."""
        for number, stage in enumerate(self.orders):
            if _is(stage, wds.filters.slice):
                order = Subset(order, slice(*stage.args))
                continue
            given = vars(stage) if isinstance(stage, wds.detshuffle) else _arguments(stage)
            own = given["seed"]
            if own is None:  # pools with equal seeds would draw the same slots
                own = int(derive_key(seed, "webdataset", number, words=1)[0])
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
            found = replace(found, batch=len(found.stages))
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


def _arguments(stage: Any) -> dict[str, Any]:
    bound = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
    bound.apply_defaults()
    return bound.arguments


class Meter:
    """Counts the samples that a pass has read, and those that the values it has given were made of."""

    def __init__(self, begun: int) -> None:
        self._read = self._used = begun
        self._entered: list[int] = []
        self._batched = False

    @property
    def used(self) -> int:
        """Samples that are not needed any more."""
        return self._used if self._batched else self._read

    def head(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Count the samples that are read."""
        for sample in samples:
            self._read += 1
            yield sample

    def batches(self, samples: Iterable[Any], stage: Callable[[Any], Iterable[Any]], size: int) -> Iterator[Any]:
        """Run ``batched``, which reads one sample more than it gives."""
        self._batched = True
        for batch in stage(self._entering(samples)):
            self._used = self._entered[:size][-1]
            del self._entered[:size]
            yield batch

    def _entering(self, samples: Iterable[Any]) -> Iterator[Any]:
        for sample in samples:
            self._entered.append(self._read)
            yield sample


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
        if path is not None:
            made["__local_path__"] = path
        made.update(names)
        return made
