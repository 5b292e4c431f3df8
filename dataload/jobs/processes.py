"""The processes of the engine `local`."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import signal
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from time import monotonic
from typing import Any, NoReturn

from dataload._util.system import usable_cpus
from dataload.errors import ConfigError, SourceError
from dataload.executors.base import StartMethod, TimeoutPolicy, WorkerStatus
from dataload.executors.handle import WorkerHandle, check_parent, start_fork_server
from dataload.executors.serialization import put_together
from dataload.executors.worker import TaskMessage
from dataload.jobs.attempt import Outcome, PartTask, attempt, check_sendable, value_of

_ATTEMPTS = 4
_POLL_SECONDS = 0.1
_END_SECONDS = 10.0  # to delete unfinished files
_TERMINATED = 128 + signal.SIGTERM


def run_parts(
    task: PartTask,
    count: int,
    advance: Callable[[int], None],
    num_workers: int | None,
    start_method: StartMethod,
) -> list[Any]:
    current = multiprocessing.current_process()
    if current.daemon:
        message = f"{current.name} is a daemonic process, which cannot start processes: pass no engine there"
        raise ConfigError(message, key="engine", value="local")
    check_parent(start_method)
    modules = set[str]() if start_method == "fork" else check_sendable(task, "local")
    if start_method == "forkserver":
        start_fork_server({__name__, *modules})
    with closing(_Run(_Work(task, count), advance, num_workers or usable_cpus(), start_method)) as run:
        return run.values()


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
