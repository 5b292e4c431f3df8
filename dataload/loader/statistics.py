"""What a loader has done, where the time went, and what is its limit. Pure (no clock)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

__all__ = ["StageStatistics", "Statistics", "Workplace"]

Workplace: TypeAlias = Literal["serial", "threads", "processes"]
"""Where batches are made; serial is the consumer's own thread."""

_NOT_COUNTED = {"counted": False}
"""Metadata of a number that is not a total, so that the difference of two says nothing."""

_FEW_STEPS = 3  # with fewer there is no verdict
_WAITS = 0.05  # of the time: a consumer that waits less than this is the limit
_DOES_NOTHING = 0.05  # of the time: a consumer that does less than this only reads
_BUSY = 0.6  # of their time: workers that are at work less than this are not what is waited for
_QUICK = 2e-4  # seconds: what a batch must take for its hand-over not to matter
_COMPUTES = 0.5  # of the work: workers that use less CPU than this mostly wait for something else
_MOST_WAITING = 4  # times as many workers are worth a try where they mostly wait
_TOGETHER = 1.5  # busy workers: what threads must be for the CPUs that they use to tell anything
_ONE_CPU = (0.8, 1.2)  # CPUs that threads use together when they take turns


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage of the work.

    Attributes:
        runs: How often it ran: once a step, or once a record where a step was made record by record.
        seconds: What it took, of all workers together.
    """

    runs: int = 0
    seconds: float = 0.0

    def __sub__(self, earlier: StageStatistics) -> StageStatistics:
        return StageStatistics(self.runs - earlier.runs, self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a loader has done since it was made.

    Attributes:
        steps: Batches that the consumer received.
        rows: Rows of these.
        nbytes: Bytes of their arrays.
        wait_seconds: What the consumer waited for them.
        first_wait_seconds: Of these, for the first: workers start, and files are opened.
        consumer_seconds: What it did in between.
        stages: What was done for these batches, by stage: read, transform, collate, batch_transform.
        workers: Number of workers, as chosen so far if that is ``"auto"``; 0 for the consumer's own thread.
        executor: Where the work was done.
        transforms: Names of the transforms of samples, which are one stage together.
        bad: Records that were left out or replaced.
        retries: Steps that were made again, record by record, for some of their records were bad.
        depth: Mean number of batches that were ready when the consumer asked for one.
        cpus: CPUs that this process may use.
        cpu_seconds: What the threads of this process computed, or waited for a CPU, in `cpu_clock_seconds` of the
            loop; 0 if unknown, or if the work is done in processes.
        cpu_clock_seconds: How long that was looked at.
    """

    steps: int
    rows: int
    nbytes: int
    wait_seconds: float
    first_wait_seconds: float = 0.0
    consumer_seconds: float
    stages: dict[str, StageStatistics]
    workers: int = field(metadata=_NOT_COUNTED)
    executor: Workplace
    transforms: tuple[str, ...] = ()
    bad: int = 0
    retries: int = 0
    depth: float = field(default=0.0, metadata=_NOT_COUNTED)
    cpus: int = field(metadata=_NOT_COUNTED)
    cpu_seconds: float = 0.0
    cpu_clock_seconds: float = 0.0

    @property
    def work_seconds(self) -> float:
        """What all stages took, of all workers together."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def rows_per_second(self) -> float:
        """As the consumer saw it."""
        return _ratio(self.rows, self.wait_seconds + self.consumer_seconds)

    @property
    def wait_share(self) -> float:
        """The part of its time that the consumer waits, in [0, 1], without the first batch."""
        return _ratio(self.wait_seconds - self.first_wait_seconds, self._loop_seconds)

    @property
    def busy_cpus(self) -> float | None:
        """CPUs that the threads of this process would keep busy if nobody else used them; None if unknown."""
        return self.cpu_seconds / self.cpu_clock_seconds if self.cpu_clock_seconds else None

    @property
    def where(self) -> str:
        """Where batches are made, in words: "2 threads", "1 process", "the consumer's thread"."""
        if not self.workers:
            return "the consumer's thread"
        one = {"threads": "thread", "processes": "process"}
        return f"{self.workers} {self.executor if self.workers > 1 else one.get(self.executor, '')}"

    @property
    def _loop_seconds(self) -> float:
        return self.wait_seconds - self.first_wait_seconds + self.consumer_seconds

    @property
    def verdict(self) -> str:
        """What the limit is and what would help, in a line.

        *Work* is what all stages took, of all workers together: so work divided by the time of the loop is the number
        of workers that were busy, and work divided by the consumer's own time is the number that would keep up with
        it. The wait for the first batch is left out. The first rule that fits decides what the limit is:

        1. Fewer than 3 batches: unknown.
        2. The consumer waits less than 5% of the time: the consumer. (Threads that hold the GIL slow it down, too.)
        3. It waits, and workers are busy less than 60% of the time: no stage. Batches that take less than 200 us are
           as quick as their hand-over; others are of unequal cost, or too few are made ahead.
        4. The stage with the most work. ``read`` is called storage; ``transform`` goes by its functions' names.

        And where it is a stage, the first of these says what would help:

        1. Threads that are busy together, and together use no more than one CPU of several, hold the GIL: processes.
        2. The consumer does nothing in between, so that no number of workers would feed it: how fast it goes, and
           how fast it could with one worker for each CPU.
        3. As many workers as would keep up with the consumer, if there are CPUs for them.
        4. One worker for each CPU, if there are fewer.
        5. Nothing: this process may not use more CPUs.

        In the last four, up to four times as many workers as now pass for one for each CPU if the CPUs' clock says
        that threads mostly wait for something else: storage, as a rule.
        """
        if self.steps < _FEW_STEPS or not self._loop_seconds:
            received = {0: "no batch was received", 1: "1 batch is too few to tell"}
            return f"limit: unknown, {received.get(self.steps, f'{self.steps} batches are too few to tell')}"
        if self.wait_share < _WAITS:
            slowed = f"; {self._turns('they hold the GIL, which slows it down')}" if self._takes_turns else ""
            return f"limit: the consumer; it waits {self.wait_share:.0%} of the time{slowed}"
        waits = f"the consumer waits {self.wait_share:.0%} of the time"
        if self._busy < _BUSY * max(1, self.workers):
            return f"limit: {self._idle()}; {waits}"
        name, stage = max(self.stages.items(), key=lambda item: item[1].seconds)
        return f"limit: {self._label(name, stage)}; {waits}; {self._advice(name)}"

    @property
    def _busy(self) -> float:
        """Workers at work, in the mean; without workers, while the consumer waits."""
        return _ratio(self.work_seconds, self._loop_seconds - (0 if self.workers else self.consumer_seconds))

    @property
    def _computes(self) -> bool:
        """Whether work takes CPUs; if not, it mostly waits."""
        used = self.busy_cpus
        working = _ratio(self.work_seconds, self._loop_seconds)
        return used is None or used >= _COMPUTES * min(working, self.cpus)

    @property
    def _takes_turns(self) -> bool:
        """Whether threads go as if one could run at a time."""
        used = self.busy_cpus
        several = self.executor == "threads" and self.cpus > 1 and self._busy > _TOGETHER
        return several and used is not None and _ONE_CPU[0] <= used <= _ONE_CPU[1]

    def _label(self, name: str, stage: StageStatistics) -> str:
        share = f"{_ratio(stage.seconds, self.work_seconds):.0%} of {'worker time' if self.workers else 'the work'}"
        if name == "read":
            return f"storage (read, {share})"
        if name == "transform" and self.transforms:
            names = [name.rpartition(".")[2] for name in self.transforms]
            return f"transform{'s' if len(names) > 1 else ''} {', '.join(names)} ({share})"
        return f"{name} ({share})"

    def _idle(self) -> str:
        """Why the consumer waits, though workers do not work."""
        each = self.work_seconds / self.steps
        if each < _QUICK:
            return f"the hand-over of batches, which take {1e6 * each:.0f} us to make; larger ones would help"
        if not self.workers:
            return f"the loader itself; the stages take {self._busy:.0%} of what the consumer waits"
        size = f", or their way between processes ({self.nbytes / self.steps / 1e6:.1f} MB each)"
        return (
            f"batches of unequal cost{size if self.executor == 'processes' else ''}; workers are busy "
            f"{self._busy / self.workers:.0%} of the time, and a larger prefetch or in_order=False may help"
        )

    def _advice(self, stage: str) -> str:
        """What would help against a stage that is the limit."""
        if self._takes_turns:
            return self._turns("it holds the GIL or waits" if stage == "read" else "it holds the GIL")
        most = self.cpus if self._computes else _MOST_WAITING * max(1, self.workers)
        possible = max(0, most - self.workers)
        if self.consumer_seconds < _DOES_NOTHING * self._loop_seconds:
            return self._throughput(stage, possible)
        # Workers that share CPUs take longer each; what counts is what they would take alone.
        alone = max(1.0, self._busy / self.cpus) if self._computes else 1.0
        needed = math.ceil(self.work_seconds / alone / self.consumer_seconds)
        wanted = max(needed - self.workers, 1)  # it waits, so one in any case
        if wanted <= possible:
            return f"{self._more(wanted)} would feed it"
        takes = f", and to feed it takes {needed} {'CPUs' if self._computes else 'workers'}" if needed > most else ""
        if not possible:
            return self._no_more(stage) + takes
        return f"{self._more(possible)} would give up to {most / max(1, self.workers):.1f} times as much{takes}"

    def _turns(self, reason: str) -> str:
        together = f"{self.workers} threads keep {self.busy_cpus:.1f} CPUs busy together"
        return f"{together}, as if {reason}: try executor='processes'"

    def _throughput(self, stage: str, possible: int) -> str:
        rate = _ratio(self.rows, self._loop_seconds)
        if not self._computes:
            faster = f"the work keeps {self.busy_cpus:.1f} CPUs busy and mostly waits, so more workers may help"
        elif possible:
            most = rate * self.cpus / max(1, self.workers)
            faster = f"{self._more(possible)}, one for each CPU, would make that {most:,.0f} at most"
        else:
            faster = self._no_more(stage)
        return f"it only reads, at {rate:,.0f} rows/s; {faster}"

    def _more(self, number: int) -> str:
        kind = "" if self.workers or not self._computes else " (processes, if it holds the GIL)"
        return f"{number}{' more' if self.workers else ''} worker{'' if number == 1 else 's'}{kind}"

    def _no_more(self, stage: str) -> str:
        unless = " unless reads wait for storage" if stage == "read" and self.busy_cpus is None else ""
        cpus = f"{self.cpus} CPU{'' if self.cpus == 1 else 's'}"
        return f"one worker more cannot help{unless}: this process may use {cpus}"

    def since(self, earlier: Self) -> Self:
        """Return the statistics of what was done after `earlier`, which is of the same loader.

        Every field that is a number is a total, and is subtracted, unless it is marked as `_NOT_COUNTED`.
        """
        totals = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in dataclasses.fields(self)
            if f.type in (int, float, "int", "float") and f.metadata.get("counted", True)
        }
        stages = {name: stage - earlier.stages.get(name, StageStatistics()) for name, stage in self.stages.items()}
        depth = _ratio(self.depth * self.steps - earlier.depth * earlier.steps, totals["steps"])
        return dataclasses.replace(self, **totals, stages=stages, depth=depth)

    def to_json(self) -> dict[str, Any]:
        """As a dict of numbers and text."""
        return {
            **dataclasses.asdict(self),
            "transforms": list(self.transforms),
            "rows_per_second": self.rows_per_second,
            "wait_share": self.wait_share,
            "busy_cpus": self.busy_cpus,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        seconds, used = self.wait_seconds + self.consumer_seconds, self.busy_cpus
        size = f"{self.steps:,} batches, {self.rows:,} rows, {self.nbytes / 1e6:,.1f} MB"
        busy = "" if used is None else f" ({used:.1f} kept busy by this process)"
        lines = [
            f"{size} in {seconds:.2f} s: {self.rows_per_second:,.0f} rows/s",
            f"the consumer waited {self.wait_seconds:.2f} s, {self.first_wait_seconds:.2f} s of it for the first batch",
            f"and worked {self.consumer_seconds:.2f} s in between; {self.depth:.1f} batches were ready when it asked",
            f"work in {self.where}, of {self.cpus} CPUs{busy}:",
        ]
        for name, stage in self.stages.items():
            share, each = _ratio(stage.seconds, self.work_seconds), 1e3 * _ratio(stage.seconds, stage.runs)
            lines.append(f"  {name:<16}{stage.seconds:8.2f} s {share:4.0%} {stage.runs:8,} times {each:10.3f} ms each")
        if self.bad:
            lines.append(f"{self.bad:,} bad records; {self.retries:,} steps made again, record by record")
        return "\n".join([*lines, self.verdict])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
