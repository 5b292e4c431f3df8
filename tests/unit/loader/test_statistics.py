"""What a loader adds up against plain sums over a script of known times, and the rules of the verdict one by one."""

import json
import random
import re
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from html import unescape
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload import Loader, MemorySource, RangeSource, WorkerError
from dataload.loader.recorder import Recorder
from dataload.loader.statistics import StageStatistics, Statistics
from dataload.loader.step import StepResult
from dataload.storage.remote.traffic import Downloads, Report, Request, Traffic


def made_step(spans=(), rows=1, nbytes=0, bad=(), **more):
    return StepResult(0, 0, None, more.pop("error", None), rows, nbytes, spans, bad, "dataload-0", **more)


class Clock:
    """A clock that stands until it is set; also that of the CPU."""

    def __init__(self):
        self.now = self.cpu = 100.0


def recorder(clock, executor="threads", **settings):
    return Recorder(executor, clock=lambda: clock.now, cpu_clock=lambda: clock.cpu, **settings)


def consume(made, clock, asked, received, step):
    """The consumer asks for a step and has it."""
    clock.now = asked
    made.begin_wait()
    clock.now = received
    made.end_wait(step)


def test_a_script_of_known_times():
    clock = Clock()
    made = recorder(clock, transforms=("decode",))
    clock.now = 0.0
    made.resume()
    read, transform = ("read", 0.0, 1.0), ("transform", 1.0, 3.0)
    consume(made, clock, 0.0, 3.5, made_step((read, transform), rows=4, nbytes=40))  # 3.5 s for the first
    assert made.lag == 0.5
    consume(made, clock, 4.0, 4.25, made_step((("read", 1.0, 2.0), ("transform", 2.0, 4.2)), rows=4, nbytes=40))
    consume(made, clock, 5.0, 5.0, made_step((("read", 2.0, 3.0),), rows=2, nbytes=20, bad=("a", "b")))
    clock.now = 7.0
    made.pause()
    found = made.snapshot(2)
    assert (found.steps, found.rows, found.nbytes, found.bad, found.retries) == (3, 10, 100, 2, 1)
    assert (found.wait_seconds, found.first_wait_seconds) == (3.75, 3.5)
    assert found.consumer_seconds == 0.5 + 0.75 + 2.0
    assert found.stages["read"] == StageStatistics(3, 3.0)
    assert found.stages["transform"].runs == 2
    assert found.stages["transform"].seconds == pytest.approx(4.2)
    assert found.work_seconds == pytest.approx(7.2)
    assert found.rows_per_second == pytest.approx(10 / 7.0)
    assert found.wait_share == pytest.approx(0.25 / 3.5)
    assert (found.workers, found.workers_allowed, found.executor, found.transforms) == (2, 2, "threads", ("decode",))
    assert made.snapshot(2, 5).workers_allowed == 5
    # Asked at 0: none is made. At 4: the third is, at 3. At 5: the third.
    assert found.depth == pytest.approx(2 / 3)


def test_a_step_that_fails_is_waited_for_but_not_received():
    clock = Clock()
    made = recorder(clock)
    made.resume()
    consume(made, clock, 0.0, 2.0, made_step((("read", 0.0, 2.0),), error=ValueError("x"), bad=(), rows=8, nbytes=8))
    found = made.snapshot(1)
    assert (found.steps, found.rows, found.nbytes, found.depth) == (0, 0, 0, 0)
    assert (found.wait_seconds, found.first_wait_seconds) == (2.0, 0.0)
    assert found.stages == {"read": StageStatistics(1, 2.0)}
    assert found.rows_per_second == 0


def test_cpu_time_is_that_of_the_loop_alone():
    clock = Clock()
    made = recorder(clock)
    for start in (0.0, 500.0):
        made.resume()
        for second in range(5):
            consume(made, clock, start + second, start + second + 0.5, made_step())
            clock.cpu += 1.5
        clock.cpu += 1000  # a validation, say
    consume(made, clock, 505.0, 505.5, made_step())
    clock.cpu -= 2000  # a thread has ended
    consume(made, clock, 506.0, 506.5, made_step())
    found = made.snapshot(2)
    assert (found.cpu_clock_seconds, found.cpu_seconds) == (8.0 + 2.0, 12.0 + 1001.5)
    assert found.busy_cpus == 1013.5 / 10
    assert recorder(clock).snapshot(2).busy_cpus is None
    made.executor = "processes"
    found = made.snapshot(2)
    assert (found.cpu_clock_seconds, found.cpu_seconds, found.busy_cpus) == (0, 0, None)


