"""Engines run all parts of a task, such as a conversion, in processes of this machine or elsewhere."""

from __future__ import annotations

import os
import selectors
import signal
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Protocol, TypeVar

from dataload._util.indexing import even_split
from dataload._util.lazy import renamed
from dataload._util.settings import Checked, Least, check_count
from dataload._util.system import usable_cpus
from dataload.errors import ConfigError, DataloadError, SourceError, message_of
from dataload.executors import check_processes
from dataload.executors.base import StartMethod, TimeoutPolicy, WorkerStatus
from dataload.executors.serialization import check_work, put_together, sendable

if TYPE_CHECKING:
    from dataload.executors.handle import WorkerHandle

Item = TypeVar("Item")
Sent = TypeVar("Sent")


class PartTask(Protocol):
    """A task in partitions, such as ``partial(convert, source, destination)``: it pickles, and may run again."""

    def __call__(self, *, part: tuple[int, int], progress: Callable[[int, int], None]) -> Any:
        """Run partition (i, n), counted from 1; `progress` is called with (units done, units of the partition)."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attempt."""

    value: Any  # what the task returned
    done: int  # units that it has done
    error: Exception | None = None


def attempt(task: PartTask, part: tuple[int, int], report: Callable[[int], None]) -> Outcome:
    """Run a partition in this process, and return its value or error; `report` is called with the units done."""
    done = 0

    def progress(units: int, _: int) -> None:
        nonlocal done
        done = units
        report(units)

    try:
        return Outcome(task(part=part, progress=progress), done)
    except Exception as error:  # a user's source or transform may raise anything
        return Outcome(None, done, sendable(error, f"the process of part {_name(part)}"))


def value_of(outcome: Outcome, part: tuple[int, int], where: str = "") -> Any:
    """Return the value of a partition, or raise its error, which names the partition and `where` it ran."""
    error = outcome.error
    if error is None:
        return outcome.value
    if isinstance(error, DataloadError):
        error.args = (f"part {_name(part)}{where}: {error}",)
    else:
        error.add_note(f"It was raised in part {_name(part)}{where}.")
    raise error


def sendable_as(pickled: Callable[[PartTask], Sent], task: PartTask, engine: str) -> Sent:
    """Return what a function makes of a task that it pickles; a ConfigError says which engine needs that."""
    try:
        return pickled(task)
    except DataloadError:
        raise
    except Exception as error:
        message = (
            f"engine {engine!r} sends the source and all options to other processes, and they do not pickle "
            f"({message_of(error)}): pass no open files or locks; functions that are not in a module need cloudpickle"
        )
        raise ConfigError(message, key="engine", value=engine) from error


def _name(part: tuple[int, int]) -> str:
    return f"{part[0]}/{part[1]}"


class Engine(Protocol):
    """Runs a task in partitions: `LocalEngine` in processes of this machine, `dataload.ray.RayEngine` on a cluster."""

    @property
    def parts(self) -> int | None:
        """Number of partitions, if the user has chosen it."""
        ...

    def default_parts(self, shards: int) -> int:
        """Return the number of partitions for so many shards, which must depend on nothing else."""
        ...

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        """Run partitions 1 to `count`, and return their values in order. An error ends the run.

        Args:
            task: Called in other processes, once for each partition, and again if its process or machine is lost.
            count: Number of partitions.
            advance: Called now and then with the units that all partitions have done so far.
        """
        ...


def engine_of(engine: Engine | Literal["local"] | None) -> Engine | None:
    if engine == "local":
        return LocalEngine()
    if engine is not None and not callable(getattr(engine, "run", None)):
        message = f"engine={engine!r}: pass 'local' or an engine, such as dataload.ray.RayEngine()"
        raise ConfigError(message, key="engine", value=engine)
    return engine


def count_parts(engine: Engine, units: int) -> int:
    count = engine.parts or engine.default_parts(units)
    select_part(range(units), 1, count)  # raises if there are too many
    return count


def select_part(units: Sequence[Item], number: int, count: int) -> tuple[Item, ...]:
    """Return the contiguous units of partition `number`, counted from 1, of `count`."""
    if check_count("the number of parts", count, least=1) > len(units):
        several = f"{len(units)} shard{'' if len(units) == 1 else 's'}"
        message = f"cannot split {several} into {count} parts: ask for fewer parts"
        raise ConfigError(message, key="part", value=count)
    if check_count("the part", number, least=1) > count:
        raise ConfigError(f"there is no part {number} of {count}: parts are counted from 1", key="part", value=number)
    start, stop = even_split(len(units), count)[number - 1]
    return tuple(units[start:stop])


