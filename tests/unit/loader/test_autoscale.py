"""``num_workers="auto"`` against a simulated consumer and simulated workers, and in a loader."""

import heapq
from time import monotonic
from typing import NamedTuple

import numpy as np
import pytest

from dataload import Loader, RangeSource
from dataload.loader.autoscale import Scaling, ThroughputSample, workers_to_use
from dataload.loader.recorder import Recorder
from dataload.samplers import GlobalShuffle


def look(workers, *, waits, work=1.0, rate=100.0):
    """A second, of which the consumer waits a part."""
    return ThroughputSample(
        workers, steps=round(rate), wait_seconds=waits, consumer_seconds=1 - waits, work_seconds=work
    )


# One decision


@pytest.mark.parametrize(
    ("before", "now", "limit", "expected"),
    [
        (None, look(1, waits=0.05), 8, 1),  # the consumer is the limit
        (None, look(1, waits=0.5, work=1.0), 8, 2),  # work for two
        (None, look(1, waits=0.9, work=1.0), 8, 2),  # for ten, but no more than there are at a time
        (None, look(4, waits=0.6, work=4.0), 6, 6),
        (None, look(4, waits=0.2, work=4.0), 8, 5),
        (None, look(4, waits=0.2, work=1.0), 8, 5),  # the consumer waits all the same
        (None, look(4, waits=1.0, work=4.0), 64, 8),  # which does nothing in between
        (None, look(8, waits=1.0, work=8.0), 8, 8),
        (look(1, waits=0.9, rate=100), look(2, waits=0.8, work=2, rate=190), 8, 4),
        (look(1, waits=0.9, rate=100), look(2, waits=0.9, work=2, rate=110), 8, 2),  # they did not help
        (look(2, waits=0.9, rate=100), look(3, waits=0.8, work=3, rate=120), 8, 6),
        (look(2, waits=0.9, rate=100), look(3, waits=0.8, work=3, rate=110), 8, 3),
    ],
)
def test_a_decision(before, now, limit, expected):
    assert workers_to_use(before, now, limit) == expected


# Many


class Step(NamedTuple):
    spans: tuple
    epoch: int = 0
    step: int = 0
    rows: int = 1
    nbytes: int = 1
    bad: tuple = ()
    error: None = None
    worker: str = "dataload-0"


class Simulation:
    """A consumer, and workers that wait `io` seconds and then compute `cpu` seconds for each batch, in order.

    Args:
        cpus: How many batches can be computed at a time: one, with a GIL that is held.
        start: Seconds until a new worker does anything.
    """

    def __init__(self, *, io=0.0, cpu=0.0, consumer=0.0, cpus=64, start=0.0, prefetch=2, executor="threads"):
        self.io, self.cpu, self.consumer, self.start, self.prefetch = io, cpu, consumer, start, prefetch
        self.cpus = [0.0] * cpus
        self.now = 0.0
        self.free = [start]
        self.recorder = Recorder(executor, clock=lambda: self.now, cpu_clock=lambda: 0.0)

    def grow(self, workers):
        for _ in range(workers - len(self.free)):
            heapq.heappush(self.free, self.now + self.start)

    def _make(self):
        begun = max(self.now, heapq.heappop(self.free))
        computes = max(begun + self.io, heapq.heappop(self.cpus))
        ended = computes + self.cpu
        heapq.heappush(self.free, ended)
        heapq.heappush(self.cpus, ended if self.cpu else 0.0)
        return begun, ended

    def run(self, steps, scaling=None):
        """Seconds of the last half of so many steps."""
        made = []
        self.recorder.resume()
        for step in range(steps):
            if step == steps // 2:
                half = self.now
            while len(made) <= step + len(self.free) * self.prefetch:
                made.append(self._make())
            begun, ended = made[step]
            self.recorder.begin_wait()
            self.now = max(self.now, ended)
            self.recorder.end_wait(Step((("read", begun, ended),)))
            if scaling is not None:
                scaling.look(self.recorder, self.grow)
            self.now += self.consumer
        return self.now - half


