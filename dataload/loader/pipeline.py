"""Loaded steps on their way to the consumer: ahead of it, across epochs, in order or as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

from dataload.errors import WorkerError, message_of, traceback_of
from dataload.executors import Executor, Result, SerialExecutor, WorkerLostError, worker_name
from dataload.loader.prefetch import TaskSizer, ordered_map, unordered_map
from dataload.loader.progress import Cursor
from dataload.loader.rescue import shorten
from dataload.loader.state import LoaderState
from dataload.loader.step import JobResult, StepRange, StepResult
from dataload.samplers import BatchPlanner

__all__ = ["Delivery", "EpochPlanners", "apply_in_consumer", "lost_step"]


class EpochPlanners:
    """The plan of each epoch: the same, but for one that goes on with steps of another size.

    Args:
        planner: Of most epochs.
        epoch: The one that goes on.
        shifted: Its plan, whose steps are counted from another origin.
    """

    def __init__(self, planner: BatchPlanner, epoch: int = -1, shifted: BatchPlanner | None = None) -> None:
        self._planner = planner
        self._epoch = epoch
        self._shifted = shifted

    def of(self, epoch: int) -> BatchPlanner:
        """The plan of an epoch."""
        return self._shifted if self._shifted is not None and epoch == self._epoch else self._planner

    @classmethod
    def resume(cls, planner: BatchPlanner, state: LoaderState) -> tuple[Self, Cursor]:
        """The plans that go on where a state was taken with perhaps another plan, and where that is in them."""
        missing, size = state.missing, planner.step_size
        # The last step of an epoch may be a short one: its end does not tell where others begin.
        shifted, first = planner.resume(missing[0] if missing else state.position)
        steps = [first + (position - missing[0]) // size for position in missing]
        step = first - (missing[0] - state.position) // size if missing else first
        return cls(planner, state.epoch, shifted), Cursor(state.epoch, step, frozenset(steps))

    def state(self, cursor: Cursor, *, source: str, order: str) -> LoaderState:
        """What to save at `cursor`.

        Args:
            cursor: What the consumer has received.
            source: Fingerprint of the data.
            order: Fingerprint of the order.
        """
        epoch, planner = cursor.epoch, self.of(cursor.epoch)
        return LoaderState(
            epoch=epoch,
            position=planner.position(cursor.step, epoch=epoch),
            length=planner.items(epoch),
            source=source,
            order=order,
            missing=tuple(planner.position(step, epoch=epoch) for step in sorted(cursor.missing)),
            step_size=planner.step_size if cursor.missing else 0,
        )


class PrefetchBudget:
    """How much may be in flight.

    It is no part of `Delivery`, for its generators ask it: they would refer to their owner, and only the garbage
    collector would then cancel what a dropped loader has in flight.

    Args:
        pace: Knows the size of a step.
        window: Jobs ahead of the one that is waited for.
        most_bytes: Bytes of batches ahead.
    """

    def __init__(self, pace: TaskSizer, window: int, most_bytes: int) -> None:
        self._pace = pace
        self._most_bytes = most_bytes
        self.window = window
        self.steps = 0  # that are in flight or ready

    def jobs(self) -> int:
        """Jobs that may be ahead of the one that is waited for: one in any case, if any work is done ahead."""
        return self.window if self.window < 2 or self.left() > 0 else 1

    def left(self) -> int:
        """Steps that may still be begun."""
        return self._most() - self.steps

    def share(self) -> int:
        """Steps that may be begun as one job, so that all jobs are of a size."""
        return min(self.left(), self._most() // (self.window + 1))

    def _most(self) -> int:
        step_bytes = self._pace.step_bytes
        return 0 if step_bytes is None else int(self._most_bytes / max(1.0, step_bytes))  # 0 until the size is known


class Delivery:
    """Runs steps ahead of the consumer. Closing it, or dropping it, cancels what has not begun.

    It ends before an epoch without a step, and before `epochs`.

    Args:
        executor: Makes the batches of a job.
        planners: The plan of each epoch.
        pace: What is known of the time and size of steps; learns more.
        start: What the consumer has.
        epochs: The epoch to stop before; None goes on.
        window: Jobs ahead of the one that is waited for; 0 for no work ahead.
        most_bytes: Bytes of batches ahead, about; one is ahead in any case.
        in_order: Whether steps come in their order, or those of an epoch as they are made.
        together: Whether several steps may be made by one read: then they are one job without workers, too.
    """

    def __init__(
        self,
        executor: Executor[StepRange, JobResult],
        planners: EpochPlanners,
        pace: TaskSizer,
        *,
        start: Cursor,
        epochs: int | None,
        window: int,
        most_bytes: int,
        in_order: bool,
        together: bool = False,
    ) -> None:
        self._pace = pace
        self._room = room = PrefetchBudget(pace, window, most_bytes)
        self._ready: list[StepResult] = []
        # Without workers nothing is handed over: each step is made when it is asked for, unless several are one read.
        groups = pace.groups if (window or together) and in_order else _singles
        jobs = _jobs(planners, start, epochs, room, groups)
        self._executor = executor
        self._waiting: deque[StepRange] = deque()  # in order: the jobs whose results have not come
        self._lost: WorkerLostError | None = None  # raised when all of `_again` have come
        self._again: deque[StepRange] = deque()
        if in_order:
            helps = _never if isinstance(executor, SerialExecutor) else pace.is_quick
            submit = _noting(executor, self._waiting)
            self._made = ordered_map(submit, jobs, window=room.jobs, helps=helps)
        else:
            self._made = unordered_map(
                executor.submit, jobs, window=room.jobs, wait_for_any=executor.wait_for_any, section=_epoch_of
            )

    def __next__(self) -> StepResult:
        """The next step that is there.

        Raises:
            StopIteration: There is none left.
            WorkerLostError: The worker that had it is gone.
        """
        if not self._ready:
            made = self._next_made()
            self._pace.note(len(made.loaded), made.seconds, sum(step.nbytes for step in made.loaded))
            self._ready = made.loaded[::-1]
            made.loaded.clear()
        self._room.steps -= 1
        return self._ready.pop()

    def _next_made(self) -> JobResult:
        if self._again:
            return self._executor.submit(self._again.popleft()).result()
        if self._lost is not None:
            raise self._lost
        try:
            made = next(self._made)
        except WorkerLostError as lost:
            job = self._waiting[0] if self._waiting else None
            if job is None or lost.place.epoch != job.epoch or not job.start < lost.place.step < job.stop:
                raise
            # The steps of the job before the one that was lost are made once more, each by itself: errors come after
            # good batches, and where one of these is at fault (it cannot be sent, say) it is said of that one.
            self._lost = lost
            self._again.extend(job._replace(start=step, stop=step + 1) for step in range(job.start, lost.place.step))
            return self._next_made()
        if self._waiting:
            self._waiting.popleft()
        return made

    def widen(self, window: int) -> None:
        """Let so many jobs be ahead from now on."""
        self._room.window = window

    def close(self) -> None:
        """Cancel what has not begun."""
        self._ready.clear()
        self._made.close()


def _noting(
    executor: Executor[StepRange, JobResult], jobs: deque[StepRange]
) -> Callable[[StepRange], Result[JobResult]]:
    def submit(job: StepRange) -> Result[JobResult]:
        jobs.append(job)
        return executor.submit(job)

    return submit


def lost_step(lost: WorkerLostError, planners: EpochPlanners, cursor: Cursor) -> WorkerError:
    """What the loss of a worker means for a consumer that stands at `cursor`."""
    epoch, place = cursor.epoch, lost.place
    inside = place.epoch == epoch and cursor.first <= place.step < planners.of(epoch).steps(epoch)
    at = f", at index {place.index}" if inside and place.index >= 0 else ""
    step = place.step if inside else cursor.first
    reason = f": {lost.worker} {lost.reason}{at}"
    return _step_error(planners, epoch, step, reason, worker=lost.worker, traceback_text=lost.stacks, appends=True)


def _step_error(
    planners: EpochPlanners,
    epoch: int,
    step: int,
    reason: str,
    *,
    worker: str,
    traceback_text: str,
    appends: bool = False,
) -> WorkerError:
    """The error of a step that failed, but not in its work.

    Args:
        planners: Know its indices.
        epoch: Its epoch.
        step: Its number.
        reason: Goes on with the message "step 3 of epoch 0 failed".
        worker: Who had it.
        traceback_text: See `WorkerError`.
        appends: Whether that is part of the message, too.
    """
    (plan,) = planners.of(epoch).plans(range(step, step + 1), epoch=epoch)
    indices = tuple(plan.indices.tolist())
    message = f"step {step} of epoch {epoch} failed{reason}\n  indices of the step: {shorten(indices)}"
    if appends and traceback_text:
        message = f"{message}\n{traceback_text}"
    return WorkerError(message, step=step, epoch=epoch, indices=indices, worker=worker, traceback_text=traceback_text)


def apply_in_consumer(loaded: StepResult, finish: Callable[[Any], Any], planners: EpochPlanners) -> Any:
    """A batch with what is done to it in the consumer's process.

    Raises:
        WorkerError: That failed.
    """
    try:
        return finish(loaded.batch)
    except Exception as error:
        reason = f" in batch_transform: {message_of(error)}"
        text = traceback_of(error)
        raise _step_error(
            planners, loaded.epoch, loaded.step, reason, worker=worker_name(), traceback_text=text
        ) from error


def _jobs(
    planners: EpochPlanners,
    start: Cursor,
    epochs: int | None,
    room: PrefetchBudget,
    groups: Callable[[range, Callable[[], int]], Iterator[range]],
) -> Generator[StepRange]:
    epoch, step = start.epoch, start.step
    while epochs is None or epoch < epochs:
        planner = planners.of(epoch)
        steps = planner.steps(epoch)
        if not steps:
            return
        if epoch == start.epoch:
            for missing in sorted(start.missing):
                room.steps += 1
                yield StepRange(epoch, planner.origin, missing, missing + 1)
        for group in groups(range(step, steps), room.share):
            room.steps += len(group)
            yield StepRange(epoch, planner.origin, group.start, group.stop)
        epoch, step = epoch + 1, 0


def _singles(steps: range, _: Callable[[], int]) -> Iterator[range]:
    return (range(step, step + 1) for step in steps)


def _epoch_of(job: StepRange) -> int:
    return job.epoch


def _never() -> bool:
    return False
