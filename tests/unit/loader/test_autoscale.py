"""The number of workers in use: against models of workloads without any clock, in simulated time, and in a loader."""

import functools
import hashlib
import heapq
import random
from collections import Counter
from time import monotonic
from typing import NamedTuple

import numpy as np
import pytest
from samples import sampled

from dataload import Loader, RangeSource
from dataload.loader import scaling as autoscale
from dataload.loader.pipeline import TaskSizer, one_by_one
from dataload.loader.recorder import Recorder
from dataload.loader.scaling import Bounds, Scaling, Setting, ThroughputSample, first_search, search
from dataload.loader.step import StepResult
from dataload.samplers import GlobalShuffle

BOUNDS = Bounds(least=0, most=8, prefetch=2)


def sample(seconds=0.01, *, waits=1.0, busy=1.0, steps=100, cpus=None):
    """A sample with so many seconds a step, of which the consumer waits a part."""
    total = seconds * steps
    clock = (0.0, 0.0) if cpus is None else (cpus * total, total)
    return ThroughputSample(steps, waits * total, (1 - waits) * total, busy * total, *clock)


def test_a_trial_that_is_much_better_is_taken_at_once_and_one_that_is_much_worse_dropped():
    state = search(first_search(Setting(1, 2), BOUNDS), sample(0.010), BOUNDS)
    assert (state.best, state.setting) == ((1, 2), (2, 2))
    assert search(state, sample(0.005), BOUNDS).best == (2, 2)
    worse = search(state, sample(0.020), BOUNDS)
    assert (worse.best, worse.setting, worse.trial, worse.failed) == ((1, 2), (1, 2), None, ((2, 2),))


def decisions(seed):
    """The states of a search, for a random workload that changes once; `random()` is the same in every Python."""
    chance = random.Random(seed).random
    most = 1 + int(6 * chance())
    bounds = Bounds(int(2 * chance()), most, 2 + int(4 * chance()), int(9 * chance()) * (chance() < 0.5))
    state = first_search(Setting(1 + int(most * chance()), 1 + int(2 * chance())), bounds)
    for turn in range(120):
        if turn % 60 == 0:
            fixed, shared, overhead, noise, cpus = chance(), 4 * chance(), 0.3 * chance(), 0.2 * chance(), chance()
        workers, prefetch = state.setting
        seconds = 0.004 * (fixed + shared / max(workers, 0.9) + overhead * workers / prefetch) * (1 + noise * chance())
        waits = 0.2 * chance() if chance() < 0.3 else chance()
        found = sample(seconds, waits=waits, busy=workers * chance(), cpus=cpus * workers if chance() < 0.7 else None)
        state = search(state, found, bounds)
        yield state.best, state.trial, state.on_trial, state.moves, state.pause, state.strays, state.length


def test_decisions_are_those_recorded():
    """A change that decides otherwise on purpose may record them anew, if the other tests of this file pass."""
    found = hashlib.sha256(repr([decision for seed in range(60) for decision in decisions(seed)]).encode())
    assert found.hexdigest()[:16] == "497828d9750ff5f7"


# Models of workloads: the seconds per step of a consumer that works `consumer` seconds a step


class Model(NamedTuple):
    rate: tuple  # steps per second that 0, 1, 2 ... workers can make; the last number holds for all others
    consumer: float = 0.0
    work: float = 0.001  # seconds a step
    depth: tuple = (1.0,)  # factors of that rate for prefetch 1, 2, 4, 8

    def seconds(self, setting):
        workers, prefetch = setting
        depth = self.depth[min(len(self.depth) - 1, prefetch.bit_length() - 1)]
        make = 1 / (self.rate[min(workers, len(self.rate) - 1)] * depth)
        return make + self.consumer if not workers else max(make, self.consumer)

    def sample(self, setting, noise):
        seconds = self.seconds(setting) * noise
        waits = seconds - self.consumer * noise
        steps = max(8, round(0.1 / seconds))
        return ThroughputSample(steps, steps * waits, steps * self.consumer * noise, steps * self.work)


