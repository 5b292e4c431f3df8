"""From a loader's arguments to its workers, and to what they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from dataload._util.checks import check_choice
from dataload._util.cpus import usable_cpus
from dataload.collate import Collate, Pack, Policy, default_collate
from dataload.errors import ConfigError
from dataload.executors import Executor, SerialExecutor, StartMethod, ThreadExecutor, TimeoutPolicy
from dataload.executors.serialization import check_pickle
from dataload.loader.recorder import Recorder
from dataload.loader.step import JobResult, StepRange, StepWork

__all__ = [
    "ExecutorName",
    "Scaling",
    "ThroughputSample",
    "check_fields",
    "check_pickles",
    "check_seconds",
    "choose_collate",
    "make_executor",
    "workers_to_use",
]

ExecutorName: TypeAlias = Literal["threads", "processes"]
"""Where batches are made when `num_workers` is not 0."""

_SLOTS_BEYOND_WINDOW = 3  # the batch that the consumer has, the one before it, and one that is on its way
_WORTH_A_WORKER = 0.1  # of the time: what the consumer must wait
_LEAST_OF_EXPECTED = 0.3  # of what workers would bring if nothing else were a limit
_LEAST_STEPS, _STEPS_PER_WORKER, _LEAST_SECONDS = 8, 4, 0.2  # for a look to say anything
_START_SECONDS = {"threads": 0.2, "processes": 1.5}  # until new workers do their part


def make_executor(
    work: StepWork, name: ExecutorName, workers: int, *, window: int, start_method: StartMethod, timeouts: TimeoutPolicy
) -> Executor[StepRange, JobResult]:
    """The workers that do `work`.

    Raises:
        ConfigError: There is no such executor or way to start one, or something cannot be pickled for processes.
    """
    for key, value, kind in (("executor", name, ExecutorName), ("start_method", start_method, StartMethod)):
        check_choice(key, value, get_args(kind))
    if not workers:
        return SerialExecutor(work)
    if name == "threads":
        return ThreadExecutor(work, workers, timeouts=timeouts)
    from dataload.executors.processes import ProcessExecutor  # `multiprocessing` takes long to import

    if start_method != "fork":
        check_pickles(work)
    slots = window + _SLOTS_BEYOND_WINDOW
    return ProcessExecutor(work, workers, slots=slots, start_method=start_method, timeouts=timeouts)


def check_pickles(work: StepWork) -> None:
    """Name what cannot be sent to worker processes.

    Raises:
        ConfigError: Some part cannot be pickled.
    """
    fetch = work.fetch
    parts: list[tuple[str, str, Any]] = [
        ("source", "the source", fetch.source),
        *(("transform", f"the transform {step.name!r}", step.function) for step in fetch.transform),
        ("collate", "collate", fetch.collate),
        ("batch_transform", "batch_transform", fetch.batch_transform),
        ("sampler", "the sampler", work.planner),
    ]
    for key, name, part in parts:
        try:
            check_pickle(part)
        except Exception as error:
            raise ConfigError(
                f"worker processes need a copy of {name}, and {part!r} cannot be pickled "
                f"({type(error).__name__}: {error}); define it at the top of a module, use executor='threads', or "
                "start_method='fork'",
                key=key,
                value=part,
            ) from error


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """What was seen of a loader for a while.

    Attributes:
        workers: Number of workers.
        steps: Batches that the consumer received.
        wait_seconds: What it waited for them.
        consumer_seconds: What it did in between.
        work_seconds: What workers did for them, all together.
    """

    workers: int
    steps: int
    wait_seconds: float
    consumer_seconds: float
    work_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.wait_seconds + self.consumer_seconds

    @property
    def steps_per_second(self) -> float:
        """How fast it went."""
        return self.steps / max(self.seconds, 1e-9)

    def since(self, earlier: ThroughputSample) -> ThroughputSample:
        """What was seen after another look."""
        return ThroughputSample(
            self.workers,
            self.steps - earlier.steps,
            self.wait_seconds - earlier.wait_seconds,
            self.consumer_seconds - earlier.consumer_seconds,
            self.work_seconds - earlier.work_seconds,
        )


def workers_to_use(before: ThroughputSample | None, now: ThroughputSample, limit: int) -> int:
    """How many workers there should be. Pure.

    Others are added while the consumer waits 10% of the time and more: as many as would keep up with it, but no more
    than as many as there are, for what they bring is an estimate until it is seen. What the last ones brought must be
    at least 30% of their share, or they stay the last.

    Args:
        before: The look with fewer workers; None if there were none fewer.
        now: The last look.
        limit: Workers at most.

    Returns:
        At least as many as there are.
    """
    workers = now.workers
    if workers >= limit or now.wait_seconds < _WORTH_A_WORKER * now.seconds:
        return workers
    if before is not None:
        expected = 1 + _LEAST_OF_EXPECTED * (workers / before.workers - 1)
        if now.steps_per_second < expected * before.steps_per_second:
            return workers
    needed = math.ceil(min(now.work_seconds / max(now.consumer_seconds, 1e-9), limit))
    return min(limit, 2 * workers, max(needed, workers + 1))


class Scaling:
    """``num_workers="auto"``: begins with one worker, and adds others as `workers_to_use` says.

    Args:
        limit: Workers at most; by default the CPUs that this process may use.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.workers = 1
        self._limit = usable_cpus() if limit is None else limit
        self._before: ThroughputSample | None = None
        self._mark = ThroughputSample(1, 0, 0.0, 0.0, 0.0)
        self._starting = True

    def look(self, recorder: Recorder, grow: Callable[[int], None]) -> None:
        """See whether there is reason to add workers, now and then; called after each batch.

        Args:
            recorder: What was seen so far.
            grow: Adds workers, up to the number that it is given.
        """
        enough = max(_LEAST_STEPS, _STEPS_PER_WORKER * self.workers)
        if self.workers >= self._limit or recorder.steps - self._mark.steps < enough:
            return
        total = ThroughputSample(
            self.workers, recorder.steps, recorder.wait_seconds, recorder.consumer_seconds, recorder.work_seconds
        )
        now = total.since(self._mark)
        if now.seconds < (_START_SECONDS[recorder.executor] if self._starting else _LEAST_SECONDS):
            return
        self._mark = total
        if self._starting:  # the consumer waited for workers to start; this says nothing of what they do
            self._starting = False
            return
        wanted = workers_to_use(self._before, now, self._limit)
        if wanted > self.workers:
            self._before, self._starting, self.workers = now, True, wanted
            grow(wanted)