def test_rare_long_work_of_the_consumer_is_a_pause_and_a_slower_consumer_is_not():
    clock = Clock()
    made = recorder(clock)
    made.resume()

    def work(*seconds):
        before = made.pause_seconds
        for each in seconds:
            consume(made, clock, clock.now, clock.now, made_step())
            clock.now += each
        made.begin_wait()
        made.end_wait(made_step())
        return made.pause_seconds - before

    assert work(*[0.05] * 50) == 0
    assert work(*[0.05] * 20, 10.0, *[0.05] * 20) == pytest.approx(10)
    assert work(0.4) == 0
    assert work(*[2.0] * 100) < 100 * 2.0 / 4
    assert work(*[2.0] * 100) == 0
    assert made.consumer_seconds == pytest.approx(91 * 0.05 - 0.05 + 10 + 0.4 + 400, abs=0.1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("in_order", [True, False])
def test_any_script_against_plain_sums(seed, in_order):
    rng = random.Random(seed)
    clock = Clock()
    made = recorder(clock)
    waits, works, served, depths = [], [], [], []
    now = 0.0
    for _ in range(rng.randint(1, 4)):
        made.resume()
        # Some are made before the epoch begins, others while it goes on.
        ends = sorted(now + rng.uniform(-5, 20) for _ in range(rng.randint(1, 30)))
        steps = [
            made_step((("read", end - 1, end - 0.5), ("collate", end - 0.5, end)), rows=rng.randint(0, 9))
            for end in ends
        ]
        if not in_order:
            rng.shuffle(steps)
            steps.sort(key=lambda step: step.spans[-1][2] > now + 10)
        asks = []
        for place, step in enumerate(steps):
            asks.append(now)
            received = max(now, step.spans[-1][2])
            consume(made, clock, now, received, step)
            waits.append(received - now)
            served.append(step)
            now = received + rng.choice([0, rng.uniform(0, 2)])
            if place + 1 < len(steps):
                works.append(now - received)
        depths += [sum(step.spans[-1][2] <= ask for step in steps[i:]) for i, ask in enumerate(asks)]
        if rng.random() < 0.5:
            works.append(now - received)
            clock.now = now
            made.pause()
        now += rng.uniform(0, 100)
    found = made.snapshot(3)
    assert found.steps == len(served)
    assert found.rows == sum(step.rows for step in served)
    assert found.wait_seconds == pytest.approx(sum(waits))
    assert found.consumer_seconds == pytest.approx(sum(works))
    assert found.first_wait_seconds == waits[0]
    assert found.worker_seconds == pytest.approx(found.workers * (sum(waits[1:]) + sum(works)))
    assert found.depth == pytest.approx(sum(depths) / len(served))
    for stage in ("read", "collate"):
        assert found.stages[stage].runs == len(served)
        assert found.stages[stage].seconds == pytest.approx(0.5 * len(served))


def test_since_is_what_came_after():
    clock = Clock()
    made = recorder(clock)
    made.resume()
    for i in range(10):
        spans = (("read", i - 1.5, i - 1.0), ("collate", i - 1.0, i - 0.9))
        consume(made, clock, i, i + 0.25, made_step(spans if i > 5 else spans[:1], rows=i, nbytes=2 * i))
        if i == 4:
            earlier = made.snapshot(2)
    found = made.snapshot(2).since(earlier)
    assert (found.steps, found.rows, found.nbytes, found.bad, found.retries) == (5, 35, 70, 0, 0)
    assert (found.wait_seconds, found.first_wait_seconds, found.consumer_seconds) == (1.25, 0, 3.75)
    assert found.stages["read"] == StageStatistics(5, 2.5)
    assert found.stages["collate"].runs == 4
    assert found.depth == pytest.approx((2 + 4 * 1) / 5)  # with collate, one more request comes too early
    assert earlier.since(earlier).depth == 0


def test_since_subtracts_every_number_unless_it_is_marked():
    @dataclass(frozen=True, kw_only=True)
    class More(Statistics):
        added: int = 0
        added_seconds: "float" = 0.0

    def at(value):
        numbers = {f.name: value for f in fields(More) if f.type in (int, float, "int", "float")}
        return More(**{**numbers, "stages": {"read": StageStatistics(value, value)}, "executor": "threads"})

    found = at(7).since(at(4))
    assert {f.name for f in fields(More) if getattr(found, f.name) == 7} == {"workers", "workers_allowed", "cpus"}
    assert found.depth == (7 * 7 - 4 * 4) / 3  # a mean over steps
    assert found.stages == {"read": StageStatistics(3, 3)}
    assert found.added == found.added_seconds == found.cpu_seconds == 3


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (["a", "bcd"], 4),
        ([b"a", "bcd"], 4),
        ([1, 2.0, True], 0),
        (["a", 1, None, np.float32], 1),  # a class has the property, not bytes
        ([[1, 2], ("abc", [np.zeros(3)])], 27),
        ({"x": np.zeros(3), "y": {"z": ["ab"]}}, 26),
        (MappingProxyType({"x": np.zeros(3)}), 24),
        ([], 0),
    ],
)
def test_a_loader_counts_the_bytes_of_any_batch(batch, size):
    with Loader(RangeSource(3), batch_size=3, collate=lambda _: batch) as loader:
        assert next(iter(loader)) is batch
        assert loader.statistics().nbytes == size


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_batches_rows_and_stages(workers, in_order):
    source = MemorySource([{"x": i} for i in range(10)])
    with Loader(source, batch_size=4, transform=[dict, lambda s: s], num_workers=workers, in_order=in_order) as loader:
        assert loader.statistics().verdict == "limit: unknown, no batch was received"
        for _ in loader:
            pass
        for _ in loader:
            break
        found = loader.statistics()
    assert (found.steps, found.rows, found.nbytes) == (4, 14, 14 * 8)
    assert {name: stage.runs for name, stage in found.stages.items()} == {"read": 4, "transform": 4, "collate": 4}
    assert found.workers == workers
    assert found.executor == ("threads" if workers else "serial")
    assert [name.rpartition(".")[2] for name in found.transforms] == ["dict", "<lambda>"]
    assert found.wait_seconds > 0
    if not workers:
        assert found.work_seconds <= found.wait_seconds
        assert found.depth == 0


