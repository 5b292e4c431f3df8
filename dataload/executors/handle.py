"""One worker process, as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Generator
from multiprocessing import process as multiprocessing_process
from time import monotonic, sleep
from typing import Any

from dataload.executors.base import Place, StartMethod, WorkerStatus
from dataload.executors.channel import Inbox, Outbox
from dataload.executors.serialization import take_apart
from dataload.executors.shared_memory import Slot
from dataload.executors.worker import DUMP_SIGNAL, NewSlot, TaskMessage, serve

__all__ = ["GUARD", "WorkerHandle"]

GUARD = (
    "each worker process imports the main module, so what that does has to stand under "
    "`if __name__ == \"__main__\":`; or use start_method='fork'"
)

_DUMP_SECONDS = 0.5
_END_SECONDS = 1.0
_REPORT_BYTES = 4096


class WorkerHandle:
    """Starts a worker process and talks with it, without ever waiting for it to listen.

    Args:
        number: Of the worker.
        context: What starts processes.
        work: What is done with a task.
        start_method: Which way that starts them.

    Attributes:
        tasks: What it has to do, by number.
        connection: To the worker; does not wait.
        inbox: What comes from it.
        outbox: What goes to it.
        status: Where it is.
    """

    DESCRIPTORS = 5
    """The connection, the report and its mapping, and two of `multiprocessing`."""

    def __init__(self, number: int, context: Any, work: Any, start_method: StartMethod) -> None:
        self.number = number
        self.tasks: dict[int, Any] = {}
        self._known_slots: set[int] = set()
        self._imports_main = start_method != "fork"
        # What the worker tells without being asked: where it is, and behind that the stacks of its threads.
        self._report = Slot()
        self._report.reserve(_REPORT_BYTES)
        os.lseek(self._report.descriptor, 0, os.SEEK_END)
        self.status = WorkerStatus(self._report.view(WorkerStatus.BYTES))
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self.inbox, self.outbox = Inbox(self.connection), Outbox(self.connection)
        name = f"dataload-{number}"
        self._process: Any = context.Process(
            target=serve, args=(theirs, name, None if self._imports_main else work), name=name, daemon=True
        )
        try:
            with _without_interrupts(only=start_method != "forkserver"):
                self._process.start()
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
        # `multiprocessing` ends what it knows when any fork of this process ends.
        getattr(multiprocessing_process, "_children", set[Any]()).discard(self._process)
        self.outbox.put_descriptor(self._report.descriptor)
        if self._imports_main:
            self.outbox.put(None, take_apart(work))

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self._process.name} (process {self._process.pid})"

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.status.place()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def give(self, job: TaskMessage, slot: Slot | None) -> None:
        """Hand over a task; and the slot it may use, the first time."""
        if slot is not None and job.slot is not None and job.slot not in self._known_slots:
            self._known_slots.add(job.slot)
            self.outbox.put(NewSlot(job.slot))
            self.outbox.put_descriptor(slot.descriptor)
        self.outbox.put(job)

    def describe(self) -> tuple[str, Place, str]:
        """Its name, where it is, and what all of its threads are at, or why that cannot be said."""
        return self.name, self.place, self._stacks()

    def _stacks(self) -> str:
        if not self.status.stage:
            return "it has not begun: it imports the main module, or is stopped"
        start = os.fstat(self._report.descriptor).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, DUMP_SIGNAL)
        until = monotonic() + _DUMP_SECONDS
        text = b""
        while monotonic() < until:
            sleep(0.02)
            found = os.pread(self._report.descriptor, 1 << 20, start)
            if found and found == text:
                break
            text = found
        return (
            text.decode(errors="replace") or "it does not answer: it is stopped, or in a call that nothing interrupts"
        )

    def end(self) -> str:
        """See to it that it has ended; tells how it did, in words."""
        self.dismiss()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_SECONDS)
            return "closed its connection and went on, and was killed"
        code: int = self._process.exitcode
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"was killed by {name}" + (" (is memory short?)" if -code == signal.SIGKILL else "")
        what = f"exited with code {code}"
        if self.status.stage == 1:
            return f"{what} while it imported what the source and the transforms need"
        if self.status.stage == 0:
            hint = f"; {GUARD}" if self._imports_main else ""
            return f"{what} before it had begun, and may have written to stderr why{hint}"
        return what

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def dismiss(self) -> None:
        """Let it end: it finishes the task that it is at, for nobody."""
        with contextlib.suppress(OSError):  # whoever else has the connection, by a fork
            self.connection.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._process.join(max(0.0, seconds))

    def close(self) -> None:
        """Give its descriptors back; kills what is left of it."""
        if self._process.pid is not None:
            if self._process.is_alive():
                self._process.kill()
                self._process.join(_END_SECONDS)
            with contextlib.suppress(ValueError):  # one that not even SIGKILL ends
                self._process.close()
        self.tasks.clear()  # they refer to this
        self.connection.close()
        self._report.close()


@contextlib.contextmanager
def _without_interrupts(*, only: bool) -> Generator[None]:
    """Start a process that does not hear of Ctrl-C until it says so; else it might be one that greets with a traceback.

    Args:
        only: Whether the process will be ours only; a fork server would pass it on to the processes of others.
    """
    if not only:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
