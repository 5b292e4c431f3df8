"""Loaders with Ray actors beside a bare loop over actors: rates, scaling, the driver's CPU time, and fairness."""

import contextlib
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections import deque
from itertools import count, cycle, islice

import numpy as np

import dataload
from benchmarks.execution import ready, ready_batch, touched
from benchmarks.harness import Case, aim, run_cases, through
from dataload.executors.base import Fleet
from dataload.loader.step import StepRange

SMALL = 1 << 18  # float32 values of a batch of 1 MB
ACTORS = int(os.environ.get("ACTORS", "64"))  # that sleep instead of decoding
RANKS, RATE = 8, 200.0  # batches a second for all ranks: less than two CPUs hand over
SECONDS = 50 * RANKS * ACTORS / RATE  # a rank gets its batches in bunches, its tasks at all actors: 50 of them
_CPUS = 0.01  # of an actor that sleeps


def small_batch(_samples):
    return ready().reshape(-1)[:SMALL].reshape(16, -1)


def slow(sample):
    time.sleep(0.005)
    return sample


def computing(sample):
    until = time.thread_time() + 0.005
    while time.thread_time() < until:
        pass
    return sample


def slow_batch(samples):
    time.sleep(0.02)
    return np.zeros((len(samples), 8), np.float32)


def slower_batch(samples):
    """So slow that the actors limit the ranks, and not the CPUs of this machine."""
    time.sleep(ACTORS / RATE)
    return np.zeros((len(samples), 8), np.float32)


class Bare:
    """An actor that returns what a loader's collate makes."""

    def __init__(self, make):
        self.make_batch = make

    def make(self):
        return self.make_batch([None] * 16)


@contextlib.contextmanager
def cluster(nodes, cpus):
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": cpus, "object_store_memory": 600 << 20, "include_dashboard": False}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.update(RAY_worker_niceness="0")  # else actors yield to anything else that this machine does
    started = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(nodes - 1):
            started.add_node(**node)
        ray.init(address=started.address, logging_level="ERROR")
        yield ray
    finally:
        ray.shutdown()
        started.shutdown()


def bare_loop(actors, batches, *, ahead):
    """Yield batches of actors in turn, each copied out of the object store, with `ahead` tasks at each actor."""
    import ray

    turns = (actors[number % len(actors)] for number in range(batches))
    pending = deque(actor.make.remote() for actor in islice(turns, ahead * len(actors)))
    while pending:
        lent = ray.get(pending.popleft())
        out = lent.copy()
        del lent
        pending.extend(actor.make.remote() for actor in islice(turns, 1))
        yield out


def bare_actors(ray, make, number, cpus):
    kind = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD")(Bare)
    return [kind.remote(make) for _ in range(number)]


def rates(title, collate, batches):
    """Two nodes: batches that cost nothing to make."""
    with cluster(2, 2) as ray, contextlib.ExitStack() as held:
        actors = bare_actors(ray, collate, 2, 1)
        source = dataload.RangeSource(batches * 16)
        settings = {"batch_size": 16, "collate": collate, "num_workers": 2}
        loader = held.enter_context(dataload.Loader(source, executor="ray", **settings))
        cases = [
            Case("bare loop over 2 actors", lambda: bare_loop(actors, batches, ahead=3)),
            Case("Loader, 2 actors", through(loader), 0.9),
        ]
        return run_cases(title, cases, same=None, rows=touched, seconds=2.0)


def scaling(transform):
    """One and two actors with a transform of 5 ms a sample."""
    with cluster(2, 2), contextlib.ExitStack() as held:
        cases = []
        for workers, floor in ((1, None), (2, 1.8)):
            settings = {"batch_size": 16, "transform": transform, "num_workers": workers, "executor": "ray"}
            loader = held.enter_context(dataload.Loader(dataload.RangeSource(4096), **settings))
            cases.append(Case(f"Loader, {workers} actors", through(loader), floor))
        title = f"5 ms a sample on Ray, {transform.__name__}"
        return run_cases(title, cases, same=None, rows=lambda batch: len(batch["index"]), seconds=2.0)


def _cpu_of(batches, number):
    """The CPU milliseconds of this process for each batch."""
    for _ in islice(batches, 2 * ACTORS):
        pass
    begun = time.process_time()
    for _ in islice(batches, number):
        pass
    return 1e3 * (time.process_time() - begun) / number


