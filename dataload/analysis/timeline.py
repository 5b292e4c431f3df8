"""Who loaded which step when, and when the consumer waited: recorded on request, for pictures and traces."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dataload.loader.base import LoaderBase
from dataload.loader.recorder import Recorder, StepRecord

CONSUMER = "consumer"
"""The line of the consumer's thread, whatever that is called."""

Span = tuple[str, float, float]
"""What went on, its begin and its end in seconds of `time.perf_counter`."""


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """What became of one step. Times are seconds of `time.perf_counter`.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step.
        worker: Who made the batch; `CONSUMER` if that did it itself.
        spans: Its stages, one after another.
        asked: When the consumer asked for it.
        received: When it had it.
        rows: Rows of the plan.
        nbytes: Bytes of the batch's arrays.
        bad: Number of records that were left out or replaced.
        failed: Whether there was no batch.
    """

    epoch: int
    step: int
    worker: str
    spans: tuple[Span, ...]
    asked: float
    received: float
    rows: int
    nbytes: int
    bad: int
    failed: bool


class Timeline:
    """What happened while it was recorded; see `record_timeline`.

    Attributes:
        steps: In the order in which the consumer received them.
        work: Begin and end of what the consumer did in between.
    """

    def __init__(self) -> None:
        self.steps: list[TimelineStep] = []
        self.work: list[tuple[float, float]] = []

    def waited(self, step: StepRecord, asked: float, received: float) -> None:
        """Another step was received; called by the loader."""
        self.steps.append(
            TimelineStep(
                epoch=step.epoch,
                step=step.step,
                worker=step.worker if step.worker.startswith("dataload-") else CONSUMER,
                spans=tuple(step.spans),
                asked=asked,
                received=received,
                rows=step.rows,
                nbytes=step.nbytes,
                bad=len(step.bad),
                failed=step.error is not None,
            )
        )

    def worked(self, begun: float, ended: float) -> None:
        """The consumer did something else; called by the loader."""
        self.work.append((begun, ended))

    @property
    def workers(self) -> list[str]:
        """Names of those that made batches, in the order of their numbers, without the consumer."""
        return sorted({step.worker for step in self.steps} - {CONSUMER}, key=_by_number)

    @property
    def begun(self) -> float:
        """The first thing in it. What was prefetched began before the consumer asked; 0 if there is nothing."""
        starts = [step.asked for step in self.steps] + [begun for begun, _ in self.work]
        return min(starts + [begun for step in self.steps for _, begun, _ in step.spans], default=0.0)

    @property
    def ended(self) -> float:
        """The last thing in it."""
        return max([step.received for step in self.steps] + [ended for _, ended in self.work], default=0.0)

    def busy_seconds(self, worker: str) -> float:
        """What a worker was at work for these steps."""
        spans = (span for step in self.steps if step.worker == worker for span in step.spans)
        return sum(ended - begun for _, begun, ended in spans)

    def to_json(self) -> dict[str, Any]:
        """As a dict of numbers and text; times in seconds since the first thing in it."""
        origin = self.begun
        return {
            "seconds": self.ended - origin,
            "workers": self.workers,
            "steps": [
                {
                    "epoch": step.epoch,
                    "step": step.step,
                    "worker": step.worker,
                    "spans": [[stage, begun - origin, ended - origin] for stage, begun, ended in step.spans],
                    "asked": step.asked - origin,
                    "received": step.received - origin,
                    "rows": step.rows,
                    "nbytes": step.nbytes,
                    "bad": step.bad,
                    "failed": step.failed,
                }
                for step in self.steps
            ],
            "work": [[begun - origin, ended - origin] for begun, ended in self.work],
        }

    def to_trace(self) -> dict[str, Any]:
        """As a trace in Chrome's JSON format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

        One line for the consumer, with its waits and its work, and one for each worker, with its steps and their
        stages inside; times in microseconds since the first thing in it.
        """
        lines = {name: number for number, name in enumerate([CONSUMER, *self.workers])}
        process, origin = os.getpid(), self.begun
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": "dataload"}}
        ]
        for name, number in lines.items():
            place = {"ph": "M", "pid": process, "tid": number}
            events.append({**place, "name": "thread_name", "args": {"name": name}})
            events.append({**place, "name": "thread_sort_index", "args": {"sort_index": number}})

        def add(line: str, name: str, category: str, begun: float, ended: float, **facts: Any) -> None:
            times = {"ts": 1e6 * (begun - origin), "dur": 1e6 * (ended - begun)}
            place = {"ph": "X", "pid": process, "tid": lines[line]}
            events.append({**place, "name": name, "cat": category, **times, "args": facts})

        for step in self.steps:
            facts = {"epoch": step.epoch, "step": step.step}
            add(CONSUMER, "wait", "wait", step.asked, step.received, **facts)
            if step.spans:
                about = {"rows": step.rows, "nbytes": step.nbytes, "bad": step.bad, "failed": step.failed}
                begun, ended = step.spans[0][1], step.spans[-1][2]
                add(step.worker, f"step {step.step}", "step", begun, ended, **facts, **about)
            for stage, begun, ended in step.spans:
                add(step.worker, stage, "stage", begun, ended, **facts)
        for begun, ended in self.work:
            add(CONSUMER, "work", "work", begun, ended)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `to_trace` to a file."""
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(self.to_trace(), stream)

    def __repr__(self) -> str:
        return f"Timeline({len(self.steps)} steps, {len(self.workers)} workers, {self.ended - self.begun:.3f} s)"


@contextmanager
def record_timeline(loader: LoaderBase[Any, Any]) -> Generator[Timeline]:
    """Record what a loader's workers and its consumer do inside the ``with``.

    It costs a microsecond and some 500 bytes a step, and nothing when it is over.

    Args:
        loader: Any; in use already or not.

    Yields:
        What is recorded, filled as the consumer goes on.

    Raises:
        RuntimeError: A timeline of this loader is being recorded already.

    Example:
        >>> import dataload
        >>> from dataload.analysis.timeline import record_timeline
        >>> loader = dataload.Loader(dataload.RangeSource(8), batch_size=4)
        >>> with record_timeline(loader) as timeline:
        ...     for batch in loader:
        ...         pass
        >>> [(step.step, step.worker) for step in timeline.steps]
        [(0, 'consumer'), (1, 'consumer')]
    """
    recorder: Recorder = loader._recorder  # pyright: ignore[reportPrivateUsage] # users have `statistics()`
    if recorder.listener is not None:
        raise RuntimeError("a timeline of this loader is being recorded already: use that one, or end it first")
    timeline = recorder.listener = Timeline()
    try:
        yield timeline
    finally:
        recorder.listener = None


def _by_number(name: str) -> tuple[str, int]:
    """dataload-10 comes behind dataload-9."""
    number = re.search(r"\d+$", name)
    return (name[: number.start()], int(number[0])) if number else (name, -1)