def check_fields(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    """The names of the fields to read, or None for all.

    Raises:
        ConfigError: It is one text, of which each letter would be a name.
    """
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of names, got the text {fields!r}", key="fields", value=fields)
    return None if fields is None else tuple(fields)


def choose_collate(collate: Callable[..., Any] | Mapping[str, Policy] | None, *, packs: bool) -> Callable[..., Any]:
    """The function that makes a batch of samples.

    Raises:
        ConfigError: It is no function; or rows are packed, and it does not do that.
    """
    if packs:
        if collate is not None and not isinstance(collate, Pack):
            raise ConfigError(
                f"packed rows are laid out by dataload.Pack: pass Pack(pad_value=...) or nothing, got {collate!r}",
                key="collate",
                value=collate,
            )
        return collate or Pack()
    if collate is None:
        return default_collate
    if isinstance(collate, Mapping):
        return Collate(policies=collate) if collate else default_collate
    if not callable(collate):
        raise ConfigError(f"collate is a function of a list of samples, got {collate!r}", key="collate", value=collate)
    return collate


def check_seconds(name: str, value: Any) -> float | None:
    """A time, or None.

    Raises:
        ConfigError: It is no number above 0.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        raise ConfigError(f"{name} must be a number of seconds above 0, or None; got {value!r}", key=name, value=value)
    return value
