"""Orders as lists, batches as lists, and how far counts are from what chance gives."""

import itertools

import numpy as np


def order(sampler, epoch=0, length=None):
    return sampler.indices(np.arange(len(sampler) if length is None else length), epoch=epoch).tolist()


def plans_of(planner, epoch=0):
    return planner.plans(range(planner.steps(epoch)), epoch=epoch)


def rows_of(plan):
    """Return the indices that count."""
    return plan.indices.tolist() if plan.valid is None else plan.indices[plan.valid].tolist()


def global_batches(planner, world_size, epoch=0):
    """Return what each step serves on all ranks together, sorted; `planner` makes one from `world_size` and `rank`."""
    ranks = [plans_of(planner(world_size=world_size, rank=rank), epoch) for rank in range(world_size)]
    return [sorted(itertools.chain(*map(rows_of, step))) for step in zip(*ranks, strict=True)]


def deviations(counts, expected=None):
    """Return by how many standard deviations the chi-square misses its mean; expectations are equal if not given."""
    counts = np.asarray(counts, float)
    expected = np.ones(counts.size) if expected is None else np.asarray(expected, float)
    expected = expected / expected.sum() * counts.sum()
    assert expected.min() > 5, "too few for a chi-square"
    return (((counts - expected) ** 2 / expected).sum() - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1))
