"""Predicted throughput against loops whose throughput is known: a consumer and workers with GIL, CPUs and storage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.loader.prediction import Loop, predict


def loop(work, consumer=0.0, *, workers=1, executor="threads", cpus=8, gil=False, waits=False, nbytes=0, knows=True):
    """A loop in which a batch takes `work` seconds of one worker alone, as an ideal machine runs it."""
    serial = not workers
    period = seconds(work, consumer, workers, cpus, gil=gil and executor == "threads", waits=waits)
    # Workers that are the limit are busy all the time, wherever they wait.
    busy = period * workers if period > consumer and not serial else work
    used = None if executor == "processes" or not knows else ((0.05 if waits else 1) * work + consumer) / period
    return Loop(period, consumer, busy, nbytes, workers, "serial" if serial else executor, cpus, used)


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
@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_work_that_computes_at_once(before, executor, cpus, consumer, knows):
    found = loop(0.01, consumer, workers=before, executor=executor, cpus=cpus, knows=knows)
    for workers in range(max(1, before), cpus + 1):
        gain = predict(found, workers, executor)
        truth = found.period / seconds(0.01, consumer, workers, cpus)
        assert gain.gain == pytest.approx(truth, rel=0.25)


@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_processes_instead_of_threads_that_hold_the_gil(before):
    found = loop(0.01, workers=before, gil=True, cpus=4)
    for workers in (2, 4):
        gain = predict(found, workers, "processes")
        assert gain.gain == pytest.approx(workers, rel=0.25)
        assert gain.known
    if before >= 2:
        assert predict(found, 8, "threads") == (1.0, True)


def test_more_workers_that_wait_are_only_a_hope():
    for before in (0, 2):
        gain = predict(loop(0.01, waits=True, workers=before, cpus=2), 8, "threads")
        assert gain.gain == pytest.approx(8 / max(1, before))
        assert not gain.known


@pytest.mark.parametrize(
    ("found", "executor", "shared", "known"),
    [
        (loop(0.01, workers=2), "threads", False, True),
        (loop(0.01, workers=1), "threads", False, False),  # one thread at a time tells nothing about the GIL
        (loop(0.01, workers=2, knows=False), "threads", False, False),
        (loop(0.01, workers=0), "threads", False, False),
        (loop(0.01, workers=0), "processes", False, True),
        (loop(0.01, workers=2, executor="processes"), "processes", False, True),
        (loop(0.01, workers=2, executor="processes"), "processes", True, False),  # they may wait for storage
        (loop(0.01, workers=2, nbytes=5e6), "threads", True, True),
        (loop(0.01, workers=2, nbytes=20e6), "threads", True, False),  # 2 GB/s each: memory may be the limit
        (loop(0.01, 0.01, workers=2, gil=True), "processes", False, False),  # how much of it is the consumer's?
    ],
)
def test_nothing_is_promised_that_cannot_be_known(found, executor, shared, known):
    assert predict(found, 4, executor, shared=shared).known is known


def test_batches_from_processes_have_to_be_handed_over():
    quick = loop(100e-6, workers=0)
    assert predict(quick, 8, "processes").gain < 1.1
    assert predict(quick, 8, "threads").gain > 4
    large = loop(0.01, workers=0, nbytes=100e6)
    assert predict(large, 8, "processes").gain == 1.0


@given(
    st.builds(
        Loop,
        period=st.floats(1e-6, 10),
        consumer=st.floats(0, 10),
        work=st.floats(0, 10),
        nbytes=st.floats(0, 1e9),
        workers=st.integers(0, 64),
        executor=st.sampled_from(["serial", "threads", "processes"]),
        cpus=st.integers(1, 64),
        busy_cpus=st.none() | st.floats(0, 64),
    ),
    st.integers(0, 64),
    st.sampled_from(["threads", "processes"]),
)
def test_no_prediction_is_a_loss_or_infinite(found, workers, executor):
    assert 1.0 <= predict(found, workers, executor).gain < 1e13
