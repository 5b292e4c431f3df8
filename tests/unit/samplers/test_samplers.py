"""What every order promises: each record as often as declared, for any number of records, in little memory."""

import dataclasses
import itertools
import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from dataload.samplers import (
    GlobalShuffle,
    Lanes,
    Mixture,
    PoolShuffle,
    Repeat,
    Sequential,
    ShardSequential,
    Subset,
    Weighted,
)
from dataload.samplers._common import records_of
from dataload.types import Sampler


def order(sampler, epoch=0):
    return sampler.indices(np.arange(len(sampler)), epoch=epoch)


def shards_of(n):
    """`n` records in shards of growing length, empty ones among them."""
    lengths = [0]
    while sum(lengths) < n:
        lengths += [min(n - sum(lengths), n // 7 + len(lengths)), 0]
    return tuple(lengths)


def halves(n):
    return GlobalShuffle(n // 2, 1), GlobalShuffle(n - n // 2, 2)


# name: (n -> the order, times that it serves each record)
ORDERS = {
    "sequential": (Sequential, 1),
    "global": (lambda n: GlobalShuffle(n, 3), 1),
    "global of global": (lambda n: GlobalShuffle(n, 3, parent=GlobalShuffle(n, 4)), 1),
    "shards": (lambda n: ShardSequential(shards_of(n), 3), 1),
    "pool of 1": (lambda n: PoolShuffle(Sequential(n), 1, 3), 1),
    "pool": (lambda n: PoolShuffle(Sequential(n), 10, 3), 1),
    "shards -> pool": (lambda n: PoolShuffle(ShardSequential(shards_of(n), 3), 100, 4), 1),
    "lanes": (lambda n: Lanes(GlobalShuffle(n, 3), 3), 1),
    "shards -> lanes -> pool": (lambda n: Lanes(ShardSequential(shards_of(n), 3), 4, 16, 5), 1),
    "subset": (lambda n: Subset(GlobalShuffle(n, 3), slice(None, None, -1)), 1),
    "repeat": (lambda n: Repeat(PoolShuffle(Sequential(n), 10, 3), 3), 3),
    "repeat of shuffled repeat": (
        lambda n: Repeat(GlobalShuffle(2 * n, 1, parent=Repeat(GlobalShuffle(n, 2), 2)), 2),
        4,
    ),
}
SIZES = [*range(6), *range(7, 12), 31, 32, 33, 97, 127, 128, 129, 1009, 1023, 1024, 1025, 4095, 4096, 4097, 5003]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ORDERS)
def test_each_record_comes_as_often_as_declared(kind, n):
    make, times = ORDERS[kind]
    sampler = make(n)
    assert len(sampler) == times * n
    assert sampler.records == n
    for epoch in (0, 1, 2**40):
        assert np.array_equal(np.sort(order(sampler, epoch)), np.repeat(np.arange(n), times))


@pytest.mark.parametrize("n", [n for n in SIZES if n])
def test_an_urn_is_emptied(n):
    sampler = Weighted(np.arange(1, n + 1), n, 3, replacement=False)
    assert np.array_equal(np.sort(order(sampler)), np.arange(n))
    assert len(Weighted([1], 0, 0)) == order(Weighted([1], 0, 0)).size == 0


@pytest.mark.parametrize("n", [n for n in SIZES if n > 1])
def test_a_mixture_serves_each_record_and_starts_no_part_anew_before_its_end(n):
    sampler = Mixture(halves(n), (1, 2), stop="longest")
    assert sampler.records == n
    counts = Counter(order(sampler, 5).tolist())
    assert sorted(counts) == list(range(n))
    for part in (range(n // 2), range(n // 2, n)):
        assert max(counts[index] for index in part) - min(counts[index] for index in part) <= 1


def huge(n):
    """Orders of n records or more, some of them with many places."""
    share = n // 1000
    shards = (share,) * 999 + (n - 999 * share,)
    halves = GlobalShuffle(n // 2, 1), PoolShuffle(Sequential(n - n // 2), 1024, 2)
    return {
        "sequential": Sequential(n),
        "global": GlobalShuffle(n, 1),
        "shards": ShardSequential(shards, 1),
        "pool": PoolShuffle(Sequential(n), 1024, 1),
        "shards -> pool": PoolShuffle(ShardSequential(shards, 1), 65_536, 2),
        "lanes": Lanes(GlobalShuffle(n, 1), 12),
        "shards -> lanes -> pool": Lanes(ShardSequential(shards, 1), 64, 1024, 2),
        "subset by slice": Subset(GlobalShuffle(n, 1), slice(n, None, -1)),
        "subset by range": Subset(GlobalShuffle(n, 1), range(1, n, 2)),
        "repeat": Repeat(GlobalShuffle(n // 1000, 1), 1000),
        "mixture": Mixture(halves, (1, 1)),
        "endless mixture": Mixture(halves, (0.3, 0.7), stop="never"),
        "weighted": Weighted(np.arange(1, 1000), n, 1),
    }


@pytest.mark.parametrize("n", [10**10, 2**48])
@pytest.mark.parametrize("kind", huge(10**10))
def test_memory_does_not_grow_with_the_number_of_records(kind, n):
    tracemalloc.start()
    try:
        sampler = huge(n)[kind]
        length = len(sampler)
        assert length >= n // 2 - 2000
        blocks = [np.arange(start, start + 4096) for start in (0, length // 2, length - 4096)]
        found = [sampler.indices(block, epoch=1) for block in blocks]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 10**6
    found = np.concatenate(found)
    assert found.min() >= 0
    assert found.max() < sampler.records
    if kind not in ("repeat", "endless mixture", "weighted"):
        assert len(np.unique(found)) == found.size
    # what was computed before changes nothing, nor does the way the positions are taken
    positions = np.concatenate(blocks)
    some = np.random.default_rng(0).permutation(len(positions))[:100]
    assert np.array_equal(huge(n)[kind].indices(positions[some], epoch=1), found[some])


def test_no_order_has_more_than_2_to_48_positions_so_sums_stay_exact():
    # The last positions of the largest orders, where an overflow would show.
    last = np.array([2**48 - 1])
    assert Sequential(2**48).indices(last, epoch=0).tolist() == [2**48 - 1]
    assert Lanes(Sequential(2**48), 65_536).indices(last, epoch=0).tolist() == [2**48 - 1]
    assert PoolShuffle(Sequential(2**48), 1, 0).indices(last, epoch=0).tolist() == [2**48 - 1]
    assert ShardSequential((2**47, 2**47), 0).indices(last, epoch=0) % 2**47 == 2**47 - 1


@pytest.mark.parametrize("kind", ORDERS)
def test_orders_are_frozen_values(kind):
    sampler = ORDERS[kind][0](20)
    assert isinstance(sampler, Sampler)
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    with pytest.raises(AttributeError):
        setattr(sampler, dataclasses.fields(sampler)[0].name, 11)


def test_an_order_of_the_user_s_own_serves_as_many_records_as_it_has_positions_unless_it_says():
    class Own:
        def __len__(self):
            return 12

        def indices(self, positions, *, epoch):
            return positions % 5

    assert records_of(Own()) == PoolShuffle(Own(), 3, 0).records == 12
    telling = type("Telling", (Own,), {"records": 5})()
    assert records_of(telling) == Lanes(telling, 3).records == 5


def test_epochs_of_numpy_s_integers_are_the_same():
    for (make, _), epoch in itertools.product(ORDERS.values(), (0, 3)):
        assert np.array_equal(order(make(40), np.int32(epoch)), order(make(40), epoch))
