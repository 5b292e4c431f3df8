"""How random the orders are: chi-squares with fixed seeds, and no order that comes back under another address."""

import itertools

import numpy as np
import pytest
from orders import deviations, order

from dataload.samplers import GlobalShuffle, Lanes, Mixture, PoolShuffle, Repeat, Sequential, ShardSequential, Weighted

ORDERS = {
    "global": lambda seed: GlobalShuffle(50, seed),
    "shards": lambda seed: ShardSequential((1, 2, 3, 4, 5) * 4, seed),
    "pool": lambda seed: PoolShuffle(Sequential(50), 8, seed),
    "pool of all": lambda seed: PoolShuffle(Sequential(50), 50, seed),
    "lanes with pools": lambda seed: Lanes(Sequential(50), 4, 6, seed),
    "repeat": lambda seed: Repeat(GlobalShuffle(50, seed), 2),
    "weighted": lambda seed: Weighted(np.arange(1, 40), 50, seed),
    "weighted urn": lambda seed: Weighted(np.arange(1, 60), 50, seed, replacement=False),
    "mixture": lambda seed: Mixture((GlobalShuffle(30, seed), GlobalShuffle(40, seed)), (2, 1), seed=seed),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_seeds_and_epochs_do_not_alias(kind):
    addresses = list(itertools.product((-1, 0, 1, 2, 2**64, 2**64 + 1), range(6)))
    orders = {tuple(order(ORDERS[kind](seed), epoch)) for seed, epoch in addresses}
    assert len(orders) == len(addresses)


N = 20_000
WHOLE = {
    "global": GlobalShuffle(N, 0),
    "pool": PoolShuffle(Sequential(N), N, 0),
    "shards": ShardSequential((1,) * N, 0),
    "lane": Lanes(Sequential(N), 1, N, 0),
    "urn": Weighted(np.ones(N), N, 0, replacement=False),
}


def unrelated(one, other):
    return abs(deviations(np.bincount((np.array(one) - other) % N * 100 // N, minlength=100))) < 5


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(WHOLE, 2)))
def test_the_same_seed_for_another_purpose_gives_an_unrelated_order(one, other):
    for epoch in (0, 1):
        assert unrelated(order(WHOLE[one], epoch), order(WHOLE[other], epoch))


@pytest.mark.parametrize("kind", WHOLE)
def test_epochs_and_neighbours_are_unrelated(kind):
    orders = [np.array(order(WHOLE[kind], epoch)) for epoch in range(3)]
    assert all(unrelated(one, other) for one, other in itertools.combinations(orders, 2))
    for found in orders:
        one, other = found.reshape(-1, 2).T * 10 // N
        assert abs(deviations(np.bincount(one * 10 + other, minlength=100))) < 5
