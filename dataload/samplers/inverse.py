"""The inverse of an order: the steps that serve a record. Pure (no I/O)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload._util.settings import check_count
from dataload.errors import ConfigError
from dataload.samplers.batch import BatchPlan, BatchPlanner, BatchSampler
from dataload.samplers.common import MAX_LENGTH
from dataload.types import Int64Array, Sampler

_BLOCK = 1 << 18


def positions_of(sampler: Sampler, index: int, *, epoch: int, below: int = MAX_LENGTH) -> Int64Array:
    """Return the positions under `below` of a record in an epoch, (n,) int64, ascending."""
    below = min(below, len(sampler))
    compute: Any = getattr(sampler, "positions_of", None)
    if compute is not None:
        return compute(index, epoch=epoch, below=below)
    found = [np.empty(0, np.int64)]
    for start in range(0, below, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, below))
        found.append(block[sampler.indices(block, epoch=epoch) == index])
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class Serving:
    """One row in which a record is served.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in the epoch.
        rank: Rank that gets the row.
        row: Row of that rank's batch.
        offset: The record's place in a row of several records: its number in the chunk, or its first element in a
            packed row. None if a row is one record.
    """

    epoch: int
    step: int
    rank: int
    row: int
    offset: int | None = None


def servings_of(planner: BatchPlanner, index: int, *, epoch: int, steps: range | None = None) -> list[Serving]:
    """Return all rows in which an epoch serves a record, by step and rank, without padding.

    Args:
        planner: The plan of any rank.
        index: Index of the record.
        epoch: Number of the epoch.
        steps: The steps to search, by default all of the epoch.

    Raises:
        ConfigError: `index` or `epoch` is not an integer of 0 or more; or `steps` is None and the mixture never ends.
    """
    check_count("index", index, least=0)
    total = planner.steps(check_count("epoch", epoch, least=0))
    if steps is None and planner.items(epoch) >= MAX_LENGTH:
        raise ConfigError(
            f"epoch {epoch} never ends (it has {total:,} steps): give the steps to search", key="steps", value=None
        )
    steps = range(total) if steps is None else range(max(0, steps.start), min(steps.stop, total))
    if isinstance(planner, BatchSampler):
        size, ranks, origin = planner.step_size, planner.world_size, planner.origin
        start, below = (min(planner.items(epoch), origin + step * size) for step in (steps.start, steps.stop))
        if steps.start and below - start <= _BLOCK:  # `positions_of` would begin at position 0
            block = np.arange(start, below)
            found = block[planner.sampler.indices(block, epoch=epoch) == index]
        else:
            found = positions_of(planner.sampler, index, epoch=epoch, below=below)
        rows = [(*divmod(position, size),) for position in (found - origin).tolist()]
        return [Serving(epoch, step, row % ranks, row // ranks) for step, row in rows if step in steps]
    block = max(1, _BLOCK // planner.rows_per_step)
    served: list[Serving] = []
    for rank in range(planner.world_size):
        of_rank = planner.with_ranks(rank=rank)
        for start in range(steps.start, steps.stop, block):
            for plan in of_rank.plans(range(start, min(start + block, steps.stop)), epoch=epoch):
                served += [Serving(epoch, plan.step, rank, *place) for place in _places(plan, index)]
    return sorted(served, key=lambda serving: (serving.step, serving.rank, serving.row))


def _places(plan: BatchPlan, index: int) -> list[tuple[int, int | None]]:
    """Return the rows and offsets at which a plan has a record."""
    at = np.flatnonzero(plan.indices == index)
    if plan.packing is not None:
        return list(zip(plan.packing.rows[at].tolist(), plan.packing.starts[at].tolist(), strict=True))
    if plan.valid is not None:
        at = at[plan.valid.ravel()[at]]
    if plan.chunk == 1:
        return [(row, None) for row in at.tolist()]
    return [divmod(place, plan.chunk) for place in at.tolist()]
