"""Runs tasks in the actors of a fleet, and makes those that are lost with an actor or a node again elsewhere."""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from dataload._util.arrays import pooled_empty
from dataload.errors import text_of
from dataload.executors import check_pickles
from dataload.executors.base import (
    Fleet,
    OwnedPool,
    PoolExecutor,
    Result,
    StallMonitor,
    TimeoutPolicy,
    WorkerLostError,
    WorkerPosition,
    WorkerStatus,
    raise_closed,
)
from dataload.executors.serialization import put_together
from dataload.executors.worker import ResultMessage
from dataload.loader.step import StepRange, StepsResult
from dataload.ray import connect, dump
from dataload.ray.actor import Homes
from dataload.ray.crew import POLL_SECONDS, UNKNOWN, Actor, Crew

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_LOSSES = 3  # of actors that were making one step, before it is an error
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
    __slots__ = ("_pool", "actor", "causes", "errors", "is_cut", "lost", "nodes", "number", "reference", "task")

    def __init__(self, pool: FleetPool, number: int, task: Any) -> None:
        self._pool = pool
        self.number: int = number
        self.task: Any = task
        self.actor: Actor | None = None  # None while it waits for one
        self.reference: Any = None
        self.lost: bool = False  # with an actor
        self.is_cut: bool = False  # lost, and to be made step by step, so that an error names the step
        self.causes: list[str] = []  # of actors that were lost while they made it
        self.nodes: set[str] = set()  # of these actors
        self.errors: list[WorkerLostError] = []  # once too many were lost

    def result(self) -> Any:
        return self._pool.receive(self)

    def done(self) -> bool:
        return self._pool.is_done(self)

    def cancel(self) -> None:
        self._pool.cancel(self)


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
        self._gone: tuple[str, str] | None = None  # a lost actor that the consumer does not know of, if it `_continues`

    def is_usable(self) -> bool:
        return super().is_usable() and self._ray.is_initialized()

    def use(self, workers: int) -> None:
        with self.transaction():
            self._crew.use(workers)
            self._place()

    def submit(self, task: Any, *, lost: bool = False) -> _Pending:
        with self.transaction():
            pending = self._in_flight[self._next] = _Pending(self, self._next, task)
            self._next += 1
            pending.lost = lost
            self._queue.append(pending)
            self._place()
            return pending

    def _place(self) -> None:
        """Give tasks to actors that have room."""
        crew = self._crew
        for actor, error in crew.fill():
            self._lose(actor, error)
        while self._queue:
            pending = self._queue[0]
            if self._gone is not None:  # another actor cannot go on with this task
                pending.errors.append(WorkerLostError(*self._gone, UNKNOWN, again=True))
                self._queue.popleft()
                continue
            in_flight = None if pending.lost else len(self._in_flight)  # others may be waiting for it to be received
            actor = crew.choose(in_flight, pending.nodes, partial(self._homes.of, pending.task))
            if actor is None:
                return
            self._queue.popleft()
            actor.give(pending.number, pending)
            pending.actor = actor
            asked = pending.task, crew.nodes_for(actor)
            content = pickle.dumps((crew.loader, pending.number, asked, len(actor.tasks)), protocol=5)
            pending.reference = actor.handle.make.remote(content)

    def is_done(self, pending: _Pending) -> bool:
        with self.transaction():
            self._place()
            return bool(pending.errors or (pending.reference is not None and self._crew.done([pending.reference])))

    def wait_for_any(self, waiting: Sequence[_Pending]) -> None:
        """Wait until one of some tasks is done, or is lost."""
        watch = StallMonitor(self._timeouts)
        while not self._wait(waiting, watch.next_look()):
            self._look(watch, waiting[0])

    def _wait(self, waiting: Sequence[_Pending], seconds: float) -> bool:
        """Wait until one of some tasks is done, or anything else happens; return whether one is."""
        # The references have a frame of their own: the traceback of an error would keep their results.
        crew = self._crew
        with self.transaction():
            self._place()
            if any(each.errors or each.is_cut for each in waiting):
                return True
            wanted = {each.reference for each in waiting if each.reference is not None}
            watched = {*wanted, *(each.loaded for each in crew.starting)}
            if self._queue or crew.starting:
                seconds = min(seconds, POLL_SECONDS)
        return bool(crew.done(watched, seconds, 1) & wanted)

    def receive(self, pending: _Pending) -> Any:
        """Wait for a task, and return its result; a `WorkerLostError` if it has none."""
        watch = StallMonitor(self._timeouts)
        while True:
            if pending.reference is None or self._queue or self._crew.starting:
                self.wait_for_any([pending])
            if pending.is_cut:
                return self._step_by_step(pending.task)
            if pending.errors:
                with self.transaction():
                    self._drop(pending)
                self._gone = None
                raise pending.errors.pop()  # not from a local variable: its traceback would refer to it
            self.check_usable()
            try:
                answer = self._ray.get(pending.reference, timeout=watch.next_look())
            except self._ray.exceptions.GetTimeoutError:
                self._look(watch, pending)
                continue
            except self._ray.exceptions.RayError as error:
                error.__traceback__ = None  # frames of Ray refer to the result, which would stay in the store
                with self.transaction():
                    self._failed(pending, error)
                continue
            with self.transaction():
                self._drop(pending)
            if not answer:  # another thread has cancelled it
                raise_closed()
            content, *large = [answer] if isinstance(answer, bytes) else answer
            message, small = pickle.loads(content)  # noqa: S301 - from our own actor
            return self._opened(message, small, large, pending)

    def _step_by_step(self, task: StepRange) -> StepsResult:
        steps, seconds = list[Any](), 0.0
        for step in range(task.start, task.stop):
            made: StepsResult = self.submit(task._replace(start=step, stop=step + 1), lost=True).result()
            steps += made.loaded
            seconds += made.seconds
            if made.loaded[-1].error is not None:
                break
        return StepsResult(steps, seconds)

    def _opened(self, message: ResultMessage, small: Sequence[Any], large: Sequence[Any], pending: _Pending) -> Any:
        name = "" if pending.actor is None else pending.actor.name
        if message.failure:
            raise WorkerLostError(name, message.failure, message.position or UNKNOWN, message.traceback_text)
        try:
            return put_together(small or (_copied(large) if self._writable else large))
        except Exception as error:
            reason = f"sent a batch that cannot be unpickled: {type(error).__name__}: {error}"
            raise WorkerLostError(name, reason, _position(pending.task)) from error

    def _failed(self, pending: _Pending, error: Any) -> None:
        """Queue what was lost with an actor or a node again; raise a `WorkerLostError` where that does not help."""
        actor, errors = pending.actor, self._ray.exceptions
        if actor is None:
            raise_closed()
        losses = errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError, errors.TaskCancelledError
        is_lost = isinstance(error, losses)
        if self._continues or not is_lost:
            self._crew.kill(actor if is_lost else None, error)
            self._drop(pending)
            self._gone = None
            reason = f"{'is lost' if is_lost else 'failed'}: {text_of(error)}"
            raise WorkerLostError(actor.name, reason, _position(pending.task), again=is_lost) from error
        if isinstance(error, errors.ObjectLostError):  # of a node that has made it; its actor gives notice itself
            self._again([pending], actor, text_of(error))
        else:
            self._crew.kill(actor, error)
            self._lose(actor, error)
        self._place()

    def _lose(self, actor: Actor, error: Any) -> None:
        """Queue the tasks of an actor that is lost again."""
        if self._continues:  # the consumer knows where to go on, once it asks for a result
            self._gone = actor.name, f"is lost: {text_of(error)}"
        else:
            lost = [each for each in actor.tasks.values() if self._is_lost(each)]
            self._again(sorted(lost, key=lambda each: each.number), actor, text_of(error))

    def _again(self, lost: list[_Pending], actor: Actor, reason: str) -> None:
        for each in lost:
            actor.take(each.number)
            each.actor = each.reference = None
            each.lost = True
        if lost:
            first = lost[0]  # the one that the actor was making
            first.causes.append(f"{actor.name}: {reason}")
            first.nodes.add(actor.node)
            first.is_cut = isinstance(first.task, StepRange) and first.task.stop - first.task.start > 1
            if len(first.causes) == _LOSSES:
                reason = "; ".join([f"is the last of {_LOSSES} workers that were lost with this step", *first.causes])
                first.errors.append(WorkerLostError(actor.name, reason, _position(first.task)))
            if first.is_cut or first.errors:
                self._drop(lost.pop(0))
        self._queue.extendleft(reversed(lost))

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
        # `ray.cancel` of a task that is on its way leaves a gap in the actor's queue. The actor waits 30 s for the
        # missing task, and then drops all others.
        if self.is_usable():
            with self._lock, contextlib.suppress(Exception):  # an actor that is gone
                self._drop(pending)
                if (actor := pending.actor) is not None:
                    actor.handle.skip.options(concurrency_group="report").remote(self._crew.loader, pending.number)

    def _drop(self, pending: _Pending) -> None:
        """Forget a task, and its reference, whose end frees the result."""
        self._in_flight.pop(pending.number, None)
        if pending.actor is not None:
            pending.actor.take(pending.number)
        elif pending in self._queue:
            self._queue.remove(pending)
        pending.reference = None

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
