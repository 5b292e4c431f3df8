"""Work ahead of the consumer, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from dataload.executors import Result

__all__ = ["ordered_map"]

Task = TypeVar("Task")
T = TypeVar("T")


def ordered_map(submit: Callable[[Task], Result[T]], tasks: Iterable[Task], *, window: int) -> Generator[T]:
    """Yield the results of `tasks` in their order, with at most `window` + 1 of them in flight.

    A task that fails raises at its place, after the results before it. Closing the generator cancels what has
    not begun, and waits for nothing.

    Args:
        submit: Starts a task.
        tasks: Taken from as results are consumed, so they may be endless.
        window: Tasks ahead of the one that is waited for; 0 for no work ahead.
    """
    pending: deque[Result[T]] = deque()
    try:
        for task in tasks:
            pending.append(submit(task))
            if len(pending) > window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for result in pending:
            result.cancel()
