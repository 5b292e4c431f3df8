"""The worker of a fleet: a Ray actor that makes the tasks of one or several loaders."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter, time
from typing import Any

import numpy as np

from dataload._util.lazy import load_optional
from dataload.executors import WorkerStatus
from dataload.executors.worker import ResultMessage, TaskMessage, limit_threads, run_task
from dataload.loader.failures import StageSpan
from dataload.loader.step import StepsResult
from dataload.streams.messages import RowResults
from dataload.types import BytesArray

_MOST_WORKS = 64  # of loaders, which may have died without a word


def clock_offset() -> float:
    """Return the seconds from the clock of spans, which each machine has for itself, to the time of day."""
    return time() - perf_counter()


class FleetActor:
    """Makes tasks, one at a time; `report` answers at any time, from another thread."""

    def __init__(self, number: int, cpus: float) -> None:
        context = load_optional("ray", needed_by="a fleet", extra="ray").get_runtime_context()
        node = load_optional("ray.util", needed_by="a fleet", extra="ray").get_node_ip_address()
        self._node: tuple[str, str] = context.get_node_id(), node
        self._name = f"dataload-{number} (process {os.getpid()} on node {node})"
        self._status = WorkerStatus()
        self._works: OrderedDict[str, Callable[[Any, WorkerStatus], Any] | ResultMessage] = OrderedDict()
        self._waiting: dict[str, int] = {}  # tasks of each loader that it has asked for and not received
        self._made, self._nbytes = 0, 0
        if cpus <= 1:
            limit_threads()

    def load(self, loader: str, content: bytes, offset: float, directory: str) -> tuple[str, str, str]:
        """Take the work of a loader, whose clock has this offset; return this node's id and address, and a name."""
        threading.current_thread().name = self._name
        if os.path.isdir(directory):
            os.chdir(directory)  # for relative paths
        try:
            self._works[loader] = _OnClock(pickle.loads(content), clock_offset() - offset)  # noqa: S301 - of the loader
        except Exception as error:
            reason = f"could not be set up: {type(error).__name__}: {error}"
            self._works[loader] = ResultMessage(0, [], reason, traceback.format_exc())
        while len(self._works) > _MOST_WORKS:
            self.forget(next(iter(self._works)))
        return *self._node, self._name

    def make(self, loader: str, task: bytes, waiting: int) -> list[bytes | BytesArray]:
        """Return a message and the parts of a task's result; nothing if the loader's work is unknown."""
        work = self._works.get(loader)
        if work is None:
            return []
        threading.current_thread().name = self._name
        self._works.move_to_end(loader)
        self._waiting[loader] = waiting
        parts: Sequence[memoryview] = ()
        if isinstance(work, ResultMessage):
            message = work
        else:
            message, parts = run_task(TaskMessage(0, pickle.loads(task), None), work, self._status, None)  # noqa: S301
        self._made += 1
        self._nbytes += sum(part.nbytes for part in parts)
        return [pickle.dumps(message), *(np.frombuffer(part, np.uint8) for part in parts)]

    def forget(self, loader: str, *, ends: bool = False) -> None:
        """Drop the work of a loader; end this actor with its last one if it `ends` then."""
        self._works.pop(loader, None)
        self._waiting.pop(loader, None)
        if ends and not self._works:
            load_optional("ray", needed_by="a fleet", extra="ray").actor.exit_actor()

    def report(self) -> dict[str, Any]:
        """Return what this actor does: for humans, and for the loader that waits for it."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] # documented, despite its name
        named = [(thread.name, frames.get(thread.ident or 0)) for thread in threading.enumerate()]
        stacks = [f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in named if name == self._name]
        return {
            "node": self._node[1], "process": os.getpid(), "loaders": len(self._works), "made": self._made,
            "queue": sum(self._waiting.values()), "bytes": self._nbytes, "position": self._status.position(),
            "stacks": "".join(stacks),
        }  # fmt: skip


class _OnClock:
    """Work whose results have their spans on the loader's clock."""

    def __init__(self, work: Callable[[Any, WorkerStatus], Any], later: float) -> None:
        self._work = work
        self._later = later

    def __call__(self, task: Any, status: WorkerStatus) -> Any:
        result = self._work(task, status)
        if isinstance(result, StepsResult):
            for number, step in enumerate(result.loaded):
                result.loaded[number] = step._replace(spans=self._moved(step.spans))
        elif isinstance(result, RowResults):
            result = result._replace(spans=[*map(self._moved, result.spans)])
        return result

    def _moved(self, spans: list[StageSpan]) -> list[StageSpan]:
        return [(stage, begun + self._later, ended + self._later) for stage, begun, ended in spans]
