"""Steps made ahead of the consumer, across epochs, in order or in completion order."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dataload._util.clock import DecodeClock
from dataload.errors import WorkerError
from dataload.executors.base import Executor, Result, SerialExecutor, WorkerLostError
from dataload.loader.failures import is_for_consumer, step_error
from dataload.loader.fetch import BatchLoader, batch_of
from dataload.loader.rescue import shorten
from dataload.loader.state import Cursor, EpochPlanners
from dataload.loader.step import StepRange, StepResult, StepsResult
from dataload.types import AheadReader, ReadsAhead, StepsAhead

_BLOCK_ROWS = 1 << 17  # many, because a pool has to be found again for each block


class Prefetch:
    """The fetching for one loader, if `source` reads ahead and `here`, in this process."""

    # It does not refer to the loader, whose end stops it.

    def __init__(self, source: Any, fetch: BatchLoader, *, here: bool) -> None:
        self._source = source if isinstance(source, ReadsAhead) else None
        self._fields = fetch.fields
        self._here = here
        self._number = id(fetch)  # see `current_reader`
        self.reader: AheadReader | None = None

    def start(self, planners: EpochPlanners, start: Cursor, epochs: int | None) -> None:
        """Fetch what the steps from `start` read, up to epoch `epochs` or for ever."""
        self.stop()
        if self._source is not None:
            steps = steps_ahead(planners, start, epochs)
            with DecodeClock(self._number):
                self.reader = self._source.read_ahead(steps, self._fields, here=self._here)

    def stop(self) -> None:
        """Stop fetching. May be called twice."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