CASES = {
    "CPU-bound": ({"cpu": 0.05, "cpus": 8}, 8, {8}),
    "CPU-bound, fewer CPUs than allowed": ({"cpu": 0.05, "cpus": 3}, 16, range(3, 9)),
    "storage": ({"io": 0.05, "cpu": 0.001}, 8, {8}),
    "storage and CPU": ({"io": 0.02, "cpu": 0.02, "consumer": 0.004, "cpus": 4}, 8, {8}),
    "the consumer": ({"cpu": 0.005, "consumer": 0.01}, 8, {1}),
    "the consumer, just": ({"cpu": 0.0095, "consumer": 0.01}, 8, {1}),
    "work for three": ({"cpu": 0.025, "consumer": 0.01}, 8, {3}),
    "work for five": ({"cpu": 0.025, "io": 0.02, "consumer": 0.01}, 8, {5}),
    "the GIL": ({"cpu": 0.01, "cpus": 1}, 8, {2}),
    "the GIL, and a consumer": ({"cpu": 0.01, "consumer": 0.005, "cpus": 1}, 8, {2}),
    "one CPU": ({"cpu": 0.05}, 1, {1}),
    "quick batches": ({"cpu": 100e-6, "consumer": 10e-6}, 4, {4}),
    "slow batches": ({"cpu": 2.0, "consumer": 0.7}, 8, {3}),
    "processes that start slowly": ({"cpu": 0.026, "consumer": 0.01, "start": 0.7, "executor": "processes"}, 8, {3}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_simulated_loader_settles_at_a_number_that_is_as_good_as_any(name):
    settings, limit, expected = CASES[name]
    scaling = Scaling(limit)
    steps = 30_000 if name == "quick batches" else 4000
    seconds = Simulation(**settings).run(steps, scaling)
    assert scaling.workers in expected

    def fixed(workers):
        simulation = Simulation(**settings)
        simulation.grow(workers)
        return simulation.run(steps)

    assert seconds <= 1.12 * min(map(fixed, range(1, limit + 1)))


def test_it_settles_within_seconds_and_steps():
    scaling, simulation = Scaling(8), Simulation(cpu=0.05, consumer=0.005)
    simulation.run(300, scaling)
    assert scaling.workers == 8


def test_a_consumer_that_becomes_quicker_gets_more_workers():
    scaling, simulation = Scaling(8), Simulation(cpu=0.01, consumer=0.02)
    simulation.run(1000, scaling)
    assert scaling.workers == 1
    simulation.consumer = 0.003
    simulation.run(1000, scaling)
    assert scaling.workers == 4


def test_the_limit_is_the_cpus_of_the_process(monkeypatch):
    monkeypatch.setattr("dataload.loader.autoscale.usable_cpus", lambda: 3)
    scaling = Scaling()
    Simulation(cpu=0.05).run(2000, scaling)
    assert scaling.workers == 3


# In a loader


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_a_loader_that_grows_gives_the_same_batches_and_says_how_many_workers_it_has(monkeypatch, executor):
    monkeypatch.setattr("dataload.loader.autoscale.usable_cpus", lambda: 3)
    monkeypatch.setattr("dataload.loader.loader.usable_cpus", lambda: 3)
    monkeypatch.setattr("dataload.loader.autoscale._LEAST_SECONDS", 0.0)
    monkeypatch.setattr("dataload.loader.autoscale._START_SECONDS", {executor: 0.0})
    monkeypatch.setattr("dataload.loader.autoscale.workers_to_use", lambda _, now, limit: min(limit, now.workers + 1))
    seen = set()
    with Loader(RangeSource(400), batch_size=4, shuffle=True, seed=5, num_workers="auto", executor=executor) as loader:
        for epoch in range(2):
            order = GlobalShuffle(400, 5).indices(np.arange(400), epoch=epoch).tolist()
            served = []
            for batch in loader:
                served += batch["index"].tolist()
                seen.add(loader.statistics().workers)
            assert served == order
        assert seen == {1, 2, 3}
        assert f"work in 3 {executor}" in str(loader.statistics())


def test_a_loader_whose_workers_wait_takes_more_of_them(monkeypatch):
    monkeypatch.setattr("dataload.loader.autoscale.usable_cpus", lambda: 3)
    monkeypatch.setattr("dataload.loader.autoscale._LEAST_SECONDS", 0.02)
    from time import sleep

    def slow(sample):
        sleep(0.001)  # storage, in the place of which this stands
        return sample

    with Loader(RangeSource(200), batch_size=2, transform=slow, num_workers="auto") as loader:
        until = monotonic() + 30
        while loader.statistics().workers < 3 and monotonic() < until:
            assert sorted(i for batch in loader for i in batch["index"]) == list(range(200))
        assert loader.statistics().workers == 3
