"""The work of a loader, where its time went, and what limits it. Pure (no clock)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from dataload._util.interactive import html_table
from dataload.samplers.mixture_changes import SourceStatistics
from dataload.storage.remote.traffic import Downloads, ratio

Workplace: TypeAlias = Literal["serial", "threads", "processes", "ray"]
"""Where batches are made; `serial` is the consumer's thread."""

_NOT_COUNTED = {"counted": False}
"""Metadata of a number that is not a total, so that the difference of two says nothing."""

_COMPUTES = 0.5  # fraction of the work: workers that use less CPU mostly wait for something else
_TOGETHER = 1.5  # busy threads: with fewer, the CPUs that they use tell nothing about the GIL
_ONE_CPU = (0.8, 1.2)  # CPUs that threads use together if they take turns
_FEW_STEPS = 3  # with fewer, the verdict is "unknown"
WAITS = 0.05  # fraction of the time: a consumer that waits less is the limit
_DOES_NOTHING = 0.05  # fraction of the time: a consumer that works less only reads
_BUSY = 0.6  # fraction of the time: workers that work less are not the limit
_QUICK = 2e-4  # seconds: for batches that take less, the hand-over matters
_MOST_WAITING = 4  # times as many workers are worth a try if they mostly wait
_LESS = {  # what would make a stage less work
    "decode": "; less to decode would help: store images at the size you train on",
    "transform": "; less to transform would help: do before training what is the same in every epoch",
}
_COPYING = ("read", "collate")  # stages that may be limited by the memory


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage of the work."""

    runs: int = 0  # one per step, or one per record if a step was made record by record
    seconds: float = 0.0  # of all workers together

    def __sub__(self, earlier: StageStatistics) -> StageStatistics:
        return StageStatistics(self.runs - earlier.runs, self.seconds - earlier.seconds)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Statistics:
    """The work of a loader since it was built.

    Attributes:
        steps: Batches that the consumer received.
        rows: Rows of these batches in the order, with those that `on_error` or `exclude` left out.
        nbytes: Bytes of their arrays.
        wait_seconds: Time that the consumer waited for them.
        first_wait_seconds: Time that it waited for the first batch, while workers start and files are opened.
        consumer_seconds: Time that the consumer spent between batches.
        stages: The work on these batches, by stage: download, read, decode, transform, collate, batch_transform.
            ``download`` is the time that readers waited for data at URLs. In a source of your own, decoding counts as
            reading unless the source enters `dataload.decoding`.
        workers: Number of workers in use now; 0 for the consumer's thread.
        workers_allowed: Number of workers that may be used. Fewer are in use where another one does not help.
        worker_seconds: Length of the loop times the workers that were in use.
        executor: Where the work was done.
        start_method: How worker processes started: ``"fork"``, ``"forkserver"`` or ``"spawn"``; None if none has.
        transforms: Names of the transforms of samples, which together are one stage.
        bad: Records that were dropped or replaced.
        retries: Steps that were made again, record by record, because of bad records.
        depth: Mean number of batches that were ready when the consumer requested one.
        cpus: CPUs that this process may use.
        cpu_seconds: Time that the threads of this process used a CPU or waited for one during `cpu_clock_seconds`; 0 if
            unknown, or if the work is done in processes.
        cpu_clock_seconds: Length of that measurement.
        downloads: What was downloaded for the source, also by other loaders of the same source in this process, and by
            worker processes for batches that were received; None if no data are at URLs. See `Downloads`.
        sources: The records of each source of a mixture, by name or number; None for other orders.
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
    workers_allowed: int = field(default=0, metadata=_NOT_COUNTED)
    worker_seconds: float = 0.0
    transforms: tuple[str, ...] = ()
    bad: int = 0
    retries: int = 0
    depth: float = field(default=0.0, metadata=_NOT_COUNTED)
    cpus: int = field(metadata=_NOT_COUNTED)
    cpu_seconds: float = 0.0
    cpu_clock_seconds: float = 0.0
    downloads: Downloads | None = None
    start_method: str | None = None
    sources: dict[str, SourceStatistics] | None = field(default=None, metadata=_NOT_COUNTED)

    @property
    def work_seconds(self) -> float:
        """Time of all stages, of all workers together."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def rows_per_second(self) -> float:
        """Rows per second as the consumer saw them."""
        return ratio(self.rows, self.wait_seconds + self.consumer_seconds)

    @property
    def wait_share(self) -> float:
        """The fraction of its time that the consumer waits, in [0, 1], without the wait for the first batch."""
        return ratio(self.wait_seconds - self.first_wait_seconds, self._loop_seconds)

    @property
    def busy_cpus(self) -> float | None:
        """CPUs that the threads of this process would keep busy on an idle machine; None if unknown."""
        return self.cpu_seconds / self.cpu_clock_seconds if self.cpu_clock_seconds else None

    @property
    def where(self) -> str:
        """The makers of batches, in words: "2 threads", "1 process", "the consumer's thread"."""
        if not self.workers:
            return "the consumer's thread"
        plural = "es" if self.executor == "processes" else "s"
        one = {"threads": "thread", "processes": "process", "ray": "actor"}
        return f"{self.workers} {one.get(self.executor, '')}{'' if self.workers == 1 else plural}"

    @property
    def _loop_seconds(self) -> float:
        return self.wait_seconds - self.first_wait_seconds + self.consumer_seconds

    @property
    def verdict(self) -> str:
        """One line that says what the limit is and what would help.

        *Work* is the time of all stages and workers together. Divided by the time of the loop it is the number of busy
        workers, and divided by the consumer's own time it is the number that would keep up with the consumer. The
        wait for the first batch does not count. The first rule that applies decides what the limit is:

        1. Fewer than 3 batches: unknown.
        2. The consumer waits less than 5% of the time: the consumer. (Threads that hold the GIL also slow it down.)
        3. Workers are busy less than 60% of the time: not a stage. Batches that take under 200 us are as quick as
           their hand-over; others are of unequal cost, or too few are made ahead.
        4. Otherwise the stage with the most work. ``read`` is called storage unless the CPU clock shows that reading
           keeps CPUs busy; ``transform`` is shown by the names of its functions.

        If the limit is ``download``, the first rule that applies decides what would help:

        1. More than 1% of the requests were answered with 429 or 503: fewer connections.
        2. More than 10% of the downloads of whole shards were of shards that had been evicted: a larger cache.
        3. Less than half of the connections are in use on average: bytes are requested too late, or too many at once.
        4. Bytes flow for less than half of the time of requests: latency.
        5. Otherwise: bandwidth.

        If it is another stage, the first rule that applies decides what would help:

        1. Threads are busy together, but use only one of several CPUs, so they hold the GIL: processes.
        2. Fewer workers are in use than are allowed, because more were not faster when they were tried.
        3. The consumer does nothing between batches, so no number of workers would feed it. The line says how fast it
           is, and whether more workers may help.
        4. As many workers as would keep up with the consumer, if there are CPUs for them.
        5. One worker per CPU, if there are fewer.
        6. Nothing: this process may not use more CPUs.

        For the last four, if the CPU clock shows that threads mostly wait for something else, such as storage, the
        limit is four times the present number of workers instead of one per CPU. If the stage is ``decode`` or
        ``transform``, the line ends with a way to have less of that work.
        """
        if self.steps < _FEW_STEPS or not self._loop_seconds:
            received = {0: "no batch was received", 1: "1 batch is too few to tell"}
            return f"limit: unknown, {received.get(self.steps, f'{self.steps} batches are too few to tell')}"
        if self.wait_share < WAITS:
            slowed = f"; {self._turns('they hold the GIL, which slows it down')}" if self._takes_turns else ""
            return f"limit: the consumer; it waits {self.wait_share:.0%} of the time{slowed}"
        waits = f"the consumer waits {self.wait_share:.0%} of the time"
        if self._busy < _BUSY * max(1, self._mean_workers):
            return f"limit: {self._idle()}; {waits}"
        name, stage = max(self.stages.items(), key=lambda item: item[1].seconds)
        return f"limit: {self._label(name, stage)}; {waits}; {self._advice(name)}{_LESS.get(name, '')}"

    @property
    def _mean_workers(self) -> float:
        """Mean number of workers that were in use."""
        return ratio(self.worker_seconds, self._loop_seconds) if self.worker_seconds else self.workers

    @property
    def _busy(self) -> float:
        """Mean number of busy workers; without workers, of those while the consumer waits."""
        return ratio(self.work_seconds, self._loop_seconds - (0 if self.workers else self.consumer_seconds))

    @property
    def _cpus(self) -> int:
        """Number of CPUs for workers; on a cluster, where it is unknown, a number that is never the limit."""
        return self.cpus if self.executor != "ray" else _MOST_WAITING * self.workers_allowed

    @property
    def _computes(self) -> bool:
        """True if the work uses CPUs; otherwise it mostly waits."""
        used, busy = self.busy_cpus, self.work_seconds / self._loop_seconds
        return used is None or used >= _COMPUTES * min(busy, self._cpus) or self._takes_turns

    @property
    def _takes_turns(self) -> bool:
        """True if threads behave as if only one could run at a time."""
        used, busy = self.busy_cpus, self.work_seconds / self._loop_seconds
        several = self.executor == "threads" and self.cpus > 1 and busy > _TOGETHER
        return several and used is not None and _ONE_CPU[0] <= used <= _ONE_CPU[1]

    @property
    def _alone(self) -> float:
        """Seconds that all the work would take one worker with a CPU, and the GIL, to itself."""
        work, loop = self.work_seconds, self._loop_seconds
        if not self.workers:
            return max(work, loop - self.consumer_seconds)  # with the loader's own
        if not self._computes:
            return work
        if self.busy_cpus is None:
            return work / max(1.0, work / loop / self._cpus)
        # Threads that wait for the GIL or for a CPU are busy but use none.
        return min(work, self.busy_cpus * loop)

    def _label(self, name: str, stage: StageStatistics) -> str:
        share = f"{ratio(stage.seconds, self.work_seconds):.0%} of {'worker time' if self.workers else 'the work'}"
        if name == "read":  # workers that keep CPUs busy read from memory, and copy or decode
            computes = self._computes and not self._takes_turns and self.busy_cpus is not None
            return f"read (on CPUs, {share})" if computes else f"storage (read, {share})"
        if name == "transform" and self.transforms:
            names = [name.rpartition(".")[2] for name in self.transforms]
            return f"transform{'s' if len(names) > 1 else ''} {', '.join(names)} ({share})"
        return f"{name} ({share})"

    def _idle(self) -> str:
        """Return why the consumer waits although workers are idle."""
        each = self.work_seconds / self.steps
        if each < _QUICK:
            return f"the hand-over of batches, which take {1e6 * each:.0f} us to make; larger ones would help"
        if not self.workers:
            return f"the loader itself; the stages take {self._busy:.0%} of what the consumer waits"
        size = f", or their way between processes ({self.nbytes / self.steps / 1e6:.1f} MB each)"
        return (
            f"batches of unequal cost{size if self.executor in ('processes', 'ray') else ''}; workers are busy "
            f"{ratio(self._busy, self._mean_workers):.0%} of the time, "
            "and a larger prefetch or in_order=False may help"
        )

    def _advice(self, stage: str) -> str:
        """Return what would help if a stage is the limit."""
        if stage == "download" and self.downloads is not None:
            seconds = self.wait_seconds + self.consumer_seconds
            return self.downloads.advice(seconds, processes=self.executor not in ("serial", "threads"))
        if self._takes_turns:
            return self._turns("it holds the GIL or waits" if stage == "read" else "it holds the GIL")
        if self.workers < self.workers_allowed:
            return self._fewer(stage)
        most = self._cpus if self._computes else _MOST_WAITING * max(1, self.workers)
        possible = max(0, most - self.workers)
        if self.consumer_seconds < _DOES_NOTHING * self._loop_seconds:
            return self._throughput(stage, possible)
        needed = math.ceil(self._alone / self.consumer_seconds - 1e-9)
        wanted = max(needed - self.workers, 1)  # at least one, because the consumer waits
        if wanted <= possible:
            return f"{self._more(wanted)} would feed it"
        takes = (
            f"; to keep up with the consumer takes {needed} {'CPUs' if self._computes else 'workers'}"
            if needed > most
            else ""
        )
        if not possible:
            return self._no_more(stage) + takes
        return f"{self._more(possible)} may help{takes}"

    def _turns(self, reason: str) -> str:
        together = f"{self.workers} threads keep {self.busy_cpus:.1f} CPUs busy together"
        return f"{together}, as if {reason}: try executor='processes'"

    def _fewer(self, stage: str) -> str:
        """Return why fewer workers are in use than are allowed, and what would help."""
        used = (
            f"{self.workers or 'none'} of {self.workers_allowed} workers {'is' if self.workers < 2 else 'are'} in use"
        )
        line = f"{used}, because more were not faster"
        quick = self.work_seconds < _QUICK * self.steps
        if self.executor in ("processes", "ray") or not self._computes or self.cpus == 1 or quick:
            return line
        if stage in _COPYING:
            return f"{line}: the memory may be the limit, or the GIL"
        return f"{line}, perhaps because it holds the GIL: try executor='processes'"

    def _throughput(self, stage: str, possible: int) -> str:
        rate = ratio(self.rows, self._loop_seconds)
        if not self._computes:
            faster = f"the work keeps {self.busy_cpus:.1f} CPUs busy and mostly waits, so more workers may help"
        elif possible:
            faster = f"{self._more(possible)}, one per CPU, may help"
        else:
            faster = self._no_more(stage)
        return f"it only reads, at {rate:,.0f} rows/s; {faster}"

    def _more(self, number: int) -> str:
        kind = "" if self.workers or not self._computes else " (processes, if it holds the GIL)"
        return f"{number}{' more' if self.workers else ''} worker{'' if number == 1 else 's'}{kind}"

    def _no_more(self, stage: str) -> str:
        unless = " unless reads wait for storage" if stage == "read" and self.busy_cpus is None else ""
        cpus = f"{self.cpus} CPU{'' if self.cpus == 1 else 's'}"
        return f"another worker cannot help{unless}: this process may use {cpus}"

    def since(self, earlier: Self) -> Self:
        """Return the work after `earlier`, which must be of the same loader.

        Every field that is a number is a total, and is subtracted, unless it is marked as `_NOT_COUNTED`.
        """
        totals = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in dataclasses.fields(self)
            if f.type in (int, float, "int", "float") and f.metadata.get("counted", True)
        }
        stages = {name: stage - earlier.stages.get(name, StageStatistics()) for name, stage in self.stages.items()}
        downloads = self.downloads and self.downloads - (earlier.downloads or Downloads())
        depth = ratio(self.depth * self.steps - earlier.depth * earlier.steps, totals["steps"])
        return dataclasses.replace(self, **totals, stages=stages, depth=depth, downloads=downloads)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of numbers and text."""
        return {
            **dataclasses.asdict(self),
            "transforms": list(self.transforms),
            "rows_per_second": self.rows_per_second,
            "wait_share": self.wait_share,
            "busy_cpus": self.busy_cpus,
            "verdict": self.verdict,
        }

    @property
    def _size(self) -> str:
        seconds = self.wait_seconds + self.consumer_seconds
        size = f"{self.steps:,} batches, {self.rows:,} rows, {self.nbytes / 1e6:,.1f} MB"
        return f"{size} in {seconds:.2f} s: {self.rows_per_second:,.0f} rows/s"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._size}; {self.verdict})"

    def _repr_html_(self) -> str:
        return html_table(self.verdict, str(self).splitlines()[:-1])

    def __str__(self) -> str:
        used = self.busy_cpus
        busy = "" if used is None else f" ({used:.1f} kept busy by this process)"
        cpus = "" if self.executor == "ray" else f", of {self.cpus} CPUs{busy}"
        started = f" started by {self.start_method}" if self.start_method else ""
        lines = [
            self._size,
            f"the consumer waited {self.wait_seconds:.2f} s, {self.first_wait_seconds:.2f} s of it for the first batch",
            f"and worked {self.consumer_seconds:.2f} s in between; {self.depth:.1f} batches were ready when it asked",
            f"work in {self.where}{started}{cpus}:",
        ]
        for name, stage in self.stages.items():
            share, each = ratio(stage.seconds, self.work_seconds), 1e3 * ratio(stage.seconds, stage.runs)
            lines.append(f"  {name:<16}{stage.seconds:8.2f} s {share:4.0%} {stage.runs:8,} times {each:10.3f} ms each")
        if self.downloads is not None:
            lines.append(str(self.downloads))
        if self.bad:
            lines.append(f"{self.bad:,} bad records; {self.retries:,} steps made again, record by record")
        return "\n".join([*lines, self.verdict])
