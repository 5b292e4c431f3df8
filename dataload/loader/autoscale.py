"""``num_workers="auto"``: how many workers a loader should have."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import sub
from typing import NamedTuple

from dataload._util.cpus import usable_cpus
from dataload.loader.recorder import Recorder

_LEAST_WAIT = 0.1  # part of the time that the consumer waits; below it, more workers are not worth it
_LEAST_OF_EXPECTED = 0.3  # part of the speed-up that workers would bring if nothing else were a limit
_LEAST_STEPS, _STEPS_PER_WORKER, _LEAST_SECONDS = 8, 4, 0.2  # for a sample to be reliable
_START_SECONDS = {"threads": 0.2, "processes": 1.5}  # until new workers deliver


class ThroughputSample(NamedTuple):
    """How a loader did for a while.

    Attributes:
        workers: Number of workers.
        steps: Batches that the consumer received.
        wait_seconds: Time that the consumer waited for them.
        consumer_seconds: Time that the consumer spent in between.
        work_seconds: Time that all workers together spent on them.
    """

    workers: int
    steps: int
    wait_seconds: float
    consumer_seconds: float
    work_seconds: float

    @property
    def seconds(self) -> float:
        """Length of the sample."""
        return self.wait_seconds + self.consumer_seconds

    @property
    def steps_per_second(self) -> float:
        """Batches per second."""
        return self.steps / max(self.seconds, 1e-9)

    def since(self, earlier: ThroughputSample) -> ThroughputSample:
        """Return the part of this sample that came after an earlier one."""
        steps = self.steps - earlier.steps
        return ThroughputSample(self.workers, steps, *map(sub, self[2:], earlier[2:]))


def workers_to_use(before: ThroughputSample | None, now: ThroughputSample, limit: int) -> int:
    """Return how many workers there should be. Pure.

    Workers are added while the consumer waits at least 10% of the time: as many as would keep up with it, but at most
    twice the present number, because the gain is an estimate until it is measured. Once the last ones brought less
    than 30% of their share, no more are added.

    Args:
        before: The last sample with fewer workers; None if there were never fewer.
        now: The present sample.
        limit: Most workers allowed.

    Returns:
        At least the present number.
    """
    workers = now.workers
    if workers >= limit or now.wait_seconds < _LEAST_WAIT * now.seconds:
        return workers
    if before is not None:
        expected = 1 + _LEAST_OF_EXPECTED * (workers / before.workers - 1)
        if now.steps_per_second < expected * before.steps_per_second:
            return workers
    needed = math.ceil(min(now.work_seconds / max(now.consumer_seconds, 1e-9), limit))
    return min(limit, 2 * workers, max(needed, workers + 1))


class Scaling:
    """Starts with one worker, and adds others as `workers_to_use` decides.

    Args:
        limit: Most workers allowed; by default the CPUs that this process may use.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.workers = 1
        self._limit = usable_cpus() if limit is None else limit
        self._before: ThroughputSample | None = None
        self._mark = ThroughputSample(1, 0, 0.0, 0.0, 0.0)
        self._starting = True

    def look(self, recorder: Recorder, grow: Callable[[int], None]) -> None:
        """Add workers if a new sample is complete and says so. Call this after each batch.

        Args:
            recorder: The loader's recorder.
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
        if self._starting:  # the consumer waited for workers to start, which says nothing about their work
            self._starting = False
            return
        wanted = workers_to_use(self._before, now, self._limit)
        if wanted > self.workers:
            self._before, self._starting, self.workers = now, True, wanted
            grow(wanted)
