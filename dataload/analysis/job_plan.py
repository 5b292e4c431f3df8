"""A training job on paper: what each node downloads, keeps and waits for. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dataload.analysis.job import Job, Touches, steps_of, touches
from dataload.analysis.node import Machine
from dataload.analysis.simulation import simulate
from dataload.errors import ConfigError
from dataload.storage.remote.choice import Choice, choose, measure, sharers_of
from dataload.types import Int64Array

BINS = 100
"""Parts of an epoch, and of the shards, by which load is counted."""

_MOST_RANKS = 16  # that are simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """The downloads, waits and load of the nodes of a job.

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
        first_bytes: Bytes that a node downloads before the first batch.
        first_seconds: Time until the first batch.
        epoch_bytes: Bytes that the simulated nodes download for each epoch, on average; None without a step time.
        again_bytes: Those of them beyond one download of each shard, also by range; None without a step time.
        wait_seconds: Waits in each epoch, the first batch included; None without a step time.
        simulated: Part of all steps that was simulated.
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
    first_bytes: float
    first_seconds: float
    epoch_bytes: tuple[float, ...] | None
    again_bytes: tuple[float, ...] | None
    wait_seconds: tuple[float, ...] | None
    simulated: float
    readers: tuple[float, int]
    readers_at_once: int
    load: Int64Array

    def to_json(self) -> dict[str, Any]:
        """Return all but the load in values of JSON."""
        names = (name for name in self.__slots__ if name not in ("load", "mode"))
        values = {name: getattr(self, name) for name in names}
        return {"mode": self.mode.mode, "reason": self.mode.reason, **values}


def plan_job(
    job: Job, machine: Machine, *, mode: Literal["auto", "shards", "ranges"], step_seconds: float | None, epochs: int
) -> JobPlan:
    """Plan a job.

    Raises:
        ConfigError: The order has no steps, neither whole shards nor ranges serve it, or it is too long to be walked.
    """
    if not job.planner.steps(0):
        raise ConfigError("the order has no steps: there is nothing to plan", key="sampler", value=job.planner.order)
    choice = _choose(job, machine.budget) if mode == "auto" else Choice(mode, "remote.mode says so")
    thin = job.thinned(job.nodes)
    found = touches(thin, range(thin.nodes), 0)
    shown = list(range(job.nodes)) if job.planner.world_size <= _MOST_RANKS else [0]
    if choice.mode == "shards":
        run = _run_shards(job, machine, shown, step_seconds, epochs)
    else:
        run = _run_ranges(job, machine, step_seconds, epochs)
    pairs = np.bincount(found.shard, minlength=len(job.ends)) * thin.nodes_per_node
    if choice.mode == "shards":
        per_node = np.bincount(found.node, job.sizes[found.shard], minlength=thin.nodes)
    else:
        per_node = np.bincount(found.node, found.rows, minlength=thin.nodes) * job.record_bytes * thin.records_per_row
    load = _load(thin, found)
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
        load=load,
        **run,
    )


def _choose(job: Job, budget: int | None) -> Choice:
    """Return how the loader of rank 0 would read, which sees its first steps."""
    data_bytes = int(job.sizes.sum())
    budget = data_bytes if budget is None else budget
    block = steps_of(job, [0], 0, max(1, (1 << 17) // job.planner.rows_per_step))[0]
    budget //= sharers_of(data_bytes, job.ranks_per_node, budget)
    reads = measure(block, job.ends, np.arange(len(job.ends)), job.sizes, job.record_bytes, budget)
    return choose(reads.of_ranks(job.ranks_per_node), budget)


def _run_shards(
    job: Job, machine: Machine, nodes: list[int], step_seconds: float | None, epochs: int
) -> dict[str, Any]:
    thin = job.thinned(len(nodes))
    nodes = nodes if thin.nodes > 1 else [0]
    whole = None if thin is job else job
    run = simulate(thin, machine, nodes, epochs, whole=whole, only_first=step_seconds is None)
    found: dict[str, Any] = {"first_bytes": run.first_bytes, "first_seconds": float(run.waits[0]), "simulated": 0.0}
    if step_seconds is None:
        return {**found, **dict.fromkeys(("epoch_bytes", "again_bytes", "wait_seconds"))}
    done = int(epochs * run.steps / run.total_steps)
    steps = run.total_steps // epochs
    waits = run.waits[: max(1, done) * steps].reshape(max(1, done), -1)
    more = max(1.0, steps / run.steps)  # what was not simulated is like the steps before
    return {
        **found,
        "epoch_bytes": tuple(run.epoch_bytes.mean(axis=1)[:done].tolist()),
        "again_bytes": tuple((run.again_bytes + run.range_bytes).mean(axis=1)[:done].tolist()),
        "wait_seconds": tuple((more * waits.sum(axis=1)).tolist()),
        "simulated": run.steps / run.total_steps,
    }


def _run_ranges(job: Job, machine: Machine, step_seconds: float | None, epochs: int) -> dict[str, Any]:
    nbytes = job.planner.rows_per_step * job.ranks_per_node * job.record_bytes
    seconds, steps = nbytes / machine.bandwidth, job.planner.steps(0)
    found: dict[str, Any] = {"first_bytes": nbytes, "first_seconds": seconds, "simulated": 1.0}
    if step_seconds is None:
        return {**found, **dict.fromkeys(("epoch_bytes", "again_bytes", "wait_seconds"))}
    wait = max(0.0, seconds - step_seconds)
    return {
        **found,
        "epoch_bytes": (nbytes * steps,) * epochs,
        "again_bytes": (0.0,) * epochs,
        "wait_seconds": (seconds + (steps - 1) * wait, *(steps * wait,) * (epochs - 1)),
    }


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
