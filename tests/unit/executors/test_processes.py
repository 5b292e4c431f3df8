"""The process executor: results in shared memory, and workers that end, hang, or are too many."""

import contextlib
import errno
import gc
import os
import re
import resource
import signal
import socket
import sys
import threading
import warnings
import weakref
from importlib.machinery import ModuleSpec
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dataload import ConfigError
from dataload.executors import handle, processes
from dataload.executors.base import TimeoutPolicy, WorkerLostError, WorkerPosition
from dataload.executors.handle import WorkerHandle
from dataload.executors.processes import ProcessExecutor

sys.path.append(str(Path(__file__).parents[2] / "children"))
import works

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]
PID = ("pid",)


@contextlib.contextmanager
def executor(work, workers=1, slots=4, **settings):
    made = ProcessExecutor(work, workers, slots=slots, **settings)
    try:
        yield made
    finally:
        made.close()


def patiently(tasks, task):
    """Return the result of a task, again if a busy machine needs longer than the timeout to start a worker."""
    while True:
        with warnings.catch_warnings(), contextlib.suppress(WorkerLostError):
            warnings.simplefilter("ignore", RuntimeWarning)
            return tasks.submit(task).result()


def is_in_a_slot(array):
    """Whether an array lies in memory that worker processes write to."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    slots = [line.split()[0].split("-") for line in maps if "memfd:dataload" in line]
    return any(int(start, 16) <= array.ctypes.data < int(end, 16) for start, end in slots)


def free_slots(tasks, task=lambda number: number):
    """The results in shared memory if as many as possible are kept."""
    kept = []
    while not kept or is_in_a_slot(kept[-1]):
        result = tasks.submit(task(len(kept))).result()
        kept.append(result[0] if isinstance(result, list) else result)
    return len(kept) - 1


def test_results_come_in_shared_memory_that_is_used_again_but_never_while_they_are_kept():
    with executor(works.large, workers=2) as tasks:
        addresses = set()
        for number in range(30):
            found = tasks.submit(number).result()
            assert (found == number).all()
            addresses.add(found.ctypes.data)
        assert len(addresses) <= 4
        del found
        pending = [tasks.submit(number) for number in range(100)]
        kept = [result.result()[10:20] for result in pending]
        again = [tasks.submit(number).result() for number in range(100, 110)]
        assert all((array == number).all() for number, array in enumerate([*kept, *again]))
        del kept, again, pending
        gc.collect()
        assert free_slots(tasks) == 4
        held = tasks.submit(5).result()
    assert (held == 5).all()  # after everything is closed
    held[:] = 6  # it belongs to the caller


def test_thousands_of_tiny_tasks_with_cancelling_and_growing():
    with executor(works.echo) as tasks:
        pending = {}
        for number in range(2000):
            pending[number] = tasks.submit(number)
            if number == 1000:
                tasks.use(2)
                tasks.use(1)
            if number % 3 == 0:
                pending.pop(number).cancel()
            if len(pending) > 64:
                tasks.wait_for_any(pending.values())
                done = [key for key, result in pending.items() if result.done()]
                assert done
                assert [pending.pop(key).result() for key in done] == done
        assert [result.result() for result in pending.values()] == list(pending)
        assert free_slots(tasks, lambda number: np.full(20_000, number)) == 4


def test_a_cancelled_task_is_not_begun():
    with executor(works.do) as tasks:
        first = tasks.submit(PID)
        assert any(connection.wait([first.worker.connection], 5) and first.done() for _ in range(9)), "in some pieces"
        os.kill(pid := first.result(), signal.SIGSTOP)
        tasks.submit(("die", signal.SIGKILL)).cancel()
        behind = tasks.submit(PID)
        os.kill(pid, signal.SIGCONT)
        assert behind.result() == pid


def test_processes_that_are_not_in_use_get_no_tasks():
    with executor(works.echo, workers=3) as tasks:
        seen = set()
        for workers in (3, 1, 2):
            tasks.use(workers)
            for number in range(20):
                assert tasks.submit(number).result() == number
            pending = [tasks.submit(number) for number in range(6)]
            used = {result.worker for result in pending}
            assert len(used) == workers
            assert [result.result() for result in pending] == list(range(6))
            seen |= used
        assert len(seen) == 3


def test_tasks_and_results_larger_than_any_pipe_do_not_lock_each_other():
    with executor(works.echo, workers=2, slots=1) as tasks:
        pending = [tasks.submit(np.full(3 * 10**5, number, np.int32)) for number in range(8)]
        for number, result in enumerate(pending):
            assert (result.result() == number).all()


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (("die", signal.SIGKILL), r"was killed by SIGKILL \(out of memory\?\)"),
        (("die", signal.SIGSEGV), "was killed by SIGSEGV"),
        (("exit", 3), "exited with code 3"),
        (("grandchild",), "exited with code 5|without exiting, and was killed"),
    ],
)
def test_a_worker_that_ends_is_told_and_replaced(task, reason, capfd, tmp_path):
    pipe = tmp_path / "pipe"
    if task == ("grandchild",):
        os.mkfifo(pipe)
        task = (*task, str(pipe))
    with executor(works.do) as tasks:
        before, lost, behind = (tasks.submit(each) for each in (PID, task, PID))
        pid = before.result()
        with pytest.raises(WorkerLostError) as caught:
            lost.result()
        assert caught.value.worker == f"dataload-0 (process {pid})"
        assert re.search(reason, caught.value.reason)
        assert caught.value.position == WorkerPosition(2, 3, 4)
        with pytest.raises(WorkerLostError):
            behind.result()
        assert tasks.submit(PID).result() != pid
        assert free_slots(tasks, lambda number: ("echo", np.full(20_000, number))) == 4
    if pipe.exists():
        pipe.write_bytes(b"")  # ends the grandchild, which keeps the fork server's pipe open


FORKED = (
    "was forked while it made a batch, by a transform for example, and both processes continued: end the child with "
    r"os._exit\(\)"
)


@pytest.mark.parametrize(
    ("task", "reason", "text"),
    [
        (("raise",), "failed: KeyError: 'no such thing'", "raise KeyError"),
        (("sys.exit", 4), "failed: SystemExit: 4", "sys.exit"),
        (("unpicklable",), "could not send its batch, which must be picklable: .*lambda", "dump"),
        (("unloadable",), "sent a batch that cannot be unpickled: ValueError: invalid literal", "loads"),
        (("fork",), FORKED, ""),
    ],
)
@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_result_that_is_none_is_told_and_the_worker_goes_on(task, reason, text, start_method, capfd):
    with executor(works.do, start_method=start_method) as tasks:
        pid = tasks.submit(PID).result()
        with pytest.raises(WorkerLostError) as caught:
            tasks.submit(task).result()
        assert re.match(reason, caught.value.reason)
        assert text in caught.value.stacks
        assert caught.value.position == WorkerPosition(2, 3, -1 if reason.startswith(("failed", "could")) else 4)
        assert tasks.submit(PID).result() == pid
    if task == ("fork",) and start_method == "fork":  # a fork server writes where it was started
        assert "dataload-0 (process " in capfd.readouterr().err


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (works.DiesWhenLoaded(), "exited with code 7 while importing what the source and the transforms need"),
        (works.FailsWhenLoaded(), "could not be set up: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_workers_that_never_come_to_work_are_an_error_and_not_tried_for_ever(work, reason):
    with executor(work, workers=2) as tasks:
        pending = [tasks.submit(number) for number in range(6)]
        for result in pending:
            with pytest.raises(WorkerLostError) as caught:
                result.result()
            assert caught.value.reason == reason
        with contextlib.suppress(WorkerLostError):
            tasks.submit(1).result()


@pytest.mark.parametrize(("what", "stacks"), [("hang", "in hang_here"), ("stop", "it does not respond: it is stopped")])
def test_a_stuck_worker_is_described_then_ended(what, stacks):
    with executor(works.do, start_method="fork", timeouts=TimeoutPolicy(timeout=1)) as tasks:
        pid = patiently(tasks, PID)
        stuck = rf"dataload-0 \(process {pid}\) is at step 3 of epoch 2, index 4\n.*{stacks}"
        with (
            pytest.warns(RuntimeWarning, match=rf"(?s)no batch for .* s: {stuck}"),
            pytest.raises(WorkerLostError) as caught,
        ):
            tasks.submit((what,)).result()
        assert caught.value.reason.startswith("has returned no batch for ")
        assert stacks in caught.value.stacks
        assert patiently(tasks, PID) != pid  # the stuck one is gone


def test_the_timeout_covers_a_fork_server_that_is_stopped():
    with executor(works.echo) as tasks:
        tasks.submit(1).result()  # it runs
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    try:
        with executor(works.echo, timeouts=TimeoutPolicy(timeout=0.4)) as tasks:
            late = r"no batch for \d+\.\d s: dataload-0 has not started it\nthe fork server"
            with pytest.warns(RuntimeWarning, match=late), pytest.raises(WorkerLostError) as caught:
                tasks.submit(1)
            lost = caught.value
            assert (lost.worker, lost.position) == ("dataload-0", WorkerPosition(-1, -1, -1))
            assert re.fullmatch(r"has returned no batch for \d+\.\d s \(timeout=0\.4\)", lost.reason)
            assert lost.stacks.startswith("the fork server of multiprocessing does not answer: it is importing the m")
            os.kill(server, signal.SIGCONT)
            assert patiently(tasks, 7) == 7
            for thread in threading.enumerate():  # what was asked for ends by itself
                if thread.name == "dataload-0-start-0":
                    thread.join(20)
                    assert not thread.is_alive()
    finally:
        os.kill(server, signal.SIGCONT)


def test_workers_have_one_thread_and_hear_no_interrupts():
    with executor(works.do) as tasks:
        counts, name = tasks.submit(("threads",)).result()
        assert name == "dataload-0"
        assert set(counts) == {1}
        assert tasks.submit(("environment",)).result() == ("1", True), "one thread, and no workers of its own"
        assert tasks.submit(("signals",)).result() == (True, set())


def test_a_finished_value_is_kept_by_nobody():
    with executor(works.large, slots=0) as tasks:
        value = tasks.submit(3).result()
        dead = weakref.ref(value.base if isinstance(value.base, np.ndarray) else value)
        tasks.submit(4).result()
        del value
        assert dead() is None


def test_a_forgotten_executor_stops_its_processes():
    tasks = ProcessExecutor(works.do, 2, slots=1)
    pids = {tasks.submit(PID).result() for _ in range(2)}
    del tasks
    gc.collect()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_closing_ends_a_wait_in_another_thread():
    tasks = ProcessExecutor(works.do, 1, slots=1)
    tasks.submit(PID).result()
    hanging, found = tasks.submit(("hang",)), []

    def wait():
        try:
            hanging.result()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    tasks.close()
    thread.join(20)
    assert found == ["the loader was closed while waiting for a batch"]
    with pytest.raises(RuntimeError, match="the loader was closed while waiting for a batch"):
        tasks.submit(PID)


def test_a_fork_has_workers_of_its_own_and_leaves_those_of_its_parent():
    with executor(works.do, workers=2, start_method="fork") as tasks:
        pids = {tasks.submit(PID).result() for _ in range(2)}
        pending = [tasks.submit(("echo", number)) for number in range(5)]
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                pending[0].cancel()
                try:
                    pending[1].result()
                except RuntimeError as error:
                    own = tasks.submit(PID).result()
                    tasks.close()
                    if "its workers belong to the parent" in str(error) and own not in pids:
                        os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert [result.result() for result in pending] == [[number] for number in range(5)]
        assert {tasks.submit(PID).result() for _ in range(4)} <= pids


def failing(error):
    def fail(*_):
        raise error

    return fail


def test_an_interrupt_amid_the_books_ends_the_pool_and_the_next_task_gets_another(monkeypatch):
    with executor(works.do) as tasks:
        pid = tasks.submit(PID).result()
        with monkeypatch.context() as patch:
            patch.setattr(WorkerHandle, "give", failing(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                tasks.submit(PID)
        assert tasks.submit(PID).result() != pid


def test_a_slot_that_cannot_be_mapped_is_an_error_of_its_batch_only(monkeypatch):
    with executor(works.large, slots=2) as tasks:
        first, *others = (tasks.submit(number) for number in range(3))
        with monkeypatch.context() as patch:
            patch.setattr(handle.Slot, "view", failing(OSError(errno.EMFILE, "too many files")))
            with pytest.raises(WorkerLostError) as caught:
                first.result()
        assert caught.value.reason == "sent a batch that cannot be unpickled: OSError: [Errno 24] too many files"
        again = tasks.submit(7)
        assert (again.result() == 7).all()
        assert again.worker is first.worker
        del first, others, again


def test_a_connection_that_a_worker_closes_ends_it():
    with executor(works.do) as tasks:
        tasks.submit(PID).result()
        hanging = tasks.submit(("hang",))
        hanging.worker.connection.shutdown(socket.SHUT_RD)
        with pytest.raises(WorkerLostError, match="closed its connection without exiting, and was killed"):
            hanging.result()


def test_a_lack_of_memory_is_found_and_told(monkeypatch):
    monkeypatch.setattr(processes, "available_bytes", lambda: 200_000)  # room for two batches more
    message = (
        r"6 batches of 80,\d+ bytes in flight need \d{3},\d+ more bytes of memory, but 160,000 are available: keeping "
        r"\d in shared memory and sending others through a pipe; use fewer workers, less"
    )
    with executor(works.large, slots=6) as tasks:
        with pytest.warns(RuntimeWarning, match=message) as warned:  # no other slot has memory yet
            kept = [tasks.submit(0).result()]
        assert len(warned) == 1
        pending = [tasks.submit(number) for number in range(1, 20)]
        kept += [result.result() for result in pending]
        assert all((array == number).all() for number, array in enumerate(kept))
        del kept, pending
        assert 1 <= free_slots(tasks) < 6


def open_files(monkeypatch, free):
    used = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + free, used + free))


def test_a_limit_of_open_files_leaves_fewer_slots_and_workers(monkeypatch):
    # Four workers with five each, ten slots with two each, 16 spared: 56.
    need = r"4 worker processes and 10 slots of shared memory need 56 file descriptors, but \d+ of \d+ are free; raise"
    open_files(monkeypatch, 60)
    assert handle.within_descriptors(4, 10) == (4, 10)
    for free, (workers, slots) in ((50, (4, 7)), (36, (4, 0)), (28, (2, 1)), (21, (1, 0))):
        open_files(monkeypatch, free)
        with pytest.warns(RuntimeWarning, match=rf"{need} .*: using {workers} workers and {slots} slots, and"):
            assert handle.within_descriptors(4, 10) == (workers, slots)
    open_files(monkeypatch, 18)
    with pytest.raises(ConfigError, match=need):
        handle.within_descriptors(4, 10)
    monkeypatch.setattr(os, "listdir", failing(FileNotFoundError()))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 + 60, 0))
    assert handle.within_descriptors(4, 10) == (4, 10)


def test_workers_that_cannot_be_started_are_done_without(monkeypatch):
    start = WorkerHandle.__init__

    def limited(self, number, *rest, **settings):
        if number >= fitting:
            raise OSError(errno.EAGAIN, "no more processes")
        start(self, number, *rest, **settings)

    monkeypatch.setattr(WorkerHandle, "__init__", limited)
    fitting = 1
    message = r"cannot start worker process 2 of 3 \(BlockingIOError: .*no more.*continuing with 1"
    with executor(works.echo, workers=3) as tasks:
        with pytest.warns(RuntimeWarning, match=message):
            pending = tasks.submit(5)
        assert pending.result() == 5
    fitting = 0
    with executor(works.echo, workers=3) as tasks, pytest.raises(ConfigError, match="start worker process 1 of 3"):
        tasks.submit(5)


def test_a_limit_of_threads_is_told_as_one_of_processes(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", failing(RuntimeError("can't start new thread")))
    tasks = ProcessExecutor(works.echo, 1, slots=1)
    with pytest.raises(ConfigError, match=r"cannot start worker process 1 of 1 \(OSError: can't start new thread\)"):
        tasks.submit(1)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
@pytest.mark.parametrize("what", ["start", "socketpair"])
def test_a_start_that_fails_leaves_nothing(monkeypatch, start_method, what):
    context = get_context(start_method)
    open_before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:  # which ends with the error, whose traceback refers to the handle
        where = context.Process if what == "start" else handle.socket
        patch.setattr(where, what, failing(OSError(errno.ENOMEM, "no memory")))
        with pytest.raises(OSError, match="no memory"):
            WorkerHandle(0, context, works.echo, start_method, TimeoutPolicy())
    gc.collect()
    assert os.listdir("/proc/self/fd") == open_before


def test_a_process_that_may_have_none_says_so(monkeypatch):
    current = handle.multiprocessing.current_process()
    monkeypatch.setattr(current, "_inheriting", True, raising=False)
    tasks = ProcessExecutor(works.echo, 1, slots=1)
    with pytest.raises(ConfigError, match=r"a worker process tried to start workers: .* with `if __name__ == \"__main"):
        tasks.submit(1)
    monkeypatch.setattr(current, "_inheriting", False)
    monkeypatch.setitem(current._config, "daemon", True)
    with pytest.raises(ConfigError, match=r"MainProcess is a daemonic process, .*: use executor='threads' there"):
        tasks.submit(1)


def test_a_program_that_workers_cannot_import_says_so(monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "<stdin>", raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    tasks = ProcessExecutor(works.echo, 1, slots=1)
    with pytest.raises(ConfigError, match="import the main module, and the file <stdin> does not exist: save"):
        tasks.submit(1)
    with executor(works.echo, start_method="fork") as tasks:
        assert tasks.submit(1).result() == 1


@pytest.mark.parametrize(
    ("file", "spec", "known", "used"),
    [
        (None, None, ["__main__"], ["numpy.linalg"]),  # workers do not import notebooks
        ("train.py", None, ["__main__"], ["numpy", "numpy.linalg"]),
        ("train.py", ModuleSpec("package.__main__", None), ["__main__"], ["numpy.linalg"]),  # python -m package
        (None, None, ["__main__", "json"], []),  # of a user, who knows what is needed
        (None, None, ["numpy", "threadpoolctl"], []),  # of a user who wants no main module
    ],
)
def test_a_fork_server_imports_what_is_needed_and_installed(monkeypatch, file, spec, known, used):
    main = ModuleType("__main__")
    main.np, main.Path, main.run, main.seed, main.__spec__ = np, Path, contextlib.suppress, 3, spec
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", known)
    asked = []
    monkeypatch.setattr(forkserver, "set_forkserver_preload", asked.append)
    modules = {"numpy.linalg", "json", "works", "__main__", "missing"}
    ProcessExecutor(works.echo, 1, slots=1, modules=modules).close()
    added = [name for name in ["dataload.executors.worker", "threadpoolctl", *used] if name not in known]
    wanted = [["dataload.executors.preload", *known, *added], known]
    assert asked == wanted, "as the user left it"
    ProcessExecutor(works.echo, 1, slots=1, start_method="spawn").close()
    assert asked == wanted, "not needed"


@pytest.mark.slow_suite
def test_an_interrupt_does_not_end_the_fork_server_while_it_imports_and_workers_skip_its_garbage():
    forkserver._forkserver._stop()
    with executor(works.collector) as tasks:
        server = forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGINT)  # it has hardly started
        enabled, frozen = tasks.submit(None).result()
    assert enabled, "workers collect their own garbage"
    assert frozen > 10_000  # objects
    assert forkserver._forkserver._forkserver_pid == server
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    of_others = get_context("forkserver").Process(target=works.interrupted)
    of_others.start()
    of_others.join(60)
    assert of_others.exitcode == 7, "its processes are interrupted as always"
    of_others.close()
