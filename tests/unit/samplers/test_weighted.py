"""Weighted: its frequencies against the weights, its table against a search."""

import numpy as np
import pytest
from orders import deviations, order

from dataload.samplers import Weighted


def test_without_replacement_first_and_second_draws_are_those_of_an_urn():
    weights = np.array([1.0, 2, 4, 8, 3])
    sampler = Weighted(weights, 2, 2, replacement=False)
    draws = np.array([order(sampler, epoch) for epoch in range(2000)])
    first = weights / weights.sum()
    assert deviations(np.bincount(draws[:, 0], minlength=5), first) < 4
    pairs = [(one, two) for one in range(5) for two in range(5) if one != two]
    expected = [first[one] * weights[two] / (weights.sum() - weights[one]) for one, two in pairs]
    assert deviations([np.all(draws == pair, axis=1).sum() for pair in pairs], expected) < 4


def test_the_caller_s_weights_may_change_afterwards():
    weights = np.array([1.0, 0.0])
    sampler = Weighted(weights, 5, 0, replacement=True)
    weights[:] = [0, 1]
    assert order(sampler) == [0] * 5
    with pytest.raises(ValueError, match="read-only"):
        sampler.weights[0] = 0