def test_the_work_on_the_last_batch_counts():
    with Loader(RangeSource(2), batch_size=2) as loader:
        assert len(list(loader)) == 1
        assert loader.statistics().consumer_seconds > 0


def test_a_loader_counts_bad_records_and_failures():
    class Bad(RangeSource):
        def _read(self, indices):
            if 3 in indices:
                raise ValueError("three")
            return super()._read(indices)

    def run(**settings):
        loader = Loader(Bad(8), batch_size=4, transform=dict, **settings)
        try:
            list(loader)
        finally:
            found.append(loader.statistics())

    found = []
    run(on_error="skip")
    assert (found[0].steps, found[0].bad, found[0].retries) == (2, 1, 1)
    assert found[0].stages["read"].runs == 1 + 4 + 1
    assert "1 bad records; 1 steps made again" in str(found[0])
    with pytest.raises(WorkerError, match="three"):
        run()
    assert (found[1].steps, found[1].bad) == (0, 0)


def test_frozen_and_as_json_and_as_text():
    found = statistics(transforms=("m.decode",))
    with pytest.raises(FrozenInstanceError):
        found.steps = 1
    data = json.loads(json.dumps(found.to_json()))
    assert data["stages"]["transform"] == {"runs": 100, "seconds": 30.0}
    assert (data["transforms"], data["verdict"], data["wait_share"]) == (["m.decode"], found.verdict, found.wait_share)
    found = replace(found, first_wait_seconds=1.0, cpu_seconds=15, cpu_clock_seconds=10)
    assert str(found).splitlines() == [
        "100 batches, 1,000 rows, 1.0 MB in 20.00 s: 50 rows/s",
        "the consumer waited 10.00 s, 1.00 s of it for the first batch",
        "and worked 10.00 s in between; 0.5 batches were ready when it asked",
        "work in 2 threads, of 8 CPUs (1.5 kept busy by this process):",
        "  read                4.00 s  11%      100 times     40.000 ms each",
        "  transform          30.00 s  83%      100 times    300.000 ms each",
        "  collate             2.00 s   6%      100 times     20.000 ms each",
        found.verdict,
    ]
    assert replace(found, workers=1).where == "1 thread"
    assert replace(found, workers=1, executor="processes").where == "1 process"
    assert "work in the consumer's thread, of 8 CPUs (1.5" in str(replace(found, workers=0, executor="serial"))


