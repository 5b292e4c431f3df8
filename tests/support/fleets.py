"""A Ray cluster of some nodes on this machine, and what tests of fleets let its actors do."""

import contextlib
import os
import signal
import sys
import time

import numpy as np
import pytest

import dataload
from dataload.executors.base import Fleet

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
# A node that refuses connections is lost after five seconds. One that does not answer may be on a machine that pauses.
PATIENT = {"health_check_period_ms": 1000, "health_check_timeout_ms": 20_000, "health_check_failure_threshold": 5}
RECORDS = 600


def process():
    return os.getpid()


@contextlib.contextmanager
def ray_cluster(nodes, node=NODE, system=PATIENT, caches=None):
    """A cluster of `nodes` with the settings `node`, to which this process is connected; skips without Ray.

    Each node has a cache of its own below `caches`.
    """
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_AUTH_MODE", "disabled")
        patched.setenv("RAY_worker_niceness", "0")  # else workers yield to other tests, and take long to start
        patched.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), *sys.path]))
        started = None
        try:
            own = [{"env_vars": {"XDG_CACHE_HOME": f"{caches}/{number}"}} if caches else {} for number in range(nodes)]
            started = Cluster(initialize_head=True, head_node_args={**node, **own[0], "_system_config": system})
            for settings in own[1:]:
                started.add_node(**node, **settings)
            ray.init(address=started.address, log_to_driver=False)
            ray.get([ray.remote(process).remote() for _ in range(nodes)], timeout=150)
        except (TypeError, AttributeError, ImportError, ray.exceptions.RayTaskError):  # it has started
            raise
        except Exception as error:  # which Ray raises as well
            ray.shutdown()
            if started is not None:
                started.shutdown()
            pytest.skip(f"Ray does not start here: {type(error).__name__}: {error}")
        try:
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


def reports():
    """What the actors of this process's own fleets say of themselves, by name, as far as they answer."""
    import ray

    found = {}
    own = [each for each in ray.util.list_named_actors(all_namespaces=True) if f"-{os.getpid()}-" in each["name"]]
    for actor in own:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
            found[actor["name"]] = ray.get(handle.report.options(concurrency_group="report").remote(), timeout=5)
    return found


def references():
    """The objects in the store that this process refers to."""
    import ray

    return set(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


def take_one():
    """The program of a rank of the fleet `ranks` that says that it has a batch, and then does nothing."""
    loader = dataload.Loader(dataload.RangeSource(RECORDS), batch_size=4, num_workers=2, executor=Fleet(name="ranks"))
    next(iter(loader))
    os.write(1, b"has one\n")
    time.sleep(600)  # until the test kills this process


def break_often():
    """The program of a loader that ends iterations after a batch, and says how long it waited for a first batch."""
    loader = dataload.Loader(dataload.RangeSource(RECORDS), batch_size=4, num_workers=1, executor="ray")
    longest = 0.0
    with loader:
        for _ in range(6):
            begun = time.monotonic()
            batches = iter(loader)
            next(batches)
            time.sleep(0.2)  # others are ready, so that the next one comes before a task that it asks for has left
            next(batches)
            longest = max(longest, time.monotonic() - begun)
    os.write(1, f"{longest}\n".encode())


def noisy(sample, context):
    """Each record takes two milliseconds, and has random numbers of its own."""
    time.sleep(0.002)
    return {"index": sample["index"], "x": context.generator.random(500), "name": str(sample["index"])}


def slow(sample):
    time.sleep(0.002)
    return sample


def slower(sample):
    time.sleep(0.05)
    return sample


def bad_at_77(sample):
    if sample["index"] == 77:
        raise ValueError("no 77")
    return sample


def dies_at_77(sample):
    if sample["index"] == 77:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def slow_at_77(sample):
    time.sleep(30 if sample["index"] == 77 else 0)
    return sample


def walk(length):
    """A stream of `length` items; each takes a millisecond."""
    for number in range(length):
        time.sleep(0.001)
        yield {"v": np.array([length, number])}


def is_even(record):
    return record["index"] % 2 == 0
