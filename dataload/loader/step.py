"""The work of one task: several steps of one epoch, one after another."""

import threading
from collections.abc import Callable, Mapping, Sequence
from os import getpid
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np

from dataload._util.caches import PerProcess
from dataload._util.failures import owner_of
from dataload._util.randomness import seed_global_generators
from dataload.errors import ChangedFileError, SourceNotFoundError, WorkerError
from dataload.executors.base import WorkerStatus, worker_name
from dataload.loader.failures import BadRecord, StageSpan, StepTrace, is_for_consumer, step_error
from dataload.loader.fetch import BatchLoader
from dataload.loader.rescue import Rescue
from dataload.loader.state import EpochPlanners
from dataload.samplers import BatchPlan, BatchPlanner
from dataload.sources.base import traffics_of
from dataload.storage.remote.traffic import Downloads, Report


class StepRange(NamedTuple):
    """Consecutive steps of an epoch."""

    epoch: int
    origin: int  # first item of its step 0; see `BatchPlanner`
    start: int
    stop: int  # the step after the last one
    plans: Sequence[BatchPlan] | None = None  # if workers cannot compute them; see `BatchPlanner.sent`


class StepResult(NamedTuple):
    """The batch of one step, or its error."""

    epoch: int
    step: int
    batch: Any  # None if the step failed
    error: WorkerError | None
    rows: int  # of the plan; 0 if there is no plan
    nbytes: int  # bytes of the batch's arrays
    spans: list[StageSpan]
    bad: list[BadRecord]  # records that were left out or replaced
    worker: str
    # Of a step that several workers made together, for each its name, its rows and its spans.
    shares: Sequence[tuple[str, int, list[StageSpan]]] = ()
    downloads: Report | None = None  # of a worker process, since its last step that has one
    records: int = 0  # read for it, good or bad
    report: Any = None  # of a worker about itself, for loaders that need one


class StepsResult(NamedTuple):
    """The results of a `StepRange`."""

    loaded: list[StepResult]  # its steps, up to the first one that failed
    seconds: float  # time that it took


BLOCK_ROWS = 16_384
"""Rows whose plans are computed together. In blocks of a few hundred rows an index costs ten times more; the arrays of
much longer blocks are returned to the system and faulted in again."""
_MOST_BLOCKS = 4  # workers may be two blocks apart, and prefetching crosses from one epoch to the next


_Blocks = dict[tuple[int, int, int], Sequence[BatchPlan]]