def test_downloads_of_this_process_and_of_workers_since_the_loader_was_built():
    clock, traffic = Clock(), Traffic(16)
    traffic.add(requests=5, nbytes=500)
    made = recorder(clock, traffics=(traffic,))
    made.resume()
    assert made.snapshot(1).downloads == Downloads(connections=16)
    traffic.requested(Request("read", 1.0, 1.5, failed=True), again=False, throttled=True)
    traffic.add(nbytes=10, wasted_bytes=4)
    report = Report(Downloads(requests=2, nbytes=7, request_seconds=0.25, connections=16), [])
    consume(made, clock, 0.0, 1.0, made_step(downloads=report))
    found = made.snapshot(1)
    assert found.downloads == Downloads(3, 0, 1, 17, 4, 0.75, connections=16)
    consume(made, clock, 2.0, 3.0, made_step(downloads=report))
    assert made.snapshot(1).since(found).downloads == report.downloads
    assert recorder(clock).snapshot(1).downloads is None
    assert recorder(clock).snapshot(1).since(recorder(clock).snapshot(1)).downloads is None


def test_shards_are_found_or_downloaded_or_downloaded_again():
    traffic = Traffic()
    for shard in ("a", "b"):
        traffic.found(shard)
    for shard in ("a", "c", "c", "d"):
        traffic.downloaded(shard)
    assert [traffic.knows(shard) for shard in "abcde"] == [True, True, True, True, False]
    assert traffic.total() == Downloads(shards_found=2, shards_downloaded=4, shards_again=2)
    requests = [Request("read", 0.0, 1.0, failed=False)] * 3
    for request in requests:
        traffic.requested(request, again=False, throttled=False)
    assert traffic.report() == (traffic.total(), requests)
    assert traffic.report() is None
    traffic.add(nbytes=3)
    assert traffic.report() == (Downloads(nbytes=3), [])


def test_downloads_as_text_and_as_json():
    found = statistics(downloads=Downloads(1200, 30, 4, 2_500_000, 500_000, connections=16))
    line = "downloaded 2.5 MB, 20% of it wasted, by 1,200 requests; 30 were repeated, 4 throttled"
    assert str(found).splitlines()[-2] == line
    assert json.loads(json.dumps(found.to_json()))["downloads"]["wasted_bytes"] == 500_000
    assert str(Downloads(shards_found=3, shards_downloaded=2, shards_again=1)) == (
        "downloaded 0.0 MB, none of it wasted, by 0 requests; 0 were repeated, 0 throttled; "
        "3 shards were in the cache, 2 were downloaded, 1 of them again"
    )
    assert "; 1 shard was in the cache, 1 was downloaded, 0 of" in str(Downloads(shards_found=1, shards_downloaded=1))


SERIAL = {"workers": 0, "executor": "serial"}
PROCESSES = {"executor": "processes"}


def statistics(read=4.0, transform=30.0, collate=2.0, decode=0.0, waits=10.0, works=10.0, **values):
    """100 batches in 20 s, half of them waited, with two busy threads on eight CPUs."""
    stages = {"read": read, "decode": decode, "transform": transform, "collate": collate}
    given = {
        "steps": 100,
        "rows": 1000,
        "nbytes": 1_000_000,
        "wait_seconds": waits,
        "consumer_seconds": works,
        "stages": {name: StageStatistics(100, seconds) for name, seconds in stages.items() if seconds},
        "workers": 2,
        "executor": "threads",
        "depth": 0.5,
        "cpus": 8,
    }
    return Statistics(**{**given, **values})


