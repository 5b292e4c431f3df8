"""The downloads, cache and load of a training job, computed from its order. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dataload.analysis.job import Job, Touches, steps_of, touches
from dataload.errors import ConfigError
from dataload.storage.remote.choice import Choice, choose, measure, sharers_of
from dataload.types import Int64Array

BINS = 100
"""Parts of an epoch, and of the shards, by which load is counted."""

_MOST_RANKS = 16  # with more, the first step is computed for one node only


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The downloads, cache and load of the nodes of a job.

    Attributes:
        nodes: Number of nodes.
        ranks_per_node: Ranks on each.
        steps: Steps of an epoch.
        data_bytes: Bytes of all shards.
        shards: Number of shards.
        mode: Whether whole shards or ranges are downloaded, and the reason.
        walked: Part of an epoch's records that were looked at; the others are like their neighbours.
        node_bytes: Bytes that nodes read in the first epoch, the mean and the most.
        together_bytes: Most bytes of shards that a node reads at the same time: the cache in which each is downloaded
            once in an epoch. 0 for ranges.
        first_bytes: Bytes that a node needs before the first batch; downloads for later batches share its line.
        first_seconds: Time that the line takes for them.
        readers: Nodes that read the same shard in an epoch, the mean and the most.
        readers_at_once: Most nodes that begin to read the same shard in the same hundredth of an epoch.
        load: (BINS, BINS), nodes that begin to read shards: parts of the shards over parts of the epoch.
    """

    nodes: int
    ranks_per_node: int
    steps: int
    data_bytes: int
    shards: int
    mode: Choice
    walked: float
    node_bytes: tuple[float, float]
    together_bytes: int
    first_bytes: int
    first_seconds: float
    readers: tuple[float, int]
    readers_at_once: int
    load: Int64Array

    def to_json(self) -> dict[str, Any]:
        """Return all but the load in values of JSON, with the names of former simulations for a release."""
        names = (name for name in self.__slots__ if name not in ("load", "mode"))
        values = {name: getattr(self, name) for name in names}
        former = dict.fromkeys(("epoch_bytes", "again_bytes", "wait_seconds", "simulated"))
        return {"mode": self.mode.mode, "reason": self.mode.reason, **values, **former}


def plan_job(job: Job, *, bandwidth: float, budget: int | None, mode: Literal["auto", "shards", "ranges"]) -> JobPlan:
    """Plan a job.

    Args:
        job: The job.
        bandwidth: Bytes per second of each node's line.
        budget: Bytes of each node's cache; None means room for all shards.
        mode: Whether whole shards or ranges are downloaded; "auto" chooses as a loader does.

    Raises:
        ConfigError: The order has no steps, neither whole shards nor ranges serve it, or it is too long to be walked.
    """
    if not job.planner.steps(0):
        raise ConfigError("the order has no steps: there is nothing to plan", key="sampler", value=job.planner.order)
    choice = _choose(job, budget) if mode == "auto" else Choice(mode, "remote.mode says so")
    thin = job.thinned(job.nodes)
    found = touches(thin, range(thin.nodes), 0)
    pairs = np.bincount(found.shard, minlength=len(job.ends)) * thin.nodes_per_node
    if choice.mode == "shards":
        per_node = np.bincount(found.node, job.sizes[found.shard], minlength=thin.nodes)
        first_bytes = _first_bytes(job)
    else:
        per_node = np.bincount(found.node, found.rows, minlength=thin.nodes) * job.record_bytes * thin.records_per_row
        first_bytes = round(job.planner.rows_per_step * job.ranks_per_node * job.record_bytes)
    return JobPlan(
        nodes=job.nodes,
        ranks_per_node=job.ranks_per_node,
        steps=job.planner.steps(0),
        data_bytes=int(job.sizes.sum()),
        shards=len(job.sizes),
        mode=choice,
        walked=min(1.0, float(found.rows.sum()) / max(1, job.planner.items(0))),
        node_bytes=(float(per_node.mean()), float(per_node.max())),
        together_bytes=_together(thin, found) if choice.mode == "shards" else 0,
        readers=(float(pairs[pairs > 0].mean()), int(pairs.max())),
        readers_at_once=_at_once(thin, found),
        first_bytes=first_bytes,
        first_seconds=first_bytes / bandwidth,
        load=_load(thin, found),
    )


def _choose(job: Job, budget: int | None) -> Choice:
    """Return how the loader of rank 0 would read, which sees its first steps."""
    data_bytes = int(job.sizes.sum())
    budget = data_bytes if budget is None else budget
    block = steps_of(job, [0], 0, max(1, (1 << 17) // job.planner.rows_per_step))[0]
    budget //= sharers_of(data_bytes, job.ranks_per_node, budget)
    reads = measure(block, job.ends, np.arange(len(job.ends)), job.sizes, job.record_bytes, budget)
    return choose(reads.of_ranks(job.ranks_per_node), budget)


def _first_bytes(job: Job) -> int:
    """Return the most bytes of shards that a node reads in the first step."""
    found = touches(job, range(job.nodes if job.planner.world_size <= _MOST_RANKS else 1), 0, 1)
    return int(np.bincount(found.node, job.sizes[found.shard]).max())


def _together(job: Job, found: Touches) -> int:
    """Return the most bytes of shards that one node reads at the same time."""
    last = found.last
    if job.records_per_row > 1:
        last = last + _late_steps(job)
    steps = int(max(last)) + 2
    changes = np.zeros(job.nodes * steps)
    np.add.at(changes, found.node * steps + found.first, job.sizes[found.shard])
    np.add.at(changes, found.node * steps + last + 1, -job.sizes[found.shard])
    return int(changes.reshape(job.nodes, steps).cumsum(axis=1).max())


def _late_steps(job: Job) -> int:
    """Return the steps by which the last record of a shard leaves a pool after the last one that was walked."""
    sampler: Any = getattr(job.planner, "sampler", None)
    pool, lanes = getattr(sampler, "pool_size", None), getattr(sampler, "lanes", 1)
    if pool is None:
        return 0
    # The last of n records leaves after about pool * ln n steps of the pool.
    return int(pool * np.log(job.records_per_row) * lanes / job.planner.step_size)


def _load(job: Job, found: Touches) -> Int64Array:
    times = found.first * BINS // max(1, int(found.last.max()) + 1)
    load = np.zeros((BINS, BINS), np.int64)
    np.add.at(load, (found.shard * BINS // len(job.ends), times), job.nodes_per_node)
    return load


def _at_once(job: Job, found: Touches) -> int:
    times = found.first * BINS // max(1, int(found.last.max()) + 1)
    _, counts = np.unique(found.shard * BINS + times, return_counts=True)
    return int(counts.max()) * job.nodes_per_node
