"""The work of one step: read, transform, collate."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from dataload.collate import default_collate, empty_like
from dataload.errors import (
    ConfigError,
    SourceError,
    WorkerError,
    message_of,
    printable,
    text_of,
    traceback_of,
)
from dataload.executors import worker_name
from dataload.loader.batches import complete
from dataload.loader.rescue import BadRecord, ErrorPolicy, OnError, read_excluded, substitute
from dataload.loader.stages import StageError, Trace, is_for_consumer, run_stage
from dataload.samplers import BatchPlan
from dataload.sources.base import Source, locate, select_fields
from dataload.transforms import SampleContext, Step
from dataload.types import BatchReader, ColumnReader, Int64Array

__all__ = ["Fetcher", "Trace", "make_policy", "shorten"]

_MESSAGE_INDICES = 8
_SOURCE_CHARACTERS = 200
_EXAMPLES_TRIED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Makes the batch of a plan; called by several workers at once.

    How records are read is decided once, when this is made: as columns if the source can and nothing needs single
    samples; else with one `__getitems__`; else one by one. Where that fails and a record may be at fault, records are
    read one by one to find out which.

    Attributes:
        source: Anything with ``__len__`` and ``__getitem__``.
        fields: Fields to keep; None means all.
        transform: Steps applied to each sample.
        collate: Samples to a batch; samples and their `Packing`, where plans have one.
        batch_transform: Steps applied to the batch; their context has the index of the first row.
        seed: The loader's seed.
        policy: What to do about records that fail.
        reads_columns: Whether batches come from ``source.read_batch`` without a sample being made.
    """

    source: Any
    fields: tuple[str, ...] | None
    transform: tuple[Step, ...]
    collate: Callable[..., Any]
    batch_transform: Callable[[Any], Any] | None
    seed: int
    policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    reads_columns: bool = field(init=False)

    def __post_init__(self) -> None:
        stacks = not self.transform and self.collate is default_collate
        object.__setattr__(self, "reads_columns", stacks and isinstance(self.source, ColumnReader))

    def __call__(self, plan: BatchPlan, epoch: int, trace: Trace | None = None) -> Any:
        """The batch of `plan`.

        Args:
            plan: The rows.
            epoch: Number of the epoch.
            trace: Takes what is worth knowing about the step.

        Raises:
            WorkerError: Anything in it failed; names the step, the stage and what it was working on.
        """
        trace = Trace() if trace is None else trace
        trace.status.at(epoch, plan.step)
        try:
            batch = self._batch(plan, epoch, trace)
            if self.batch_transform is not None:
                batch = run_stage(trace, "batch_transform", self.batch_transform, batch)
        except StageError as failure:
            raise self._worker_error(plan, epoch, failure) from failure.error
        except BaseException as error:
            if is_for_consumer(error):
                raise
            raise self._worker_error(plan, epoch, StageError("", error)) from error
        return batch

    @property
    def reads_together(self) -> bool:
        """Whether `together` may give anything."""
        return self.reads_columns and self.batch_transform is None

    def together(self, plans: Sequence[BatchPlan], trace: Trace) -> list[Any] | None:
        """The batches of several steps from one read, where the source gives columns.

        One read of many rows takes the GIL once, and has its fixed costs once. The batches are views of one memory.

        Args:
            plans: The rows.
            trace: Takes how long the read took.

        Returns:
            None where that cannot be done with these, or failed: each step by itself then tells what is wrong with it.
        """
        if not (self.reads_together and all(len(plan.indices) and plan.packing is None for plan in plans)):
            return None
        indices = np.concatenate([plan.indices for plan in plans])
        if self.policy.excluded_among(indices):
            return None
        try:
            columns = run_stage(trace, "read", self.source.read_batch, indices, self.fields)
        except StageError:
            return None
        if not all(isinstance(column, (np.ndarray, list)) for column in columns.values()):
            return None
        batches: list[Any] = []
        stop = 0
        for plan in plans:
            start, stop = stop, stop + len(plan.indices)
            batch = {name: column[start:stop] for name, column in columns.items()}
            batches.append(complete(batch, plan))
        return batches

    def _batch(self, plan: BatchPlan, epoch: int, trace: Trace) -> Any:
        bad = self.policy.excluded_among(plan.indices)
        rows, _ = self._arranged(plan, bad, None, epoch, trace)
        try:
            return self._whole(rows, epoch, trace)
        except StageError as error:
            if not error.record_may_be_at_fault:
                raise
            failure = error if self.policy.action == "raise" else None
        if failure is None:
            return self._salvaged(plan, bad, epoch, trace)
        try:
            raise self._narrowed(failure, rows, trace)
        finally:
            del failure  # its traceback refers to this frame: each would keep the other

    def _whole(self, plan: BatchPlan, epoch: int, trace: Trace) -> Any:
        """The batch of a step of which every record is good."""
        if not len(plan.indices):
            _, sample = self._example(None, epoch, trace)
            return self._collated([sample], plan, trace)
        if self.reads_columns:
            batch = run_stage(trace, "read", self.source.read_batch, plan.indices, self.fields)
            return complete(batch, plan)
        samples = run_stage(trace, "read", self._samples, plan.indices)
        if self.transform:
            samples = run_stage(trace, "transform", self._transformed_all, samples, plan.indices, epoch, trace)
        return self._collated(samples, plan, trace)

    def _salvaged(self, plan: BatchPlan, excluded: set[int], epoch: int, trace: Trace) -> Any:
        """The batch of a step with bad records among its own: without them, or with others in their place."""
        good: dict[int, Any] = {}
        bad: dict[int, BadRecord] = {}
        for index in dict.fromkeys(plan.indices.tolist()):
            if index in excluded:
                continue
            try:
                good[index] = self._sample(index, epoch, trace)
            except StageError as failure:
                if not failure.record_may_be_at_fault:
                    raise
                # Text from here on: a traceback would refer to this frame, and this frame to it.
                bad[index] = self._bad_record(plan.step, epoch, index, failure)
        last = next(reversed(bad.values()), None)
        rows, replaced = self._arranged(plan, excluded | bad.keys(), last, epoch, trace)
        wanted = set(plan.wanted.tolist())
        trace.bad += [replace(bad[index], replaced_by=replaced.get(index)) for index in bad if index in wanted]
        for index in set(rows.indices.tolist()) - good.keys():
            good[index] = self._sample(index, epoch, trace)
        if not len(rows.indices):
            return self._collated([self._example(last, epoch, trace)[1]], rows, trace)
        return self._collated(_own(good, rows.indices), rows, trace)

    def _arranged(
        self, plan: BatchPlan, bad: Collection[int], last: BadRecord | None, epoch: int, trace: Trace
    ) -> tuple[BatchPlan, dict[int, int]]:
        """`plan` without its bad records, or with others in their place; and which those are, by bad record.

        Args:
            plan: The rows.
            bad: Indices of it that are excluded or have failed.
            last: The last that has failed, for messages.
            epoch: Number of the epoch.
            trace: As for `__call__`.
        """
        if not bad:
            return plan, {}
        is_bad = np.isin(plan.indices, list(bad))
        good = plan.indices[~is_bad]
        if plan.columns is not None and (self.policy.action != "replace" or not len(good)):
            filler = int(good[0]) if len(good) else self._example(last, epoch, trace)[0]
            return plan.filled(is_bad, filler), {}
        if self.policy.action != "replace" or plan.packing is not None:
            return plan.without(is_bad), {}
        if len(good):
            replaced = {index: substitute(self.seed, epoch, index, good) for index in bad}
        elif not len(plan.wanted):  # rows that only fill up the batch, which any record can do
            replaced = dict.fromkeys(bad, self._example(last, epoch, trace)[0])
        else:
            reason = f"; the last: {last.text}" if last else ", all of them by exclude="
            error = SourceError(
                f"all {len(bad)} records of the step are bad, and only others of the same step can take their places"
                f"{reason}. Use a greater batch_size, or on_error='skip'"
            )
            raise StageError("on_error='replace'", error)
        indices = np.array([replaced.get(index, index) for index in plan.indices.tolist()], np.int64)
        return replace(plan, indices=indices), replaced

    def _example(self, last: BadRecord | None, epoch: int, trace: Trace) -> tuple[int, Any]:
        """Some good record and its sample: a step without rows still has the fields and shapes of any other."""
        reason = last.text if last else "the source has no other"
        tried = self.policy.examples(len(self.source), _EXAMPLES_TRIED)
        for index in tried:
            try:
                return index, self._sample(index, epoch, trace)
            except StageError as failure:
                if not failure.record_may_be_at_fault:
                    raise
                reason = f"{failure.stage}: {message_of(failure.error)}"
        error = SourceError(
            f"the step has no good record, nor is any of {len(tried)} others that could show the fields of a batch "
            f"without rows; the last: {reason}"
        )
        raise StageError("on_error", error)

    def _sample(self, index: int, epoch: int, trace: Trace) -> Any:
        sample = self._read_one(index, trace)
        if self.transform:
            indices = np.array([index], np.int64)
            (sample,) = run_stage(trace, "transform", self._transformed_all, [sample], indices, epoch, trace)
        return sample

    def _read_one(self, index: int, trace: Trace) -> Any:
        trace.status.at_index(index)
        try:
            return run_stage(trace, "read", self._samples, np.array([index], np.int64))[0]
        except StageError as failure:
            failure.index = index
            raise

    def _narrowed(self, failure: StageError, plan: BatchPlan, trace: Trace) -> StageError:
        """The failure of the first record that fails by itself, where several were read at once."""
        if failure.index is None and not isinstance(failure.error, ConfigError):
            for index in plan.indices.tolist():
                try:
                    self._read_one(index, trace)
                except StageError as found:
                    return found
        return failure

    def _samples(self, indices: Int64Array) -> list[Any]:
        source = self.source
        if isinstance(source, Source):
            samples = source.read(indices)
        elif isinstance(source, BatchReader):
            samples = source.__getitems__(indices.tolist())
        else:
            samples = [source[index] for index in indices.tolist()]
        if len(samples) != len(indices):
            raise SourceError(f"the source's __getitems__ gave {len(samples)} records for {len(indices)} indices")
        if self.fields is None:
            return samples
        return [select_fields(sample, self.fields) for sample in samples]

    def _transformed_all(self, samples: list[Any], indices: Int64Array, epoch: int, trace: Trace) -> list[Any]:
        return [
            self._transformed(sample, SampleContext(index, epoch, self.seed), trace)
            for sample, index in zip(samples, indices.tolist(), strict=True)
        ]

    def _transformed(self, sample: Any, context: SampleContext, trace: Trace) -> Any:
        trace.status.at_index(context.index)
        for step in self.transform:
            try:
                sample = step(sample, context)
            except BaseException as error:
                if is_for_consumer(error):
                    raise
                raise StageError(f"transform {step.name!r}", error, context.index) from error
        return sample

    def _collated(self, samples: list[Any], plan: BatchPlan, trace: Trace) -> Any:
        """The batch of samples: one for each row, or one that shows the fields where there is no row."""
        if plan.packing is not None:
            batch = run_stage(trace, "collate", self.collate, samples, plan.packing)
        else:
            batch = run_stage(trace, "collate", self.collate, samples)
            if not len(plan.indices):
                batch = run_stage(trace, "collate", _without_rows, batch)
        return complete(batch, plan)

    def _bad_record(self, step: int, epoch: int, index: int, failure: StageError) -> BadRecord:
        place = locate(self.source, index)
        path = getattr(failure.error, "path", None)
        return BadRecord(
            epoch=epoch,
            step=step,
            index=index,
            source=_short(self.source),
            shard=path if place.shard is None and isinstance(path, str) else place.shard,
            record=place.record,
            key=place.key,
            stage=failure.stage,
            error=type(failure.error).__name__,
            cause=text_of(failure.error),
        )

    def _worker_error(self, plan: BatchPlan, epoch: int, failure: StageError) -> WorkerError:
        indices = tuple(plan.indices.tolist())
        where = f" in {failure.stage}" if failure.stage else ""
        lines = [f"source: {_short(self.source)}"]
        if failure.index is not None:
            where += f" on index {failure.index}"
            place = locate(self.source, failure.index)
            if place.shard is not None or place.key is not None:
                lines.append(f"place: {printable(str(place))}")
        lines.append(f"indices of the step: {shorten(indices)}")
        return WorkerError(
            "\n  ".join([f"step {plan.step} of epoch {epoch} failed{where}: {message_of(failure.error)}", *lines]),
            step=plan.step,
            epoch=epoch,
            indices=indices,
            worker=worker_name(),
            traceback_text=traceback_of(failure.error),
        )


