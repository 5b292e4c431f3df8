"""Heartbeats, and what a wait says when it takes long."""

import numpy as np
import pytest

from dataload.executors.base import Place, StallMonitor, TimeoutPolicy, WorkerLostError, WorkerStatus


def test_a_heartbeat_is_seen_through_the_same_memory():
    memory = np.zeros(100, np.uint8)
    worker, consumer = WorkerStatus(memory), WorkerStatus(memory)
    assert consumer.place() == Place(-1, -1, -1)
    worker.at(0, 0)
    assert consumer.place() == Place(0, 0, -1)
    worker.at(3, 2**40, 5)
    worker.at_index(2**50)
    assert consumer.place() == Place(3, 2**40, 2**50)
    assert not worker.is_cancelled(0)
    consumer.cancel(4)
    consumer.cancel(2)  # takes nothing back
    assert [worker.is_cancelled(number) for number in (0, 4, 5)] == [True, True, False]
    worker.stage = 2
    assert consumer.stage == 2
    assert WorkerStatus().place() == Place(-1, -1, -1)


def describe():
    return "somebody", Place(1, 2, 3), "stacks"


def test_a_watch_warns_half_way_and_then_gives_up():
    watch = StallMonitor(TimeoutPolicy(timeout=0.2))
    assert 0 < watch.next_look() <= 0.1
    assert not watch.is_due()
    with pytest.warns(RuntimeWarning, match=r"no batch for 0\.0 s: somebody is at step 2 of epoch 1, index 3\nstacks"):
        watch.look(describe)
    while not watch.is_due():
        pass
    with pytest.raises(WorkerLostError) as caught:
        watch.look(describe)
    assert caught.value.reason == "has returned no batch for 0.2 s (timeout=0.2)"
    assert (caught.value.worker, caught.value.place, caught.value.stacks) == describe()


def test_a_watch_without_an_end_warns_ever_more_seldom():
    watch = StallMonitor(TimeoutPolicy(warn_after=1000))
    for doubled in (2000, 4000):
        with pytest.warns(RuntimeWarning, match="nobody has not started it\n"):
            watch.look(lambda: ("nobody", Place(-1, -1, -1), ""))
        assert doubled - 1 < watch.next_look() <= doubled