def steps_ahead(planners: EpochPlanners, start: Cursor, epochs: int | None) -> Generator[StepsAhead]:
    """Yield the steps that a loader makes from `start`, in blocks; it ends like `StepDelivery`."""
    for epoch, planner, missing, steps in planners.epochs_from(start, epochs):
        size = max(1, _BLOCK_ROWS // planner.rows_per_step)
        for block in in_blocks(missing, steps, size):
            rows = [plan.indices for plan in planner.plans(block, epoch=epoch)]
            yield StepsAhead(epoch, np.concatenate(rows), np.cumsum([len(indices) for indices in rows]), steps.stop)


def in_blocks(missing: Iterable[int], steps: range, size: int) -> Generator[range]:
    """Yield the steps that are missing, one by one, and then `steps` in blocks of `size`."""
    yield from (range(step, step + 1) for step in missing)
    yield from (steps[first : first + size] for first in range(0, len(steps), size))


Task = TypeVar("Task")
T = TypeVar("T")
StepGroups: TypeAlias = Callable[[range, Callable[[], int]], Iterator[range]]
"""Cuts the steps of an epoch into tasks, given the number of steps that may still be started."""

_TASK_SECONDS = 1.5e-3
_TASK_BYTES = 1 << 22  # the blocks of larger tasks push each other out of the CPU's caches
_MAX_STEPS = 64


class StepDelivery:
    """Runs steps ahead of the consumer. Closing or dropping it cancels tasks that have not started.

    It ends before an epoch without steps, and before epoch `epochs`. At most `window` tasks are ahead of the one that
    is waited for, and batches of about `max_bytes`, but one in any case. If not `in_order`, steps come in completion
    order within each epoch. If `together`, one read can serve several steps, which are then grouped even without
    workers.
    """

    def __init__(
        self,
        executor: Executor[StepRange, StepsResult],
        planners: EpochPlanners,
        sizer: TaskSizer,
        *,
        start: Cursor,
        epochs: int | None,
        window: int,
        max_bytes: float,
        in_order: bool,
        together: bool = False,
        groups: StepGroups | None = None,
    ) -> None:
        self._sizer = sizer
        self._budget = budget = PrefetchBudget(sizer, window, max_bytes, together=together)
        self._ready: list[StepResult] = []
        groups = groups or (sizer.groups if in_order else one_by_one)
        tasks = _tasks(planners, start, epochs, budget, groups)
        self._executor = executor
        self._waiting: deque[StepRange] = deque()  # with in_order, the tasks in flight
        self._lost: WorkerLostError | None = None  # raised after the steps of `_again`
        self._again: deque[StepRange] = deque()
        if in_order:
            helps = (lambda: False) if isinstance(executor, SerialExecutor) else sizer.is_quick
            recorded = _recorded(tasks, self._waiting)
            self._results = ordered_map(executor.submit, recorded, window=budget.tasks, helps=helps)
        else:
            wait, section = executor.wait_for_any, attrgetter("epoch")
            self._results = unordered_map(
                executor.submit, tasks, window=budget.tasks, wait_for_any=wait, section=section
            )

    def __next__(self) -> StepResult:
        """Return the next step. Raises `WorkerLostError` if the worker of this step is gone."""
        if not self._ready:
            result = self._next_result()
            steps = result.loaded
            self._sizer.learn(len(steps), result.seconds, sum(step.nbytes for step in steps))
            self._ready = steps[::-1]
            steps.clear()
        self._budget.steps -= 1
        return self._ready.pop()

    def _next_result(self) -> StepsResult:
        if self._again:
            return self._executor.submit(self._again.popleft()).result()
        if self._lost is not None:
            raise self._lost
        try:
            result = next(self._results)
        except WorkerLostError as lost:
            task = self._waiting[0] if self._waiting else None
            if task is None or lost.position.epoch != task.epoch or not task.start < lost.position.step < task.stop:
                raise
            # Make the steps before the lost one again, one by one: errors come after good batches, and if one of
            # these steps is at fault (it cannot be pickled, say) the error names that one.
            self._lost = lost
            steps = range(task.start, lost.position.step)
            self._again.extend(task._replace(start=step, stop=step + 1) for step in steps)
            return self._next_result()
        if self._waiting:
            self._waiting.popleft()
        return result

    def set_window(self, window: int) -> None:
        """Allow `window` tasks ahead from now on."""
        self._budget.window = window

    def in_flight(self) -> int:
        """Return the steps that are in flight or ready."""
        return self._budget.steps

    def close(self) -> None:
        """Cancel tasks that have not started."""
        self._ready.clear()
        self._results.close()


def ordered_map(
    submit: Callable[[Task], Result[T]],
    tasks: Iterable[Task],
    *,
    window: Callable[[], int],
    helps: Callable[[], bool] = lambda: False,
) -> Generator[T]:
    """Yield the results of `tasks` in order, with at most `window()` + 1 of them in flight."""
    # The error of a task is raised after the results before it. Closing the generator cancels tasks that have not
    # started, and waits for nothing. `tasks` may be endless. If `helps()`, the consumer's thread runs tasks when it
    # would wait.
    pending: deque[Result[T]] = deque()
    try:
        for task in tasks:
            pending.append(submit(task))
            while len(pending) > window():
                _help(pending, helps)
                yield pending.popleft().result()
        while pending:
            _help(pending, helps)
            yield pending.popleft().result()
    finally:
        for result in pending:
            result.cancel()


def _help(pending: deque[Result[T]], helps: Callable[[], bool]) -> None:
    """Run tasks that no worker has started until the first of all is done, or none is left."""
    if not helps() or pending[0].done():
        return
    for result in pending:
        if result.run() and pending[0].done():
            return


def unordered_map(
    submit: Callable[[Task], Result[T]],
    tasks: Iterable[Task],
    *,
    window: Callable[[], int],
    wait_for_any: Callable[[Iterable[Result[T]]], None],
    section: Callable[[Task], object],
) -> Generator[T]:
    """Yield the results of `tasks` in completion order, each `section` before the next; else as `ordered_map`."""
    pending: list[tuple[object, Result[T]]] = []
    try:
        for task in tasks:
            pending.append((section(task), submit(task)))
            while len(pending) > window():
                yield _pop_any(pending, wait_for_any).result()
        while pending:
            yield _pop_any(pending, wait_for_any).result()
    finally:
        for _, result in pending:
            result.cancel()


def _pop_any(pending: list[tuple[object, Result[T]]], wait_for_any: Callable[[Iterable[Result[T]]], None]) -> Result[T]:
    """Wait for a result of the first section, and remove it."""
    first = pending[0][0]
    waiting = [result for section, result in pending if section == first]  # these are at the front
    wait_for_any(waiting)
    return pending.pop(next(i for i, result in enumerate(waiting) if result.done()))[1]


class TaskSizer:
    """Chooses how many steps make one task, so that handing over results takes less time than making them."""

    # Waking a waiting thread takes 20 to 50 us, more in a virtual machine, which is as long as a small batch takes.
    # Steps under a millisecond are therefore grouped. The first task is one step, so that it comes soon.

    def __init__(self) -> None:
        self._steps = 1
        self._seconds = math.inf  # per step of the last task
        self.step_bytes: float | None = None  # mean of the last task; None before the first

    def is_quick(self) -> bool:
        """Return True if running a task here beats waiting for a worker: it takes one or two milliseconds."""
        return self._steps * self._seconds < 2 * _TASK_SECONDS

    def groups(self, steps: range, room: Callable[[], int]) -> Generator[range]:
        """Yield consecutive parts of `steps`, each of the best size when it is requested: 1 to `room()` steps."""
        start = steps.start
        while start < steps.stop:
            stop = min(start + min(self._steps, max(1, room())), steps.stop)
            yield range(start, stop)
            start = stop

    def learn(self, steps: int, seconds: float, nbytes: int) -> None:
        """Take into account a task's number of steps, its time, and the bytes of its batches."""
        # One slow task may have been interrupted; two are slow.
        last, self._seconds = self._seconds, seconds / steps
        self.step_bytes = nbytes / steps
        fitting = int(_TASK_SECONDS / max(min(last, self._seconds), 1e-9))
        fitting = max(1, min(fitting, int(_TASK_BYTES / max(self.step_bytes, 1.0))))
        # Powers of two: tasks of few different sizes reuse memory.
        self._steps = min(1 << (fitting.bit_length() - 1), 2 * self._steps, _MAX_STEPS)


class PrefetchBudget:
    """The tasks and steps that may be in flight: `window` tasks ahead, and batches of about `max_bytes`."""

    # Infinite `max_bytes` are no limit, also while the size is unknown.
    # Kept apart from `StepDelivery` to avoid a reference cycle, which would delay cancellation.

    def __init__(self, sizer: TaskSizer, window: int, max_bytes: float, *, together: bool) -> None:
        self._sizer = sizer
        self._max_bytes = max_bytes
        self._together = together  # whether one read can serve several steps
        self.window = window
        self.steps = 0  # in flight or ready

    def tasks(self) -> int:
        """Return the tasks that may be ahead of the one that is waited for: at least one, if any may."""
        return self.window if self.window < 2 or self.left() > 0 else 1

    def left(self) -> int:
        """Return the steps that may still be started."""
        return self._max_steps() - self.steps

    def share(self) -> int:
        """Return the steps that one task may have, so that all tasks are about equal."""
        if not self.window and not self._together:
            return 1  # no hand-over to save: make each step on request
        return min(self.left(), self._max_steps() // (self.window + 1))

    def _max_steps(self) -> int:
        if self._max_bytes == math.inf:
            return sys.maxsize
        step_bytes = self._sizer.step_bytes
        return 0 if step_bytes is None else int(self._max_bytes / max(1.0, step_bytes))  # 0 until the size is known


def lost_step(lost: WorkerLostError, planners: EpochPlanners, cursor: Cursor) -> WorkerError:
    """Return the error that the loss of a worker means for a consumer at `cursor`."""
    epoch, position = cursor.epoch, lost.position
    inside = position.epoch == epoch and cursor.first <= position.step < planners.of(epoch).steps(epoch)
    at = f", at index {position.index}" if inside and position.index >= 0 else ""
    step = position.step if inside else cursor.first
    indices, details = _indices(planners, epoch, step)
    shown = f"\n{lost.stacks}" if lost.stacks else ""
    message = f"step {step} of epoch {epoch} failed: {lost.worker} {lost.reason}{at}{details}{shown}"
    return WorkerError(message, step=step, epoch=epoch, indices=indices, worker=lost.worker, traceback_text=lost.stacks)


def apply_in_consumer(step: StepResult, function: Callable[[Any], Any], planners: EpochPlanners) -> Any:
    """Apply a function to the batch of a step in the consumer's process; a failure becomes a `WorkerError`."""
    try:
        return batch_of("batch_transform", function(step.batch))
    except BaseException as error:
        if is_for_consumer(error):
            raise
        indices, details = _indices(planners, step.epoch, step.step)
        raise step_error(step.step, step.epoch, " in batch_transform", error, indices, details) from error


def _indices(planners: EpochPlanners, epoch: int, step: int) -> tuple[tuple[int, ...], str]:
    """Return the indices of a step, and a line that shows them."""
    indices = tuple(planners.of(epoch).plan(step, epoch=epoch).indices.tolist())
    return indices, f"\n  indices of the step: {shorten(indices)}"


def _recorded(tasks: Iterable[Task], record: deque[Task]) -> Iterator[Task]:
    for task in tasks:
        record.append(task)
        yield task


def one_by_one(steps: Iterable[int], _: Callable[[], int]) -> Iterator[range]:
    """Yield one task for each step."""
    return (range(step, step + 1) for step in steps)


def _tasks(
    planners: EpochPlanners, start: Cursor, epochs: int | None, budget: PrefetchBudget, groups: StepGroups
) -> Generator[StepRange]:
    for epoch, planner, missing, steps in planners.epochs_from(start, epochs):
        for group in chain(one_by_one(missing, budget.share), groups(steps, budget.share)):
            budget.steps += len(group)
            yield StepRange(epoch, planner.origin, group.start, group.stop, planners.sent(group, epoch=epoch))
