"""The time at which each worker loaded each step, and at which the consumer waited, for pictures and traces."""

import json
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

from dataload.loader.device import AnyLoader, loader_of
from dataload.loader.failures import StageSpan
from dataload.loader.recorder import Recorder
from dataload.loader.statistics import Statistics
from dataload.loader.step import StepResult
from dataload.storage.remote.traffic import Request

_LEAST_WORK = 1e-4  # seconds a batch: a consumer that works less only takes batches
_MOST_RECEIVED = 1000  # small batches a second: Ray takes 0.4 to 1 ms of the trainer's process for each

CONSUMER = "consumer"
"""The name of the consumer's thread in a timeline."""


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """The work of one worker on one step. Times are in seconds of `time.perf_counter`."""

    epoch: int
    step: int
    worker: str  # `CONSUMER` for the consumer's thread
    spans: tuple[StageSpan, ...]  # the stages of the work, one after another
    asked: float  # when the consumer requested the step
    received: float  # and when it received it
    rows: int  # made by this worker
    nbytes: int  # of their arrays
    bad: int  # records that were dropped or replaced
    failed: bool


class Timeline:
    """The steps that a loader delivered while it was recorded, and who worked when; see `record_timeline`."""

    def __init__(self) -> None:
        # As received by the consumer. A step that several workers made together has one entry for each.
        self.steps: list[TimelineStep] = []
        self.work: list[tuple[float, float]] = []  # begin and end of the consumer's work between steps
        # In the order in which they ended; of each worker process at most the last 256 before each step.
        self.requests: list[Request] = []

    def waited(self, step: StepResult, asked: float, received: float) -> None:
        """Add a step; called by the loader."""
        self.requests += step.downloads.requests if step.downloads is not None else ()
        for worker, rows, spans in step.shares or [(step.worker, step.rows, step.spans)]:
            self.steps.append(
                TimelineStep(
                    epoch=step.epoch,
                    step=step.step,
                    worker=worker if worker.startswith("dataload-") else CONSUMER,
                    spans=tuple(spans),
                    asked=asked,
                    received=received,
                    rows=rows,
                    nbytes=step.nbytes * rows // (step.rows or 1),
                    bad=len(step.bad),
                    failed=step.error is not None,
                )
            )

    def worked(self, begun: float, ended: float) -> None:
        """Add work of the consumer between steps; called by the loader."""
        self.work.append((begun, ended))

    @property
    def workers(self) -> list[str]:
        """Names of the workers that made batches, in numeric order, without the consumer."""
        return sorted(
            {step.worker for step in self.steps} - {CONSUMER}, key=lambda name: (len(name.partition(" ")[0]), name)
        )

    @property
    def connections(self) -> list[list[Request]]:
        """The requests, dealt to as few lines as have one at a time, each in the order of their begins."""
        lines: list[list[Request]] = []
        for request in sorted(self.requests, key=lambda each: each.begun):
            line = next((line for line in lines if line[-1].ended <= request.begun), None)
            if line is None:
                lines.append([request])
            else:
                line.append(request)
        return lines

    @property
    def begun(self) -> float:
        """Time of the first event, which for prefetched steps is before the first request; 0 if empty."""
        starts = [step.asked for step in self.steps] + [begun for begun, _ in self.work]
        starts += [request.begun for request in self.requests]
        return min(starts + [begun for step in self.steps for _, begun, _ in step.spans], default=0.0)

    @property
    def ended(self) -> float:
        """Time of the last event's end; 0 if empty."""
        ends = [step.received for step in self.steps] + [ended for _, ended in self.work]
        return max(ends + [request.ended for request in self.requests], default=0.0)

    def busy_seconds(self, worker: str) -> float:
        """Return the time that a worker worked on the steps."""
        spans = (span for step in self.steps if step.worker == worker for span in step.spans)
        return sum(ended - begun for _, begun, ended in spans)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of numbers and text, with times in seconds since the first event."""
        origin = self.begun
        return {
            "seconds": self.ended - origin,
            "workers": self.workers,
            "steps": [
                {
                    **asdict(step),
                    "spans": [[stage, begun - origin, ended - origin] for stage, begun, ended in step.spans],
                    "asked": step.asked - origin,
                    "received": step.received - origin,
                }
                for step in self.steps
            ],
            "work": [[begun - origin, ended - origin] for begun, ended in self.work],
            "connections": [
                [[each.what, each.begun - origin, each.ended - origin, each.failed] for each in line]
                for line in self.connections
            ],
        }

    def to_trace(self) -> dict[str, Any]:
        """Return a trace in Chrome's JSON format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

        It has one line for the consumer, with its waits and its work, one for each worker, with its steps and their
        stages, and one for each connection to an object store, with its requests. Times are in microseconds since the
        first event.
        """
        connections = {f"connection {number}": line for number, line in enumerate(self.connections)}
        lines = {name: number for number, name in enumerate([CONSUMER, *self.workers, *connections])}
        process, origin = os.getpid(), self.begun
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": "dataload"}}
        ]
        for name, number in lines.items():
            thread = {"ph": "M", "pid": process, "tid": number}
            events.append({**thread, "name": "thread_name", "args": {"name": name}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": number}})

        def add(line: str, name: str, category: str, begun: float, ended: float, **facts: Any) -> None:
            times = {"ts": 1e6 * (begun - origin), "dur": 1e6 * (ended - begun)}
            thread = {"ph": "X", "pid": process, "tid": lines[line]}
            events.append({**thread, "name": name, "cat": category, **times, "args": facts})

        asked = None
        for step in self.steps:
            facts = {"epoch": step.epoch, "step": step.step}
            if step.asked != asked:  # not another share of the same step
                add(CONSUMER, "wait", "wait", step.asked, step.received, **facts)
                asked = step.asked
            if step.spans:
                about = {"rows": step.rows, "nbytes": step.nbytes, "bad": step.bad, "failed": step.failed}
                begun, ended = step.spans[0][1], step.spans[-1][2]
                add(step.worker, f"step {step.step}", "step", begun, ended, **facts, **about)
            for stage, begun, ended in step.spans:
                add(step.worker, stage, "stage", begun, ended, **facts)
        for begun, ended in self.work:
            add(CONSUMER, "work", "work", begun, ended)
        for name, line in connections.items():
            for request in line:
                add(name, request.what, "request", request.begun, request.ended, failed=request.failed)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the result of `to_trace` to a file."""
        with open(path, "w", encoding="utf-8") as stream:
            json.dump(self.to_trace(), stream)

    def __repr__(self) -> str:
        return f"Timeline({len(self.steps)} steps, {len(self.workers)} workers, {self.ended - self.begun:.3f} s)"


