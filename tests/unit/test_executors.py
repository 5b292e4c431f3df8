"""The thread executor: results, errors, and that nothing is left behind."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from dataload.executors import ThreadExecutor


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dataload")]


def test_starts_with_the_first_task_and_runs_in_its_threads():
    executor = ThreadExecutor(2)
    assert threads() == []
    barrier = threading.Barrier(2)  # both tasks must run at once

    def task(number):
        barrier.wait(10)
        return number, threading.current_thread().name

    results = [executor.submit(task, number) for number in (0, 1)]
    found = [result.result() for result in results]
    assert [number for number, _ in found] == [0, 1]
    assert {name for _, name in found} == {"dataload-0", "dataload-1"}
    executor.close()
    executor.close()
    assert threads() == []


def test_an_error_is_raised_where_the_result_is_asked_for():
    executor = ThreadExecutor(1)
    failing = executor.submit(int, "x")
    assert executor.submit(int, "3").result() == 3
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result()
    executor.close()


def test_a_forgotten_executor_stops_its_threads():
    executor = ThreadExecutor(2)
    executor.submit(int).result()
    assert len(threads()) == 2
    del executor
    gc.collect()
    assert threads() == []


def test_close_drops_what_has_not_begun():
    executor = ThreadExecutor(1)
    begun, go_on = threading.Event(), threading.Event()
    ran = []

    def block():
        begun.set()
        go_on.wait(10)

    first = executor.submit(block)
    later = [executor.submit(ran.append, number) for number in range(5)]
    begun.wait(10)
    closer = threading.Thread(target=executor.close)
    closer.start()
    with pytest.raises(RuntimeError, match="the loader was closed while a batch was waited for"):
        later[0].result()
    go_on.set()
    closer.join(10)
    first.result()
    assert ran == []


def test_a_finished_value_is_not_kept_by_the_worker():
    class Value:
        pass

    executor = ThreadExecutor(1)
    value = executor.submit(Value).result()
    executor.submit(int).result()
    dead = weakref.ref(value)
    del value
    gc.collect()
    assert dead() is None
    executor.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads():
    executor = ThreadExecutor(1)
    executor.submit(int).result()
    child = os.fork()
    if child == 0:
        os._exit(0 if executor.submit(int, "7").result() == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0
    executor.close()


def test_the_interpreter_exits_with_work_in_flight():
    code = """
import dataload, time
source = dataload.RangeSource(10**6)
loader = dataload.Loader(source, batch_size=10, num_workers=3, transform=lambda s: s)
batches = iter(loader)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