def make_policy(on_error: OnError, exclude: Any, source: Any) -> ErrorPolicy:
    """What `dataload.Loader` does about records of `source` that fail, from its arguments.

    Raises:
        ConfigError: There is no such `on_error`, or `exclude` is not what `read_excluded` takes.
    """
    return ErrorPolicy(on_error, read_excluded(exclude, len(source), partial(locate, source)))


def shorten(indices: Sequence[int]) -> str:
    """The first few of some indices, for messages."""
    return ", ".join(map(str, indices[:_MESSAGE_INDICES])) + (", ..." if len(indices) > _MESSAGE_INDICES else "")


def _own(samples: Mapping[int, Any], indices: Int64Array) -> list[Any]:
    """A sample for each row; rows do not share one, as they do not where each is read."""
    given: set[int] = set()
    rows: list[Any] = []
    for index in indices.tolist():
        rows.append(copy.deepcopy(samples[index]) if index in given else samples[index])
        given.add(index)
    return rows


def _without_rows(batch: Any) -> Any:
    try:
        return empty_like(batch)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"a step without rows needs a batch without rows, and what collate gives cannot be cut to that ({error}): "
            "let its values be arrays and lists, and choose tail='drop' or on_error='replace' otherwise",
            key="collate",
        ) from error


def _short(source: Any) -> str:
    text = f"{type(source).__name__} without a repr"
    with contextlib.suppress(Exception):
        text = repr(source)
    return printable(text, _SOURCE_CHARACTERS)
