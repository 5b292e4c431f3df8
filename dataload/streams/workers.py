"""The workers of a multi-stream loader. Each owns a fixed group of rows, and every worker contributes to every step."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from dataload.errors import WorkerError
from dataload.executors import make_executor
from dataload.executors.base import (
    Executor,
    Result,
    TimeoutPolicy,
    WorkerLostError,
    WorkerPosition,
    WorkerStatus,
    worker_name,
)
from dataload.loader.failures import StageSpan, is_for_consumer, step_error
from dataload.loader.pipeline import TaskSizer
from dataload.loader.scaling import WorkerSettings
from dataload.sources.memory import owned
from dataload.streams.messages import RowGroup, RowResults, RowTask, Stacked, Step, StepRows, stack
from dataload.streams.rows import RowStart, RowStream, StreamSpec, Taken, describe

_MESSAGE_COST = 40
"""Cost of a message with a result, relative to waking a thread: it takes one to two milliseconds of CPU time."""

_LOSSES = 3
"""Workers that are lost with their machines one after another, before that is an error."""

_MOST_SECONDS = 0.2
"""Seconds after which a task returns the steps made so far, because the consumer waits."""


class RowWork:
    """Makes the steps of one worker's rows. `first` is their first row in the batch; `rows` count all ranks."""

    continues = True
    """A task goes on where the one before stopped, so another worker cannot make it alone."""

    def __init__(self, plan: StreamSpec, first: int, rows: Sequence[int], *, shares: bool = False) -> None:
        self.plan = plan
        self._first = first
        self._rows = rows
        self._shares = shares  # whether the consumer gets the samples themselves, while the next ones are made
        self._session = -1
        self._step = 0
        self._streams: list[RowStream] = []

    def __reduce__(self) -> Any:
        return type(self), (self.plan, self._first, self._rows)  # without open streams; results are pickled, too

    def __call__(self, task: RowTask, status: WorkerStatus) -> RowResults:
        """Return up to `task.most` steps, or the steps before the first error and the error."""
        begun = perf_counter()
        if task.session != self._session:
            self._begin(task, status)
        # No name here may refer to an error: its traceback refers to frames, which would refer to it.
        made, failures, spans = list[Step](), list[WorkerError](), list[list[StageSpan]]()
        seconds = 0.0
        while self._streams and len(made) < task.most and seconds <= _MOST_SECONDS:  # an error closes the streams
            status.at(task.epoch, self._step)
            spans.append(self._make(task.epoch, made, failures))
            self._step += 1
            seconds = perf_counter() - begun
        samples = [sample for step in made for sample in step.samples]
        stacking = perf_counter()
        stacked = stack(samples) if self.plan.stacks else Stacked(len(samples), samples=samples)
        stacked = stacked.owned() if self._shares else stacked
        if made and self.plan.stacks:
            spans[len(made) - 1].append(("collate", stacking, perf_counter()))
        return RowResults.of(made, stacked, failures, spans, worker_name(), perf_counter() - begun)

    def _begin(self, task: RowTask, status: WorkerStatus) -> None:
        self.close()
        self._session, self._step = task.session, task.step
        self._streams = [
            RowStream(self.plan, row, start, status, (self._first + i) * self.plan.order.sequences)
            for i, (row, start) in enumerate(zip(self._rows, task.starts, strict=True))
        ]

    def _make(self, epoch: int, made: list[Step], failures: list[WorkerError]) -> list[StageSpan]:
        """Add the next step to `made` or its error to `failures`; return the spans of its stages."""
        times = [perf_counter()]
        taken: list[Taken] = []
        if made:
            made[-1].samples[:] = map(owned, made[-1].samples)  # streams may fill the same buffers again
        try:
            for stream in self._streams:
                taken.append(stream.take())
                times.append(perf_counter())
            made.append(self._step_of(taken, times))
        except BaseException as error:
            if is_for_consumer(error):
                raise
            failures.append(self._error(epoch, len(taken), error))
        return [("read", times[0], perf_counter())]

    def _step_of(self, taken: list[Taken], times: list[float]) -> Step:
        streams = self._streams
        return Step(
            [(each.sequence, each.offset, *stream.position) for each, stream in zip(taken, streams, strict=True)],
            [each.starts for each in taken],
            self.plan.chunk,
            times,
            tuple([stream.state() for stream in streams]),
            [sample for each in taken for sample in each.samples],
        )

    def _error(self, epoch: int, row: int, error: BaseException) -> WorkerError:
        """Return the error of the next step; `row` is the failed row, or the number of rows if no row failed."""
        where, indices = "", ()
        if row < len(self._streams):
            stream = self._streams[row]
            where = f" in row {self._first + row}"
            if stream.sequence >= 0:
                indices = (stream.sequence,)
                where += f", at item {stream.position[2]} of {describe(self.plan.sequences, stream.sequence)}"
        failure = step_error(self._step, epoch, where, error, indices)
        failure.__cause__ = error
        self.close()  # otherwise tasks already submitted would continue after the failed one
        return failure

    def close(self) -> None:
        streams, self._streams = self._streams, []
        if streams:
            with contextlib.ExitStack() as closing:
                for stream in reversed(streams):
                    closing.callback(stream.close)

    def __del__(self) -> None:
        self.close()  # nothing else closes it in a worker process


