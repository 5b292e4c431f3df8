"""The thread executor: results, errors, threads that hang, and that nothing is left behind."""

import contextlib
import gc
import os
import threading
import time
import weakref

import pytest

from dataload.executors import SerialExecutor, ThreadExecutor, TimeoutPolicy, WorkerLostError, worker_name
from dataload.loader.pipeline import ordered_map


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dataload")]


def call(task, status):
    return task()


def test_starts_with_the_first_task_and_runs_in_its_threads():
    barrier = threading.Barrier(2)  # both tasks must run at once

    def work(task, status):
        barrier.wait(10)
        return task, worker_name()

    executor = ThreadExecutor(work, 2)
    assert threads() == []
    results = [executor.submit(number) for number in (0, 1)]
    found = [result.result() for result in results]
    assert [number for number, _ in found] == [0, 1]
    assert {name for _, name in found} == {"dataload-0", "dataload-1"}
    executor.close()
    executor.close()
    assert threads() == []


def test_an_error_is_raised_where_the_result_is_asked_for():
    executor = ThreadExecutor(lambda task, status: int(task), 1)
    failing = executor.submit("x")
    assert executor.submit("3").result() == 3
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result()
    executor.close()


def test_a_forgotten_executor_stops_its_threads():
    executor = ThreadExecutor(call, 2)
    executor.submit(int).result()
    assert len(threads()) == 2
    del executor
    gc.collect()
    assert threads() == []


def test_close_drops_what_has_not_begun():
    executor = ThreadExecutor(call, 1)
    begun, go_on = threading.Event(), threading.Event()
    ran = []

    def block():
        begun.set()
        go_on.wait(10)

    first = executor.submit(block)
    later = [executor.submit(lambda: ran.append(1)) for _ in range(5)]
    begun.wait(10)
    closer = threading.Thread(target=executor.close)
    closer.start()
    with pytest.raises(RuntimeError, match="the loader was closed while waiting for a batch"):
        later[0].result()
    go_on.set()
    closer.join(10)
    first.result()
    assert ran == []
    with pytest.raises(RuntimeError, match="the loader was closed while waiting for a batch"):
        executor.submit(int)


def test_a_finished_value_is_not_kept_by_the_worker():
    class Value:
        pass

    executor = ThreadExecutor(call, 1)
    value = executor.submit(Value).result()
    executor.submit(int).result()
    dead = weakref.ref(value)
    del value
    gc.collect()
    assert dead() is None
    executor.close()


def test_a_cancelled_task_is_not_begun_and_the_consumer_may_do_one_itself():
    executor = ThreadExecutor(call, 1)
    go_on = threading.Event()
    blocking = executor.submit(lambda: go_on.wait(10))
    ran = []
    cancelled, helped = executor.submit(lambda: ran.append(1)), executor.submit(worker_name)
    cancelled.cancel()
    assert helped.run()
    assert not helped.run()
    assert helped.done()
    assert helped.result() == threading.current_thread().name
    assert not blocking.done()
    go_on.set()
    assert blocking.result()
    executor.close()
    assert ran == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_while_the_consumer_helps_is_raised_at_once(error):
    executor, begun, go_on = ThreadExecutor(call, 1), threading.Event(), threading.Event()

    def block():
        begun.set()
        go_on.wait(10)

    def interrupt():
        go_on.set()
        raise error

    def tasks():
        yield block
        begun.wait(10)
        yield interrupt

    batches = ordered_map(executor.submit, tasks(), window=lambda: 1, helps=lambda: True)
    with pytest.raises(error):
        next(batches)
    executor.close()


def test_where_time_is_limited_the_consumer_does_none_itself():
    executor = ThreadExecutor(call, 1, timeouts=TimeoutPolicy(timeout=30))
    go_on = threading.Event()
    executor.submit(lambda: go_on.wait(10))
    task = executor.submit(worker_name)
    assert not task.run()
    go_on.set()
    assert task.result() == "dataload-0"
    executor.close()


def test_the_first_of_several_is_waited_for():
    executor = ThreadExecutor(call, 2)
    go_on = threading.Event()
    slow, quick = executor.submit(lambda: go_on.wait(10)), executor.submit(int)
    executor.wait_for_any([slow, quick])
    assert (slow.done(), quick.done()) == (False, True)
    go_on.set()
    executor.wait_for_any([slow])
    assert slow.done()
    for _ in range(1000):  # results that are there already leave nothing behind
        done = executor.submit(int)
        done.result()
    executor.wait_for_any([executor.submit(int)])
    assert executor._pool.finished.qsize() <= 1
    executor.close()


def test_the_threads_in_use_change():
    executor = ThreadExecutor(call, 1)
    executor.submit(int).result()
    executor.use(3)
    assert sorted(thread.name for thread in threads()) == ["dataload-0", "dataload-1", "dataload-2"]
    barrier = threading.Barrier(3)
    for result in [executor.submit(lambda: barrier.wait(10)) for _ in range(3)]:
        result.result()
    executor.close()


