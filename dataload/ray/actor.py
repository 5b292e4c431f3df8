"""The worker of a fleet: a Ray actor that makes the tasks of one or several loaders, and reads ahead for its node.

The nodes whose caches have, or will have, the shards of a step are a function of the plan and of the nodes.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from time import monotonic, perf_counter, sleep, time
from typing import Any

import numpy as np

from dataload._util.lazy import load_optional
from dataload._util.randomness import derive_word, hash64
from dataload.executors.base import WorkerLostError, WorkerPosition, WorkerStatus
from dataload.executors.worker import SMALL_RESULT, TaskMessage, limit_threads, run_task
from dataload.loader.failures import StageSpan
from dataload.loader.pipeline import steps_ahead
from dataload.loader.state import Cursor, EpochPlanners
from dataload.loader.step import StepRange, StepsResult, StepWork
from dataload.streams.messages import RowResults
from dataload.types import AheadReader, BytesArray, Int64Array, ReadsAhead, StepsAhead


class Homes:
    """The home of each step of a source of several shards; other work has none."""

    def __init__(self, work: Any) -> None:
        self._work = work if isinstance(work, StepWork) else None
        lengths: Sequence[int] = () if self._work is None else getattr(self._work.fetch.source, "shard_lengths", ())
        self._ends: Int64Array = np.cumsum(lengths, dtype=np.int64)
        self._dealt: tuple[Sequence[str], Int64Array] = (), np.empty(0, np.int64)

    def of(self, task: Any, nodes: Sequence[str]) -> str:
        """Return the node that should make a task; "" if it does not matter."""
        work = self._work
        if work is None or len(nodes) < 2 or len(self._ends) < 2 or not isinstance(task, StepRange):
            return ""
        wanted = [plan.wanted for plan in work.plans_of(task)]
        return self.of_indices(np.concatenate(wanted), nodes)

    def of_indices(self, wanted: Int64Array, nodes: Sequence[str]) -> str:
        """Return the node that should read records; "" if it does not matter."""
        if len(nodes) < 2 or len(self._ends) < 2:
            return ""
        if self._dealt[0] != nodes:  # when a node joins or leaves, other nodes keep their shards
            shards = np.arange(len(self._ends))
            scores = [hash64(derive_word(0, "home", node), shards) for node in nodes]
            self._dealt = nodes, np.argmax(scores, axis=0)
        shards = np.searchsorted(self._ends, wanted, side="right")
        counts = np.bincount(self._dealt[1][shards], minlength=len(nodes))
        best = int(np.argmax(counts))
        # Halfway from an even share to all of its records: a shuffle of everything has no homes.
        return nodes[best] if 2 * counts[best] * len(nodes) > (len(nodes) + 1) * len(wanted) else ""


class NodeAhead:
    """Downloads into a node's cache what its actors will read for one loader; one of them has it."""

    def __init__(self, work: Any, node: str) -> None:
        self._work, self._node = work, node
        source = work.fetch.source if isinstance(work, StepWork) else None
        self._source = source if isinstance(source, ReadsAhead) else None
        self._homes = Homes(work)
        self._nodes: Sequence[str] = ()
        self._last = 0, 0
        self._coming: deque[tuple[int, int]] = deque()  # epochs and steps that `_reader` was given
        self._reader: AheadReader | None = None

    def follow(self, task: Any, nodes: Sequence[str]) -> None:
        """Read ahead of a task, which this actor makes now; not at all without `nodes`, as another actor does."""
        if self._source is None or not isinstance(task, StepRange) or task.plans is not None:
            return
        if nodes != self._nodes or (task.epoch, task.start) < self._last:  # or a state was loaded
            self.close()
            self._nodes, self._coming = nodes, deque()
            if nodes:
                fields = self._work.fetch.fields
                self._reader = self._source.read_ahead(self._own(task, self._homes, self._coming), fields, here=False)
        self._last = task.epoch, task.start
        while self._reader is not None and self._coming and self._coming[0] < self._last:
            self._coming.popleft()
            self._reader.received()

    def _own(self, task: StepRange, homes: Homes, coming: deque[tuple[int, int]]) -> Iterator[StepsAhead]:
        """Yield the steps from a task on that belong to this node, or to no node."""
        planner = self._work.planner
        planners = EpochPlanners(planner, task.epoch, planner.with_ranks(origin=task.origin))
        epoch, steps = task.epoch, count(task.start)
        for block in steps_ahead(planners, Cursor(task.epoch, task.start), None):
            if block.epoch != epoch:
                epoch, steps = block.epoch, count()
            own: list[Int64Array] = []
            for wanted, step in zip(np.split(block.indices, block.ends[:-1]), steps, strict=False):
                if homes.of_indices(wanted, self._nodes) in ("", self._node):
                    own.append(wanted)
                    coming.append((epoch, step))
            if own:
                yield replace(block, indices=np.concatenate(own), ends=np.cumsum([len(each) for each in own]))

    def close(self) -> None:
        """Stop downloading."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


_LOOK_SECONDS = 1.0  # between checks whether loaders have died
_EMPTY_SECONDS = 60.0  # that an actor of a shared fleet waits for its first loader


def clock_offset() -> float:
    """Return the seconds from the clock of spans, which each machine has for itself, to the time of day."""
    return time() - perf_counter()


class FleetActor:
    """Makes tasks, one at a time; `report` answers at any time, from another thread.

    Ray ends an actor that one loader owns. A shared actor is detached, and watches leases: each loader has a result
    pending at it, and Ray reports the end of a result's owner. An actor that `ends` stops with its last loader.
    """

    def __init__(self, number: int, cpus: float, *, shared: bool = False, ends: bool = True) -> None:
        self._ray: Any = load_optional("ray", needed_by="a fleet", extra="ray")
        context = self._ray.get_runtime_context()
        node = load_optional("ray.util", needed_by="a fleet", extra="ray").get_node_ip_address()
        self._node: str = context.get_node_id()
        self._address: str = node
        self._name = f"dataload-{number} (process {os.getpid()} on node {node})"
        self._status = WorkerStatus()
        self._works: dict[str, _Work] = {}
        self._leases: dict[str, Any] = {}
        self._empty_since: float | None = monotonic()  # until the first loader
        self._waiting: dict[str, int] = {}  # tasks of each loader that it has asked for and not received
        self._skipped: defaultdict[str, set[int]] = defaultdict(set)  # tasks of each loader that it has cancelled
        self._made, self._nbytes = 0, 0
        if cpus <= 1:
            limit_threads()
        if shared:
            threading.Thread(target=self._watch, args=(ends,), name="leases", daemon=True).start()

    def lease(self) -> None:
        """Never return: the result, which belongs to the loader, is pending as long as the loader lives."""
        threading.Event().wait()

    def load(
        self, loader: str, content: bytes, offset: float, directory: str, leases: Sequence[Any]
    ) -> tuple[str, str]:
        """Take the work of a loader, whose clock has this offset; return this node's id, and a name."""
        self._leases.update((loader, lease) for lease in leases)
        self._empty_since = None
        threading.current_thread().name = self._name
        if os.path.isdir(directory):
            os.chdir(directory)  # for relative paths
        try:
            work = pickle.loads(content)  # noqa: S301 - of the loader
        except Exception as error:
            reason = f"could not be set up: {type(error).__name__}: {error}"
            work = partial(_fail, reason, traceback.format_exc())
        self._works[loader] = _Work(work, clock_offset() - offset, self._node)
        return self._node, self._name

    def make(self, content: bytes) -> bytes | list[bytes | BytesArray]:
        """Return the outcome of a task: a pickle, and arrays if they are large."""
        # One argument, and one result where it is small, because each more takes the loader's process tens of us.
        loader, number, asked, waiting = pickle.loads(content)  # noqa: S301 - of the loader
        if number in self._skipped[loader]:
            self._skipped[loader].remove(number)
            return b""
        threading.current_thread().name = self._name
        self._waiting[loader] = waiting
        message, parts = run_task(TaskMessage(number, asked, None), self._works[loader], self._status, None)
        nbytes = sum(part.nbytes for part in parts)
        self._made += 1
        self._nbytes += nbytes
        if nbytes <= SMALL_RESULT:
            return pickle.dumps((message, [*map(bytearray, parts)]), protocol=5)  # which can be written to
        return [pickle.dumps((message, ()), protocol=5), *(np.frombuffer(part, np.uint8) for part in parts)]

    def skip(self, loader: str, number: int) -> None:
        """Do not make a task of a loader."""
        self._skipped[loader].add(number)

    def forget(self, loader: str) -> None:
        for of_loaders in (self._leases, self._waiting, self._skipped):
            of_loaders.pop(loader, None)
        if (work := self._works.pop(loader, None)) is not None:
            work.ahead.close()

    def _watch(self, ends: bool) -> None:
        """Drop the work of loaders that have died; end this actor when none is left, if it `ends`."""
        while True:
            leases = {lease: loader for loader, lease in [*self._leases.items()]}
            if leases:
                for lease in self._ray.wait([*leases], num_returns=len(leases), timeout=_LOOK_SECONDS)[0]:
                    self.forget(leases[lease])
                continue
            if ends and (self._empty_since is None or monotonic() - self._empty_since > _EMPTY_SECONDS):
                self._ray.kill(self._ray.get_runtime_context().current_actor)
            sleep(_LOOK_SECONDS)

    def report(self) -> dict[str, Any]:
        """Return what this actor does: for humans, and for the loader that waits for it."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] # documented, despite its name
        named = [(thread.name, frames.get(thread.ident or 0)) for thread in threading.enumerate()]
        stacks = [f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in named if name == self._name]
        return {
            "node": self._address, "process": os.getpid(), "loaders": len(self._works), "made": self._made,
            "queue": sum(self._waiting.values()), "bytes": self._nbytes, "position": self._status.position(),
            "stacks": "".join(stacks),
        }  # fmt: skip


def _fail(reason: str, stacks: str, *_: Any) -> None:
    raise WorkerLostError("", reason, WorkerPosition(-1, -1, -1), stacks)


class _Work:
    """The work of a loader, which downloads ahead for its node among others, with spans on the loader's clock."""

    def __init__(self, work: Callable[[Any, WorkerStatus], Any], later: float, node: str) -> None:
        self._work, self._later = work, later
        self.ahead: NodeAhead = NodeAhead(work, node)

    def __call__(self, asked: tuple[Any, Sequence[str]], status: WorkerStatus) -> Any:
        task, nodes = asked
        self.ahead.follow(task, nodes)
        result = self._work(task, status)
        if isinstance(result, StepsResult):
            for number, step in enumerate(result.loaded):
                result.loaded[number] = step._replace(spans=self._moved(step.spans))
        elif isinstance(result, RowResults):
            result = result._replace(spans=[*map(self._moved, result.spans)])
        return result

    def _moved(self, spans: list[StageSpan]) -> list[StageSpan]:
        return [(stage, begun + self._later, ended + self._later) for stage, begun, ended in spans]