MODELS = {
    "the GIL": Model((100, 97, 94, 92, 90)),
    "the GIL, and a consumer": Model((100, 150, 140, 130, 125), consumer=0.005),
    "copies, cheap to make and dear to hand over": Model((100, 50, 70, 75, 70)),
    "memory": Model((100, 100, 150, 152, 150, 145, 140, 130, 120)),
    "decoding on 8 CPUs": Model((100, 99, 195, 290, 380, 470, 560, 650, 740), work=0.01),
    "decoding on 4 CPUs": Model((100, 99, 195, 290, 380, 378, 375), work=0.01),
    "storage": Model((10, 10, 20, 30, 40, 50, 60, 70, 80), work=0.1),
    "a slow consumer": Model((1000, 1000, 2000), consumer=0.01),
    "a consumer that three keep up with": Model((20, 20, 40, 60, 80, 100, 120), consumer=0.018, work=0.05),
    "uneven batches": Model((50, 50, 60, 70, 80), work=0.02, depth=(0.5, 0.6, 0.8, 1.0)),
}


def run(model, state, bounds, samples, noise=0.0, seed=0, after=0):
    """Feed a search with samples of a model. Returns it, the mean seconds per step after so many, and the changes."""
    rng = random.Random(seed)
    total, changes = [], 0
    for number in range(samples):
        setting = state.setting
        state = search(state, model.sample(setting, rng.lognormvariate(0.0, noise / state.length**0.5)), bounds)
        if number >= after:
            total.append(model.seconds(setting))
            changes += state.setting != setting
    return state, sum(total) / len(total), changes


def best_seconds(model, bounds):
    depths = {2, bounds.prefetch}
    return min(model.seconds(Setting(w, d)) for w in range(bounds.least, bounds.most + 1) for d in depths)


@pytest.mark.parametrize(("start", "noise"), [(1, 0.1), (8, 0.3)])
@pytest.mark.parametrize("name", MODELS)
def test_the_search_settles_at_a_setting_that_is_as_good_as_any(name, noise, start):
    model, bounds = MODELS[name], BOUNDS._replace(prefetch=8)
    lost = []
    for seed in range(3):
        state = first_search(Setting(start, 2), bounds)
        _, seconds, changes = run(model, state, bounds, 600, noise, seed, after=300)
        lost.append(seconds / best_seconds(model, bounds))
        assert noise > 0.1 or changes <= 100, "it does not come to rest"
    assert sorted(lost)[1] <= (1.03 if noise <= 0.1 else 1.1)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("the GIL", {0}),
        ("copies, cheap to make and dear to hand over", {0}),
        ("a slow consumer", {1}),
        ("a consumer that three keep up with", {3, 4}),
        ("decoding on 4 CPUs", {4, 5}),
        ("memory", {2}),
        ("decoding on 8 CPUs", {8}),
        ("storage", {8}),
    ],
)
def test_workers_that_are_not_needed_are_not_used_and_at_rest_it_costs_next_to_nothing(name, workers):
    model = MODELS[name]
    state, _, _ = run(model, first_search(Setting(8, 2), BOUNDS), BOUNDS, 400, 0.01)
    assert state.best.workers in workers
    state, _, _ = run(model, state, BOUNDS, 1000, 0.02)
    _, seconds, changes = run(model, state, BOUNDS, 500, 0.02, seed=1)
    assert seconds <= 1.02 * model.seconds(state.best)
    assert changes <= 45


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("the GIL", "storage"),
        ("decoding on 8 CPUs", "copies, cheap to make and dear to hand over"),
        ("a slow consumer", "memory"),
        ("memory", "a consumer that three keep up with"),
    ],
)
def test_it_follows_a_workload_that_changes(before, after):
    state, _, _ = run(MODELS[before], first_search(Setting(2, 2), BOUNDS), BOUNDS, 2000, 0.02)
    state, seconds, _ = run(MODELS[after], state, BOUNDS, 200, 0.02, after=100)
    assert seconds <= 1.05 * best_seconds(MODELS[after], BOUNDS)


