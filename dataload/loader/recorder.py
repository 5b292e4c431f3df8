"""What happens to a loader's consumer, as it happens: added up, and told to whoever wants all of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from dataload._util.cpus import cpu_demand, usable_cpus
from dataload.loader.statistics import StageStatistics, Statistics, Workplace

__all__ = ["Listener", "Recorder", "StepRecord"]

_MOST_ASKED = 4096
_CPU_CLOCK_SECONDS = 0.2  # between two looks at it
_CPU_CLOCK_COST = 1e-3  # of the time, at most: with hundreds of threads a look takes milliseconds


class StepRecord(Protocol):
    """What a step tells of itself."""

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        ...

    @property
    def step(self) -> int:
        """Number of the step."""
        ...

    @property
    def error(self) -> Exception | None:
        """Why there is no batch; None if there is one."""
        ...

    @property
    def rows(self) -> int:
        """Rows of its plan."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its batch."""
        ...

    @property
    def spans(self) -> Sequence[tuple[str, float, float]]:
        """Stage, begin and end in seconds of the recorder's clock, one after another."""
        ...

    @property
    def bad(self) -> Sequence[Any]:
        """Records that were left out or replaced."""
        ...

    @property
    def worker(self) -> str:
        """Name of the worker."""
        ...


class Listener(Protocol):
    """Is told everything, by the consumer's thread."""

    def waited(self, step: StepRecord, asked: float, received: float) -> None:
        """The consumer waited for a step from `asked` to `received`; must not keep `step`, which holds a batch."""
        ...

    def worked(self, begun: float, ended: float) -> None:
        """The consumer did something else."""
        ...


@dataclass(slots=True)
class Recorder:
    """Adds up what `Statistics` shows. Used by the consumer's thread; `snapshot` by any.

    Attributes:
        executor: Where batches are made.
        transforms: Names of the transforms.
        clock: Seconds; the clock of the steps' spans.
        cpu_clock: Seconds, as `cpu_demand` counts them.
        listener: Is told everything; None, as a rule.
        steps: Batches received.
        wait_seconds: What the consumer waited.
        consumer_seconds: What it did in between.
    """

    executor: Workplace = "serial"
    transforms: tuple[str, ...] = ()
    clock: Callable[[], float] = perf_counter
    cpu_clock: Callable[[], float] = cpu_demand
    listener: Listener | None = None
    steps: int = field(default=0, init=False)
    wait_seconds: float = field(default=0.0, init=False)
    consumer_seconds: float = field(default=0.0, init=False)
    _rows: int = field(default=0, init=False)
    _nbytes: int = field(default=0, init=False)
    _first_wait: float = field(default=0.0, init=False)
    _bad: int = field(default=0, init=False)
    _retries: int = field(default=0, init=False)
    _ready: int = field(default=0, init=False)
    _stages: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]), init=False)
    _cpu_seconds: float = field(default=0.0, init=False)
    _cpu_clock_seconds: float = field(default=0.0, init=False)
    _cpus: int = field(default_factory=usable_cpus, init=False)
    _asked: list[float] = field(default_factory=list[float], init=False)  # the times of the last few requests
    _delivered: float | None = field(default=None, init=False)
    _cpu_looked: tuple[float, float] | None = field(default=None, init=False)
    _cpu_pause: float = field(default=_CPU_CLOCK_SECONDS, init=False)

    @property
    def work_seconds(self) -> float:
        """What all stages took, of all workers together."""
        return sum(seconds for _, seconds in self._stages.values())

    def resume(self) -> None:
        """The consumer begins an epoch: what it did since the last does not count."""
        self._delivered = self._cpu_looked = None

    def begin_wait(self) -> None:
        """The consumer asks for a batch."""
        now = self.clock()
        self._end_work(now)
        self._asked.append(now)
        if len(self._asked) > _MOST_ASKED:
            del self._asked[: _MOST_ASKED // 2]

    def end_wait(self, step: StepRecord) -> None:
        """It has it, or why there is none."""
        now = self._delivered = self.clock()
        asked = self._asked
        wait = now - asked[-1]
        self.wait_seconds += wait
        stages, made = self._stages, now
        for stage, begun, made in step.spans:
            entry = stages[stage]
            entry[0] += 1
            entry[1] += made - begun
        if self.listener is not None:
            self.listener.waited(step, asked[-1], now)
        if step.error is not None:
            return
        if not self.steps:
            self._first_wait = wait
        self.steps += 1
        self._rows += step.rows
        self._nbytes += step.nbytes
        # The requests that found it made: their sum over batches is the sum over requests of the batches they found.
        self._ready += len(asked) - bisect_left(asked, made)
        if step.bad:
            self._bad += len(step.bad)
            self._retries += 1
        looked = self._cpu_looked
        if looked is None or now - looked[0] > self._cpu_pause:
            self._look_at_cpu(now)

    def pause(self) -> None:
        """The consumer is through with an epoch."""
        self._end_work(self.clock())

    def _end_work(self, now: float) -> None:
        if self._delivered is not None:
            self.consumer_seconds += now - self._delivered
            if self.listener is not None:
                self.listener.worked(self._delivered, now)
            self._delivered = None

    def _look_at_cpu(self, now: float) -> None:
        """From one batch to a later one of the same epoch, so that what a process does between epochs is not in it."""
        used = self.cpu_clock()
        if self._cpu_looked is not None:
            self._cpu_clock_seconds += now - self._cpu_looked[0]
            self._cpu_seconds += max(0.0, used - self._cpu_looked[1])  # threads that ended are not in it any more
        self._cpu_looked = now, used
        self._cpu_pause = max(_CPU_CLOCK_SECONDS, (self.clock() - now) / _CPU_CLOCK_COST)

    def snapshot(self, workers: int) -> Statistics:
        """Return the totals so far, for a number of workers."""
        here = self.executor != "processes"
        return Statistics(
            steps=self.steps,
            rows=self._rows,
            nbytes=self._nbytes,
            wait_seconds=self.wait_seconds,
            first_wait_seconds=self._first_wait,
            consumer_seconds=self.consumer_seconds,
            # A list at once, for the consumer's thread may add a stage meanwhile.
            stages={name: StageStatistics(runs, seconds) for name, (runs, seconds) in list(self._stages.items())},
            workers=workers,
            executor=self.executor if workers else "serial",
            transforms=self.transforms,
            bad=self._bad,
            retries=self._retries,
            depth=self._ready / self.steps if self.steps else 0.0,
            cpus=self._cpus,
            cpu_seconds=self._cpu_seconds if here else 0.0,
            cpu_clock_seconds=self._cpu_clock_seconds if here else 0.0,
        )
