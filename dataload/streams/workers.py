"""The workers of a multi-stream loader: each owns a fixed part of the rows, and all of them make every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataload.executors import Place, Result, StartMethod, TimeoutPolicy
from dataload.loader.workers import ExecutorName, make_executor
from dataload.streams.parts import Part, PartTask, PartWork
from dataload.streams.rows import RowStart, StreamPlan, describe


def parts_of(rows: int, most: int) -> int:
    """Return the largest number of equal parts of `rows` that is at most `most`."""
    return next(parts for parts in range(min(rows, most), 0, -1) if rows % parts == 0)


@dataclass(frozen=True, slots=True)
class StreamLocator:
    """Decodes (row, sequence) from the index of a worker's status.

    Attributes:
        plan: Knows the sequences.
    """

    plan: StreamPlan

    def sequence(self, place: Place) -> int:
        """Return the sequence that the worker is at; -1 if unknown."""
        return place.index % self.plan.order.sequences if place.index >= 0 else -1

    def __call__(self, place: Place) -> tuple[int, str]:
        """Return the sequence and the text; see `TimeoutPolicy`."""
        return self.sequence(place), self.text(place)

    def text(self, place: Place) -> str:
        """Return the row of the batch and the sequence in words; empty if unknown."""
        if place.index < 0:
            return ""
        row = place.index // self.plan.order.sequences
        return f"in row {row}, at {describe(self.plan.sequences, self.sequence(place))}"


class StreamWorkers:
    """Makes every step of all rows; each worker makes its part.

    Args:
        plan: The work of all rows.
        rows: The rows of this rank, numbered among those of all ranks.
        workers: Maximum number of workers; 0 for the consumer's thread.
        executor: Where workers run.
        start_method: How processes start.
        window: Steps ahead.
        timeout: Seconds to wait for a step before raising an error.

    Attributes:
        workers: Number of workers.
        locator: Finds the stream that a worker is at.

    Raises:
        ConfigError: The executor or the start method is unknown, or something cannot be pickled for processes.
    """

    def __init__(
        self,
        plan: StreamPlan,
        rows: Sequence[int],
        workers: int,
        *,
        executor: ExecutorName,
        start_method: StartMethod,
        window: int,
        timeout: float | None,
    ) -> None:
        self.workers = parts_of(len(rows), workers) if workers else 0
        self.locator = StreamLocator(plan)
        self._timeouts = TimeoutPolicy(timeout, locate=self.locator)
        self._executor: ExecutorName = executor
        self._start_method: StartMethod = start_method
        self._window = window
        size = len(rows) // max(self.workers, 1)
        self._plan = plan
        self._parts = [(first, rows[first : first + size]) for first in range(0, len(rows), size)]
        self._start()

    def submit(self, epoch: int, step: int, session: int, starts: tuple[RowStart, ...]) -> Result[list[Part]]:
        """Start a step in all workers.

        Args:
            epoch: Number of the epoch.
            step: Number of the step.
            session: See `PartTask`.
            starts: Where the rows start, if this is the first step of the session; else empty.
        """
        return _AllParts(
            [
                executor.submit(PartTask(session, epoch, step, starts[first : first + len(rows)]))
                for executor, (first, rows) in zip(self._executors, self._parts, strict=True)
            ]
        )

    def replace(self) -> None:
        """Continue with new workers: one that hung may come back, and would take items from streams of others."""
        self.close()
        self._start()

    def close(self) -> None:
        """Stop the workers, and close their streams."""
        for executor in self._executors:
            executor.close()
        for work in self._works:
            work.close()

    def _start(self) -> None:
        self._works = [PartWork(self._plan, *part) for part in self._parts]
        plan = self._plan
        parts = [("make_stream", "make_stream", plan.make_stream.function), ("sequences", "sequences", plan.sequences)]
        self._executors = [
            make_executor(
                work,
                self._executor,
                min(self.workers, 1),
                window=self._window,
                start_method=self._start_method,
                timeouts=self._timeouts,
                parts=parts if number == 0 else (),  # they are the same for all workers
                first=number,
            )
            for number, work in enumerate(self._works)
        ]


class _AllParts(Result[list[Part]]):
    """The result of one step of all workers."""

    def __init__(self, results: list[Result[Part]]) -> None:
        self._results = results

    def result(self) -> list[Part]:
        return [result.result() for result in self._results]

    def done(self) -> bool:
        return all(result.done() for result in self._results)

    def cancel(self) -> None:
        for result in self._results:
            result.cancel()
