"""A node that is frozen, and not dead: Ray's health checks give it up, and its batches are made elsewhere."""

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from fleets import ray_cluster, reports

import dataload
from dataload.streams import MultiStreamLoader

ray = pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

STRICT = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 4}
LENGTHS = [*range(20, 40)]


@pytest.fixture
def nothing_is_left_behind():
    """Ray keeps what it has opened until it is shut down."""


def large(sample):
    """So large that it comes through the object store, which is frozen."""
    return {"index": sample["index"], "x": np.full(50_000, sample["index"])}


def walk(length):
    """A stream of `length` large items."""
    for number in range(length):
        yield {"v": np.full(50_000, [length, number][number % 2])}


def rows(**settings):
    return dataload.Loader(dataload.RangeSource(400), batch_size=8, transform=large, epochs=1, **settings)


def streams(**settings):
    return MultiStreamLoader(walk, LENGTHS, batch_size=4, mode="split", epochs=1, seed=3, **settings)


def parent(report):
    """The process that has started an actor: its node's raylet."""
    return int(Path(f"/proc/{report['process']}/stat").read_text().rpartition(")")[2].split()[1])


def values(batch):
    return {name: column.tolist() for name, column in batch.items()}


@pytest.mark.parametrize("make", [rows, streams])
def test_batches_of_a_frozen_node_are_made_elsewhere(make):
    with make(num_workers=0) as made:
        expected = [values(batch) for batch in made]
    with ray_cluster(2, system=STRICT) as cluster, make(num_workers=2, executor="ray") as made:
        batches = iter(made)
        found = [values(next(batches)) for _ in range(4)]
        raylet = cluster.list_all_nodes()[-1].all_processes["raylet"][0].process.pid
        while raylet not in map(parent, reports().values()):
            found.append(values(next(batches)))  # until the worker of this node has started
        os.kill(raylet, signal.SIGSTOP)
        try:
            found += map(values, batches)
            alive = [node["Alive"] for node in ray.nodes()]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(raylet, signal.SIGCONT)
    assert found == expected
    assert sorted(alive) == [False, True]
