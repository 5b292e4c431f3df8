"""The costs of loops that are known: a consumer and workers with GIL, CPUs and storage."""

import pytest

from dataload.loader.statistics import Loop


def loop(work, consumer=0.0, *, workers=1, executor="threads", cpus=8, gil=False, waits=False, knows=True):
    """A loop in which a batch takes `work` seconds of one worker alone, as an ideal machine runs it."""
    serial = not workers
    period = seconds(work, consumer, workers, cpus, gil=gil and executor == "threads", waits=waits)
    # Workers that are the limit are busy all the time, wherever they wait.
    busy = period * workers if period > consumer and not serial else work
    used = None if executor == "processes" or not knows else ((0.05 if waits else 1) * work + consumer) / period
    return Loop(period, consumer, busy, workers, "serial" if serial else executor, cpus, used)


def seconds(work, consumer, workers, cpus, *, gil=False, waits=False):
    """Seconds per batch on an ideal machine."""
    if not workers:
        return work + consumer
    shared = 0.0 if waits else (work + consumer) / (1 if gil else cpus)
    return max(consumer, work / workers, shared)


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("consumer", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("cpus", [2, 8])
@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_the_work_of_a_worker_alone(workers, executor, cpus, consumer, knows):
    found = loop(0.01, consumer, workers=workers, executor=executor, cpus=cpus, knows=knows)
    assert found.computes
    assert found.alone == pytest.approx(0.01, rel=0.25)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_threads_that_hold_the_gil_take_turns(workers):
    found = loop(0.01, workers=workers, gil=True, cpus=4)
    assert found.takes_turns == (workers > 1), "one thread at a time tells nothing about the GIL"
    assert found.alone == pytest.approx(0.01)
    assert not loop(0.01, workers=workers, cpus=4).takes_turns


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_that_wait_do_not_compute(workers):
    found = loop(0.01, waits=True, workers=workers, cpus=2)
    assert not found.computes
    assert found.alone == pytest.approx(0.01)