class BlockedPlans:
    """The plans of steps, computed in blocks by the worker that needs a block first. Pickled without the blocks."""

    def __init__(self, planner: BatchPlanner) -> None:
        self._planner = planner
        self._block_steps = max(1, BLOCK_ROWS // planner.rows_per_step)
        # For each process: at a fork, a thread of the parent may hold the lock.
        self._kept: PerProcess[tuple[threading.Lock, _Blocks]] = PerProcess()

    def block_of(self, epoch: int, origin: int, step: int) -> Sequence[BatchPlan]:
        """Return the plans of the block that holds `step`; step 0 of its epoch begins at item `origin`."""
        size = self._block_steps
        block = step // size
        lock, blocks = self._kept.get(lambda: (threading.Lock(), _Blocks()))
        with lock:
            plans = blocks.get((epoch, origin, block))
            if plans is None or not plans[0].step <= step <= plans[-1].step:
                if origin != self._planner.origin:
                    self._planner = self._planner.with_ranks(origin=origin)
                start, stop = step, step + -(-size // 8)  # of the first block, for which a batch waits
                if blocks:  # others are whole, from where the order is known
                    start, stop = max(block * size, min(step, self._planner.first_step(epoch))), (block + 1) * size
                steps = range(start, min(stop, self._planner.steps(epoch)))
                if step not in steps:  # asked for by a task of an earlier order, whose epoch was longer
                    raise IndexError(f"step {step} is out of range: epoch {epoch} has {steps.stop} steps")
                plans = blocks[epoch, origin, block] = self._planner.plans(steps, epoch=epoch)
                if len(blocks) > _MOST_BLOCKS:
                    del blocks[next(iter(blocks))]
        return plans

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._planner,)


class StepWork:
    """Makes the batches of a `StepRange`. Thread-safe; pickled once for each worker process."""

    # With `reseeds` it seeds the global generators of `random`, numpy and torch before each step. A safety net for
    # transforms that use them, in processes where no other code does.

    assign: Callable[[Any], int | None] | None = None
    """The number of the worker process for a task, if that matters."""

    def __init__(self, fetch: BatchLoader, planner: BatchPlanner, *, reseeds: bool = False) -> None:
        self.fetch = fetch
        self.planner: BatchPlanner = planner
        self.in_processes = reseeds  # where its workers are
        self._reads_together = fetch.reads_together
        self._pid = getpid()  # of the consumer
        self._plans = BlockedPlans(planner)

    def plan_for(self, planner: BatchPlanner) -> None:
        """Follow another plan; no task of the earlier one may be awaited. Worker processes do not follow."""
        self.planner = planner
        self._plans = BlockedPlans(planner)

    def __call__(self, job: StepRange, status: WorkerStatus) -> StepsResult:
        """Return the batches of `job`, or those before the first error and the error."""
        begun = perf_counter()
        together = self._reads_together and job.stop - job.start > 1
        loaded = self._load_together(job, status) if together else []
        failed = bool(loaded) and loaded[-1].error is not None
        for step in () if failed else range(job.start + len(loaded), job.stop):
            if self.in_processes:
                seed_global_generators(self.fetch.seed, job.epoch, step)
            # No name in this frame may hold the error: its traceback refers to this frame, so the two would keep each
            # other and the source alive until the garbage collector runs.
            loaded.append(self._load(job, step, StepTrace(status, id(self.fetch))))
            if loaded[-1].error is not None:
                break
        if getpid() != self._pid:
            loaded[-1] = loaded[-1]._replace(downloads=self._report())
        return StepsResult(loaded, perf_counter() - begun)

    def make(self, planners: EpochPlanners, epoch: int, step: int) -> StepResult:
        """Return one step of any epoch, made in this thread; a WorkerError if it fails."""
        told = planners.sent(range(step, step + 1), epoch=epoch)
        loaded = self(StepRange(epoch, planners.of(epoch).origin, step, step + 1, told), WorkerStatus()).loaded
        if loaded[0].error is not None:
            raise cast("WorkerError", loaded.pop().error)  # a name would keep the error and this frame alive
        return loaded.pop()

    def settings(self) -> list[tuple[str, str, Any]]:
        """Return what worker processes get copies of, for `dataload.executors.check_pickles`."""
        fetch = self.fetch
        return [
            ("source", "the source", fetch.source),
            *(("transform", f"the transform {each.name!r}", each.function) for each in fetch.transform),
            ("collate", "collate", fetch.collate),
            ("batch_transform", "batch_transform", fetch.batch_transform),
            ("sampler", "the sampler", self.planner),
        ]

    def _report(self) -> Report | None:
        """Return what this process has downloaded since the last report; None if nothing."""
        reports = [report for traffic in traffics_of(self.fetch.source) if (report := traffic.report()) is not None]
        if not reports:
            return None
        downloads = sum((report.downloads for report in reports), Downloads())
        return Report(downloads, [request for report in reports for request in report.requests])

    def _load(self, job: StepRange, step: int, trace: StepTrace) -> StepResult:
        """Return the result of one step, whether it fails or not."""
        worker, rows, records = worker_name(), 0, 0
        try:
            plan = self.plan_of(job, step)
            wanted = plan.wanted
            rows, records = plan.rows, len(wanted) - len(self.fetch.policy.excluded_among(wanted))
            batch = load_step(self.fetch, plan, job.epoch, trace)
        except WorkerError as error:
            return StepResult(job.epoch, step, None, error, rows, 0, trace.spans, trace.bad, worker)
        size = nbytes(batch)
        return StepResult(job.epoch, step, batch, None, rows, size, trace.spans, trace.bad, worker, records=records)

    def _load_together(self, job: StepRange, status: WorkerStatus) -> list[StepResult]:
        """Return the results of all steps from one read, or a failure; none if they have to be read one by one."""
        trace, worker = StepTrace(status, id(self.fetch)), worker_name()
        try:
            plans = self.plans_of(job)
            status.at(job.epoch, job.start)
            batches = self.fetch.load_together(plans, trace)
        except BaseException as error:
            if is_for_consumer(error):
                raise
            if owner_of(error) != "store" or isinstance(error, (ChangedFileError, SourceNotFoundError)):
                return []  # the step at fault will fail by itself, and at once
            try:  # to ask a store again would take the time-out again
                raise step_error(job.start, job.epoch, "", error) from error
            except WorkerError as failure:
                return [StepResult(job.epoch, job.start, None, failure, 0, 0, trace.spans, [], worker)]
        if not batches:
            self._reads_together = batches is None
            return []
        shares = even_shares(trace.spans, len(plans))
        return [
            StepResult(
                job.epoch, plan.step, batch, None, plan.rows, nbytes(batch), spans, [], worker, records=len(plan.wanted)
            )
            for plan, batch, spans in zip(plans, batches, shares, strict=True)
        ]

    def plan_of(self, job: StepRange, step: int) -> BatchPlan:
        """Return the plan of a step of a task."""
        block = self._block_of(job, step)
        return block[step - block[0].step]

    def plans_of(self, job: StepRange) -> list[BatchPlan]:
        """Return the plans of all steps of a task."""
        plans: list[BatchPlan] = []
        while (step := job.start + len(plans)) < job.stop:
            block = self._block_of(job, step)
            plans += block[step - block[0].step : job.stop - block[0].step]
        return plans

    def _block_of(self, job: StepRange, step: int) -> Sequence[BatchPlan]:
        if job.plans is not None:
            return job.plans
        try:
            return self._plans.block_of(job.epoch, job.origin, step)
        except Exception as error:
            raise step_error(step, job.epoch, " in the order", error) from error


def load_step(fetch: BatchLoader, plan: BatchPlan, epoch: int, trace: StepTrace) -> Any:
    """Return the batch of `plan`, or raise a `WorkerError` that names the step, the stage and the record."""
    trace.status.at(epoch, plan.step)
    try:
        if len(plan.indices) and not len(fetch.policy.excluded_among(plan.indices)):
            return fetch.load(plan, epoch, trace)
        return Rescue(fetch, plan, epoch, trace).load_rest()
    except BaseException as error:
        if is_for_consumer(error):
            raise
        failure = trace.failure(error)
    try:
        return Rescue(fetch, plan, epoch, trace).recover(failure)
    finally:
        del failure  # its traceback refers to this frame: each would keep the other alive


def even_shares(spans: Sequence[StageSpan], count: int) -> list[list[StageSpan]]:
    """Return each step's share of the adjoining spans of `count` steps: the same stages, and one step after another."""
    at = spans[0][1]
    shares: list[list[StageSpan]] = []
    for _ in range(count):
        share: list[StageSpan] = []
        for stage, begun, ended in spans:
            start, at = at, at + (ended - begun) / count
            share.append((stage, start, at))
        shares.append(share)
    return shares


_NUMBERS = frozenset((int, float, bool))


def nbytes(batch: Any) -> int:
    """Return the bytes of the arrays, tensors and byte strings in a batch."""
    if isinstance(batch, np.ndarray):
        return batch.nbytes
    if isinstance(batch, dict):
        columns = cast("dict[str, Any]", batch).values()
        # Without a call for each array: with 100 fields, this takes 5 us of a step of 80 instead of 9.
        return sum([column.nbytes if type(column) is np.ndarray else nbytes(column) for column in columns])
    if isinstance(batch, (list, tuple)):
        several = cast("list[Any]", batch)
        kinds = {*map(type, several)}
        if kinds == {str}:
            return len("".join(several))  # to ask each takes five times as long
        return 0 if kinds <= _NUMBERS else sum(map(len if kinds <= {bytes, str} else nbytes, several))
    if isinstance(batch, (bytes, str)):
        return len(batch)
    try:
        own = getattr(batch, "nbytes", None)
    except RuntimeError:  # sparse tensors have none
        return 0
    if isinstance(own, (int, np.integer)):  # not of a class; to ask for a mapping takes longer than all the rest
        return int(own)
    return sum(map(nbytes, cast("Mapping[str, Any]", batch).values())) if isinstance(batch, Mapping) else 0