def locate(plan: StreamSpec, position: WorkerPosition) -> tuple[int, str]:
    """Decode row and sequence from a worker's status; return (-1, "") if they are unknown."""
    if position.index < 0:
        return -1, ""
    row, sequence = divmod(position.index, plan.order.sequences)
    return sequence, f"in row {row}, at {describe(plan.sequences, sequence)}"


def group_count(rows: int, most: int) -> int:
    """Return the largest divisor of `rows` that is at most `most`."""
    return max(count for count in range(1, min(rows, most) + 1) if rows % count == 0)


class StreamWorkers:
    """Makes all rows of this rank with the most workers, up to `settings.most`, that divide them."""

    def __init__(self, plan: StreamSpec, rows: Sequence[int], settings: WorkerSettings) -> None:
        self.workers: int = group_count(len(rows), settings.most) if settings.most else 0
        self._window = settings.prefetch if self.workers else 0
        # Without workers, no hand-over is saved: make each step on request.
        self._hand_over = 0 if not self.workers else 1 if settings.here else _MESSAGE_COST
        self._settings: dict[str, Any] = {
            "name": settings.executor,
            "workers": min(self.workers, 1),
            "window": self._window,
        }
        self._timeout = settings.timeout
        self._sessions = itertools.count()
        self._works: list[RowWork] = []
        self._executors: list[Executor[RowTask, RowResults]] = []
        self.deal(plan, rows)

    def deal(self, plan: StreamSpec, rows: Sequence[int]) -> None:
        """Make these rows from now on, as many as before."""
        size = len(rows) // max(self.workers, 1)
        self._plan = plan
        self.locate: Callable[[WorkerPosition], tuple[int, str]] = partial(locate, plan)
        self._groups = [(first, rows[first : first + size]) for first in range(0, len(rows), size)]
        self.replace()

    @property
    def start_method(self) -> str | None:
        """Start method of the worker processes; None before they start."""
        return self._executors[0].start_method

    def follow(self, epoch: int, step: int, starts: tuple[RowStart, ...], *, ahead: bool = True) -> list[RowSteps]:
        """Start a session at `step` and return each worker's steps; unless `ahead`, make them on request."""
        return [
            RowSteps(
                executor,
                self._sessions,
                slice(first, first + len(rows)),
                RowTask(next(self._sessions), epoch, step, starts[first : first + len(rows)]),
                window=self._window if ahead else 0,
                hand_over=self._hand_over if ahead else 0,
                others=self._executors,
            )
            for executor, (first, rows) in zip(self._executors, self._groups, strict=True)
        ]

    def replace(self) -> None:
        """Continue with new workers: a hung worker may wake up and take items from shared streams."""
        self.close()
        plan = self._plan
        copied = [("make_stream", "make_stream", plan.make_stream.function), ("sequences", "sequences", plan.sequences)]
        timeouts = TimeoutPolicy(self._timeout, locate=self.locate)
        self._works = [RowWork(plan, *group, shares=self._window > 0) for group in self._groups]
        self._executors = [
            # All workers copy the same groups.
            make_executor(work, settings=() if number else copied, first=number, timeouts=timeouts, **self._settings)
            for number, work in enumerate(self._works)
        ]

    def close(self) -> None:
        for executor in self._executors:
            executor.close()
        for work in self._works:
            work.close()


class RowSteps:
    """The steps of one worker's rows, made up to `window` tasks ahead; with `hand_over` 0, one step per task."""

    def __init__(
        self,
        executor: Executor[RowTask, RowResults],
        sessions: Iterator[int],
        rows: slice,
        first: RowTask,
        *,
        window: int,
        hand_over: float,
        others: Sequence[Executor[RowTask, RowResults]] = (),  # of all rows
    ) -> None:
        self._executor, self._others = executor, others
        self._sessions = sessions
        self._rows = rows
        self._task = first
        self._losses = 0  # of workers since the last result
        self._window = window
        self._hand_over = hand_over
        self._sizer = TaskSizer()
        self._sizes = self._sizer.groups(range(sys.maxsize), lambda: sys.maxsize)
        self._pending: deque[Result[RowResults]] = deque()
        self._ready: list[RowGroup] = []

    def request(self) -> None:
        while not self._ready and len(self._pending) <= self._window:
            most = len(next(self._sizes)) if self._hand_over else 1
            self._pending.append(self._executor.submit(self._task._replace(most=most)))
            self._task = self._task._replace(starts=())

    def take(self, step: int, here: StepRows | tuple[RowStart, ...]) -> RowGroup:
        """Return the next step, which is `step`; `here` has the places of all rows before it."""
        while not self._ready:
            try:
                results = self._pending.popleft().result()
            except WorkerLostError as lost:
                self._losses += 1
                if not lost.again or self._losses == _LOSSES:
                    raise
                self.close()
                starts = here.starts() if isinstance(here, StepRows) else here
                self._task = RowTask(next(self._sessions), self._task.epoch, step, starts[self._rows])
                self.request()
                for executor in self._others:
                    executor.use(1)  # starts another worker now if its own was lost with the same node
                continue
            self._losses = 0
            if self._hand_over:
                self._sizer.learn(len(results.spans), results.total_seconds / self._hand_over, results.nbytes())
            self._ready = results.groups()[::-1]
        return self._ready.pop()

    def close(self) -> None:
        self._ready.clear()
        while self._pending:
            self._pending.pop().cancel()
