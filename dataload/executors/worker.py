"""What runs in a worker process."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from dataload.executors.base import Place, WorkerStatus
from dataload.executors.channel import Inbox, receive_descriptor, send
from dataload.executors.serialization import put_together, take_apart
from dataload.executors.shared_memory import Extent, Slot

__all__ = ["DUMP_SIGNAL", "SMALL_RESULT", "NewSlot", "ResultMessage", "TaskMessage", "limit_threads", "serve"]

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker write down the stacks of its threads, whatever holds the GIL."""

SMALL_RESULT = 16 << 10
"""Bytes up to which a result is sent: to lend a slot would cost more."""


class TaskMessage(NamedTuple):
    """A task for a worker.

    Attributes:
        number: Of the task; rises.
        task: What `work` is called with.
        slot: Number of the slot for the result, or None to send it.
    """

    number: int
    task: Any
    slot: int | None


class NewSlot(NamedTuple):
    """A slot that the worker does not know yet; its descriptor follows."""

    number: int


class ResultMessage(NamedTuple):
    """What became of a task. The parts of its result come with this message, unless they are in its slot.

    Attributes:
        number: Of the task.
        extents: The parts of the result in its slot; empty if they are not there.
        failure: Why there is none.
        traceback_text: Where that happened.
        note: Why the result is not in its slot, where that is unexpected.
        place: Where the worker was then; by the time that this is read it may be elsewhere.
    """

    number: int
    extents: list[Extent]
    failure: str = ""
    traceback_text: str = ""
    note: str = ""
    place: Place | None = None


def serve(connection: socket.socket, name: str, work: Callable[[Any, WorkerStatus], Any] | None) -> None:
    """Do tasks until the parent says no more, or is gone.

    Args:
        connection: To the parent.
        name: Of the worker.
        work: What is done with a task; None if it is the first that comes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has the parent's handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.current_thread().name = name
    _follow_parent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        # The memory for what the worker tells without being asked, ahead of the work, whose import may take long.
        report = Slot(receive_descriptor(connection))
        status = WorkerStatus(report.view(WorkerStatus.BYTES))
        faulthandler.register(DUMP_SIGNAL, file=report.descriptor, all_threads=True)
        status.stage = 1
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
        inbox = Inbox(connection)
        failure: tuple[str, str] | None = None
        if work is None:
            _, parts = _next(inbox)
            try:
                work = put_together(parts)
            except Exception as error:
                failure = _set_up_failure(error), traceback.format_exc()
            del parts
        limit_threads()
        status.stage = 2
        _loop(connection, inbox, work, status, failure)


def _next(inbox: Inbox) -> tuple[Any, list[bytearray]]:
    message = inbox.take()
    assert message is not None, "the socket waits"
    return message


def _set_up_failure(error: Exception) -> str:
    hint = ""
    if "__main__" in str(error):
        hint = (
            "; functions of a notebook or an interactive session do not exist in worker processes: "
            "put them into a module, or use start_method='fork'"
        )
    return f"could not be set up: {type(error).__name__}: {error}{hint}"


def _loop(
    connection: socket.socket, inbox: Inbox, work: Any, status: WorkerStatus, failure: tuple[str, str] | None
) -> None:
    slots: dict[int, Slot] = {}
    while True:
        message, _ = _next(inbox)
        if isinstance(message, NewSlot):
            slots[message.number] = Slot(receive_descriptor(connection))
            continue
        job: TaskMessage = message
        if status.is_cancelled(job.number):
            send(connection, ResultMessage(job.number, [], "was told to leave the batch out"))
        elif failure is not None:
            send(connection, ResultMessage(job.number, [], *failure))
        else:
            send(connection, *_do(job, work, status, None if job.slot is None else slots[job.slot]))


def _do(job: TaskMessage, work: Any, status: WorkerStatus, slot: Slot | None) -> tuple[ResultMessage, list[memoryview]]:
    doing = "failed"
    try:
        value = work(job.task, status)
        doing = "could not send its batch, which has to be something that can be pickled"
        parts = take_apart(value)
    except BaseException as error:  # SystemExit, too: a transform does not decide when workers end
        failure = f"{doing}: {type(error).__name__}: {error}"
        place = replace(status.place(), index=-1)  # of the batch, not of its last sample
        return ResultMessage(job.number, [], failure, traceback.format_exc(), place=place), []
    if slot is None or sum(part.nbytes for part in parts) <= SMALL_RESULT:
        return ResultMessage(job.number, []), parts
    try:
        return ResultMessage(job.number, slot.write(parts)), []
    except OSError as error:
        return ResultMessage(job.number, [], note=f"shared memory for one cannot be had: {error}"), parts


def _follow_parent() -> None:
    """End when the parent does."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel: Any = parent.sentinel
    with contextlib.suppress(AttributeError, OSError):
        # On Linux the kernel sees to it, even if something here holds the GIL for ever, or the process is stopped.
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | fcntl.FASYNC)
    ends = [sentinel]
    with contextlib.suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(parent.pid or 0))  # the sentinel stays open while some fork of the parent has it

    def wait_for_end() -> None:
        wait(ends)
        os._exit(1)

    threading.Thread(target=wait_for_end, name=f"{threading.current_thread().name}-parent", daemon=True).start()


_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


def limit_threads() -> None:
    """One thread for each library that would start as many as there are cores, in every worker."""
    with contextlib.suppress(ImportError):
        importlib.import_module("threadpoolctl").threadpool_limits(1)
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    if torch is not None:
        torch.set_num_threads(1)
    if cv2 is not None:
        cv2.setNumThreads(0)