def downloading(waited=30.0, executor="threads", **figures):
    """100 batches in 20 s, whose readers waited for downloads: 16 connections in use, mostly for bytes."""
    given = {
        "requests": 1000,
        "nbytes": 400_000_000,
        "request_seconds": 320.0,
        "transfer_seconds": 300.0,
        "shards_downloaded": 100,
        "connections": 16,
    }
    found = statistics(transform=0.0, executor=executor, downloads=Downloads(**{**given, **figures}))
    return replace(found, stages={"download": StageStatistics(100, waited), **found.stages})


def using(cpus):
    return {"cpu_seconds": 20 * cpus, "cpu_clock_seconds": 20.0}


READS = {"waits": 20.0, "works": 0.1}
BY_RANGE = {"shards_downloaded": 0}
SHORT = {
    "TRANSFORM": "transform (83% of worker time)",
    "DOWNLOAD": "download (83% of worker time)",
    "STORAGE": "storage (read, 95% of worker time)",
    "TRY": "try executor='processes'",
    "TO KEEP UP": "to keep up with the consumer",
    "NOT FASTER": "because more were not faster",
    "OR PROCESSES": "processes, if it holds the GIL",
    "ONLY READS": "it only reads, at 50 rows/s",
    "CANNOT HELP": "another worker cannot help: this process may use",
}