def _bare_tasks(crew):
    """Yield the results of the actors of a loader, which a bare loop asks for the loader's steps."""
    import ray

    tasks = (pickle.dumps((crew.loader, -1, (StepRange(0, 0, step, step + 1), ()), 3)) for step in count())
    turns = cycle(crew.actors)
    pending = deque(next(turns).handle.make.remote(next(tasks)) for _ in range(3 * ACTORS))
    while True:
        yield pickle.loads(ray.get(pending.popleft()))  # noqa: S301 - from our own actors
        pending.append(next(turns).handle.make.remote(next(tasks)))


def driver():
    """The CPU time of a driver with many actors."""
    with cluster(1, 4):
        number = 20 * ACTORS
        source = dataload.RangeSource(1600 * number)
        settings = {"batch_size": 16, "collate": slow_batch, "num_workers": ACTORS}
        with dataload.Loader(source, executor=Fleet(num_cpus=_CPUS), **settings) as loader:
            batches = iter(loader)
            crew = _crew_of(loader, batches)
            ours, bare = [], []
            for _ in range(3):
                ours.append(_cpu_of(batches, number))
                bare.append(_cpu_of(_bare_tasks(crew), number))
    title = f"{ACTORS} actors that sleep 20 ms"
    print(f"\n{title}: the driver takes {min(bare):.3f} ms a batch in a bare loop, {min(ours):.3f} ms in a loader")
    ratio = statistics.median(mine / other for mine, other in zip(ours, bare, strict=True))
    return [aim(title, "CPU of the driver, loader / bare loop", ratio, most=1.5)]


def _crew_of(loader, batches):
    """The actors of a loader, once all of them have started."""
    next(batches)
    crew = loader._executor._pool._crew
    while len(crew.actors) < ACTORS:
        next(batches)
    return crew


def rank(number):
    """The program of one of the ranks that share a fleet: it counts the batches that it receives in `SECONDS`."""
    settings = {"batch_size": 16, "collate": slower_batch, "num_workers": ACTORS, "rank": number, "world_size": RANKS}
    source = dataload.RangeSource(1 << 24)
    with dataload.Loader(source, executor=Fleet(num_cpus=_CPUS, name="shared"), **settings) as loader:
        batches = iter(loader)
        _crew_of(loader, batches)
        print("ready", flush=True)
        begun = float(sys.stdin.readline())
        found = 0
        for _ in batches:
            found += begun <= time.time() < begun + SECONDS
            if time.time() >= begun + SECONDS:
                break
        print("counted", found, flush=True)
        sys.stdin.readline()  # the others still count


def _said(process, word):
    """Return what follows a word in a line of a process; Ray's own lines are in between."""
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise SystemExit(f"a rank has ended without saying {word!r}")


def fairness():
    """Ranks in processes of their own that share actors."""
    with cluster(1, 4) as ray:
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        programs = [f"from benchmarks import fleet; fleet.rank({number})" for number in range(RANKS)]
        ranks = [subprocess.Popen([sys.executable, "-c", program], **pipes) for program in programs]
        try:
            for each in ranks:
                _said(each, "ready")
            begin = f"{time.time() + 3}\n"  # when all of them have a full window
            for each in ranks:
                each.stdin.write(begin)
                each.stdin.flush()
            counts = [int(_said(each, "counted")) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.communicate()
    print(f"\nbatches of {RANKS} ranks that share {ACTORS} actors: {counts}")
    spread = (max(counts) - min(counts)) / statistics.mean(counts)
    return [aim("ranks that share a fleet", "(most - least) / mean batches", spread, most=0.05)]


PARTS = {
    "small": lambda: rates("1 MB batches from Ray actors", small_batch, 4000),
    "large": lambda: rates("16 MB batches from Ray actors", ready_batch, 400),
    "sleeping": lambda: scaling(slow),
    "computing": lambda: scaling(computing),
    "driver": driver,
    "fairness": fairness,
}


def fleet():
    """Those of PARTS, or all; none without Ray."""
    try:
        import ray  # noqa: F401
    except ImportError:
        print("\nRay is not installed: pip install 'dataload[ray]'")
        return []
    chosen = os.environ.get("PARTS", ",".join(PARTS)).split(",")
    return [row for name in chosen for row in PARTS[name]()]
