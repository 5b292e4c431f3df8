"""The parent's handle on one worker process, and limits on such processes."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from collections.abc import Generator, Iterable
from concurrent.futures import wait
from multiprocessing import forkserver, resource_tracker
from multiprocessing import process as multiprocessing_process
from time import monotonic, sleep
from types import FunctionType, ModuleType
from typing import Any

from dataload._util.caches import pickling_for_worker
from dataload._util.system import open_files_limit, read_at
from dataload._util.threads import DaemonThreads
from dataload.errors import ConfigError
from dataload.executors.base import StallMonitor, StartMethod, TimeoutPolicy, WorkerPosition, WorkerStatus
from dataload.executors.serialization import has_importable_main, take_apart
from dataload.executors.transport import Inbox, Outbox, Slot
from dataload.executors.worker import DUMP_SIGNAL, NewSlot, TaskMessage, serve

GUARD = (
    "each worker process imports the main module, so guard its top-level code with "
    "`if __name__ == \"__main__\":`, or use executor='fork' (of an engine, start_method='fork')"
)

_SERVER_WAITS = "the fork server of multiprocessing does not answer: it is importing the main module, or is stopped"
_DUMP_SECONDS = 0.5
_END_SECONDS = 1.0
_REPORT_BYTES = 4096
_SPARE_DESCRIPTORS = 16


class WorkerHandle:
    """Starts a worker process and exchanges messages with it, without ever blocking on it."""

    DESCRIPTORS = 5
    """Descriptors per worker: the connection, the report and its mapping, and two of `multiprocessing`."""

    def __init__(
        self,
        number: int,
        context: Any,
        work: Any,
        start_method: StartMethod,
        timeouts: TimeoutPolicy,
        *,
        inherits: bool | None = None,  # by default, forks inherit `work`; others get a pickled copy
    ) -> None:
        self.number = number
        self.exitcode: int | None = None  # once it is closed
        self.pid: int | None = None
        self._is_open = True
        self.tasks: dict[int, Any] = {}  # unfinished, by number
        self._known_slots: set[int] = set()
        self._imports_main = start_method != "fork"
        # The worker writes its status here, followed by the stack traces of its threads on request.
        self._report = Slot()
        self._report.reserve(_REPORT_BYTES)
        os.lseek(self._report.descriptor, 0, os.SEEK_END)
        self.status: WorkerStatus = WorkerStatus(self._report.view(WorkerStatus.BYTES))
        self.connection: socket.socket
        self.connection, theirs = socket.socketpair()
        self.connection.setblocking(False)
        self.inbox: Inbox = Inbox(self.connection)
        self.outbox: Outbox = Outbox(self.connection)
        name = f"dataload-{number}"
        inherits = start_method == "fork" if inherits is None else inherits
        self._process: Any = context.Process(
            target=serve, args=(theirs, name, work if inherits else None), name=name, daemon=True
        )
        try:
            if start_method == "forkserver":
                _start_in_time(self._process, theirs, timeouts)
            else:
                with _without_interrupts():
                    _start(self._process, theirs)
        except BaseException:
            self.close()
            raise
        self.pid = self._process.pid
        self.outbox.put_descriptor(self._report.descriptor)
        if not inherits:
            with pickling_for_worker():
                self.outbox.put(None, take_apart(work, by_value=True))

    @property
    def name(self) -> str:
        return f"{self._process.name} (process {self._process.pid})"

    @property
    def position(self) -> WorkerPosition:
        return self.status.position()

    def is_alive(self) -> bool:
        return self._is_open and self._process.is_alive()

    def give(self, task: TaskMessage, slot: Slot | None) -> None:
        """Queue a task, after the slot for its result if that is new to the worker."""
        if slot is not None and task.slot is not None and task.slot not in self._known_slots:
            self._known_slots.add(task.slot)
            self.outbox.put(NewSlot(task.slot))
            self.outbox.put_descriptor(slot.descriptor)
        self.outbox.put(task)

    def describe(self) -> tuple[str, WorkerPosition, str]:
        """Return the worker's name, its position, and the stack traces of its threads (or why there are none)."""
        return self.name, self.position, self._stacks()

    def _stacks(self) -> str:
        if not self.status.stage:
            return "it has not started: it is importing the main module, or is stopped"
        start = os.fstat(self._report.descriptor).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, DUMP_SIGNAL)
        until = monotonic() + _DUMP_SECONDS
        text = b""
        while monotonic() < until:
            sleep(0.02)
            found = read_at(self._report.descriptor, 1 << 20, start)
            if found and found == text:
                break
            text = found
        return text.decode(errors="replace") or "it does not respond: it is stopped, or in an uninterruptible call"

    def end(self) -> str:
        """Make sure that the process has ended, and return how, in words."""
        self.dismiss()
        self._process.join(_END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_SECONDS)
            return "closed its connection without exiting, and was killed"
        code: int = self._process.exitcode
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
        what = f"exited with code {code}"
        if self.status.stage == 1:
            return f"{what} while importing what the source and the transforms need"
        if self.status.stage == 0:
            hint = f"; {GUARD}" if self._imports_main else ""
            return f"{what} before it started; stderr may say why{hint}"
        return what

    def terminate(self) -> None:
        if self._is_open:
            self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):  # a fork of this process may share the connection
            self.connection.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        if self._is_open:
            self._process.join(seconds)

    def close(self) -> None:
        if self._process.pid is not None:
            if self._process.is_alive():
                self._process.kill()
                self._process.join(_END_SECONDS)
            with contextlib.suppress(ValueError):  # not even SIGKILL ended it
                self.exitcode = self._process.exitcode
                self._process.close()
                self._is_open = False
        self.tasks.clear()  # they refer to this handle
        self.connection.close()
        self._report.close()
        self.status = WorkerStatus()  # the old one's memory is the report's


