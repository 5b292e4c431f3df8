"""ShardSequential: another order of shards in each epoch; tests/properties/test_orders.py compares it with lists."""

import itertools

import numpy as np

from dataload.samplers import ShardSequential


def order(sampler, epoch=0):
    return sampler.indices(np.arange(len(sampler)), epoch=epoch).tolist()


def test_the_order_of_shards_changes_with_the_epoch():
    sampler = ShardSequential((4,) * 20, 0)
    assert len({tuple(order(sampler, epoch)) for epoch in range(10)}) == 10


def test_lengths_may_be_any_iterable_of_integers():
    assert ShardSequential(iter([np.int64(2), 3]), 0) == ShardSequential((2, 3), 0)


def test_epochs_interleaved():
    sampler = ShardSequential((3, 1, 4, 1, 5), 7)
    expected = {epoch: order(ShardSequential((3, 1, 4, 1, 5), 7), epoch) for epoch in range(3)}
    for position, epoch in itertools.product(range(14), range(3)):
        assert sampler.indices(np.array([position]), epoch=epoch).tolist() == [expected[epoch][position]]


def test_its_repr_does_not_list_the_shards():
    assert repr(ShardSequential((10,) * 10_000, 7)) == "ShardSequential(10000 shards, 100000 records, seed=7)"