@dataclass(frozen=True, slots=True)
class FleetEstimate:
    """The batches that a fleet of `workers` can make, from the time that the measured workers took for them."""

    workers: int
    batches_per_second: float  # that it can make
    bytes_per_second: float  # over the network, for those that the trainer takes
    needed: int | None  # workers that keep up with the trainer; None if its work was too short to tell

    @classmethod
    def of(cls, statistics: Statistics, workers: int) -> Self:
        """Return the estimate for a loader that has delivered at least one batch."""
        each, consumer = (
            seconds / statistics.steps for seconds in (statistics.work_seconds, statistics.consumer_seconds)
        )
        possible = workers / max(each, 1e-9)
        taken = min(possible, 1 / consumer if consumer else possible)
        needed = math.ceil(each / consumer) if consumer > _LEAST_WORK else None
        return cls(workers, possible, taken * statistics.nbytes / statistics.steps, needed)

    def __str__(self) -> str:
        name = f"a fleet of {self.workers} worker{'' if self.workers == 1 else 's'}"
        needs = "" if self.needed is None else f"; the trainer needs {self.needed} to wait for none"
        rates = f"{self.batches_per_second:,.1f} batches/s, {self.bytes_per_second / 1e6:,.1f} MB/s over the network"
        limit = (
            f" (one trainer can receive about {_MOST_RECEIVED:,}/s)" if self.batches_per_second > _MOST_RECEIVED else ""
        )
        return f"{name}: {rates}{limit}{needs}"


@contextmanager
def record_timeline(loader: AnyLoader) -> Generator[Timeline]:
    """Record what a loader's workers and its consumer do inside the ``with``.

    Recording takes about a microsecond and 500 bytes per step.

    Args:
        loader: A `Loader`, `MultiStreamLoader`, `dataload.torch.DataLoader` or device loader, already in use or not.

    Yields:
        The timeline, which grows while the consumer iterates.

    Raises:
        RuntimeError: A timeline of this loader is already being recorded.

    Examples:
        >>> import dataload
        >>> from dataload.analysis.timeline import record_timeline
        >>> loader = dataload.Loader(dataload.RangeSource(8), batch_size=4)
        >>> with record_timeline(loader) as timeline:
        ...     for batch in loader:
        ...         pass
        >>> [(step.step, step.worker) for step in timeline.steps]
        [(0, 'consumer'), (1, 'consumer')]
    """
    recorder: Recorder = loader_of(loader, "record_timeline")._recorder  # pyright: ignore[reportPrivateUsage] # users have `statistics()`
    if any(isinstance(listener, Timeline) for listener in recorder.listeners):
        raise RuntimeError("a timeline of this loader is already being recorded: use that one, or end it first")
    timeline = Timeline()
    recorder.listen(timeline)
    add = timeline.requests.append
    for traffic in recorder.traffics:
        traffic.listeners.append(add)
    try:
        yield timeline
    finally:
        recorder.unlisten(timeline)
        for traffic in recorder.traffics:
            traffic.listeners.remove(add)
