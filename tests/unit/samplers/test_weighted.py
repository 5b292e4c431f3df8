"""Weighted: its frequencies against the weights, its table against a search."""

import numpy as np
import pytest
from orders import deviations, order

from dataload._util.randomness import derive_key
from dataload.samplers import Weighted
from dataload.samplers.weighted import uniform


def test_without_replacement_first_and_second_draws_are_those_of_an_urn():
    weights = np.array([1.0, 2, 4, 8, 3])
    sampler = Weighted(weights, 2, 2, replacement=False)
    draws = np.array([order(sampler, epoch) for epoch in range(2000)])
    first = weights / weights.sum()
    assert deviations(np.bincount(draws[:, 0], minlength=5), first) < 4
    pairs = [(one, two) for one in range(5) for two in range(5) if one != two]
    expected = [first[one] * weights[two] / (weights.sum() - weights[one]) for one, two in pairs]
    assert deviations([np.all(draws == pair, axis=1).sum() for pair in pairs], expected) < 4


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("scale", [2.0**-1060, 2.0**-500, 4.0, 2.0**1015])
def test_only_proportions_matter(scale, replacement):
    weights = np.array([3, 1, 7, 2, 11.0, 1])
    expected = order(Weighted(weights, 6, 1, replacement=replacement))
    assert order(Weighted(weights * scale, 6, 1, replacement=replacement)) == expected


def test_the_largest_and_the_smallest_float_together():
    largest, smallest = np.finfo(float).max, 5e-324
    assert order(Weighted([smallest, largest, largest], 3, 0, replacement=False))[2] == 0
    assert set(order(Weighted([smallest, largest, largest, smallest], 200, 0))) == {1, 2}


@pytest.mark.parametrize(
    "weights",
    [
        [3.0],
        [0, 0, 1, 0],
        np.random.default_rng(0).random(1000),
        np.where(np.arange(5000) % 7 == 3, 1.0, 0.0),
        10.0 ** np.random.default_rng(1).uniform(-12, 2, 3000),
        np.r_[1e12, np.full(4999, 1e-3)],
        np.r_[np.full(50_000, 1e-9), 1.0],
    ],
)
def test_the_table_finds_what_a_search_finds(weights):
    sampler, positions = Weighted(weights, 10**6, 5), np.arange(30_000)
    shares = uniform(derive_key(5, "weighted", 2, words=1)[0], positions)
    scaled = np.ldexp(np.asarray(weights, float), -np.frexp(np.max(weights))[1])
    ends = np.cumsum(scaled)
    expected = np.searchsorted(ends, shares * ends[-1], side="right")
    assert np.array_equal(sampler.indices(positions, epoch=2), expected)


def test_the_caller_s_weights_may_change_afterwards():
    weights = np.array([1.0, 0.0])
    sampler = Weighted(weights, 5, 0, replacement=True)
    weights[:] = [0, 1]
    assert order(sampler) == [0] * 5
    with pytest.raises(ValueError, match="read-only"):
        sampler.weights[0] = 0
