"""Runs tasks in the actors of a fleet, and makes those that are lost with an actor or a node again elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import threading
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from dataload._util.arrays import pooled_empty
from dataload._util.lazy import load_optional
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
from dataload.executors.base import StallMonitor, check_process, raise_closed
from dataload.executors.serialization import put_together
from dataload.executors.worker import ResultMessage
from dataload.loader.step import StepRange, StepsResult
from dataload.ray.actor import FleetActor, clock_offset
from dataload.ray.cluster import NAMESPACE, connect
from dataload.types import BytesArray

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_log = logging.getLogger("dataload")

_LOSSES = 3  # of actors that were making one step, before it is an error
_FAILED_STARTS, _START_PAUSE = 5, 0.5  # Ray may not have noticed yet that a node or a named actor is gone
_POLL_SECONDS = 0.05  # while actors start, or tasks wait for one
_WAIT_SECONDS = 60.0  # of one wait; Ray takes no infinite ones
_REPORT_SECONDS = 0.5
_IDLE_SECONDS = 30.0  # after which an actor that `use` does not allow any more ends
_ALIGNMENT = 64
_UNKNOWN = WorkerPosition(-1, -1, -1)


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
    load_optional("ray.cloudpickle", needed_by="a fleet", extra="ray").dumps(value)
    return set()


@dataclass(slots=True, eq=False)
class _Actor:
    """An actor as one loader sees it."""

    handle: Any
    number: int
    loaded: Any  # the reference to the result of `FleetActor.load`
    node: str = ""
    name: str = ""
    tasks: dict[int, _Pending] = field(default_factory=dict[int, "_Pending"])  # asked for and not received
    idle_since: float = 0.0


class _Pending(Result[Any]):
    __slots__ = ("_pool", "actor", "causes", "nodes", "number", "parts", "reference", "task")

    def __init__(self, pool: FleetPool, number: int, task: Any) -> None:
        self._pool = pool
        self.number = number
        self.task = task
        self.actor: _Actor | None = None  # None while it waits for one
        self.reference: Any = None
        self.causes: list[str] = []  # of actors that were lost while they made it
        self.nodes: set[str] = set()  # of these actors
        self.parts: list[_Pending] = []  # the steps of a lost task, which are made one by one

    def result(self) -> Any:
        if self.parts:
            return self._joined()
        return self._pool.receive(self)

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


class FleetPool:
    """The actors and tasks of one loader, used by the consumer's thread; any thread may stop it."""

    # Tasks go to the actors that have started and have the fewest. `_queue` has those that no actor has room for,
    # while actors start or Ray has no CPUs for all. Ray's references keep results in the object store until they are
    # received, or dropped here.

    def __init__(self, work: Any, size: int, *, fleet: Fleet, timeouts: TimeoutPolicy, first: int) -> None:
        self._ray: Any = connect(fleet.address)
        self._fleet, self._timeouts, self._first, self._size = fleet, timeouts, first, size
        self._pid, self._lock, self._stopped = os.getpid(), threading.RLock(), False
        self._continues: bool = getattr(work, "continues", False)
        self._is_shared = fleet.name is not None and not self._continues
        self._loader = uuid.uuid4().hex
        own = f"{fleet.name or socket.gethostname()}-{os.getpid()}-{self._loader[:6]}"
        self._name: str = fleet.name if fleet.name is not None and self._is_shared else own
        cloudpickle = load_optional("ray.cloudpickle", needed_by="a fleet", extra="ray")
        self._content: Any = self._ray.put(cloudpickle.dumps(work))
        self._remote: Any = self._ray.remote(concurrency_groups={"report": 1})(FleetActor)
        self._actors: list[_Actor] = []
        self._starting: list[_Actor] = []
        self._queue: deque[_Pending] = deque()
        self._in_flight: dict[int, _Pending] = {}
        self._next, self._looked = 0, 0.0
        self._failed_starts, self._start_at = 0, 0.0  # in a row; when to start the next one
        self._check_room()

    def _check_room(self) -> None:
        wanted, found = self._size * self._fleet.num_cpus, self._ray.cluster_resources().get("CPU", 0)
        if wanted > found:
            message = f"{self._size} workers of {self._fleet.num_cpus:g} CPUs need {wanted:g}, and the Ray cluster has"
            warnings.warn(f"{message} {found:g}: using as many as fit until nodes join", RuntimeWarning, stacklevel=2)

    def is_usable(self) -> bool:
        return not self._stopped and self._pid == os.getpid() and self._ray.is_initialized()

    def use(self, workers: int) -> None:
        with self._transaction():
            self._size = workers
            for actor in [each for each in self._starting if each.number >= self._first + workers]:
                self._starting.remove(actor)
                self._end(actor)

    def submit(self, task: Any) -> _Pending:
        with self._transaction():
            pending = _Pending(self, self._next, task)
            self._next += 1
            self._queue.append(pending)
            self._in_flight[pending.number] = pending
            self._place()
            return pending

    def _place(self) -> None:
        """Give tasks to actors that have room, and start actors that are missing."""
        active, now = range(self._first, self._first + self._size), monotonic()
        missing = {*active} - {each.number for each in (*self._actors, *self._starting)}
        for number in missing if now >= self._start_at else ():
            self._starting.append(self._start(number))
        if now - self._looked > _POLL_SECONDS or not self._actors:
            self._looked = now
            self._look(active, now)
        room = 1 - -len(self._in_flight) // max(1, self._size)
        while self._queue:
            free = [each for each in self._actors if each.number in active and len(each.tasks) < room]
            if not free:
                return
            pending = self._queue.popleft()
            self._give(pending, min(free, key=lambda each: (each.node in pending.nodes, len(each.tasks))))

    def _give(self, pending: _Pending, actor: _Actor) -> None:
        actor.tasks[pending.number] = pending
        pending.actor = actor
        task = pickle.dumps(pending.task, protocol=5)
        pending.reference = actor.handle.make.remote(self._loader, task, len(actor.tasks))

    def _start(self, number: int) -> _Actor:
        fleet = self._fleet
        options: dict[str, Any] = {"num_cpus": fleet.num_cpus, "namespace": NAMESPACE, "get_if_exists": True}
        options |= {} if fleet.memory is None else {"memory": fleet.memory}
        options |= {"scheduling_strategy": "SPREAD"} if fleet.scheduling == "spread" else {}
        options |= {"lifetime": "detached"} if fleet.detached and self._is_shared else {}
        handle = self._remote.options(name=f"{self._name}/{number}", **options).remote(number, fleet.num_cpus)
        return _Actor(handle, number, handle.load.remote(self._loader, self._content, clock_offset(), os.getcwd()))

    def _look(self, active: range, now: float) -> None:
        """Note which actors have started, which tasks are done if others wait, and which actors are not needed."""
        ready = self._ready([each.loaded for each in self._starting])
        for actor in [each for each in self._starting if each.loaded in ready]:
            self._starting.remove(actor)
            try:
                actor.node, _, actor.name = self._ray.get(actor.loaded)
            except self._ray.exceptions.RayError as error:
                self._failed_starts += 1
                self._start_at = now + _START_PAUSE
                if self._failed_starts == _FAILED_STARTS:
                    self._failed_starts = 0
                    reason = f"cannot be started: {text_of(error)}"
                    raise WorkerLostError(f"{self._name}/{actor.number}", reason, _UNKNOWN) from error
            else:
                self._failed_starts = 0
                self._actors.append(actor)
        if self._queue:
            placed = [each for actor in self._actors for each in actor.tasks.values()]
            done = self._ready([each.reference for each in placed])
            for each in placed:
                if each.reference in done and each.actor is not None:
                    each.actor.tasks.pop(each.number, None)
        for actor in [each for each in self._actors if each.number not in active and not each.tasks]:
            actor.idle_since = actor.idle_since or now
            if now - actor.idle_since > _IDLE_SECONDS:
                self._actors.remove(actor)
                self._end(actor)

    def _ready(self, references: Sequence[Any], seconds: float = 0.0, count: int | None = None) -> set[Any]:
        if not references:
            return set()
        found, _ = self._ray.wait(list(references), num_returns=count or len(references), timeout=seconds)
        return {*found}

    def is_done(self, pending: _Pending) -> bool:
        with self._transaction():
            self._place()
            if pending.parts:
                return all(map(self.is_done, pending.parts))
            return bool(self._ready([pending.reference])) if pending.reference is not None else False

    def wait_for_any(self, waiting: Sequence[_Pending]) -> None:
        """Wait until one of some tasks is done, or is lost."""
        watch = StallMonitor(self._timeouts)
        while True:
            with self._transaction():
                self._place()
            asked = [part for each in waiting for part in (each.parts or [each])]
            references = {each.reference for each in asked if each.reference is not None}
            short = bool(self._queue or self._starting)
            others = {each.reference for each in self._in_flight.values() if each.reference is not None}
            others |= {each.loaded for each in self._starting}
            seconds = min(watch.next_look(), _POLL_SECONDS if short else _WAIT_SECONDS)
            if self._ready([*references, *(others - references if short else ())], seconds, 1) & references:
                return
            if watch.is_due():
                self._warn(watch, asked[0])

    def receive(self, pending: _Pending) -> Any:
        """Wait for a task, and return its result; a `WorkerLostError` if it has none."""
        watch = StallMonitor(self._timeouts)
        while True:
            if pending.reference is None or self._queue or self._starting:
                self.wait_for_any([pending])
            if self._stopped or self._pid != os.getpid():
                check_process(self._pid)
                raise_closed()
            try:
                seconds = min(watch.next_look(), _WAIT_SECONDS)
                message, *parts = self._ray.get(pending.reference, timeout=seconds) or (None,)
            except self._ray.exceptions.GetTimeoutError:
                if watch.is_due():
                    self._warn(watch, pending)
                continue
            except self._ray.exceptions.RayError as error:
                with self._transaction():
                    self._lost(pending, error)
                if pending.parts:
                    return pending.result()
                continue
            if message is None:
                with self._transaction():
                    self._load_again(pending)
                continue
            self._drop(pending)
            return self._opened(pickle.loads(message), parts, pending)  # noqa: S301 - from our own actor

    def _opened(self, message: ResultMessage, parts: list[BytesArray], pending: _Pending) -> Any:
        name = "" if pending.actor is None else pending.actor.name
        if message.failure:
            raise WorkerLostError(name, message.failure, message.position or _UNKNOWN, message.traceback_text)
        try:
            return put_together(_copied(parts) if self._fleet.writable else parts)
        except Exception as error:
            reason = f"sent a batch that cannot be unpickled: {type(error).__name__}: {error}"
            raise WorkerLostError(name, reason, _position(pending.task)) from error

    def _load_again(self, pending: _Pending) -> None:
        """Send the work of this loader to an actor that has dropped it, and the task again."""
        actor = pending.actor
        if actor is not None:
            actor.handle.load.remote(self._loader, self._content, clock_offset(), os.getcwd())
            self._give(pending, actor)

    def _lost(self, pending: _Pending, error: Any) -> None:
        """Put tasks that were lost into the queue again; raise a `WorkerLostError` where that does not help."""
        actor, errors = pending.actor, self._ray.exceptions
        if actor is None:
            return
        name = actor.name
        if isinstance(error, errors.TaskCancelledError):
            raise_closed()
        if not isinstance(error, (errors.RayActorError, errors.ObjectLostError, errors.NodeDiedError)):
            self._drop(pending)
            raise WorkerLostError(name, f"failed: {text_of(error)}", _position(pending.task)) from error
        if isinstance(error, errors.ObjectLostError):
            lost = [pending]
        else:
            if actor in self._actors:
                self._actors.remove(actor)
                self._end(actor)
            lost = [each for each in actor.tasks.values() if each is pending or self._is_lost(each)]
            _log.warning("%s is lost, its batches are made again: %s", name, text_of(error).splitlines()[0])
        if self._continues:
            self._drop(pending)
            raise WorkerLostError(name, "is lost", _UNKNOWN, again=True) from error
        lost[0].causes.append(f"{name}: {text_of(error)}")
        lost[0].nodes.add(actor.node)
        for each in reversed(lost):
            actor.tasks.pop(each.number, None)
            each.actor = each.reference = None
            self._queue.appendleft(each)
        if len(lost[0].causes) >= _LOSSES:
            self._drop(lost[0])
            reason = "; ".join([f"was lost, the {_LOSSES}rd to make this step", *lost[0].causes])
            raise WorkerLostError(name, reason, _position(lost[0].task)) from error
        first: Any = lost[0].task
        if isinstance(first, StepRange) and first.stop - first.start > 1:
            self._drop(lost[0])
            steps = range(first.start, first.stop)
            lost[0].parts = [self.submit(first._replace(start=step, stop=step + 1)) for step in steps]
        self._place()

    def _is_lost(self, pending: _Pending) -> bool:
        try:
            self._ray.get(pending.reference, timeout=0)
        except self._ray.exceptions.RayError:  # or a timeout, but its actor will not finish it
            return True
        return False

    def _warn(self, watch: StallMonitor, pending: _Pending) -> None:
        """Warn of an actor that is late, or give up on it and end it."""
        actor = pending.actor
        try:
            watch.look(partial(self._describe, actor))
        except WorkerLostError:
            with self._transaction():
                if actor in self._actors:
                    self._actors.remove(actor)
                    self._end(actor)
            raise

    def _describe(self, actor: _Actor | None) -> tuple[str, WorkerPosition, str]:
        if actor is None:
            return f"fleet {self._name}", _UNKNOWN, "no worker has started: Ray has no CPUs free, or starts workers"
        try:
            report = actor.handle.report.options(concurrency_group="report").remote()
            found = self._ray.get(report, timeout=_REPORT_SECONDS)
        except self._ray.exceptions.RayError as error:
            return actor.name, _UNKNOWN, f"it does not answer: {text_of(error)}"
        return actor.name, found["position"], found["stacks"]

    def cancel(self, pending: _Pending) -> None:
        """Drop a task; its actor skips it if it has not started it."""
        if not self.is_usable():
            return
        with self._lock:
            reference = self._drop(pending)
            if reference is not None:
                with contextlib.suppress(Exception):  # an actor that is gone
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

    def _end(self, actor: _Actor) -> None:
        with contextlib.suppress(Exception):  # it is gone
            if self._is_shared:
                actor.handle.forget.remote(self._loader, ends=not self._fleet.detached)
            else:
                self._ray.kill(actor.handle)

    def stop(self) -> None:
        if not self.is_usable():
            return
        self._stopped = True
        with self._lock:
            for actor in (*self._actors, *self._starting):
                self._end(actor)
            self._actors.clear()
            self._starting.clear()
            self._queue.clear()
            for pending in self._in_flight.values():
                pending.reference = None
            self._in_flight.clear()
            self._content = None

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        check_process(self._pid)
        with self._lock:
            if self._stopped:
                raise_closed()
            yield


def _position(task: Any) -> WorkerPosition:
    return WorkerPosition(task.epoch, task.start, -1) if isinstance(task, StepRange) else _UNKNOWN


def _copied(parts: Sequence[BytesArray]) -> list[Any]:
    """Return copies of arrays in one block of this process's pool."""
    starts = [0]
    for part in parts[1:]:
        starts.append(starts[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
    block = pooled_empty((starts[-1],), "u1")
    copies: list[Any] = [parts[0]]
    for part, start in zip(parts[1:], starts, strict=False):
        copies.append(copy := block[start : start + part.nbytes])
        copy[:] = part
    return copies
