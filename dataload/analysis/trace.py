"""The steps that served a record, and the records that were served in steps of high loss."""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dataload.analysis.shown import has_others, policy_of
from dataload.errors import ConfigError, closest
from dataload.loader.failures import ErrorPolicy
from dataload.loader.loader import Loader
from dataload.samplers.batch import BatchPlanner, Serving, servings_of
from dataload.samplers.common import Float64Array
from dataload.samplers.quality import global_rows
from dataload.sources.base import Source
from dataload.sources.shards import locate
from dataload.types import Int64Array

_BLOCK_ROWS = 1 << 16
_MOST_ADDED = 1 << 22  # losses of records, before they are summed
_MOST_EPOCHS = 100_000


def trace_record(loader: Loader[Any], index: int, epochs: Iterable[int], steps: range | None = None) -> list[Serving]:
    """Return where epochs serve a record on all ranks (by default in all steps), computed without reading data."""
    records = len(loader.source)
    if not 0 <= index < records:
        raise ConfigError(f"index {index} is out of range: the source has {records} records", key="index", value=index)
    found, policy = list[Serving](), policy_of(loader)
    for epoch in () if is_excluded(loader, index) else epochs:
        planner = loader.batch_sampler_of(epoch)
        found += [_moved_up(each, planner, policy) for each in servings_of(planner, index, epoch=epoch, steps=steps)]
    return found


def is_excluded(loader: Loader[Any], index: int) -> bool:
    """Return whether the loader leaves a record out."""
    return len(policy_of(loader).excluded_among(np.array([index]))) > 0


def _moved_up(serving: Serving, planner: BatchPlanner, policy: ErrorPolicy) -> Serving:
    """Return a serving in its row of the batch, which lacks the rows of excluded records."""
    if policy.excluded is None or serving.offset is not None:
        return serving
    plan = planner.with_ranks(rank=serving.rank).plan(serving.step, epoch=serving.epoch)
    gone = 0 if has_others(plan, policy) else len(policy.excluded_among(plan.indices[: serving.row]))
    return replace(serving, row=serving.row - gone)


def find_key(source: Any, key: str) -> int:
    """Return the index of the first record with a key, by looking at the keys of all records before it."""
    keys: set[str] = set()
    for index in range(len(source)):
        found = locate(source, index).key
        if found == key:
            return index
        if found is None and not keys:
            raise ConfigError(f"{source!r} has no keys: give the index of the record", key="key", value=key)
        if found is not None and len(keys) < 10_000:
            keys.add(found)
    raise ConfigError(
        f"no record of {source!r} has the key {key!r}: {closest(key, sorted(keys))}", key="key", value=key
    )


@dataclass(frozen=True, slots=True)
class StepLosses:
    """The loss of some steps, (n,) each."""

    epochs: Int64Array
    steps: Int64Array  # numbered within their epoch
    losses: Float64Array

    @classmethod
    def parse(cls, text: str, loader: Loader[Any]) -> StepLosses:
        """Read CSV with ``step``, ``loss`` and optionally ``epoch``; without it, steps count over all epochs."""
        reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
        names = reader.fieldnames or ()
        for name in ("step", "loss"):
            if name not in names:
                raise ConfigError(f"the losses need the columns 'step' and 'loss', found {list(names)}", key="spike")
        rows: list[tuple[int, int, float]] = []
        firsts = [0]
        for line in reader:
            found = f"losses, line {reader.line_num}: expected integers as step and epoch, and a number as loss, found "
            try:
                step, loss = int(line["step"]), float(line["loss"])
                epoch = int(line["epoch"]) if "epoch" in names else None
            except (TypeError, ValueError):
                raise ConfigError(found + repr({name: line[name] for name in names}), key="spike") from None
            if not np.isfinite(loss):
                raise ConfigError(f"{found}{loss}: remove this line and all lines after it", key="spike")
            rows.append((*_find_step(loader, epoch, step, reader.line_num, firsts), loss))
        if not rows:
            raise ConfigError("the file of losses has no lines", key="spike")
        epochs, steps, losses = zip(*rows, strict=True)
        return cls(np.array(epochs, np.int64), np.array(steps, np.int64), np.array(losses, np.float64))


def _find_step(loader: Loader[Any], epoch: int | None, step: int, line: int, firsts: list[int]) -> tuple[int, int]:
    """Return epoch and step of a line; `firsts`, the first steps of epochs counted over all epochs, grows on demand."""

    def steps_of(epoch: int) -> int:
        return loader.batch_sampler_of(epoch).steps(epoch)

    if epoch is None:
        while firsts[-1] <= step:
            if len(firsts) > _MOST_EPOCHS or not (steps := steps_of(len(firsts) - 1)):
                ended = f"epoch {len(firsts) - 1} begins at step {firsts[-1]}"
                raise ConfigError(f"losses, line {line}: step {step} is out of range: {ended}", key="spike")
            firsts.append(firsts[-1] + steps)
        epoch = max(0, bisect_right(firsts, step) - 1)
        step -= firsts[epoch]
    steps = steps_of(epoch) if epoch >= 0 else 0
    if not 0 <= step < steps:
        raise ConfigError(f"losses, line {line}: epoch {epoch} has {steps} steps, found step {step}", key="spike")
    return epoch, step


