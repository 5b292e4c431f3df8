"""The throughput of a loader with other workers, predicted from what was measured. Pure (no clock)."""

from __future__ import annotations

from typing import Literal, NamedTuple

_HAND_OVER_SECONDS = 1e-4  # of a batch from another process
_COPY_BYTES_PER_SECOND = 5e9  # of its arrays
_COMPUTES = 0.5  # part of the work: workers that use less CPU mostly wait for something else
_TOGETHER = 1.5  # busy threads: with fewer, the CPUs that they use tell nothing about the GIL
_ONE_CPU = (0.8, 1.2)  # CPUs that threads use together if they take turns
_SMALL_PART = 0.2  # of the time: what the consumer's own CPU time may be without a measurement of it
_MEMORY_BYTES_PER_SECOND = 1e9  # by one worker: above it, the memory may be the limit


class Loop(NamedTuple):
    """One turn of a training loop, in seconds per batch."""

    period: float  # from one batch to the next
    consumer: float  # between batches
    work: float  # of all workers together, waits for the GIL and for CPUs included
    nbytes: float  # of a batch
    workers: int  # 0 for the consumer's thread
    executor: str
    cpus: int  # that the process may use
    busy_cpus: float | None  # CPUs that the threads of this process keep busy; None if unknown

    @property
    def busy(self) -> float:
        """Mean number of busy workers."""
        return self.work / self.period

    @property
    def computes(self) -> bool:
        """True if the work uses CPUs; otherwise it mostly waits."""
        used = self.busy_cpus
        return used is None or used >= _COMPUTES * min(self.busy, self.cpus) or self.takes_turns

    @property
    def takes_turns(self) -> bool:
        """True if threads behave as if only one could run at a time."""
        used = self.busy_cpus
        several = self.executor == "threads" and self.cpus > 1 and self.busy > _TOGETHER
        return several and used is not None and _ONE_CPU[0] <= used <= _ONE_CPU[1]

    @property
    def alone(self) -> float:
        """The work on a batch by a worker with a CPU, and the GIL, to itself."""
        if not self.workers:
            return max(self.work, self.period - self.consumer)  # with the loader's own
        if not self.computes:
            return self.work
        if self.busy_cpus is None:
            return self.work / max(1.0, self.busy / self.cpus)
        # Threads that wait for the GIL or for a CPU are busy but use none.
        return min(self.work, self.busy_cpus * self.period)

    @property
    def consumer_cpu(self) -> float:
        """The CPU time of the consumer between batches; all of its time if unknown."""
        if self.busy_cpus is None or not self.computes:
            return self.consumer
        return min(self.consumer, max(0.0, self.busy_cpus * self.period - self.alone))


class Prediction(NamedTuple):
    """The throughput with other workers, relative to the present one."""

    gain: float
    known: bool  # whether it follows from measurements; otherwise it is at most this


def predict(loop: Loop, workers: int, executor: Literal["threads", "processes"], *, shared: bool = False) -> Prediction:
    """Return the gain of a number of workers. The consumer's time, the CPUs, and the hand-over bound it.

    Args:
        shared: Whether the work is reading or copying, and storage or memory that all CPUs share may limit it.
    """
    hand_over = 0.0
    if executor == "processes" and loop.executor != "processes":
        hand_over = _HAND_OVER_SECONDS + loop.nbytes / _COPY_BYTES_PER_SECOND
    bounds = [loop.consumer + hand_over, loop.alone / max(1, workers)]
    if loop.computes:
        bounds.append((loop.alone + loop.consumer_cpu) / loop.cpus)
        if executor == "threads" and loop.takes_turns:
            bounds.append(loop.period)
    gain = max(1.0, loop.period / max(*bounds, 1e-12))
    return Prediction(gain, _is_known(loop, executor, shared=shared))


def _is_known(loop: Loop, executor: str, *, shared: bool) -> bool:
    if not loop.computes:
        return False
    if shared and (loop.busy_cpus is None or loop.nbytes > _MEMORY_BYTES_PER_SECOND * loop.alone):
        return False  # it may wait for storage, or for memory
    if executor == "threads":  # only threads that already run at once show that they can
        return loop.executor == "threads" and loop.busy_cpus is not None and loop.busy > _TOGETHER
    # Of threads that take turns, it is unknown how much of their CPU time was the consumer's.
    return not loop.takes_turns or loop.consumer <= _SMALL_PART * loop.period
