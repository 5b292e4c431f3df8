"""Work ahead of the consumer, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from dataload.executors import Result

__all__ = ["TaskSizer", "ordered_map", "unordered_map"]

_TASK_SECONDS = 1.5e-3
_MOST_STEPS = 64

Task = TypeVar("Task")
T = TypeVar("T")


def ordered_map(
    submit: Callable[[Task], Result[T]],
    tasks: Iterable[Task],
    *,
    window: Callable[[], int],
    helps: Callable[[], bool] = lambda: False,
) -> Generator[T]:
    """Yield the results of `tasks` in their order, with at most `window()` + 1 of them in flight.

    A task that fails raises at its place, after the results before it. Closing the generator cancels what has
    not begun, and waits for nothing.

    Args:
        submit: Starts a task.
        tasks: Taken from as results are consumed, so they may be endless.
        window: Tasks ahead of the one that is waited for; 0 for no work ahead. Asked before each is submitted.
        helps: Whether the consumer's thread does a task itself where it would have to wait for one.
    """
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


def unordered_map(
    submit: Callable[[Task], Result[T]],
    tasks: Iterable[Task],
    *,
    window: Callable[[], int],
    wait_for_any: Callable[[Iterable[Result[T]]], None],
    section: Callable[[Task], object],
) -> Generator[T]:
    """Yield the results of `tasks` as they come, with at most `window()` + 1 of them in flight.

    A task that fails raises when it is done. Closing the generator cancels what has not begun, and waits for nothing.

    Args:
        submit: Starts a task.
        tasks: Taken from as results are consumed, so they may be endless.
        window: Tasks ahead of the one that is waited for; 0 for no work ahead. Asked before each is submitted.
        wait_for_any: Waits until one of some results is done.
        section: Consecutive tasks for which this is equal all come before any of the next.
    """
    pending: list[tuple[object, Result[T]]] = []
    try:
        for task in tasks:
            pending.append((section(task), submit(task)))
            while len(pending) > window():
                yield _take_any(pending, wait_for_any).result()
        while pending:
            yield _take_any(pending, wait_for_any).result()
    finally:
        for _, result in pending:
            result.cancel()


def _take_any(
    pending: list[tuple[object, Result[T]]], wait_for_any: Callable[[Iterable[Result[T]]], None]
) -> Result[T]:
    """Take out a result of the first section that is done."""
    first = pending[0][0]
    waiting = [result for section, result in pending if section == first]  # they stand at the front
    wait_for_any(waiting)
    return pending.pop(next(place for place, result in enumerate(waiting) if result.done()))[1]


def _help(pending: deque[Result[T]], helps: Callable[[], bool]) -> None:
    """Do tasks that nobody has begun until the first of all is done, or none is left."""
    if pending[0].done() or not helps():
        return
    for result in pending:
        if result.run() and pending[0].done():
            return


class TaskSizer:
    """How many steps make one task, so that handing over results does not cost more than making them.

    To wake a waiting thread costs 20 to 50 us and more in a virtual machine, as much as a small batch. Steps that take
    less than a millisecond or so are therefore made several at a time. The first task is one step: it should come soon.

    Attributes:
        step_bytes: Mean bytes of a step of the last task; None before there was one.
    """

    def __init__(self) -> None:
        self._steps = 1
        self.step_bytes: float | None = None

    def is_quick(self) -> bool:
        """Whether a task takes about a millisecond, as far as is known: then to do one is better than to wait."""
        return self._steps > 1

    def groups(self, steps: range, room: Callable[[], int]) -> Generator[range]:
        """Consecutive parts of `steps`, each of the size that is right when it is asked for.

        Args:
            steps: What to part.
            room: Steps of a part at most, but for a single one.
        """
        start = steps.start
        while start < steps.stop:
            stop = min(start + min(self._steps, max(1, room())), steps.stop)
            yield range(start, stop)
            start = stop

    def note(self, steps: int, seconds: float, nbytes: int) -> None:
        """Learn from a task: its steps, the time it took, and the bytes of its batches."""
        fitting = max(1, int(_TASK_SECONDS * steps / max(seconds, 1e-9)))
        # Powers of two: tasks of few different sizes find memory of their size again.
        self._steps = min(1 << (fitting.bit_length() - 1), 2 * self._steps, _MOST_STEPS)
        self.step_bytes = nbytes / steps
