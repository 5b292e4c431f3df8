"""Work ahead of the consumer, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from dataload.executors import Result

__all__ = ["Pace", "ordered_map"]

_TASK_SECONDS = 1e-3
_MOST_STEPS = 64

Task = TypeVar("Task")
T = TypeVar("T")


def ordered_map(
    submit: Callable[[Task], Result[T]],
    tasks: Iterable[Task],
    *,
    window: int,
    helps: Callable[[], bool] = lambda: False,
) -> Generator[T]:
    """Yield the results of `tasks` in their order, with at most `window` + 1 of them in flight.

    A task that fails raises at its place, after the results before it. Closing the generator cancels what has
    not begun, and waits for nothing.

    Args:
        submit: Starts a task.
        tasks: Taken from as results are consumed, so they may be endless.
        window: Tasks ahead of the one that is waited for; 0 for no work ahead.
        helps: Whether the consumer's thread does a task itself where it would have to wait for one.
    """
    pending: deque[Result[T]] = deque()
    try:
        for task in tasks:
            pending.append(submit(task))
            if len(pending) > window:
                _help(pending, helps)
                yield pending.popleft().result()
        while pending:
            _help(pending, helps)
            yield pending.popleft().result()
    finally:
        for result in pending:
            result.cancel()


def _help(pending: deque[Result[T]], helps: Callable[[], bool]) -> None:
    """Do tasks that nobody has begun until the first of all is done, or none is left."""
    if pending[0].done() or not helps():
        return
    for result in pending:
        if result.run() and pending[0].done():
            return


class Pace:
    """How many steps make one task, so that handing over results does not cost more than making them.

    To wake a waiting thread costs 20 to 50 us and more in a virtual machine, as much as a small batch. Steps that take
    less than a millisecond are therefore made several at a time. The first task is one step: it should come soon.
    """

    def __init__(self) -> None:
        self._steps = 1

    def is_quick(self) -> bool:
        """Whether a task takes about a millisecond, as far as is known: then to do one is better than to wait."""
        return self._steps > 1

    def groups(self, steps: range) -> Generator[range]:
        """Consecutive parts of `steps`, each of the size that is right when it is asked for."""
        start = steps.start
        while start < steps.stop:
            stop = min(start + self._steps, steps.stop)
            yield range(start, stop)
            start = stop

    def note(self, steps: int, seconds: float) -> None:
        """Learn from a task of that many steps; called by several workers, of whom the last one wins."""
        fitting = int(_TASK_SECONDS * steps / max(seconds, 1e-9))
        self._steps = max(1, min(fitting, 2 * self._steps, _MOST_STEPS))
