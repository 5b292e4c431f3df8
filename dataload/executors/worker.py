"""The main loop of a worker process."""

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

from dataload.executors.base import WorkerLostError, WorkerPosition, WorkerStatus, begin_task, check_fork
from dataload.executors.serialization import put_together, take_apart
from dataload.executors.transport import Extent, Inbox, Slot, receive_descriptor, send

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a worker write the stack traces of its threads, even while code holds the GIL."""

SMALL_RESULT = 16 << 10
"""Results of at most this many bytes are sent over the socket: lending a slot would cost more."""


class TaskMessage(NamedTuple):
    """A task for a worker."""

    number: int  # increases from task to task
    task: Any
    slot: int | None  # number of the slot for the result; None sends the result over the socket


class NewSlot(NamedTuple):
    """A slot that is new to the worker; its descriptor follows."""

    number: int


class ResultMessage(NamedTuple):
    """The outcome of a task. Its buffers come with this message unless they are in its slot."""

    number: int
    extents: list[Extent]  # buffers of the result in its slot; empty if they are not there
    failure: str = ""  # why there is no result; empty if there is one
    traceback_text: str = ""
    note: str = ""  # why the result is unexpectedly not in its slot
    position: WorkerPosition | None = None  # the worker's position at the failure


def serve(connection: socket.socket, name: str, work: Callable[[Any, WorkerStatus], Any] | None) -> None:
    """Run tasks until the parent closes the connection; without `work`, the first message contains it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the parent's handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.current_thread().name = name
    _follow_parent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        # The report comes before the work, because importing the work may take long.
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
                hint = ""
                if "__mp_main__" in str(error):
                    main = '`if __name__ == "__main__":`'
                    hint = f"; workers do not define what stands under {main}: move it out of there"
                reason = f"could not be set up: {type(error).__name__}: {error}{hint}"
                failure = reason, traceback.format_exc()
            del parts
        limit_threads()
        status.stage = 2
        _loop(connection, inbox, work, status, failure)


def _next(inbox: Inbox) -> tuple[Any, list[bytearray]]:
    message = inbox.take()
    assert message is not None, "the socket blocks"
    return message


def _loop(
    connection: socket.socket, inbox: Inbox, work: Any, status: WorkerStatus, failure: tuple[str, str] | None
) -> None:
    slots: dict[int, Slot] = {}
    while True:
        message, _ = _next(inbox)
        if isinstance(message, NewSlot):
            slots[message.number] = Slot(receive_descriptor(connection))
            continue
        task: TaskMessage = message
        if status.is_cancelled(task.number):
            send(connection, ResultMessage(task.number, [], "was told to skip the batch"))
        elif failure is not None:
            send(connection, ResultMessage(task.number, [], *failure))
        else:
            send(connection, *run_task(task, work, status, None if task.slot is None else slots[task.slot]))


def run_task(
    task: TaskMessage, work: Any, status: WorkerStatus, slot: Slot | None
) -> tuple[ResultMessage, list[memoryview]]:
    doing, pid = "failed", begin_task()
    try:
        try:
            value = work(task.task, status)
        finally:
            check_fork(pid, status)
        doing = "could not send its batch, which must be picklable"
        parts = take_apart(value)
    except WorkerLostError as lost:
        return ResultMessage(task.number, [], lost.reason, lost.stacks, position=lost.position), []
    except BaseException as error:  # even SystemExit: transforms do not end workers
        failure = f"{doing}: {type(error).__name__}: {error}"
        position = replace(status.position(), index=-1)  # the batch failed, not its last sample
        return ResultMessage(task.number, [], failure, traceback.format_exc(), position=position), []
    if slot is None or sum(part.nbytes for part in parts) <= SMALL_RESULT:
        return ResultMessage(task.number, []), parts
    try:
        return ResultMessage(task.number, slot.write(parts)), []
    except OSError as error:
        return ResultMessage(task.number, [], note=f"cannot allocate shared memory for a batch: {error}"), parts


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel: Any = parent.sentinel
    with contextlib.suppress(AttributeError, OSError):
        # On Linux the kernel kills this process, even one that holds the GIL for ever or is stopped.
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | fcntl.FASYNC)
    ends = [sentinel]
    with contextlib.suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(parent.pid or 0))  # the sentinel stays open while a fork of the parent has it

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
    """Limit libraries that would start a thread per core in every worker to a single thread."""
    with contextlib.suppress(ImportError):
        importlib.import_module("threadpoolctl").threadpool_limits(1)
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    if torch is not None:
        torch.set_num_threads(1)
    if cv2 is not None:
        cv2.setNumThreads(0)
