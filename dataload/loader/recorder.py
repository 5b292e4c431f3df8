"""Records what a loader's consumer receives, how long it waits, and how long it works in between."""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from dataload._util.system import cpu_demand, usable_cpus
from dataload.loader.statistics import StageStatistics, Statistics, Workplace
from dataload.loader.step import StepResult
from dataload.storage.remote.traffic import Downloads, Traffic

_MAX_REQUESTS = 4096  # whose times are kept
_PAUSE, _PAUSE_SECONDS = 8, 0.1  # times the usual work of a consumer, and seconds more: longer work is a pause
_CPU_CLOCK_SECONDS = 0.2  # between two readings
_CPU_CLOCK_COST = 1e-3  # maximum fraction of the time: with hundreds of threads a reading takes milliseconds


class Listener(Protocol):
    """Called with every event, by the consumer's thread."""

    def waited(self, step: StepResult, asked: float, received: float) -> None:
        """Handle a wait from `asked` to `received`; must not keep `step`, which holds a batch."""
        ...

    def worked(self, begun: float, ended: float) -> None:
        """Handle work of the consumer between batches."""
        ...


@dataclass(slots=True)
class Recorder:
    """Adds up `Statistics`. Used by the consumer's thread; any thread may call `snapshot`."""

    executor: Workplace = "serial"  # where batches are made
    transforms: tuple[str, ...] = ()
    traffics: Sequence[Traffic] = ()  # what this process downloads for the source; empty if no data are remote
    clock: Callable[[], float] = perf_counter  # the clock of the steps' spans
    cpu_clock: Callable[[], float] = cpu_demand
    listeners: tuple[Listener, ...] = field(default=(), init=False)
    steps: int = field(default=0, init=False)
    wait_seconds: float = field(default=0.0, init=False)
    consumer_seconds: float = field(default=0.0, init=False)  # time that the consumer spent between batches
    pause_seconds: float = field(default=0.0, init=False)  # of the consumer: rare long times, such as for a checkpoint
    _usual_work: float = field(default=0.0, init=False)
    _rows: int = field(default=0, init=False)
    _nbytes: int = field(default=0, init=False)
    _worker_seconds: float = field(default=0.0, init=False)  # until `_workers_since`, in seconds of the loop
    _workers_since: float = field(default=0.0, init=False)
    _first_wait: float = field(default=0.0, init=False)
    _bad: int = field(default=0, init=False)
    _retries: int = field(default=0, init=False)
    _ready: int = field(default=0, init=False)
    _stages: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]), init=False)
    cpu_seconds: float = field(default=0.0, init=False)
    cpu_clock_seconds: float = field(default=0.0, init=False)
    _cpus: int = field(default_factory=usable_cpus, init=False)
    _asked: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_REQUESTS), init=False)
    _made: float = field(default=0.0, init=False)  # when the last step was made
    _received: float = field(default=0.0, init=False)  # and received
    _resumed: float = field(default=0.0, init=False)
    _delivered: float | None = field(default=None, init=False)
    _cpu_read: tuple[float, float] | None = field(default=None, init=False)
    _cpu_pause: float = field(default=_CPU_CLOCK_SECONDS, init=False)
    _downloads: Downloads = field(default_factory=Downloads, init=False)  # of other processes, less those before

    def __post_init__(self) -> None:
        self._downloads -= self._downloaded_here()

    @property
    def work_seconds(self) -> float:
        """Time of all stages, of all workers together."""
        return sum(seconds for _, seconds in self._stages.values())

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every event from now on."""
        self.listeners += (listener,)

    def unlisten(self, listener: Listener) -> None:
        """Call it no longer."""
        self.listeners = tuple(each for each in self.listeners if each is not listener)

    @property
    def lag(self) -> float:
        """Seconds from the end of the work on the last step, or of a pause after it, until the step was received."""
        return self._received - max(self._made, self._resumed)

    @property
    def _loop_seconds(self) -> float:
        return self.wait_seconds - self._first_wait + self.consumer_seconds

    def end_use(self, workers: int) -> None:
        """Count the time since the last call for `workers` workers."""
        now = self._loop_seconds
        self._worker_seconds += workers * (now - self._workers_since)
        self._workers_since = now

    def resume(self) -> None:
        """Start an epoch: the consumer's time since the last one does not count."""
        self._delivered = self._cpu_read = None
        self._resumed = self.clock()

    def begin_wait(self) -> None:
        """Start a wait: the consumer requests a batch."""
        now = self.clock()
        self._end_work(now)
        self._asked.append(now)

    def end_wait(self, step: StepResult) -> None:
        """End a wait: the consumer has the batch, or the error."""
        now = self._delivered = self._received = self.clock()
        asked = self._asked
        wait = now - asked[-1]
        self.wait_seconds += wait
        stages, made = self._stages, now
        for stage, begun, made in step.spans:
            entry = stages[stage]
            entry[0] += 1
            entry[1] += made - begun
        if step.downloads is not None:
            self._downloads += step.downloads.downloads
        for listener in self.listeners:
            listener.waited(step, asked[-1], now)
        if step.error is not None:
            return
        if not self.steps:
            self._first_wait = wait
        self.steps += 1
        self._made = made
        self._rows += step.rows
        self._nbytes += step.nbytes
        # Count the requests since the batch was ready. Summed over batches, this is the number of ready batches summed
        # over requests.
        self._ready += len(asked) - bisect_left(asked, made)
        if step.bad:
            self._bad += len(step.bad)
            self._retries += 1
        last = self._cpu_read
        if last is None or now - last[0] > self._cpu_pause:
            self._read_cpu_clock(now)

    def pause(self) -> None:
        """End an epoch."""
        self._end_work(self.clock())

    def _end_work(self, now: float) -> None:
        if self._delivered is not None:
            work = now - self._delivered
            self.consumer_seconds += work
            if work > _PAUSE_SECONDS + _PAUSE * self._usual_work:
                self.pause_seconds += work
                self._resumed = now
                work = _PAUSE_SECONDS + 2 * self._usual_work  # several in a row are no pauses
            self._usual_work += 0.1 * (work - self._usual_work)
            for listener in self.listeners:
                listener.worked(self._delivered, now)
            self._delivered = None

    def _read_cpu_clock(self, now: float) -> None:
        """Measure between batches of one epoch, so that the time between epochs does not count."""
        used = self.cpu_clock()
        if self._cpu_read is not None:
            self.cpu_clock_seconds += now - self._cpu_read[0]
            self.cpu_seconds += max(0.0, used - self._cpu_read[1])  # ended threads no longer count
        self._cpu_read = now, used
        self._cpu_pause = max(_CPU_CLOCK_SECONDS, (self.clock() - now) / _CPU_CLOCK_COST)

    def _downloaded_here(self) -> Downloads:
        return sum((traffic.total() for traffic in self.traffics), Downloads())

    def snapshot(self, workers: int, allowed: int | None = None, start_method: str | None = None) -> Statistics:
        """Return the totals so far, for the workers in use and those allowed, by default the same number."""
        here = self.executor in ("serial", "threads")
        return Statistics(
            steps=self.steps,
            rows=self._rows,
            nbytes=self._nbytes,
            wait_seconds=self.wait_seconds,
            first_wait_seconds=self._first_wait,
            consumer_seconds=self.consumer_seconds,
            # A list, because the consumer's thread may add a stage at the same time.
            stages={name: StageStatistics(runs, seconds) for name, (runs, seconds) in list(self._stages.items())},
            workers=workers,
            workers_allowed=workers if allowed is None else allowed,
            worker_seconds=self._worker_seconds + workers * (self._loop_seconds - self._workers_since),
            executor=self.executor if workers else "serial",
            start_method=start_method,
            transforms=self.transforms,
            bad=self._bad,
            retries=self._retries,
            downloads=self._downloaded_here() + self._downloads if self.traffics else None,
            depth=self._ready / self.steps if self.steps else 0.0,
            cpus=self._cpus,
            cpu_seconds=self.cpu_seconds if here else 0.0,
            cpu_clock_seconds=self.cpu_clock_seconds if here else 0.0,
        )
