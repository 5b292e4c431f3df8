"""Join the samples of all workers into the batches that the consumer receives."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar, cast

from dataload.collate import default_collate, in_chunks
from dataload.errors import ConfigError, WorkerError
from dataload.executors.base import WorkerLostError, worker_name
from dataload.loader.failures import StageSpan, step_error
from dataload.loader.fetch import batch_of
from dataload.loader.step import StepResult, nbytes
from dataload.streams.messages import RowGroup, StepRows, join, samples_of, spread
from dataload.streams.rows import RowStart
from dataload.streams.workers import RowSteps, StreamWorkers

ADDED = ("stream_id", "offset", "is_first", "valid")
"""Fields added to the samples' fields in every batch."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaker:
    """Makes batches in the consumer's thread."""

    rows: int
    chunk: int  # items of a row
    collate: Callable[..., Any]  # makes a batch of samples
    transform: Callable[[Any], Any] | None

    @property
    def joins(self) -> bool:
        """Whether workers stack their samples, which are then only joined here."""
        return self.collate is default_collate

    def __call__(self, groups: Sequence[RowGroup], rows: StepRows, epoch: int, step: int) -> StepResult:
        """Return a step whose `batch` is a pair: the batch, and the joined rows of all workers."""
        spans: list[StageSpan] = []

        def run(stage: str, function: Callable[[], T]) -> T:
            begun = perf_counter()
            try:
                return function()
            except Exception as error:
                raise step_error(step, epoch, f" in {stage}", error) from error
            finally:
                spans.append((stage, begun, perf_counter()))

        batch = run("collate", lambda: self._collate(groups, rows))
        if taken := [name for name in ADDED if name in batch]:
            raise ConfigError(
                f"samples have a field {taken[0]!r}, a name that the loader adds to batches: rename it in make_stream",
                key=taken[0],
            )
        batch.update(
            zip(ADDED, (*rows.numbers[:2], *(rows.flags if self.chunk > 1 else rows.flags[..., 0])), strict=True)
        )
        size = nbytes(batch)
        transform = self.transform
        if transform is not None:
            batch = run("batch_transform", lambda: batch_of("batch_transform", transform(batch)))
        return self.step(groups, epoch, step, batch=(batch, rows), size=size, spans=spans)

    def _collate(self, groups: Sequence[RowGroup], rows: StepRows) -> dict[str, Any]:
        stacked, valid = [group.stacked for group in groups], rows.valid.ravel()
        data = (
            join(stacked, valid)
            if self.joins
            else batch_of("collate", self.collate(spread(samples_of(stacked), valid)))
        )
        if self.chunk > 1:
            data = in_chunks(data, self.rows, self.chunk, strict=False)  # a user's collate may return anything
        return {**cast("Mapping[str, Any]", data)} if isinstance(data, Mapping) else {"data": data}

    def step(
        self,
        groups: Sequence[RowGroup],
        epoch: int,
        step: int,
        *,
        batch: Any = None,
        error: WorkerError | None = None,
        size: int = 0,
        spans: Sequence[StageSpan] = (),
    ) -> StepResult:
        """Return a step with a batch or an error; the spans of the last worker to finish come last."""
        ends = sorted(groups, key=lambda group: group.spans[-1][2])
        shares = [(group.worker, self.rows // len(groups), group.spans) for group in groups]
        return StepResult(
            epoch=epoch,
            step=step,
            batch=batch,
            error=error,
            rows=self.rows,
            nbytes=size,
            spans=[*spans, *(span for group in ends for span in group.spans)],
            bad=[],
            worker=worker_name(),
            shares=[*shares, (worker_name(), 0, list(spans))],
        )


def deliver(
    workers: StreamWorkers,
    make: BatchMaker,
    has_ended: Callable[[StepRows], bool],
    *,
    epoch: int,
    step: int,
    starts: tuple[RowStart, ...],
) -> Generator[StepResult]:
    """Yield the steps of an epoch from `step` on, until `has_ended` returns True for a step's rows."""
    # No name here may refer to a batch or an error while the consumer has it.
    lost: list[WorkerLostError] = []
    last: StepRows | None = None
    each = workers.follow(epoch, step, starts)
    try:
        while not lost or step < lost[0].position.step:
            try:
                groups = _take(each, step, starts if last is None else last)
            except WorkerLostError as error:
                if lost or error.position.epoch != epoch or error.position.step <= step:
                    raise
                # Repeat the lost task's steps one by one: good batches are delivered before the error, which then
                # names the step at fault (one that cannot be pickled, for example).
                lost.append(error)
                _close(each)
                workers.replace()
                each = workers.follow(epoch, step, starts if last is None else last.starts(), ahead=False)
                continue
            failures = [group.failures.pop() for group in groups if group.failures]
            if failures:
                made = [make.step(groups, epoch, step, error=failures[0])]
            else:
                last = StepRows.join([group.rows for group in groups if group.rows is not None])
                if has_ended(last):
                    return
                made = [make(groups, last, epoch, step)]
            del groups, failures
            yield made.pop()
            step += 1
        raise lost.pop()
    finally:
        _close(each)


def _take(each: list[RowSteps], step: int, here: StepRows | tuple[RowStart, ...]) -> list[RowGroup]:
    for steps in each:  # start all workers before waiting for the first
        steps.request()
    return [steps.take(step, here) for steps in each]


def _close(each: list[RowSteps]) -> None:
    for steps in each:
        steps.close()
