"""``num_workers="auto"``: the number of workers that a loader should have."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import sub
from typing import NamedTuple

from dataload._util.machine import usable_cpus
from dataload.loader.recorder import Recorder

_LEAST_WAIT = 0.1  # part of the time that the consumer waits; below it, more workers are not worth it
_LEAST_OF_EXPECTED = 0.3  # part of the speed-up that workers would bring if nothing else were a limit
_LEAST_STEPS, _STEPS_PER_WORKER, _LEAST_SECONDS = 8, 4, 0.2  # for a sample to be reliable
_START_SECONDS = {"threads": 0.2, "processes": 1.5}  # until new workers deliver


class ThroughputSample(NamedTuple):
    """The throughput of a loader for a while."""

    workers: int
    steps: int  # batches that the consumer received
    wait_seconds: float  # time that the consumer waited for them
    consumer_seconds: float  # time that the consumer spent in between
    work_seconds: float  # time that all workers together spent on them

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
    """Return how many workers there should be, at least the present number and at most `limit`. Pure.

    Workers are added while the consumer waits at least 10% of the time: as many as would keep up with it, but at most
    twice the present number, because the gain is an estimate until it is measured. Once the last ones brought less
    than 30% of their share, no more are added.

    Args:
        before: The last sample with fewer workers; None if there were never fewer.
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
    """Starts with one worker, and adds others as `workers_to_use` decides, up to one per usable CPU or `limit`."""

    def __init__(self, limit: int | None = None) -> None:
        self.workers = 1
        self._limit = usable_cpus() if limit is None else limit
        self._before: ThroughputSample | None = None
        self._mark = ThroughputSample(1, 0, 0.0, 0.0, 0.0)
        self._starting = True

    def look(self, recorder: Recorder, grow: Callable[[int], None]) -> None:
        """Add workers with `grow` if a new sample is complete and says so. Call this after each batch."""
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
