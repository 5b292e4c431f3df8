"""Subset against Python's own slicing and picking; Repeat to the largest length."""

import numpy as np
import pytest

from dataload.samplers import GlobalShuffle, Repeat, Sequential, Subset


def order(sampler, epoch=0):
    return sampler.indices(np.arange(len(sampler)), epoch=epoch).tolist()


def test_as_often_as_positions_reach():
    sampler = Repeat(Sequential(3), 2**48 // 3)
    assert len(sampler) == 2**48 // 3 * 3
    last = np.array([len(sampler) - 1, 0, len(sampler) - 2])
    assert sampler.indices(last, epoch=2**40).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "selection",
    [
        slice(None),
        slice(3, 9),
        slice(None, None, -1),
        slice(-4, None),
        slice(9, 2, -3),
        slice(15, 100),
        slice(5, 5),
        slice(None, None, 2**62),
    ],
)
def test_a_slice_is_that_of_a_list(selection):
    parent = GlobalShuffle(12, 1)
    for epoch in range(3):
        assert order(Subset(parent, selection), epoch) == order(parent, epoch)[selection]
    assert order(Subset(Sequential(12), selection)) == list(range(12))[selection]


@pytest.mark.parametrize(
    "selection",
    [
        [],
        [3],
        [11, 0, 11, -1, -12],
        (1, 2),
        iter([4, 5]),
        range(2, 9, 3),
        range(11, -1, -1),
        range(-3, 3),
        range(-1, -13, -2),
        range(0),
        np.array([5, 5, -1]),
        np.array([7, 1], np.uint8),
        np.array([]),
    ],
)
def test_integers_pick_from_the_order(selection):
    chosen = list(selection) if not hasattr(selection, "__next__") else [4, 5]
    sampler = Subset(Sequential(12), selection)
    assert order(sampler) == [range(12)[int(position)] for position in chosen]
    assert sampler.records == 12
    parent = GlobalShuffle(12, 1)
    for epoch in range(3):
        expected = order(parent, epoch)
        assert order(Subset(parent, chosen), epoch) == [expected[int(position)] for position in chosen]


def test_the_caller_s_array_may_change_afterwards():
    chosen = np.array([1, 2, 3])
    sampler = Subset(Sequential(10), chosen)
    chosen[:] = 0
    assert order(sampler) == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        sampler.selection[0] = 5


@pytest.mark.parametrize("selection", [slice(10, None, 3), range(10, 2**48, 3)])
def test_a_range_stays_one(selection):
    sampler = Subset(Sequential(2**48), selection)
    assert len(sampler) == (2**48 - 10 + 2) // 3
    assert sampler.selection == range(10, 2**48, 3)
    assert sampler.indices(np.array([0, 10**12]), epoch=0).tolist() == [10, 10 + 3 * 10**12]
