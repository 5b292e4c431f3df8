"""Weighted: its frequencies against the weights, its table against a search."""

import math

import numpy as np
import pytest
from orders import deviations, order

from dataload._util.randomness import derive_key
from dataload.samplers import Weighted
from dataload.samplers.weighted import _log, uniform

WEIGHTS = [3, 0, 1, 7, 0, 0, 2, 11, 1, 0]


def test_with_replacement_records_come_as_often_as_they_weigh():
    counts = np.bincount(order(Weighted(WEIGHTS, 50_000, 1)), minlength=len(WEIGHTS))
    some = np.flatnonzero(WEIGHTS)
    assert counts.sum() == counts[some].sum(), "a record without a weight was drawn"
    assert deviations(counts[some], np.array(WEIGHTS)[some]) < 4


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
    ("weights", "number", "record"),
    [
        ([0, 2, 0, 3, 0, 0], 2.0**-53, 1),  # the first and the last with a weight
        ([0, 2, 0, 3, 0, 0], 1 - 2.0**-53, 3),
        ([1, 0, 1], 1 / 2, 2),  # where a part of the table begins
        ([1, 3, 4], 1 / 8, 1),  # a step on
        ([1, 1, 2, 12], 2 / 16, 2),  # two
        ([1] * 64 + [4096 - 64], 20 / 4096, 20),  # many
    ],
)
def test_a_number_between_two_records_draws_the_second(monkeypatch, weights, number, record):
    monkeypatch.setattr("dataload.samplers.weighted.uniform", lambda key, values: np.full(len(values), number))
    assert order(Weighted(weights, 2, 0)) == [record, record]


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


def test_numbers_are_inside_of_0_and_1_at_the_extremes_of_the_hash(monkeypatch):
    extremes = np.array([0, 2**64 - 1], np.uint64)
    monkeypatch.setattr("dataload.samplers.weighted.hash64", lambda key, values: extremes)
    assert uniform(np.uint64(0), np.arange(2)).tolist() == [2.0**-53, 1 - 2.0**-53]


def test_the_logarithm_is_that_of_the_mathematics_library():
    random = np.random.default_rng(0)
    powers = 2.0 ** -np.arange(1, 54)
    middle = np.sqrt(0.5) + np.arange(-500, 500) * 2.0**-53
    values = np.concatenate([random.random(20_000), powers, 1 - powers, middle])
    expected = np.array([math.log(value) for value in values.tolist()])
    assert (np.abs(_log(values) - expected) <= 5e-16 * np.abs(expected)).all()


def test_the_caller_s_weights_may_change_afterwards():
    weights = np.array([1.0, 0.0])
    sampler = Weighted(weights, 5, 0, replacement=True)
    weights[:] = [0, 1]
    assert order(sampler) == [0] * 5
    with pytest.raises(ValueError, match="read-only"):
        sampler.weights[0] = 0
