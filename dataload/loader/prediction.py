"""The costs of a training loop, as measured. Pure (no clock)."""

from __future__ import annotations

from typing import NamedTuple

_COMPUTES = 0.5  # fraction of the work: workers that use less CPU mostly wait for something else
_TOGETHER = 1.5  # busy threads: with fewer, the CPUs that they use tell nothing about the GIL
_ONE_CPU = (0.8, 1.2)  # CPUs that threads use together if they take turns


class Loop(NamedTuple):
    """One turn of a training loop, in seconds per batch."""

    period: float  # from one batch to the next
    consumer: float  # between batches
    work: float  # of all workers together, waits for the GIL and for CPUs included
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
