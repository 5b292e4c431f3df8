"""Waits end by progress or by their deadline, in a time that the test makes, and by Ctrl-C."""

import _thread
import threading
import time
from contextlib import nullcontext
from unittest.mock import DEFAULT, Mock

import pytest

import dataload
from dataload._util import threads as waits


@pytest.fixture
def clock(monkeypatch):
    """The time; pauses let it pass."""
    now = [100.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])

    def pause(seconds):
        now[0] += seconds

    pause.now = now
    return pause


def test_without_progress_it_ends_at_the_deadline(clock):
    wait = waits.Wait(2.0, pause=clock)
    looks = sum(1 for _ in iter(lambda: wait.goes_on("the same"), False))
    assert 102 <= clock.now[0] < 102.1
    assert 40 < looks < 60  # the pauses grow
    assert not waits.Wait(0, pause=clock).goes_on("a change")


def test_threads_that_the_machine_does_not_start_are_not_waited_for(monkeypatch):
    refused = RuntimeError("can't start new thread")
    start = Mock(side_effect=[refused, DEFAULT, refused], wraps=threading.Thread.start)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: start(thread))
    with pytest.raises(RuntimeError, match="can't start new thread"), waits.DaemonThreads(2) as pool:
        pool.submit(int)
    with waits.DaemonThreads(2) as pool:
        gate = threading.Event()  # the first call holds the only thread until the second has asked for another
        calls = [pool.submit(gate.wait, 30), pool.submit(gate.is_set)]
        gate.set()
        assert [call.result(30) for call in calls] == [True, True]
    assert start.call_count == 3


def test_progress_puts_the_deadline_off_up_to_a_limit(clock):
    wait = waits.Wait(2.0, 10.0, pause=clock)
    while wait.goes_on(int(clock.now[0])):
        pass
    assert 110 <= clock.now[0] < 110.1


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_threads_end_after_queued_calls_or_running_ones_or_at_once(error):
    begun, go_on = threading.Event(), threading.Event()

    def call():
        begun.set()
        go_on.wait(20)

    with pytest.raises(error) if error else nullcontext(), waits.DaemonThreads(1) as pool:
        futures = [pool.submit(call) for _ in range(3)]
        assert begun.wait(20)
        if error is None:
            go_on.set()
        else:
            futures[2].add_done_callback(lambda _: error is ValueError and go_on.set())
            raise error
    assert [future.cancelled() for future in futures] == [False, error is not None, error is not None]
    assert futures[0].done() == (error is not KeyboardInterrupt)
    go_on.set()


def load(call):
    source = dataload.MemorySource({"x": range(1)})
    with dataload.Loader(source, batch_size=1, transform=call, num_workers=1, timeout=60) as loader:
        list(loader)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda call: waits.DaemonThreads(1).submit(call).result(), id="submit"),
        pytest.param(lambda call: list(waits.DaemonThreads(1).map(call, range(2))), id="map"),
        pytest.param(load, id="loader"),
    ],
)
def test_a_signal_that_comes_just_before_a_sleep_ends_it(run):
    """`interrupt_main` records the signal and wakes nobody, as if it had come just before the sleep."""
    go_on = threading.Event()

    def interrupt(record=None):
        time.sleep(0.1)  # the other thread sleeps now
        _thread.interrupt_main()
        go_on.wait(15)
        return record

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(interrupt)
    go_on.set()
    assert time.monotonic() - begun < 10
