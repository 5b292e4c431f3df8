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


def flow(weights, limits, positions):
    """What each component has given of the first positions, in proportion and without rounding, piece by piece."""
    given_yet, found, at = np.zeros(len(weights)), [], 0
    for position in positions:
        while at < position - 1e-6:  # sums of doubles
            rates = np.where(given_yet < limits, weights, 0)
            rates = rates / rates.sum()
            with np.errstate(divide="ignore", invalid="ignore"):
                pieces = np.where(rates > 0, (limits - given_yet) / rates, np.inf)
            piece = min(position - at, pieces.min())
            given_yet = np.where(pieces <= piece, limits, given_yet + rates * piece)
            at += piece
        found.append(given_yet)
    return np.array(found).reshape(-1, len(weights))
