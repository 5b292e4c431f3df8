"""Loaders with Ray actors beside a bare loop over actors: rates, scaling, the driver's CPU time, and fairness."""

import contextlib
import os
import statistics
import threading
import time
from collections import deque
from itertools import islice

import numpy as np

import dataload
from benchmarks.execution import ready, ready_batch, touched
from benchmarks.harness import Case, aim, run_cases, through
from dataload.executors import Fleet

SMALL = 1 << 18  # float32 values of a batch of 1 MB
ACTORS = int(os.environ.get("ACTORS", "16"))  # that sleep instead of decoding
RANKS, SECONDS = 8, 10.0
_CPUS = 0.01  # of an actor that sleeps


def small_batch(_samples):
    return ready().reshape(-1)[:SMALL].reshape(16, -1)


def slow(sample):
    time.sleep(0.005)
    return sample


def slow_batch(samples):
    time.sleep(0.02)
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


def bare_actors(ray, make, count, cpus):
    kind = ray.remote(num_cpus=cpus, scheduling_strategy="SPREAD")(Bare)
    return [kind.remote(make) for _ in range(count)]


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


def scaling():
    """One and two actors with a transform of 5 ms a sample."""
    with cluster(2, 2), contextlib.ExitStack() as held:
        source = dataload.RangeSource(4096)
        cases = []
        for workers, floor in ((1, None), (2, 1.8)):
            settings = {"batch_size": 16, "transform": slow, "num_workers": workers, "executor": "ray"}
            loader = held.enter_context(dataload.Loader(source, **settings))
            cases.append(Case(f"Loader, {workers} actors", through(loader), floor))
        return run_cases("5 ms a sample on Ray", cases, same=None, rows=lambda batch: len(batch["index"]), seconds=2.0)


def _cpu_of(batches, count):
    """The CPU milliseconds of this process for each batch."""
    for _ in islice(batches, 2 * ACTORS):
        pass
    begun = time.process_time()
    for _ in islice(batches, count):
        pass
    return 1e3 * (time.process_time() - begun) / count


def driver():
    """The CPU time of a driver with many actors, and 8 ranks that share them."""
    found = []
    with cluster(1, 4) as ray:
        count = 40 * ACTORS
        actors = bare_actors(ray, slow_batch, ACTORS, _CPUS)
        bare = [_cpu_of(bare_loop(actors, 100 * count, ahead=3), count) for _ in range(3)]
        source, settings = dataload.RangeSource(1600 * count), {"batch_size": 16, "collate": slow_batch}
        for actor in actors:
            ray.kill(actor)
        with dataload.Loader(source, num_workers=ACTORS, executor=Fleet(num_cpus=_CPUS), **settings) as loader:
            ours = [_cpu_of(iter(loader), count) for _ in range(3)]
        title = f"{ACTORS} actors that sleep 20 ms"
        print(f"\n{title}: the driver takes {min(bare):.3f} ms a batch in a bare loop, {min(ours):.3f} ms in a loader")
        ratio = statistics.median(ours) / statistics.median(bare)
        found.append(aim(title, "CPU of the driver, loader / bare loop", ratio, most=1.5))
        counts, end = [0] * RANKS, threading.Event()
        started = threading.Barrier(RANKS + 1)

        def consume(rank):
            fleet = Fleet(num_cpus=_CPUS, name="shared")
            place = {"rank": rank, "world_size": RANKS}
            with dataload.Loader(source, num_workers=ACTORS, executor=fleet, **settings, **place) as loader:
                batches = iter(loader)
                for _ in islice(batches, 4 * ACTORS):
                    pass
                started.wait()
                while not end.is_set():
                    next(batches)
                    counts[rank] += 1

        ranks = [threading.Thread(target=consume, args=(rank,)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        started.wait()
        time.sleep(SECONDS)
        end.set()
        for rank in ranks:
            rank.join()
        spread = (max(counts) - min(counts)) / statistics.mean(counts)
        found.append(aim(title, f"{RANKS} ranks share them, (most - least) / mean batches", spread, most=0.05))
    return found


def fleet():
    """All of them; none without Ray."""
    try:
        import ray  # noqa: F401
    except ImportError:
        print("\nRay is not installed: pip install 'dataload[ray]'")
        return []
    rows = rates("1 MB batches from Ray actors", small_batch, 4000)
    rows += rates("16 MB batches from Ray actors", ready_batch, 400)
    return rows + scaling() + driver()
