"""The downloads, cache and load of a training job, computed from its order. Pure (no I/O)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dataload.errors import ConfigError
from dataload.loader.pipeline import steps_ahead
from dataload.loader.state import Cursor, EpochPlanners
from dataload.samplers import (
    BatchPlanner,
    BatchSampler,
    GlobalShuffle,
    Lanes,
    PoolShuffle,
    Repeat,
    Sequential,
    ShardSequential,
)
from dataload.storage.remote.prefetch.plan import Choice, choose, measure, sharers_of
from dataload.types import Int64Array, Sampler, StepsAhead

MOST_ROWS = 1 << 21
"""Maximum number of records to walk. Longer epochs are sampled at even intervals."""

_FEWEST_PER_SHARD = 8  # sampled records, so that nearly every rank that reads a shard is found
_MOST_STEPS = 5000  # in a thinned epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A training job: an order dealt to ranks, and the shards that hold its records."""

    # In a thinned job each record stands for several neighbours, and a node perhaps for all; shards are read alike.

    planner: BatchPlanner  # of any rank
    ends: Int64Array  # (shards,), cumulative number of records
    sizes: Int64Array  # (shards,), bytes
    ranks_per_node: int  # rank r is on node r // ranks_per_node
    records_per_row: float = 1  # records of a node that each row stands for
    nodes_per_node: int = 1  # nodes that each node stands for
    records: int = 0  # in the shards, if the job reads only some of them

    @property
    def nodes(self) -> int:
        return self.planner.world_size // self.ranks_per_node

    @property
    def record_bytes(self) -> float:
        """Mean bytes of a record."""
        return float(self.sizes.sum()) / max(1, self.records or int(self.ends[-1]))

    def ranks(self, nodes: Iterable[int]) -> list[int]:
        return [node * self.ranks_per_node + rank for node in nodes for rank in range(self.ranks_per_node)]

    def thinned(self, nodes: int, most_rows: int = MOST_ROWS) -> Cluster:
        """Return a job whose `nodes` nodes read at most about `most_rows` records per epoch: all ranks, or one node."""
        planner, items = self.planner, self.planner.items(0)
        # With lanes, each rank reads only its own shards.
        apart = isinstance(planner, BatchSampler) and isinstance(planner.sampler, Lanes)
        if items * (nodes / self.nodes if apart else 1) <= most_rows:
            return self
        if not isinstance(planner, BatchSampler):
            raise _too_large(planner, items, most_rows)
        factor = math.ceil(items * nodes / self.nodes / most_rows)
        ranks, each = planner.world_size, self
        if not apart:
            # Keep enough records of a shard for each node that reads it.
            factor, ranks = max(self.nodes, math.ceil(items / most_rows)), self.ranks_per_node
            each = replace(self, nodes_per_node=self.nodes)
        factor = max(1, min(factor, int(self.ends[-1]) // (_FEWEST_PER_SHARD * len(self.ends)) or 1))
        factor = max(factor, 1 if apart else self.nodes)
        sampler = _thin(planner.sampler, factor, most_rows)
        rows = max(1, round(planner.global_batch_size / ranks / factor), -(-len(sampler) // (ranks * _MOST_STEPS)))
        thin = BatchSampler(sampler=sampler, batch_size=rows, world_size=ranks, rank=0, tail=planner.tail)
        return replace(
            each,
            planner=thin,
            ends=self.ends // factor,
            records_per_row=factor * (1 if apart else 1 / self.nodes),
        )


def _thin(sampler: Sampler, factor: int, most_rows: int) -> Sampler:
    """Return an order in which each record stands for `factor` neighbours; shards keep their places."""
    if isinstance(sampler, Sequential):
        return Sequential(len(sampler) // factor)
    if isinstance(sampler, GlobalShuffle) and sampler.parent is None:
        return GlobalShuffle(len(sampler) // factor, sampler.seed)
    if isinstance(sampler, ShardSequential):
        ends = np.cumsum(sampler.shard_lengths) // factor
        return ShardSequential(tuple(np.diff(ends, prepend=0).tolist()), sampler.seed)
    if isinstance(sampler, PoolShuffle):
        parent = _thin(sampler.parent, factor, most_rows)
        return PoolShuffle(parent, max(1, round(sampler.pool_size / factor)), sampler.seed)
    if isinstance(sampler, Lanes):
        pool = None if sampler.pool_size is None else max(1, round(sampler.pool_size / factor))
        return Lanes(_thin(sampler.parent, factor, most_rows), sampler.lanes, pool, sampler.seed)
    if isinstance(sampler, Repeat):
        return Repeat(_thin(sampler.parent, factor, most_rows), sampler.times)
    raise _too_large(sampler, len(sampler), most_rows)


def _too_large(order: Any, items: int, most_rows: int) -> ConfigError:
    return ConfigError(
        f"an epoch of {items:,} items is too long to walk (up to {most_rows:,}), and {type(order).__name__} cannot be "
        "thinned: plan a part of the data, or an order made of Sequential, GlobalShuffle, ShardSequential, "
        "PoolShuffle, Lanes and Repeat",
        key="sampler",
        value=order,
    )


def steps_of(job: Cluster, ranks: Sequence[int], epoch: int, most_steps: int | None = None) -> list[StepsAhead]:
    """Return what each rank reads in an epoch, or in its first steps."""
    planner = job.planner
    steps = planner.steps(epoch)
    shown = steps if most_steps is None else min(steps, most_steps)
    if not isinstance(planner, BatchSampler):
        return [
            _join(steps_ahead(EpochPlanners(planner.with_ranks(rank=rank)), Cursor(epoch, 0), epoch + 1), shown)
            for rank in ranks
        ]
    # All ranks at once, because a pool is run for all of them.
    rows = planner.with_ranks(rank=0).deal(range(shown), epoch=epoch)[0] + np.array(ranks)[:, None, None]
    length = len(planner.sampler)
    inside = rows < (rows.max(initial=0) + 1 if planner.tail == "pad" else length)
    rows = np.minimum(rows, length - 1)
    indices = planner.sampler.indices(rows[inside], epoch=epoch)
    counts = inside.sum(axis=2)  # (ranks, steps)
    parts = np.split(indices, np.cumsum(counts.sum(axis=1))[:-1])
    return [StepsAhead(epoch, part, np.cumsum(count), steps) for part, count in zip(parts, counts, strict=True)]


def _join(blocks: Iterable[StepsAhead], steps: int) -> StepsAhead:
    found = list(blocks)
    counts = np.concatenate([np.diff(block.ends, prepend=0) for block in found])[:steps]
    indices = np.concatenate([block.indices for block in found])[: int(counts.sum())]
    return StepsAhead(found[0].epoch, indices, np.cumsum(counts), found[0].epoch_steps)


@dataclass(frozen=True, slots=True)
class Touches:
    """The shards that nodes read in an epoch, sorted by node and shard, (touches,) int64 each."""

    node: Int64Array
    shard: Int64Array
    first: Int64Array  # first step that reads the shard
    last: Int64Array  # last step that reads the shard
    rows: Int64Array  # number of records


def touches(job: Cluster, nodes: Sequence[int], epoch: int, most_steps: int | None = None) -> Touches:
    """Return the shards that nodes read in an epoch, or in its first steps."""
    ranks, shards = job.ranks(nodes), len(job.ends)
    found = steps_of(job, ranks, epoch, most_steps)
    node = np.repeat(np.array(ranks) // job.ranks_per_node, [len(each.indices) for each in found])
    step = np.concatenate([np.repeat(np.arange(len(each.ends)), np.diff(each.ends, prepend=0)) for each in found])
    shard = np.searchsorted(job.ends, np.concatenate([each.indices for each in found]), side="right")
    keys = node * shards + shard
    order = np.lexsort((step, keys))
    keys, step = keys[order], step[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    stops = np.append(starts[1:], len(keys))
    return Touches(keys[starts] // shards, keys[starts] % shards, step[starts], step[stops - 1], stops - starts)


_BINS = 100  # of an epoch
_MOST_RANKS = 16  # with more ranks, the first step is computed for one node only


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The downloads, cache and load of a job's nodes."""

    nodes: int
    ranks_per_node: int
    steps: int  # of an epoch
    data_bytes: int  # of all shards
    shards: int
    mode: Choice  # whole shards or ranges, and the reason
    walked: float  # fraction of an epoch's records that were walked
    node_bytes: tuple[float, float]  # read per node in the first epoch, mean and maximum
    together_bytes: int  # cache in which a node downloads each shard once per epoch; 0 for ranges
    first_bytes: int  # needed by a node before its first batch
    first_seconds: float  # time to download them
    readers: tuple[float, int]  # nodes that read the same shard in an epoch, mean and maximum
    readers_at_once: int  # maximum number of nodes that begin to read a shard in the same hundredth of an epoch

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; former fields of the simulation are null for a release."""
        names = (name for name in self.__slots__ if name != "mode")
        values = {name: getattr(self, name) for name in names}
        former = dict.fromkeys(("epoch_bytes", "again_bytes", "wait_seconds", "simulated"))
        return {"mode": self.mode.mode, "reason": self.mode.reason, **values, **former}


def plan_job(
    job: Cluster, *, bandwidth: float, budget: int | None, mode: Literal["auto", "shards", "ranges"]
) -> ClusterPlan:
    """Plan a job; `bandwidth` in bytes per second and `budget` in bytes are per node, None fits all shards."""
    if not job.planner.steps(0):
        raise ConfigError("the order has no steps to plan", key="sampler", value=job.planner.order)
    choice = _choose(job, budget) if mode == "auto" else Choice(mode, "remote.mode says so")
    thin = job.thinned(job.nodes)
    found = touches(thin, range(thin.nodes), 0)
    pairs = np.bincount(found.shard, minlength=len(job.ends)) * thin.nodes_per_node
    if choice.mode == "shards":
        per_node = np.bincount(found.node, job.sizes[found.shard], minlength=thin.nodes)
        first = touches(job, range(job.nodes if job.planner.world_size <= _MOST_RANKS else 1), 0, 1)
        first_bytes = int(np.bincount(first.node, job.sizes[first.shard]).max())
    else:
        per_node = np.bincount(found.node, found.rows, minlength=thin.nodes) * job.record_bytes * thin.records_per_row
        first_bytes = round(job.planner.rows_per_step * job.ranks_per_node * job.record_bytes)
    return ClusterPlan(
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
    )


def _choose(job: Cluster, budget: int | None) -> Choice:
    """Return the mode that the loader of rank 0 would choose from its first steps."""
    data_bytes = int(job.sizes.sum())
    budget = data_bytes if budget is None else budget
    block = steps_of(job, [0], 0, max(1, (1 << 17) // job.planner.rows_per_step))[0]
    budget //= sharers_of(data_bytes, job.ranks_per_node, budget)
    reads = measure(block, job.ends, np.arange(len(job.ends)), job.sizes, job.record_bytes, budget)
    return choose(reads.of_ranks(job.ranks_per_node), budget)


def _together(job: Cluster, found: Touches) -> int:
    """Return the maximum bytes of shards that a node reads at the same time."""
    last = found.last
    if job.records_per_row > 1:
        last = last + _late_steps(job)
    steps = int(max(last)) + 2
    changes = np.zeros(job.nodes * steps)
    np.add.at(changes, found.node * steps + found.first, job.sizes[found.shard])
    np.add.at(changes, found.node * steps + last + 1, -job.sizes[found.shard])
    return int(changes.reshape(job.nodes, steps).cumsum(axis=1).max())


def _late_steps(job: Cluster) -> int:
    """Return how many steps after the last walked record the last record of a shard leaves a pool."""
    sampler: Any = getattr(job.planner, "sampler", None)
    pool, lanes = getattr(sampler, "pool_size", None), getattr(sampler, "lanes", 1)
    if pool is None:
        return 0
    # The last of n records leaves after about pool * ln(n) steps of the pool.
    return int(pool * np.log(job.records_per_row) * lanes / job.planner.step_size)


def _at_once(job: Cluster, found: Touches) -> int:
    times = found.first * _BINS // max(1, int(found.last.max()) + 1)
    _, counts = np.unique(found.shard * _BINS + times, return_counts=True)
    return int(counts.max()) * job.nodes_per_node