_MOST_PARTS = 256  # starting a process takes 0.1 s


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine(Checked):
    """Runs each partition in its own process, and again up to three times if that is killed.

    Attributes:
        num_workers: Number of processes at a time; by default one for each CPU that this process may use.
        parts: Number of partitions; by default one for each shard, but at most 256.
        start_method: How processes start, as in `multiprocessing`.
    """

    num_workers: Annotated[int, Least(1)] | None = None
    parts: Annotated[int, Least(1)] | None = None
    start_method: StartMethod = "forkserver"

    def default_parts(self, shards: int) -> int:
        return min(shards, _MOST_PARTS)

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        check_processes("engine", "local")
        import multiprocessing  # which most programs do not need

        from dataload.executors.handle import check_parent, start_fork_server

        current, start_method = multiprocessing.current_process(), self.start_method
        if current.daemon:
            message = f"{current.name} is a daemonic process, which cannot start processes: pass no engine there"
            raise ConfigError(message, key="engine", value="local")
        check_parent(start_method)
        modules = set[str]() if start_method == "fork" else sendable_as(check_work, task, "local")
        if start_method == "forkserver":
            start_fork_server({__name__, *modules})
        with closing(_Run(_Work(task, count), advance, self.num_workers or usable_cpus(), start_method)) as run:
            return run.values()


LocalEngine.__init__ = renamed(workers="num_workers")(LocalEngine.__init__)


_ATTEMPTS = 4
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0  # to delete unfinished files
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class _Work:
    """The function that the process of a part calls with the number of the part."""

    task: PartTask
    count: int

    def __call__(self, number: int, status: WorkerStatus) -> Outcome:
        before = signal.signal(signal.SIGTERM, _interrupt)  # to delete unfinished files
        try:
            return attempt(self.task, (number, self.count), status.at_index)
        except KeyboardInterrupt:
            os._exit(_TERMINATED)
        finally:
            signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


class _Run:
    """The processes of one run, at most `workers` at a time, numbered like their partitions."""

    def __init__(self, work: _Work, advance: Callable[[int], None], workers: int, start_method: StartMethod) -> None:
        self._work = work
        self._count = count = work.count
        self._advance = advance
        self._start_method: StartMethod = start_method
        self._workers = workers
        self._waiting = deque(range(1, count + 1))
        self._running: list[WorkerHandle] = []
        self._losses: Counter[int] = Counter()
        self._values: dict[int, Any] = {}
        self._done = 0
        self._selector = selectors.DefaultSelector()

    def values(self) -> list[Any]:
        while len(self._values) < self._count:
            while self._waiting and len(self._running) < self._workers:
                self._start(self._waiting.popleft())
            events = self._selector.select(_POLL_SECONDS)
            for key, _ in events:
                self._receive(key.data)
            if not events:  # a child of a partition may keep its connection open
                for handle in [handle for handle in self._running if not handle.is_alive()]:
                    self._lose(handle)
            self._advance(self._done + sum(max(0, handle.position.index) for handle in self._running))
        return [self._values[number] for number in range(1, self._count + 1)]

    def _start(self, number: int) -> None:
        import multiprocessing

        from dataload.executors.handle import WorkerHandle
        from dataload.executors.worker import TaskMessage

        try:
            context = multiprocessing.get_context(self._start_method)
            handle = WorkerHandle(number, context, self._work, self._start_method, TimeoutPolicy())
        except ChildProcessError:  # a fork of the process that started the fork server may not use it
            self._start_method = "spawn"
            self._waiting.appendleft(number)
            return
        except (OSError, EOFError) as error:
            if self._running:  # the limit of processes or open files
                self._workers = len(self._running)
                self._waiting.appendleft(number)
                return
            message = f"cannot start a process for part {number}/{self._count} ({type(error).__name__}: {error})"
            raise SourceError(
                f"{message}: raise the limits of open files (ulimit -n) and processes (ulimit -u)"
            ) from error
        handle.give(TaskMessage(0, number, None), None)
        self._running.append(handle)
        self._selector.register(handle.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, handle)

    def _receive(self, handle: WorkerHandle) -> None:
        try:
            if handle.outbox.flush():
                self._selector.modify(handle.connection, selectors.EVENT_READ, handle)
            message = handle.inbox.take()
        except (EOFError, OSError):
            self._lose(handle)
            return
        if message is None:
            return
        result, parts = message
        self._remove(handle)
        part = handle.number, self._count
        if result.failure:
            raise ConfigError(f"the process of part {part[0]}/{part[1]} {result.failure}", key="engine", value="local")
        outcome: Outcome = put_together(parts)
        self._values[handle.number] = value_of(outcome, part)
        self._done += outcome.done

    def _lose(self, handle: WorkerHandle) -> None:
        number, started = handle.number, handle.status.stage == 2
        reason = handle.end()
        self._remove(handle)
        self._losses[number] += 1
        message = f"the process of part {number}/{self._count} {reason}"
        if not started:  # and would not start again
            raise ConfigError(message, key="engine", value="local")
        if self._losses[number] >= _ATTEMPTS:
            raise SourceError(f"{message}, in attempt {_ATTEMPTS} of {_ATTEMPTS}; fewer workers need less memory")
        self._waiting.appendleft(number)

    def _remove(self, handle: WorkerHandle) -> None:
        self._selector.unregister(handle.connection)
        self._running.remove(handle)
        handle.dismiss()
        handle.join(_END_SECONDS)
        handle.close()

    def close(self) -> None:
        """End all processes: ask them to delete unfinished files, then kill those that take too long."""
        try:
            for handle in self._running:
                handle.terminate()
            until = monotonic() + _END_SECONDS
            for handle in self._running:
                handle.join(until - monotonic())
        finally:
            for handle in self._running:
                handle.close()
            self._selector.close()
