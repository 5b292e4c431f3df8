"""Runs tasks in the actors of a fleet, and makes those that are lost with an actor or a node again elsewhere."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from dataload._util.arrays import pooled_empty
from dataload.errors import text_of
from dataload.executors import (
    Fleet,
    PoolExecutor,
    Result,
    TimeoutPolicy,
    WorkerLostError,
    WorkerPosition,
    WorkerStatus,
    check_pickles,
)
from dataload.executors.base import OwnedPool, StallMonitor, raise_closed
from dataload.executors.serialization import put_together
from dataload.executors.worker import ResultMessage
from dataload.loader.step import StepRange, StepsResult
from dataload.ray.cluster import connect, dump
from dataload.ray.crew import POLL_SECONDS, UNKNOWN, Actor, Crew
from dataload.ray.homes import Homes

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_log = logging.getLogger("dataload")

_LOSSES = 3  # of actors that were making one step, before it is an error
_WAIT_SECONDS = 60.0  # of one wait; Ray takes no infinite ones
_ALIGNMENT = 64


class FleetExecutor(PoolExecutor[TaskT, ResultT]):
    """Runs tasks in Ray actors."""

    def __init__(
        self,
        work: Callable[[TaskT, WorkerStatus], ResultT],
        workers: int,
        *,
        fleet: Fleet,
        timeouts: TimeoutPolicy,
        settings: Iterable[tuple[str, str, Any]],
        first: int = 0,
    ) -> None:
        self._fleet = fleet
        super().__init__(partial(FleetPool, work, fleet=fleet, timeouts=timeouts, first=first), workers)
        check_pickles(*settings, check=_check)

    def capacity(self) -> int:
        """Return the actors for which the cluster has CPUs."""
        ray = connect(self._fleet.address)
        return max(1, int(ray.cluster_resources().get("CPU", 1) / self._fleet.num_cpus))


def _check(value: Any) -> set[str]:
    dump(value)
    return set()


class _Pending(Result[Any]):
    __slots__ = ("_pool", "actor", "causes", "lost", "nodes", "number", "parts", "reference", "task")

    def __init__(self, pool: FleetPool, number: int, task: Any) -> None:
        self._pool = pool
        self.number: int = number
        self.task: Any = task
        self.actor: Actor | None = None  # None while it waits for one
        self.reference: Any = None
        self.lost: bool = False  # with an actor, or a part of what was
        self.causes: list[str] = []  # of actors that were lost while they made it
        self.nodes: set[str] = set()  # of these actors
        self.parts: list[_Pending] = []  # the steps of a lost task, which are made one by one

    def result(self) -> Any:
        return self._joined() if self.parts else self._pool.receive(self)

    def _joined(self) -> StepsResult:
        steps, seconds = list[Any](), 0.0
        for part in self.parts:
            made: StepsResult = part.result()
            steps += made.loaded
            seconds += made.seconds
            if made.loaded[-1].error is not None:
                break
        return StepsResult(steps, seconds)

    def done(self) -> bool:
        return self._pool.is_done(self)

    def cancel(self) -> None:
        self._pool.cancel(self)
        for part in self.parts:
            part.cancel()


class FleetPool(OwnedPool):
    """The tasks of one loader and its actors."""

    # Tasks go to the actors that have started and have the fewest. `_queue` has those that no actor has room for,
    # while actors start or Ray has no CPUs for all. Ray's references keep results in the object store until they are
    # received, or dropped here.

    def __init__(self, work: Any, size: int, *, fleet: Fleet, timeouts: TimeoutPolicy, first: int) -> None:
        super().__init__()
        self._ray: Any = connect(fleet.address)
        self._timeouts, self._writable = timeouts, fleet.writable
        self._continues: bool = getattr(work, "continues", False)
        self._homes = Homes(work)
        self._crew = Crew(self._ray, fleet, dump(work), size, first=first, shares=not self._continues)
        self._queue: deque[_Pending] = deque()
        self._in_flight: dict[int, _Pending] = {}
        self._next = 0

    def is_usable(self) -> bool:
        return super().is_usable() and self._ray.is_initialized()

    def use(self, workers: int) -> None:
        with self.transaction():
            self._crew.use(workers)

    def submit(self, task: Any) -> _Pending:
        with self.transaction():
            self._queue.append(pending := self._new(task))
            self._place()
            return pending

    def _new(self, task: Any) -> _Pending:
        pending = self._in_flight[self._next] = _Pending(self, self._next, task)
        self._next += 1
        return pending

    def _place(self) -> None:
        """Give tasks to actors that have room."""
        crew = self._crew
        crew.fill()
        while self._queue:
            pending = self._queue[0]
            in_flight = None if pending.lost else len(self._in_flight)  # others may be waiting for it to be received
            actor = crew.choose(in_flight, pending.nodes, partial(self._homes.of, pending.task))
            if actor is None:
                return
            self._queue.popleft()
            self._give(pending, actor)

    def _give(self, pending: _Pending, actor: Actor) -> None:
        actor.tasks[pending.number], actor.given = pending, pending.number
        pending.actor = actor
        crew = self._crew
        content = pickle.dumps((crew.loader, pending.task, len(actor.tasks), crew.nodes_for(actor)), protocol=5)
        pending.reference = actor.handle.make.remote(content)

    def is_done(self, pending: _Pending) -> bool:
        with self.transaction():
            self._place()
            if pending.parts:
                return all(map(self.is_done, pending.parts))
            return pending.reference is not None and bool(self._crew.done([pending.reference]))

    def wait_for_any(self, waiting: Sequence[_Pending]) -> None:
        """Wait until one of some tasks is done, or is lost."""
        watch = StallMonitor(self._timeouts)
        asked = [part for each in waiting for part in (each.parts or [each])]
        while not self._wait(asked, watch.next_look()):
            if watch.is_due():
                self._look(watch, asked[0])

    def _wait(self, asked: Sequence[_Pending], seconds: float) -> bool:
        """Wait until one of some tasks is done, or anything else happens; return whether one is."""
        # The references have a frame of their own: the traceback of an error would keep their results.
        crew = self._crew
        with self.transaction():
            self._place()
            wanted = {each.reference for each in asked if each.reference is not None}
            watched = {*wanted, *(each.loaded for each in crew.starting)}
            seconds = min(seconds, POLL_SECONDS if self._queue or crew.starting else _WAIT_SECONDS)
        return bool(crew.done(watched, seconds, 1) & wanted)

    def receive(self, pending: _Pending) -> Any:
        """Wait for a task, and return its result; a `WorkerLostError` if it has none."""
        watch = StallMonitor(self._timeouts)
        while True:
            if pending.reference is None or self._queue or self._crew.starting:
                self.wait_for_any([pending])
            self.check_usable()
            try:
                seconds = min(watch.next_look(), _WAIT_SECONDS)
                answer = self._ray.get(pending.reference, timeout=seconds)
            except self._ray.exceptions.GetTimeoutError:
                if watch.is_due():
                    self._look(watch, pending)
                continue
            except self._ray.exceptions.RayError as error:
                error.__traceback__ = None  # frames of Ray refer to the result, which would stay in the store
                with self.transaction():
                    self._lose(pending, error)
                if pending.parts:
                    return pending.result()
                continue
            if answer:
                with self.transaction():
                    self._drop(pending)
                content, *large = [answer] if isinstance(answer, bytes) else answer
                message, small = pickle.loads(content)  # noqa: S301 - from our own actor
                return self._opened(message, [*small, *large], pending)
            with self.transaction():  # the actor has dropped the work of this loader
                if pending.actor is not None:
                    self._crew.load(pending.actor)
                    self._give(pending, pending.actor)

    def _opened(self, message: ResultMessage, parts: list[Any], pending: _Pending) -> Any:
        name = "" if pending.actor is None else pending.actor.name
        if message.failure:
            raise WorkerLostError(name, message.failure, message.position or UNKNOWN, message.traceback_text)
        try:
            return put_together(_copied(parts) if self._writable else parts)
        except Exception as error:
            reason = f"sent a batch that cannot be unpickled: {type(error).__name__}: {error}"
            raise WorkerLostError(name, reason, _position(pending.task)) from error

    def _lose(self, pending: _Pending, error: Any) -> None:
        """Queue what was lost with an actor or a node again; raise a `WorkerLostError` where that does not help."""
        actor, errors = pending.actor, self._ray.exceptions
        if actor is None or isinstance(error, errors.TaskCancelledError):
            raise_closed()
        reason = text_of(error)
        if not isinstance(error, (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError)):
            self._drop(pending)
            raise WorkerLostError(actor.name, f"failed: {reason}", _position(pending.task)) from error
        lost = [pending]
        if not isinstance(error, errors.ObjectLostError):  # of a node that has made it; its actor gives notice itself
            self._crew.kill(actor)
            others = [each for each in actor.tasks.values() if each is not pending and self._is_lost(each)]
            lost = sorted([pending, *others], key=lambda each: each.number)
            _log.warning("%s is lost, its batches are made again: %s", actor.name, reason.splitlines()[0])
        if self._continues:
            self._drop(pending)
            raise WorkerLostError(actor.name, f"is lost: {reason}", UNKNOWN, again=True) from error
        for each in reversed(lost):
            actor.tasks.pop(each.number, None)
            each.actor = each.reference = None
            each.lost = True
            self._queue.appendleft(each)
        first = self._queue[0]  # the one that the actor was making
        first.causes.append(f"{actor.name}: {reason}")
        first.nodes.add(actor.node)
        if len(first.causes) == _LOSSES:
            self._drop(first)
            reason = "; ".join([f"is the last of {_LOSSES} workers that were lost with this step", *first.causes])
            raise WorkerLostError(actor.name, reason, _position(first.task)) from error
        if isinstance(first.task, StepRange) and first.task.stop - first.task.start > 1:
            self._drop(first)
            steps = range(first.task.start, first.task.stop)
            first.parts = [self._new(first.task._replace(start=step, stop=step + 1)) for step in steps]
            for part in reversed(first.parts):
                part.lost = True
                self._queue.appendleft(part)
        self._place()

    def _is_lost(self, pending: _Pending) -> bool:
        try:
            self._ray.get(pending.reference, timeout=0)
        except self._ray.exceptions.RayError:  # or a timeout, but its actor will not finish it
            return True
        return False

    def _look(self, watch: StallMonitor, pending: _Pending) -> None:
        """Warn of an actor that is late, or give up on it and end it."""
        try:
            watch.look(partial(self._crew.describe, pending.actor))
        except WorkerLostError:
            with self.transaction():
                self._crew.kill(pending.actor)
            raise

    def cancel(self, pending: _Pending) -> None:
        """Drop a task; its actor skips it if it has not started it."""
        if self.is_usable():
            with self._lock, contextlib.suppress(Exception):  # an actor that is gone
                if (reference := self._drop(pending)) is not None:
                    self._ray.cancel(reference, recursive=False)

    def _drop(self, pending: _Pending) -> Any:
        """Forget a task, and return its reference, whose end frees the result."""
        self._in_flight.pop(pending.number, None)
        if pending.actor is not None:
            pending.actor.tasks.pop(pending.number, None)
        elif pending in self._queue:
            self._queue.remove(pending)
        reference, pending.reference = pending.reference, None
        return reference

    def end(self) -> None:
        self._crew.close()
        self._queue.clear()
        for pending in self._in_flight.values():
            pending.reference = None
        self._in_flight.clear()


def _position(task: Any) -> WorkerPosition:
    return WorkerPosition(task.epoch, task.start, -1) if isinstance(task, StepRange) else UNKNOWN


def _copied(parts: Sequence[Any]) -> list[Any]:
    """Return copies of arrays in one block of this process's pool, after the pickle that comes first."""
    views = [*map(memoryview, parts[1:])]
    starts = [0, *accumulate(-(-view.nbytes // _ALIGNMENT) * _ALIGNMENT for view in views)]
    block: Any = pooled_empty((starts[-1],), "u1").data
    copies: list[Any] = [parts[0]]
    for view, start in zip(views, starts, strict=False):
        copies.append(copy := block[start : start + view.nbytes])
        copy[:] = view
    return copies
