"""From a loader's arguments to its plan: which order, dealt to which ranks, in batches of which size."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

from dataload._util.indexing import even_split
from dataload.errors import ConfigError
from dataload.samplers import (
    BatchPlan,
    BatchPlanner,
    BatchSampler,
    GlobalShuffle,
    PoolShuffle,
    Sequential,
    ShardSequential,
)
from dataload.samplers.batch import Tail
from dataload.types import RandomAccessSource, Sampler, Sharded

__all__ = [
    "BLOCK_ROWS",
    "BlockedPlans",
    "Shuffle",
    "default_pool_size",
    "place_of",
    "plan_batches",
    "shard_lengths",
    "shuffled",
]

Shuffle: TypeAlias = Literal["global", "shards"]
"""All records at once; or shards in a random order, behind a pool."""

_SMALLEST_POOL = 1024
_LONGEST_PIECE = 32_768
BLOCK_ROWS = 16_384
"""Rows whose plans are computed together: in blocks of a few hundred an index costs ten times more, and the arrays of
much longer ones are given back to the system and faulted in again."""


def plan_batches(
    source: RandomAccessSource[Any],
    *,
    batch_size: int | None,
    sampler: Any,
    batch_sampler: Any,
    shuffle: bool | Shuffle,
    seed: int,
    tail: Tail | None,
    rank: int | None,
    world_size: int | None,
) -> BatchPlanner:
    """The plan that the arguments of `dataload.Loader` ask for.

    Raises:
        ConfigError: Arguments contradict each other, or the plan would read records that the source has not.
    """
    rank, world_size = place_of(rank, world_size, batch_sampler)
    if tail is None:
        tail = "partial" if world_size == 1 else "pad"
    if batch_sampler is not None:
        given = {"batch_size": batch_size, "sampler": sampler, "shuffle": shuffle or None}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"batch_sampler chooses order and batches, and {name} does, too: leave one out",
                    key=name,
                    value=value,
                )
        if not isinstance(batch_sampler, BatchPlanner):
            raise ConfigError(
                f"batch_sampler must be a BatchPlanner, such as BucketBatchSampler, got {batch_sampler!r}",
                key="batch_sampler",
                value=batch_sampler,
            )
        plan = batch_sampler.with_ranks(rank=rank, world_size=world_size, tail=tail)
    else:
        if batch_size is None:
            raise ConfigError("give batch_size, or a batch_sampler", key="batch_size", value=None)
        order = _order(source, sampler, shuffle, seed)
        plan = BatchSampler(sampler=order, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
    if plan.records > len(source):
        raise ConfigError(
            f"the sampler chooses from {plan.records} records, and the source has {len(source)}",
            key="sampler",
            value=plan.order,
        )
    return plan


def shuffled(source: RandomAccessSource[Any], shuffle: Literal[True] | Shuffle, seed: int) -> Sampler:
    """The order that ``shuffle=`` stands for.

    True chooses by the source: all records at once, unless it says (`reads_in_order`) that it reads much faster in
    order. A property of the data, never of the machine: the order must be the same on another one.
    """
    if shuffle is True:
        shuffle = "shards" if getattr(source, "reads_in_order", False) else "global"
    if shuffle == "global":
        return GlobalShuffle(len(source), seed)
    return PoolShuffle(ShardSequential(shard_lengths(source), seed), default_pool_size(source), seed)


def shard_lengths(source: RandomAccessSource[Any]) -> tuple[int, ...]:
    """Records per shard, in index order, for an order by shards; one shard where the source does not say.

    Long shards are cut into equal pieces that a pool can hold two of: of one large file read front to back, no pool
    would mix the start with the end, and a piece is still long enough to be read as fast as the whole.
    """
    lengths = source.shard_lengths if isinstance(source, Sharded) else (len(source),)
    pieces = ((length, -(-length // _LONGEST_PIECE) or 1) for length in lengths)
    return tuple(stop - start for length, parts in pieces for start, stop in even_split(length, parts))


def default_pool_size(source: RandomAccessSource[Any]) -> int:
    """Positions in a pool that shuffles the shards of `source`.

    Two shards' worth of records, so that neighbours in a batch come from several; not less than is cheap.
    """
    return max(2 * len(source) // len(shard_lengths(source)), _SMALLEST_POOL)


def _order(source: RandomAccessSource[Any], sampler: Any, shuffle: bool | Shuffle, seed: int) -> Sampler:
    if shuffle not in (False, True, *get_args(Shuffle)):
        allowed = ", ".join(map(repr, get_args(Shuffle)))
        raise ConfigError(f"shuffle must be True, False, {allowed}, got {shuffle!r}", key="shuffle", value=shuffle)
    if sampler is None:
        return shuffled(source, shuffle, seed) if shuffle else Sequential(len(source))
    if shuffle:
        raise ConfigError("shuffle and sampler both choose the order: give one of them", key="shuffle", value=shuffle)
    if not isinstance(sampler, Sampler):
        raise TypeError(f"a sampler has __len__ and indices(positions, epoch=); {type(sampler).__name__} has not both")
    return sampler


def place_of(rank: int | None, world_size: int | None, plan: Any = None) -> tuple[int, int]:
    """Rank and number of ranks: those given, those of the plan, or those of the environment.

    Raises:
        ConfigError: Only one of the two is known.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together: give both or none", key="rank", value=rank)
    if rank is not None and world_size is not None:
        return rank, world_size
    if isinstance(plan, BatchPlanner) and plan.world_size > 1:
        return plan.rank, plan.world_size
    return _place_of_environment()


def _place_of_environment() -> tuple[int, int]:
    """RANK and WORLD_SIZE as torchrun sets them; 0 of 1 without."""
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not given:
        return 0, 1
    try:
        return int(given["RANK"]), int(given["WORLD_SIZE"])
    except (KeyError, ValueError):
        # Not to notice would give every rank all of the data.
        found = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"the environment has {found}: RANK and WORLD_SIZE are both needed, as integers; set them, or pass rank= "
            "and world_size=",
            key="rank",
            value=given.get("RANK"),
        ) from None


class BlockedPlans:
    """Plans of one epoch, computed in blocks by whichever worker needs one first."""

    def __init__(self, planner: BatchPlanner, epoch: int) -> None:
        self._planner = planner
        self._epoch = epoch
        self._steps = planner.steps(epoch)
        self._block_steps = max(1, BLOCK_ROWS // planner.rows_per_step)
        self._blocks: dict[int, Sequence[BatchPlan]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Steps of the epoch."""
        return self._steps

    def __getitem__(self, step: int) -> BatchPlan:
        block, place = divmod(step, self._block_steps)
        with self._lock:
            plans = self._blocks.get(block)
            if plans is None:
                start = block * self._block_steps
                steps = range(start, min(start + self._block_steps, self._steps))
                plans = self._blocks[block] = self._planner.plans(steps, epoch=self._epoch)
                # A worker that lags may still want the block before; none wants an older one.
                for old in [number for number in self._blocks if number < block - 1]:
                    del self._blocks[old]
        return plans[place]
