"""Repeat against lists put one after another."""

import numpy as np
import pytest

from dataload.samplers import GlobalShuffle, Repeat, Sequential


def order(sampler, epoch=0):
    return sampler.indices(np.arange(len(sampler)), epoch=epoch).tolist()


@pytest.mark.parametrize("times", [1, 2, 5, 40])
@pytest.mark.parametrize("length", [0, 1, 2, 13])
def test_repetitions_are_the_parent_s_epochs(length, times):
    parent = GlobalShuffle(length, 3)
    for epoch in range(3):
        expected = [index for r in range(times) for index in order(parent, epoch * times + r)]
        assert order(Repeat(parent, times), epoch) == expected


def test_each_epoch_is_another_even_when_nested():
    sampler = Repeat(Repeat(GlobalShuffle(30, 0), 3), 2)
    seen = [tuple(part) for epoch in range(5) for part in np.reshape(order(sampler, epoch), (6, 30))]
    assert len(set(seen)) == 30


def test_positions_in_any_order():
    sampler = Repeat(GlobalShuffle(50, 1), 30)
    expected = np.array(order(sampler, 2))
    positions = np.random.default_rng(0).integers(0, 1500, 400)
    assert np.array_equal(sampler.indices(positions, epoch=2), expected[positions])


def test_as_often_as_positions_reach():
    sampler = Repeat(Sequential(3), 2**48 // 3)
    assert len(sampler) == 2**48 // 3 * 3
    last = np.array([len(sampler) - 1, 0, len(sampler) - 2])
    assert sampler.indices(last, epoch=2**40).tolist() == [2, 0, 1]