class Simulation:
    """A consumer, and workers that wait `io` seconds and then compute `cpu` seconds for each batch, in order.

    Args:
        cpus: How many batches can be computed at a time: one, with a GIL that is held.
        start: Seconds until a new worker does anything.
    """

    def __init__(self, *, io=0.0, cpu=0.0, consumer=0.0, cpus=64, start=0.0, executor="threads", workers=1):
        self.io, self.cpu, self.consumer, self.start = io, cpu, consumer, start
        self.pauses = False  # of five seconds after each 30 steps
        self.cpus = [0.0] * cpus
        self.now = 0.0
        self.recorder = Recorder(executor, clock=lambda: self.now, cpu_clock=lambda: 0.0)
        self.free = [start] * workers
        self.started = workers
        self.setting = Setting(workers, 2)
        self.made, self.taken = [], 0
        self.used = Counter()  # steps of the last half, by number of workers

    def use(self, setting):
        more = setting.workers - self.setting.workers
        for number in range(self.setting.workers, setting.workers):
            heapq.heappush(self.free, self.now + (self.start if number >= self.started else 0.0))
        self.started = max(self.started, setting.workers)
        for _ in range(-more):
            heapq.heappop(self.free)
        self.setting = setting

    def _make(self):
        begun = max(self.now, heapq.heappop(self.free)) if self.free else self.now
        computes = max(begun + self.io, heapq.heappop(self.cpus))
        ended = computes + self.cpu
        if self.setting.workers:
            heapq.heappush(self.free, ended)
        heapq.heappush(self.cpus, ended if self.cpu else 0.0)
        return begun, ended

    def in_flight(self):
        return len(self.made) - self.taken

    def run(self, seconds, scaling=None):
        """Seconds per step in the last half of so many seconds, and the steps."""
        until, half = self.now + seconds, None
        self.recorder.resume()
        while self.now < until:
            if half is None and self.now >= until - seconds / 2:
                half = self.now, self.taken
            if half is not None:
                self.used[self.setting.workers] += 1
            while self.in_flight() <= self.setting.workers * self.setting.prefetch:
                self.made.append(self._make())
            begun, ended = self.made[self.taken]
            self.recorder.begin_wait()
            self.now = max(self.now, ended)
            self.recorder.end_wait(StepResult(0, 0, None, None, 1, 1, [("read", begun, ended)], [], "dataload-0"))
            self.taken += 1
            if scaling is not None:
                scaling.look(self.recorder, self.in_flight, self.use)
            self.now += self.consumer
            if self.pauses and not self.taken % 30:
                self.now += 5.0
        return (self.now - half[0]) / (self.taken - half[1])


CASES = {
    "computing": ({"cpu": 0.05, "cpus": 8}, {8}),
    "computing, fewer CPUs than allowed": ({"cpu": 0.05, "cpus": 3}, range(3, 9)),
    "storage": ({"io": 0.05, "cpu": 0.001}, {8}),
    "storage and CPU": ({"io": 0.02, "cpu": 0.02, "consumer": 0.004, "cpus": 4}, range(6, 9)),
    "the consumer": ({"cpu": 0.005, "consumer": 0.01}, {1}),
    "work for three": ({"cpu": 0.025, "consumer": 0.01}, {3}),
    "work for five": ({"cpu": 0.025, "io": 0.02, "consumer": 0.01}, {5}),
    "the GIL": ({"cpu": 0.01, "cpus": 1}, {1}),
    "the GIL, quick": ({"cpu": 0.001, "cpus": 1}, {0, 1}),
    "slow batches": ({"cpu": 2.0, "consumer": 0.7}, {3, 4}),
    "processes that start slowly": ({"cpu": 0.026, "consumer": 0.01, "start": 0.7, "executor": "processes"}, {3}),
}


@functools.cache
def best_of_fixed(name, length):
    return min(Simulation(**CASES[name][0], workers=workers).run(length) for workers in range(9))


@pytest.fixture
def eight_cpus(monkeypatch):
    monkeypatch.setattr(autoscale, "usable_cpus", lambda: 8)


@pytest.mark.parametrize("start", sampled([None, 8], [None]))
@pytest.mark.parametrize("name", CASES)
def test_a_simulated_loader_settles_at_a_number_that_is_as_good_as_any(eight_cpus, name, start):
    settings, expected = CASES[name]
    length = {"slow batches": 1000, "the GIL, quick": 6}.get(name, 40)
    scaling = Scaling(start, 2)
    simulation = Simulation(**settings, workers=scaling.setting.workers)
    assert simulation.run(length, scaling) <= 1.05 * best_of_fixed(name, length)
    assert simulation.used.most_common(1)[0][0] in expected


def changes(seed):
    """The settings in use and the steps with which they begin, for a random workload in simulated time."""
    chance = random.Random(seed).random
    cost = {"io": 0.05 * chance(), "cpu": 0.02 * chance() ** 2, "consumer": 0.02 * chance() ** 2, "start": chance()}
    cpus, executor = 1 + int(8 * chance()), "processes" if chance() < 0.5 else "threads"
    most = None if chance() < 0.5 else 1 + int(8 * chance())
    scaling = Scaling(most, 2, least=int(2 * chance()), deepens=chance() < 0.5, cpus=8)
    simulation, found = Simulation(**cost, cpus=cpus, executor=executor, workers=scaling.setting.workers), []
    simulation.pauses = chance() < 0.3
    use = simulation.use
    simulation.use = lambda setting: (found.append((simulation.taken, *setting)), use(setting))
    simulation.run(20, scaling)
    return found