def park(executor, workers):
    executor.use(workers)
    until = time.monotonic() + 20
    while executor._pool.queue.qsize():
        assert time.monotonic() < until, "threads do not park"
        time.sleep(0.001)


def test_threads_that_are_not_in_use_take_no_tasks_and_are_the_same_when_they_go_on():
    executor = ThreadExecutor(call, 3)
    executor.submit(int).result()
    before = {thread.ident for thread in threads()}
    park(executor, 1)
    begun, go_on = threading.Event(), threading.Event()

    def block():
        begun.set()
        go_on.wait(10)

    blocking, waiting = executor.submit(block), executor.submit(worker_name)
    assert begun.wait(10)
    assert executor._pool.queue.qsize() == 1
    assert not waiting.done()
    executor.use(3)
    assert waiting.result().startswith("dataload-")
    go_on.set()
    blocking.result()
    assert {thread.ident for thread in threads()} == before
    executor.close()
    assert threads() == []


def test_without_workers_in_use_tasks_run_where_their_results_are_asked_for():
    executor = ThreadExecutor(call, 2)
    queued = [executor.submit(worker_name) for _ in range(4)]
    park(executor, 0)
    here = threading.current_thread().name
    later = executor.submit(worker_name)
    executor.wait_for_any([later])
    assert later.result() == here
    assert {result.result() for result in queued} <= {"dataload-0", "dataload-1"}
    executor.use(1)
    assert executor.submit(worker_name).result() != here
    executor.use(0)
    executor.close()  # with a thread that is parked and another that may not be yet
    assert threads() == []


def test_a_thread_that_hangs_is_described_given_up_and_replaced():
    go_on = threading.Event()

    def work(task, status):
        status.at(1, 7, 33)
        return go_on.wait(20) if task else 5

    executor = ThreadExecutor(work, 1, timeouts=TimeoutPolicy(timeout=0.4))
    hanging = executor.submit(True)
    with (
        pytest.warns(
            RuntimeWarning,
            match=r"(?s)no batch for \d+\.\d s: dataload-0 is at step 7 of epoch 1, index 33\n.*go_on.wait",
        ),
        pytest.raises(WorkerLostError) as caught,
    ):
        hanging.result()
    lost = caught.value
    assert (lost.worker, lost.place.epoch, lost.place.step, lost.place.index) == ("dataload-0", 1, 7, 33)
    assert lost.reason.startswith("has returned no batch for ")
    assert "go_on.wait" in lost.stacks
    assert executor.submit(False).result() == 5  # by another thread
    with pytest.warns(
        RuntimeWarning, match=r"(?s)1 of the loader's threads did not stop and are left behind:\n.*dataload"
    ):
        executor.close()  # at once: the test's own time limit is not waited for
    go_on.set()


def test_a_task_that_nobody_begins_says_so():
    go_on = threading.Event()
    executor = ThreadExecutor(lambda task, status: go_on.wait(20), 1, timeouts=TimeoutPolicy(warn_after=0.05))
    executor.submit(0)
    later = executor.submit(1)
    timer = threading.Timer(0.3, go_on.set)
    timer.start()
    with pytest.warns(RuntimeWarning, match="the next free thread has not started it") as found:
        later.result()
    timer.join()
    assert len(found) <= 3  # after 0.05 s, 0.1 s, 0.2 s
    executor.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads_and_waits_for_none_of_the_parents():
    executor = ThreadExecutor(call, 1)
    go_on = threading.Event()
    pending = executor.submit(lambda: go_on.wait(20))
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
    go_on.set()
    executor.close()


def test_serial_work_is_done_when_its_result_is_asked_for():
    done = []

    def work(task, status):
        done.append((task, status.place().step))
        return task + 1

    executor = SerialExecutor(work)
    results = [executor.submit(1), executor.submit(2)]
    executor.wait_for_any(results)
    executor.use(4)
    assert done == []
    assert results[1].done()
    assert not results[1].run()
    assert results[1].result() == 3
    results[0].cancel()
    executor.close()
    assert done == [(2, -1)]


@pytest.mark.parametrize(("workers", "cpus", "expected"), [(1, 1, True), (1, 2, True), (2, 2, False), (3, 4, True)])
def test_the_consumer_helps_where_workers_leave_it_a_cpu(monkeypatch, workers, cpus, expected):
    monkeypatch.setattr("dataload.executors.threads.usable_cpus", lambda: cpus)
    hold, held = threading.Event(), threading.Semaphore(0)

    def wait():
        held.release()
        hold.wait(10)

    executor = ThreadExecutor(call, workers)
    busy = [executor.submit(wait) for _ in range(workers)]
    for _ in busy:
        assert held.acquire(timeout=10)
    task = executor.submit(lambda: None)
    assert task.run() == expected
    assert task.done() == expected
    executor.use(cpus + 1)  # what leaves a CPU may leave none later
    assert not executor.submit(lambda: None).run()
    hold.set()
    executor.close()
