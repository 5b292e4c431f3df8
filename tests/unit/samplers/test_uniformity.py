"""How random the orders are: chi-squares with fixed seeds, and no order that comes back under another address."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from orders import deviations, order

from dataload.samplers import GlobalShuffle, Lanes, Mixture, PoolShuffle, Repeat, Sequential, ShardSequential, Weighted


def orders_counted(orders, kinds):
    """How often each of `kinds` possible orders came."""
    counts = Counter(tuple(map(int, order)) for order in orders)
    return [*counts.values(), *[0] * (kinds - len(counts))]


def test_an_element_stays_in_the_pool_for_a_geometric_number_of_steps():
    n, pool_size, bins = 100_000, 50, 20
    emitted = np.array(order(PoolShuffle(Sequential(n), pool_size, 1)))
    when = np.empty(n, np.int64)
    when[emitted] = np.arange(n)
    elements = np.arange(pool_size, n - 40 * pool_size)  # put in one by one, and emitted before the end
    steps = when[elements] - (elements - pool_size)
    assert steps.min() == 1
    assert abs(steps.mean() - pool_size) < 0.5
    # P(steps > k) = (1 - 1/K)^k, cut at about equal parts
    stays = 1 - 1 / pool_size
    edges = np.array([round(math.log(1 - part / bins, stays)) for part in range(1, bins)])
    counts = np.bincount(np.searchsorted(edges, steps, side="left"), minlength=bins)
    beyond = stays ** np.concatenate([[0], edges])
    assert abs(deviations(counts, beyond - np.append(beyond[1:], 0))) < 5


def test_the_slots_of_a_pool_are_even_and_so_are_pairs_of_them():
    # What comes out first of a pool is the slot's number, as long as it was not refilled: one step per epoch.
    pool = PoolShuffle(Sequential(100), 10, 3)
    firsts = np.array([pool.indices(np.arange(2), epoch=epoch) for epoch in range(3000)])
    assert deviations(np.bincount(firsts[:, 0], minlength=10)) < 4
    pairs = np.bincount(firsts[:, 0] * 11 + firsts[:, 1], minlength=110).reshape(10, 11)
    # The second is the same slot, refilled with element 10, or another.
    assert (np.diagonal(pairs) == 0).all()
    assert deviations(pairs[~np.eye(10, 11, dtype=bool)]) < 4


def test_a_pool_is_emptied_in_any_order():
    drained = [order(PoolShuffle(Sequential(60), 4, seed), 5)[-4:] for seed in range(1000)]
    assert deviations(orders_counted([np.argsort(np.argsort(elements)) for elements in drained], 24)) < 4


@pytest.mark.parametrize("pool_size", [4, 100])
def test_a_pool_as_large_as_the_parent_shuffles_all_of_it(pool_size):
    orders = [order(PoolShuffle(Sequential(4), pool_size, seed), 1) for seed in range(1000)]
    assert deviations(orders_counted(orders, 24)) < 4


def test_shards_come_in_any_order():
    starts = {0, 2, 7, 8}
    samplers = [ShardSequential((2, 5, 1, 3), seed) for seed in range(50)]
    orders = [[i for i in order(sampler, epoch) if i in starts] for sampler in samplers for epoch in range(20)]
    assert deviations(orders_counted(orders, 24)) < 4


def test_parts_of_a_mixture_stand_in_any_order():
    thirds = [order(Mixture((Sequential(1),) * 3, (1, 1, 1), window=3, seed=seed)) for seed in range(300)]
    assert deviations(orders_counted(thirds, 6)) < 4
    # One place anywhere among three, each of these in its own third.
    mixtures = [
        Mixture((Sequential(1), Sequential(3)), (1, 3), window=4, seed=seed, stop="longest") for seed in range(300)
    ]
    lonely = [int(np.argmin(order(mixture))) for mixture in mixtures]
    assert deviations(np.bincount(lonely, minlength=4), [1, 2, 2, 1]) < 4


def test_rows_of_weights_have_places_of_their_own():
    mixture = Mixture((Sequential(1000),) * 2, ((1, 1), (1, 1)), window=1000)
    one, other = (np.array(order(mixture, epoch)) < 1000 for epoch in (0, 1))
    assert 0.4 < (one == other).mean() < 0.6


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