@dataclass(frozen=True, slots=True)
class Suspect:
    """A record or a shard, and the steps that had it."""

    index: int  # of the record, or number of the shard
    name: str  # its location
    loss: float  # mean over its steps
    steps: int  # number of steps


@dataclass(frozen=True, slots=True)
class SpikeReport:
    """Records and shards by mean loss, highest first."""

    loss: float  # mean over all steps
    spread: float  # standard deviation over the steps
    records: Sequence[Suspect]
    shards: Sequence[Suspect]  # empty with a single shard


def rank_by_loss(loader: Loader[Any], losses: StepLosses, *, top: int = 20) -> SpikeReport:
    """Rank records and shards by the mean loss of their steps on all ranks; more steps are better evidence."""
    source = loader.source
    lengths = source.shard_lengths if isinstance(source, Source) else ()
    firsts = np.cumsum([0, *lengths])
    of_records, of_shards = _Means(), _Means()
    for places, indices in _served(loader, losses):
        of_records.add(indices, losses.losses[places])
        if len(lengths) > 1:
            places, numbers = _distinct(places, np.searchsorted(firsts, indices, side="right") - 1)
            of_shards.add(numbers, losses.losses[places])
    records = [
        Suspect(index, str(locate(source, index)), mean, steps) for index, mean, steps in of_records.highest(top)
    ]
    shards = [
        Suspect(shard, locate(source, int(firsts[shard])).shard or f"shard {shard}", mean, steps)
        for shard, mean, steps in of_shards.highest(top)
    ]
    return SpikeReport(float(losses.losses.mean()), float(losses.losses.std()), records, shards)


def _served(loader: Loader[Any], losses: StepLosses) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the place of some steps in `losses`, and the distinct records that each of them reads; both (n,)."""
    policy = policy_of(loader)
    for epoch in np.unique(losses.epochs).tolist():
        planner = loader.batch_sampler_of(epoch)
        at = np.flatnonzero(losses.epochs == epoch)
        at = at[np.argsort(losses.steps[at], kind="stable")]
        # Compute consecutive steps together.
        for run in np.split(at, np.flatnonzero(np.diff(losses.steps[at]) != 1) + 1):
            most = max(1, _BLOCK_ROWS // (planner.rows_per_step * planner.world_size))
            for part in np.split(run, range(most, len(run), most)):
                steps = range(int(losses.steps[part[0]]), int(losses.steps[part[-1]]) + 1)
                indices, counts = global_rows(planner, steps, epoch=epoch)
                places, indices = _distinct(np.repeat(part, counts), indices)
                is_read = ~np.isin(indices, policy.excluded_among(indices))
                yield places[is_read], indices[is_read]


def _distinct(one: Int64Array, other: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct pairs of two arrays, (n,) each."""
    order = np.lexsort((other, one))
    one, other = one[order], other[order]
    is_new = np.ones(len(one), np.bool_)
    is_new[1:] = (np.diff(one) != 0) | (np.diff(other) != 0)
    return one[is_new], other[is_new]


class _Means:
    """The mean loss of numbers, of records or shards; what is added is summed now and then, to bound the memory."""

    def __init__(self) -> None:
        self._numbers: Int64Array = np.empty(0, np.int64)
        self._sums: Float64Array = np.empty(0)
        self._counts: Int64Array = np.empty(0, np.int64)
        self._added: list[tuple[Int64Array, Float64Array]] = []
        self._size = 0  # of what was added

    def add(self, numbers: Int64Array, losses: Float64Array) -> None:
        self._added.append((numbers, losses))
        self._size += len(numbers)
        if self._size > max(_MOST_ADDED, len(self._numbers)):
            self._sum()

    def _sum(self) -> None:
        numbers, losses = (
            np.concatenate(arrays) for arrays in zip((self._numbers, self._sums), *self._added, strict=True)
        )
        counts = np.append(self._counts, np.ones(self._size))
        self._numbers, inverse = np.unique(numbers, return_inverse=True)
        self._sums = np.asarray(np.bincount(inverse, losses), np.float64)
        self._counts = np.bincount(inverse, counts).astype(np.int64)
        self._added, self._size = [], 0

    def highest(self, top: int) -> list[tuple[int, float, int]]:
        """Return the numbers with the highest mean, at equal means those with more steps first, with both."""
        self._sum()
        mean = self._sums / self._counts
        order = np.lexsort((-self._counts, -mean))[:top]
        return [*zip(self._numbers[order].tolist(), mean[order].tolist(), self._counts[order].tolist(), strict=True)]
