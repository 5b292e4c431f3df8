"""The thread executor: results, errors, threads that hang, and that nothing is left behind."""

import contextlib
import gc
import os
import threading
import weakref

import pytest

from dataload.errors import MachineError
from dataload.executors.base import TimeoutPolicy, WorkerLostError, worker_name
from dataload.executors.threads import ThreadExecutor
from dataload.loader.pipeline import ordered_map

CLOSED = "the loader was closed while waiting for a batch"


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dataload")]


def call(task, status):
    return task()


@pytest.fixture
def start():
    """Starts executors, which are closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(contextlib.closing(ThreadExecutor(*args, **settings)))
    assert threads() == []


class Gate:
    """A task that says that it has begun, and then waits until it may go on."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        return self.go_on.wait(10)


def test_a_machine_that_starts_no_more_threads(start, monkeypatch):
    begin = threading.Thread.start

    def limited(thread):
        if len(threads()) == 2:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(MachineError, match="the machine starts no more than 2 threads for this loader: lower num_work"):
        start(call, 3).submit(None)
    assert threads() == []
    executor = start(call, 1)
    assert executor.submit(lambda: 1).result() == 1
    with pytest.warns(RuntimeWarning, match="starts no more than 2 threads .*; continuing with 2"):
        executor.use(4)
    assert executor.submit(lambda: 2).result() == 2


def test_an_error_is_raised_where_the_result_is_asked_for(start):
    executor = start(lambda task, status: int(task), 1)
    failing = executor.submit("x")
    assert executor.submit("3").result() == 3
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result()


def test_a_forgotten_executor_stops_its_threads():
    executor = ThreadExecutor(call, 2)
    executor.submit(int).result()
    assert [thread.daemon for thread in threads()] == [True, True], "or an interpreter that ends would wait for them"
    del executor
    gc.collect()
    assert threads() == []


def test_close_drops_what_has_not_begun(start):
    executor, gate, ran = start(call, 1), Gate(), []
    first = executor.submit(gate)
    later = [executor.submit(lambda: ran.append(1)) for _ in range(5)]
    gate.begun.wait(10)
    closer = threading.Thread(target=executor.close)
    closer.start()
    with pytest.raises(RuntimeError, match=CLOSED):
        later[0].result()
    gate.go_on.set()
    closer.join(10)
    assert first.result()
    assert ran == []
    with pytest.raises(RuntimeError, match=CLOSED):
        executor.submit(int)


def test_a_finished_value_is_not_kept_by_the_worker(start):
    executor = start(call, 1)
    value = executor.submit(Gate).result()
    executor.submit(int).result()
    dead = weakref.ref(value)
    del value
    gc.collect()
    assert dead() is None


def test_a_cancelled_task_is_not_begun_and_the_consumer_may_do_one_itself(start):
    executor, gate, ran = start(call, 1), Gate(), []
    blocking = executor.submit(gate)
    cancelled, helped = executor.submit(lambda: ran.append(1)), executor.submit(worker_name)
    cancelled.cancel()
    assert helped.run()
    assert not helped.run()
    assert helped.done()
    assert helped.result() == threading.current_thread().name
    assert not blocking.done()
    gate.go_on.set()
    assert blocking.result()
    executor.close()
    assert ran == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_while_the_consumer_helps_is_raised_at_once(error, start):
    executor, gate = start(call, 1), Gate()

    def interrupt():
        gate.go_on.set()
        raise error

    def tasks():
        yield gate
        gate.begun.wait(10)
        yield interrupt

    batches = ordered_map(executor.submit, tasks(), window=lambda: 1, helps=lambda: True)
    with pytest.raises(error):
        next(batches)


@pytest.mark.parametrize(("workers", "cpus", "expected"), [(1, 1, True), (1, 2, True), (2, 2, False), (3, 4, True)])
def test_the_consumer_helps_where_workers_leave_it_a_cpu(monkeypatch, start, workers, cpus, expected):
    monkeypatch.setattr("dataload.executors.threads.usable_cpus", lambda: cpus)
    executor, gates = start(call, workers), [Gate() for _ in range(workers)]
    for gate in gates:
        executor.submit(gate)
        assert gate.begun.wait(10)
    task = executor.submit(lambda: None)
    assert task.run() == expected
    assert task.done() == expected
    executor.use(cpus + 1)  # what leaves a CPU may leave none later
    assert not executor.submit(lambda: None).run()
    for gate in gates:
        gate.go_on.set()


def test_the_threads_in_use_change(start):
    executor = start(call, 1)
    executor.submit(int).result()
    executor.use(3)
    assert sorted(thread.name for thread in threads()) == ["dataload-0", "dataload-1", "dataload-2"]
    barrier = threading.Barrier(3)
    for result in [executor.submit(lambda: barrier.wait(10)) for _ in range(3)]:
        result.result()
    before = {thread.ident for thread in threads()}
    executor.use(1)
    gate = Gate()
    blocking, waiting = executor.submit(gate), executor.submit(worker_name)
    assert gate.begun.wait(10)  # after the other threads were told to take no tasks
    assert not waiting.done()
    executor.use(3)
    assert waiting.result().startswith("dataload-")
    gate.go_on.set()
    assert blocking.result()
    assert {thread.ident for thread in threads()} == before


def test_a_thread_that_hangs_is_described_given_up_and_replaced():
    go_on = threading.Event()

    def work(task, status):
        status.at(1, 7, 33)
        return go_on.wait(20) if task else 5

    executor = ThreadExecutor(work, 1, timeouts=TimeoutPolicy(timeout=0.2))
    hanging = executor.submit(True)
    at = r"(?s)no batch for \d+\.\d s: dataload-0 is at step 7 of epoch 1, index 33\n.*go_on.wait"
    with pytest.warns(RuntimeWarning, match=at), pytest.raises(WorkerLostError) as caught:
        hanging.result()
    lost = caught.value
    assert (lost.worker, lost.position.epoch, lost.position.step, lost.position.index) == ("dataload-0", 1, 7, 33)
    assert lost.reason.startswith("has returned no batch for ")
    assert "go_on.wait" in lost.stacks
    assert executor.submit(False).result() == 5  # by another thread
    executor.use(2)
    assert "dataload-1" in [thread.name for thread in threading.enumerate()], "one that hangs does not count"
    left = r"(?s)1 of the loader's threads did not stop and are left behind:\n.*dataload"
    with pytest.warns(RuntimeWarning, match=left):
        executor.close()  # at once: the test's own time limit is not waited for
    go_on.set()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads_and_waits_for_none_of_the_parents(start):
    executor, gate = start(call, 1), Gate()
    pending = executor.submit(gate)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            try:
                pending.result()
            except RuntimeError as error:
                if "belong to the parent" in str(error) and executor.submit(lambda: 7).result() == 7:
                    os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    gate.go_on.set()
