"""The work of a task: several steps of one epoch, one after another. Pickled once for each worker process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np

from dataload._util.memo import Memo
from dataload._util.randomness import derive_key
from dataload.errors import WorkerError, message_of, traceback_of
from dataload.executors import WorkerStatus, worker_name
from dataload.loader.fetch import Fetcher
from dataload.loader.order import BlockedPlans
from dataload.loader.rescue import BadRecord
from dataload.loader.stages import Trace
from dataload.samplers import BatchPlan, BatchPlanner

__all__ = ["JobResult", "StepRange", "StepResult", "StepWork"]


class StepRange(NamedTuple):
    """Consecutive steps of an epoch.

    Attributes:
        epoch: Number of the epoch.
        origin: First item of its step 0; see `BatchPlanner`.
        start: First step.
        stop: The step behind the last.
    """

    epoch: int
    origin: int
    start: int
    stop: int


class StepResult(NamedTuple):
    """What became of one step.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step.
        batch: The batch; None if it failed.
        error: Why it failed; None if it did not.
        rows: Rows of the plan.
        nbytes: Bytes of the batch's arrays.
        spans: Stage, begin and end in seconds of `time.perf_counter`.
        bad: Records that were left out or replaced.
        worker: Name of the worker.
    """

    epoch: int
    step: int
    batch: Any
    error: WorkerError | None
    rows: int
    nbytes: int
    spans: list[tuple[str, float, float]]
    bad: list[BadRecord]
    worker: str


class JobResult(NamedTuple):
    """What became of a job.

    Attributes:
        loaded: Its steps, up to the first that failed.
        seconds: What it took.
    """

    loaded: list[StepResult]
    seconds: float


class StepWork:
    """Makes the batches of a job; called by several threads at once.

    Args:
        fetch: Makes one batch.
        planner: Knows the rows of each step.
        reseeds: Whether to set the global generators of `random`, numpy and torch before each step: a safety net for
            transforms that do not use their context's, in processes where nobody else uses these.
    """

    def __init__(self, fetch: Fetcher, planner: BatchPlanner, *, reseeds: bool = False) -> None:
        self.fetch = fetch
        self.planner = planner
        self._reseeds = reseeds
        self._plans: Memo[BlockedPlans] = Memo()

    def __call__(self, job: StepRange, status: WorkerStatus) -> JobResult:
        """The batches of `job`; where one fails, those before it and the error."""
        begun = perf_counter()
        worker = worker_name()
        together = self.fetch.reads_together and job.stop - job.start > 1
        loaded = self._load_together(job, status, worker) if together else []
        for step in range(job.start + len(loaded), job.stop):
            if self._reseeds:
                _reseed(self.fetch.seed, job.epoch, step)
            # No name here may hold the error: its traceback refers to this frame, and the two would keep each other,
            # and the source, until the garbage collector comes.
            loaded.append(self._load(job, step, Trace(status), worker))
            if loaded[-1].error is not None:
                break
        return JobResult(loaded, perf_counter() - begun)

    def _load_together(self, job: StepRange, status: WorkerStatus, worker: str) -> list[StepResult]:
        """All steps of a job from one read; none where that cannot be done, or anything fails."""
        try:
            plans = [self._plan(job, step) for step in range(job.start, job.stop)]
            status.at(job.epoch, job.start)
            trace = Trace(status)
            batches = self.fetch.together(plans, trace)
        except Exception:  # said by the step that it belongs to
            return []
        if batches is None:
            return []
        ((stage, begun, ended),) = trace.spans
        share = (ended - begun) / len(plans)
        return [
            StepResult(
                job.epoch,
                plan.step,
                batch,
                None,
                plan.rows,
                nbytes(batch),
                [(stage, begun + i * share, begun + (i + 1) * share)],
                [],
                worker,
            )
            for i, (plan, batch) in enumerate(zip(plans, batches, strict=True))
        ]

    def _load(self, job: StepRange, step: int, trace: Trace, worker: str) -> StepResult:
        """One step, whatever becomes of it."""
        rows = 0
        try:
            plan = self._plan(job, step)
            rows = plan.rows
            batch = self.fetch(plan, job.epoch, trace)
        except WorkerError as error:
            return StepResult(job.epoch, step, None, error, rows, 0, trace.spans, trace.bad, worker)
        return StepResult(job.epoch, step, batch, None, rows, nbytes(batch), trace.spans, trace.bad, worker)

    def _plan(self, job: StepRange, step: int) -> BatchPlan:
        try:
            return self.plans(job.epoch, job.origin)[step]
        except Exception as error:
            raise _order_error(step, job.epoch, error) from error

    def plans(self, epoch: int, origin: int) -> BlockedPlans:
        """The plans of an epoch; those of two are kept, for prefetching crosses from one to the next."""
        key = epoch, origin
        plans = self._plans.recall(key)
        if plans is None:
            planner = self.planner if origin == self.planner.origin else self.planner.with_ranks(origin=origin)
            plans = self._plans.keep(key, BlockedPlans(planner, epoch))
        return plans


def _order_error(step: int, epoch: int, error: Exception) -> WorkerError:
    """What it means that a sampler cannot say which records a step has."""
    return WorkerError(
        f"step {step} of epoch {epoch} failed in the order: {message_of(error)}",
        step=step,
        epoch=epoch,
        worker=worker_name(),
        traceback_text=traceback_of(error),
    )


def nbytes(batch: Any) -> int:
    """Bytes of the arrays, tensors and byte strings in a batch."""
    if isinstance(batch, np.ndarray):  # first, for to ask whether it is a mapping takes longer than all of the rest
        return batch.nbytes
    if isinstance(batch, (dict, Mapping)):
        return sum(map(nbytes, cast("Mapping[str, Any]", batch).values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(nbytes, cast("list[Any]", batch)))
    if isinstance(batch, (bytes, str)):
        return len(batch)
    return int(getattr(batch, "nbytes", 0))


def _reseed(seed: int, epoch: int, step: int) -> None:
    word = int(derive_key(seed, "global generators", epoch, step, words=1)[0])
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)  # noqa: NPY002 - the very generator that is to be made harmless
    torch = sys.modules.get("torch")  # whoever uses its generator has imported it
    if torch is not None:
        torch.manual_seed(word)