def test_changes_are_those_recorded():
    """Like `test_decisions_are_those_recorded`, for the samples that are taken and when."""
    found = [changes(seed) for seed in range(16)]
    assert len({setting for each in found for setting in each}) > 90
    assert hashlib.sha256(repr(found).encode()).hexdigest()[:16] == "5bd93311bb2c928c"


@pytest.mark.parametrize("cpus", [2, 8, 64])
@pytest.mark.parametrize(("seconds", "share"), [(3, 1.0), (10, 0.94)])
def test_trials_cost_a_short_run_nothing_and_a_longer_one_little(cpus, seconds, share):
    fixed, searching = (Simulation(cpu=0.05, cpus=cpus, workers=cpus) for _ in range(2))
    fixed.run(seconds)
    searching.run(seconds, Scaling(cpus, 2))
    assert searching.taken >= share * fixed.taken


@pytest.mark.parametrize("workers", [8, None])
def test_pauses_of_the_consumer_do_not_decide(eight_cpus, workers):
    scaling = Scaling(workers, 2)
    simulation = Simulation(cpu=0.05, consumer=0.001, cpus=8, workers=scaling.setting.workers)
    simulation.pauses = True
    simulation.run(1000, scaling)
    assert simulation.used.most_common(1)[0][0] == 8


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("executor", "in_order"), [("threads", True), ("threads", False), ("fork", True)])
def test_a_loader_whose_workers_change_gives_the_same_batches_and_says_how_many_it_uses(
    monkeypatch, executor, in_order
):
    numbers = [3, 0, 0, 2, 1, 3, 0] if executor == "threads" else [3, 1, 2, 1, 3]
    calls, used, ahead = iter(numbers * 100), [3], []

    def look(self, recorder, in_flight, use):
        if not recorder.steps % 7:
            ahead.append((used[-1], in_flight()))
            used.append(next(calls))
            use(Setting(used[-1], 2))

    monkeypatch.setattr(Scaling, "look", look)
    monkeypatch.setattr(TaskSizer, "groups", lambda _, steps, room: one_by_one(steps, room))
    seen = set()
    settings = {"num_workers": 3, "executor": executor, "in_order": in_order}
    with Loader(RangeSource(400), batch_size=4, shuffle=True, seed=5, **settings) as loader:
        for epoch in range(2):
            order = GlobalShuffle(400, 5).indices(np.arange(400), epoch=epoch).tolist()
            served = []
            for batch in loader:
                served.append(batch["index"].tolist())
                statistics = loader.statistics()
                seen.add(statistics.workers)
                assert statistics.workers_allowed == 3
            expected = [order[i : i + 4] for i in range(0, 400, 4)]
            assert served == expected if in_order else sorted(served) == sorted(expected)
        assert seen == set(numbers)
        assert {(workers, 2 * workers) for workers in numbers} == {*ahead}, "two steps are in flight for each worker"


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({"num_workers": 2}, Bounds(least=0, most=2, prefetch=3)),
        ({"num_workers": 2, "timeout": 60}, Bounds(least=1, most=2, prefetch=3)),
        ({"num_workers": 2, "executor": "fork"}, Bounds(least=1, most=2, prefetch=3)),
        # "auto" may use more threads than CPUs, and a longer queue.
        ({"num_workers": "auto"}, Bounds(least=0, most=3, prefetch=8, most_waiting=12)),
        ({}, None),
    ],
)
def test_the_consumer_does_all_the_work_only_where_nothing_else_was_asked_for(monkeypatch, settings, bounds):
    made = []

    class Noted(Scaling):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            made.append((self.bounds, self.setting))

    monkeypatch.setattr(autoscale, "usable_cpus", lambda: 3)
    monkeypatch.setattr(autoscale, "Scaling", Noted)
    with Loader(RangeSource(10), batch_size=2, prefetch=3, **settings) as loader:
        assert loader.statistics().workers_allowed == (bounds.most if bounds else 0)
    first = 1 if settings.get("num_workers") == "auto" else 2
    assert made == ([(bounds, (first, 3))] if bounds else [])


def test_a_loader_takes_samples_of_its_own():
    seen, until = set(), monotonic() + 30
    with Loader(RangeSource(400), batch_size=4, num_workers=3) as loader:
        while len(seen) < 2 and monotonic() < until:
            for _ in loader:
                seen.add(loader.statistics().workers)
    assert len(seen) >= 2