# What a loader did, and the line about it; WAITS stands for the share of the time that the consumer waits.
VERDICTS = {
    "nothing yet": (statistics(steps=0), "unknown, no batch was received"),
    "one batch": (statistics(steps=1), "unknown, 1 batch is too few to tell"),
    "two batches": (statistics(steps=2), "unknown, 2 batches are too few to tell"),
    "no time": (statistics(waits=0.0, works=0.0), "unknown, 100 batches are too few to tell"),
    "consumer": (statistics(waits=0.2, works=9.8), "the consumer; it waits 2% of the time"),
    "consumer, slowed by threads": (statistics(waits=0.2, works=19.8, **using(1.0)),
        "the consumer; it waits 1% of the time",
        "2 threads keep 1.0 CPUs busy together, as if they hold the GIL, which slows it down: TRY"),
    "the first batch does not count": (statistics(waits=5.0, first_wait_seconds=4.8, works=9.8),
        "the consumer; it waits 2% of the time"),
    "a transform": (statistics(), "TRANSFORM; WAITS; 2 more workers would feed it"),
    "the fewest batches": (statistics(steps=3), "TRANSFORM; WAITS; 2 more workers would feed it"),
    "the consumer waits just enough": (statistics(waits=1.0, works=19.0),
        "TRANSFORM; WAITS; 1 more worker would feed it"),
    "workers are just busy enough": (statistics(transform=22.0, read=1.0, collate=1.0),
        "transform (92% of worker time); WAITS; 1 more worker would feed it"),
    "batches are just not quick": (statistics(read=0.02, transform=0.0, collate=0.0),
        "batches of unequal cost; workers are busy 0% of the time, and a larger prefetch or in_order=False may help",
        "WAITS"),
    "a transform by name": (statistics(transforms=("app.images.decode",)),
        "transform decode (83% of worker time); WAITS; 2 more workers would feed it"),
    "threads that wait for CPUs": (statistics(**using(1.4)), "TRANSFORM; WAITS; 1 more worker would feed it"),
    "more processes than CPUs": (statistics(transform=76.0, workers=4, cpus=2, **PROCESSES),
        "transform (93% of worker time); WAITS; CANNOT HELP 2 CPUs; TO KEEP UP takes 4 CPUs"),
    "threads that hold the GIL, on two CPUs": (statistics(cpus=2, **using(0.8)),
        "TRANSFORM; WAITS; 2 threads keep 0.8 CPUs busy together, as if it holds the GIL: TRY"),
    "threads that hold the GIL, and use a little more": (statistics(cpus=2, **using(1.2)),
        "TRANSFORM; WAITS; 2 threads keep 1.2 CPUs busy together, as if it holds the GIL: TRY"),
    "threads of one CPU": (statistics(cpus=1, **using(1.0)),
        "TRANSFORM; WAITS; CANNOT HELP 1 CPU; TO KEEP UP takes 2 CPUs"),
    "threads that are hardly busy together": (statistics(transform=28.0, read=1.0, collate=1.0, **using(1.0)),
        "transform (93% of worker time); WAITS; 1 more worker would feed it"),
    "transforms by name": (statistics(transforms=("app.images.decode", "Crop", "f.<locals>.<lambda>")),
        "transforms decode, Crop, <lambda> (83% of worker time); WAITS; 2 more workers would feed it"),
    "storage": (statistics(read=32.0, transform=0.0, collate=8.0, cpus=3),
        "storage (read, 80% of worker time); WAITS; 1 more worker may help; TO KEEP UP takes 4 CPUs"),
    "enough on average": (statistics(workers=4, transform=26.0, waits=2.0, works=8.0),
        "transform (81% of worker time); WAITS; 1 more worker would feed it"),
    "no more CPUs": (statistics(cpus=2), "TRANSFORM; WAITS; CANNOT HELP 2 CPUs; TO KEEP UP takes 4 CPUs"),
    "processes that read on all CPUs": (statistics(read=24.0, transform=0.0, collate=6.0, cpus=2, **PROCESSES),
        "storage (read, 80% of worker time); WAITS",
        "another worker cannot help unless reads wait for storage: this process may use 2 CPUs",
        "TO KEEP UP takes 3 CPUs"),
    "threads that hold the GIL": (statistics(**using(1.0)),
        "TRANSFORM; WAITS; 2 threads keep 1.0 CPUs busy together, as if it holds the GIL: TRY"),
    "a source that holds the GIL": (statistics(read=38.0, transform=0.0, **using(1.1)),
        "STORAGE; WAITS; 2 threads keep 1.1 CPUs busy together, as if it holds the GIL or waits: TRY"),
    "threads that do not": (statistics(**using(1.8)), "TRANSFORM; WAITS; 2 more workers would feed it"),
    "decoding of cached images": (statistics(read=6.0, transform=0.0, decode=30.0, collate=0.0, **using(1.9)),
        "decode (83% of worker time); WAITS; 2 more workers would feed it",
        "less to decode would help: store images at the size you train on"),
    "reads from memory": (statistics(read=38.0, transform=0.0, **using(1.9)),
        "read (on CPUs, 95% of worker time); WAITS; 2 more workers would feed it"),
    "threads that wait for storage": (statistics(read=38.0, transform=0.0, cpus=2, **using(0.2)),
        "STORAGE; WAITS; 2 more workers would feed it"),
    "threads that wait for storage, very slow": (
        statistics(read=38.0, transform=0.0, cpus=2, waits=17.0, works=3.0, **using(0.2)),
        "STORAGE; WAITS; 6 more workers may help; TO KEEP UP takes 14 workers"),
    "serial": (statistics(**SERIAL, read=1.0, transform=8.0, collate=1.0, **using(1.0)),
        "transform (80% of the work); WAITS; 1 worker (OR PROCESSES) would feed it"),
    "serial, slow": (statistics(**SERIAL, read=14.0, transform=0.0, collate=1.0, waits=16.0, works=4.0, **using(0.1)),
        "storage (read, 93% of the work); WAITS; 4 workers would feed it"),
    "serial, on two CPUs": (statistics(**SERIAL, transform=7.0, waits=15.0, works=5.0, cpus=2, **using(1.0)),
        "transform (54% of the work); WAITS; 2 workers (OR PROCESSES) may help; TO KEEP UP takes 3 CPUs"),
    "serial, the loader's own cost": (statistics(**SERIAL, read=1.0, transform=2.0, collate=1.0),
        "the loader itself; the stages take 40% of what the consumer waits; WAITS"),
    "quick batches": (statistics(read=0.001, transform=0.0, collate=0.003),
        "the hand-over of batches, which take 40 us to make; larger ones would help; WAITS"),
    "workers that wait": (statistics(transform=4.0, collate=0.0),
        "batches of unequal cost",
        "workers are busy 20% of the time, and a larger prefetch or in_order=False may help; WAITS"),
    "processes that wait": (statistics(transform=4.0, collate=0.0, **PROCESSES, nbytes=10**15),
        "batches of unequal cost, or their way between processes (10000000.0 MB each)",
        "workers are busy 20% of the time, and a larger prefetch or in_order=False may help; WAITS"),
    "only reads": (statistics(**READS, transform=34.0),
        "transform (85% of worker time); WAITS; ONLY READS; 6 more workers, one per CPU, may help"),
    "only reads, on all CPUs": (statistics(**READS, transform=34.0, cpus=2),
        "transform (85% of worker time); WAITS; ONLY READS; CANNOT HELP 2 CPUs"),
    "only reads, from slow storage": (statistics(**READS, read=38.0, transform=0.0, **using(0.1)),
        "STORAGE; WAITS; ONLY READS; the work keeps 0.1 CPUs busy and mostly waits, so more workers may help"),
    "only reads, serial": (statistics(**READS, read=16.0, transform=0.0, **SERIAL),
        "storage (read, 89% of the work); WAITS; ONLY READS; 8 workers (OR PROCESSES), one per CPU, may help"),
    "more workers were tried, and the transform holds the GIL": (
        statistics(**READS, workers=1, workers_allowed=8, transform=14.0, **using(1.0)),
        "transform (70% of worker time); WAITS",
        "1 of 8 workers is in use, NOT FASTER, perhaps because it holds the GIL: TRY"),
    "more workers were tried, and the consumer's thread is fastest": (
        statistics(waits=16.0, works=4.0, **SERIAL, workers_allowed=2, transform=10.0, **using(1.0)),
        "transform (62% of the work); WAITS",
        "none of 2 workers is in use, NOT FASTER, perhaps because it holds the GIL: TRY"),
    "more workers were tried, and batches are quick": (
        statistics(0.002, 0.008, 0.0, waits=0.01, works=1e-4, workers=1, workers_allowed=8, **using(1.0)),
        "transform (80% of worker time); WAITS; 1 of 8 workers is in use, NOT FASTER"),
    "more workers were tried, and copies are no faster": (
        statistics(**READS, workers=2, workers_allowed=4, read=39.0, transform=0.0, **using(1.9)),
        "read (on CPUs, 95% of worker time); WAITS",
        "2 of 4 workers are in use, NOT FASTER: the memory may be the limit, or the GIL"),
    "more workers were tried, and the storage is slow": (
        statistics(**READS, workers=2, workers_allowed=4, read=39.0, transform=0.0, **using(0.1)),
        "STORAGE; WAITS; 2 of 4 workers are in use, NOT FASTER"),
    "more processes were tried": (statistics(**READS, workers=2, workers_allowed=4, transform=34.0, **PROCESSES),
        "transform (85% of worker time); WAITS; 2 of 4 workers are in use, NOT FASTER"),
    "workers that were in use for a part of the time": (
        statistics(workers=8, workers_allowed=8, worker_seconds=40.0, cpus=8),
        "TRANSFORM; WAITS; CANNOT HELP 8 CPUs"),
    "downloads that nobody waits for": (replace(downloading(), wait_seconds=0.2, consumer_seconds=19.8),
        "the consumer; it waits 1% of the time"),
    "downloads that take less than decoding": (
        replace(downloading(1.0), stages={"download": StageStatistics(9, 1.0), **statistics().stages}),
        "transform (81% of worker time); WAITS; 2 more workers would feed it"),
    "throttled": (downloading(throttled=11, shards_again=90, transfer_seconds=0.0),
        "DOWNLOAD; WAITS",
        ("the store throttles, 11 of 1,000 answers were 429 or 503: allow fewer remote.connections, or "
         "shuffle in a pool of more shards")),
    "throttled once, and a cache that is too small": (downloading(throttled=10, shards_again=11, transfer_seconds=0.0),
        "DOWNLOAD; WAITS",
        ("the cache is too small, 11 of 100 downloads of shards were of evicted ones: raise remote.budget, or "
         "shuffle in a pool of fewer shards")),
    "a few downloaded again, too late": (downloading(shards_again=10, request_seconds=159.0, transfer_seconds=0.0),
        "DOWNLOAD; WAITS",
        ("8.0 of 16 connections are in use: raise remote.budget, to download further ahead, or lower "
         "remote.part_bytes")),
    "ranges too late": (downloading(request_seconds=20.0, **BY_RANGE),
        "DOWNLOAD; WAITS; 1.0 of 16 connections are in use: the order or the consumer asks too late",
        "whole shards in a remote.cache may help"),
    "ranges of processes": (downloading(request_seconds=20.0, **PROCESSES, **BY_RANGE),
        "DOWNLOAD; WAITS",
        ("1.0 of 16 connections are in use: worker processes fetch no ranges ahead, so use threads, or whole "
         "shards in a remote.cache")),
    "latency of ranges": (downloading(request_seconds=160.0, transfer_seconds=79.0, wasted_bytes=100000000, **BY_RANGE),
        "DOWNLOAD; WAITS",
        ("8.0 connections bring 20.0 MB/s, 25% of it wasted, and answers take 81 ms to begin: keep whole "
         "shards in a remote.cache, or allow more remote.connections")),
    "latency of shards": (downloading(transfer_seconds=100.0),
        "DOWNLOAD; WAITS",
        ("16.0 connections bring 20.0 MB/s, and answers take 220 ms to begin: raise remote.part_bytes, or "
         "allow more remote.connections")),
    "bandwidth of shards": (downloading(),
        "DOWNLOAD; WAITS",
        ("16.0 connections bring 20.0 MB/s: allow more remote.connections if the network has more, or raise "
         "remote.budget, which keeps more shards")),
    "bandwidth of ranges": (downloading(**BY_RANGE),
        "DOWNLOAD; WAITS",
        ("16.0 connections bring 20.0 MB/s: allow more remote.connections if the network has more, or keep "
         "shards in a remote.cache")),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name):
    found, *parts = VERDICTS[name]
    text = "; ".join(parts)
    for short, words in {**SHORT, "WAITS": f"the consumer waits {found.wait_share:.0%} of the time"}.items():
        text = text.replace(short, words)
    if text.startswith("transform"):
        text += "; less to transform would help: do before training what is the same in every epoch"
    assert found.verdict == f"limit: {text}"