def _start(process: Any, theirs: socket.socket) -> None:
    try:
        process.start()
    finally:
        theirs.close()
        # `multiprocessing` terminates its known children when any fork of this process exits.
        getattr(multiprocessing_process, "_children", set[Any]()).discard(process)


def _start_in_time(process: Any, theirs: socket.socket, timeouts: TimeoutPolicy) -> None:
    """Start a process by the fork server; a `WorkerLostError` after the timeout, where `multiprocessing` would hang."""
    try:
        started = DaemonThreads(1, f"{process.name}-start").submit(_start, process, theirs)
    except RuntimeError as error:  # the limit of threads counts processes
        theirs.close()
        raise OSError(str(error)) from error
    watch = StallMonitor(timeouts)
    while not wait([started], watch.next_look() + 1e-3).done:
        watch.look(lambda: (process.name, WorkerPosition(-1, -1, -1), _SERVER_WAITS))
    try:
        started.result()
    finally:
        del started  # the traceback of its error refers to this frame


@contextlib.contextmanager
def _without_interrupts() -> Generator[None]:
    """Start a process with Ctrl-C blocked until it handles it; not by a fork server that may have to restart."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server(modules: Iterable[str]) -> None:
    """Start the fork server of `multiprocessing` in the background, unless it runs."""
    # It imports the installed ones of `modules` and of the main module's imports. Other modules may have side effects,
    # such as opening files, that belong in each worker; and the server has another import path than this process.
    current = multiprocessing.current_process()
    if multiprocessing.parent_process() is not None or getattr(current, "_inheriting", False):
        return
    # multiprocessing cannot tell which modules others have named.
    server: Any = getattr(forkserver, "_forkserver", None)
    known: list[str] = getattr(server, "_preload_modules", ["__main__"])
    used = {*modules, *_used_by_main()} if known == ["__main__"] else ()  # respect modules named by the user
    added = ["dataload.executors.worker", "threadpoolctl", *sorted(filter(_is_installed, used))]
    others = [name for name in added if name not in known]
    forkserver.set_forkserver_preload(["dataload.executors.preload", *known, *others])
    try:
        with contextlib.suppress(OSError):  # raised again where a worker starts
            resource_tracker.ensure_running()  # which unblocks signals when it starts
            with _without_interrupts():
                forkserver.ensure_running()
    finally:
        forkserver.set_forkserver_preload(known)


def _used_by_main() -> set[str]:
    """Return the modules from which the main module has imported names, which workers import with it."""
    if not has_importable_main():
        return set()
    values = list(vars(sys.modules["__main__"]).values())
    modules = {value.__name__ for value in values if isinstance(value, ModuleType)}
    return modules | {str(value.__module__) for value in values if isinstance(value, FunctionType | type)}


def _is_installed(module: str) -> bool:
    origin = getattr(getattr(sys.modules.get(module), "__spec__", None), "origin", None) or ""
    return module.startswith("dataload.") or not {"site-packages", "dist-packages"}.isdisjoint(origin.split(os.sep))


def check_parent(start_method: StartMethod) -> None:
    """Refuse to start workers in a worker, or if workers could not import the main module."""
    current = multiprocessing.current_process()
    if getattr(current, "_inheriting", False):
        raise ConfigError(f"a worker process tried to start workers: {GUARD}", key="executor", value="processes")
    if current.daemon:
        raise ConfigError(
            f"{current.name} is a daemonic process, which cannot start processes: use executor='threads' there",
            key="executor",
            value="processes",
        )
    main = sys.modules["__main__"]
    path: str | None = getattr(main, "__file__", None)
    if start_method == "fork" or path is None or getattr(main, "__spec__", None) is not None:
        return
    if not os.path.exists(os.path.join(getattr(multiprocessing_process, "ORIGINAL_DIR", None) or "", path)):
        raise ConfigError(
            f"worker processes import the main module, and the file {path} does not exist: save the program to a "
            "file, or use executor='fork' (of an engine, start_method='fork')",
            key="executor",
            value=start_method,
        )


def within_descriptors(workers: int, slots: int) -> tuple[int, int]:
    limit = open_files_limit()
    try:
        free = limit - len(os.listdir("/proc/self/fd"))
    except OSError:
        free = limit - 64
    left = max(0, free - _SPARE_DESCRIPTORS)
    fitting = min(workers, left // WorkerHandle.DESCRIPTORS)
    kept = min(slots, (left - fitting * WorkerHandle.DESCRIPTORS) // Slot.DESCRIPTORS)
    if (fitting, kept) == (workers, slots):
        return workers, slots
    needed = workers * WorkerHandle.DESCRIPTORS + slots * Slot.DESCRIPTORS + _SPARE_DESCRIPTORS
    message = (
        f"{workers} worker processes and {slots} slots of shared memory need {needed} file descriptors, but "
        f"{free} of {limit} are free; raise the limit (ulimit -n)"
    )
    if not fitting:
        raise ConfigError(message, key="num_workers", value=workers)
    warnings.warn(
        f"{message}: using {fitting} workers and {kept} slots, and a pipe for other batches",
        RuntimeWarning,
        stacklevel=2,
    )
    return fitting, kept