def test_the_statistics_of_a_notebook_are_their_text():
    found = statistics(transforms=("<script>",))
    page = found._repr_html_()
    assert "<script" not in page
    text = unescape(re.sub(r"(<[^>]*>)+", "\n", page)).strip().split("\n")
    assert text == [found.verdict, *str(found).splitlines()[:-1]]
    assert repr(found) == f"Statistics(100 batches, 1,000 rows, 1.0 MB in 20.00 s: 50 rows/s; {found.verdict})"
    assert "rows, 2,000,000.0 MB in" in repr(replace(found, nbytes=2 * 10**12))


SECONDS = st.integers(0, 10**13).map(lambda nanoseconds: nanoseconds / 1e9)  # as the clock counts


@given(
    st.builds(
        statistics,
        read=SECONDS,
        transform=SECONDS,
        collate=SECONDS,
        wait_seconds=SECONDS,
        consumer_seconds=SECONDS,
        workers=st.integers(0, 64),
        steps=st.integers(0, 10**6),
        rows=st.integers(0, 10**9),
        executor=st.sampled_from(["threads", "processes"]),
        cpus=st.integers(1, 64),
        cpu_seconds=SECONDS,
        cpu_clock_seconds=st.floats(1, 1e4),
    )
)
def test_no_verdict_is_absurd(found):
    line = found.verdict
    assert re.fullmatch(r"limit: [^\n]+", line)
    assert not re.search(r"\b(nan|inf|-\d)", line)
    for number in re.findall(r"(\d+) (?:more )?workers? ", line):
        assert 1 <= int(number) <= max(found.cpus - found.workers, 4 * max(1, found.workers) - found.workers)
    str(found)
