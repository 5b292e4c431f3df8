"""How random the orders are: chi-squares with fixed seeds, and no order that comes back under another address."""

import itertools
import tracemalloc

import numpy as np
import pytest
from orders import deviations, order

from dataload._util.randomness import KEY_WORDS, derive_key, permute, unpermute
from dataload.samplers import GlobalShuffle, Lanes, Mixture, PoolShuffle, Repeat, Sequential, ShardSequential, Weighted
from dataload.samplers.common import MAX_LENGTH

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


def key(seed, epoch=0):
    return derive_key(seed, "test", epoch, words=KEY_WORDS)


def test_is_a_bijection():
    for n in [*range(1, 9), 31, 32, 33, 1023, 1024, 1025, 4095, 4096, 4097, 10007, 65537]:
        for seed in range(3):
            assert np.array_equal(np.sort(permute(np.arange(n), n, key(seed))), np.arange(n)), n
    for n in (0, 10**6):
        assert permute(np.empty(0, np.int64), n, key(0)).shape == (0,)


@pytest.mark.parametrize("n", [1, 1000, 65_537, 10**6, 2**31 + 5, 2**32 - 1, 2**32 + 1, 10**10, MAX_LENGTH])
def test_any_split_of_positions_gives_the_same_in_little_memory_and_has_an_inverse(n):
    positions = np.random.default_rng(0).integers(0, n, 1000)
    before = positions.copy()
    tracemalloc.start()
    whole = permute(positions, n, key(1))
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()
    parts = np.concatenate([permute(part, n, key(1)) for part in np.split(positions, [1, 10, 500])])
    assert np.array_equal(whole, parts)
    assert np.array_equal(positions, before)
    assert whole.dtype == np.int64
    assert whole.min() >= 0
    assert whole.max() < n
    assert [unpermute(image, n, key(1)) for image in whole[:100].tolist()] == positions[:100].tolist()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_handful_of_records_reaches_every_order_equally(n):
    orders = [tuple(permute(np.arange(n), n, key(seed))) for seed in range(3000)]
    _, counts = np.unique(np.array(orders), axis=0, return_counts=True)
    assert len(counts) == [1, 1, 2, 6, 24][n]
    assert deviations(counts) < 4


@pytest.mark.parametrize("n", [3000, 2**15])
def test_differences_at_every_power_of_two_are_uniform(n):
    # The check that four and five rounds fail, by hundreds of standard deviations.
    bins = 50
    for lag in [2**k for k in range((n // 2).bit_length())]:
        counts = np.zeros(bins)
        worst = -np.inf
        for seed in range(12):
            order = permute(np.arange(n), n, key(seed))
            found = np.bincount((order[lag:] - order[:-lag]) % n * bins // n, minlength=bins)
            counts += found
            worst = max(worst, deviations(found))
        assert worst < 7, lag
        assert deviations(counts) < 6, lag


def test_where_an_element_goes_is_uniform_over_seeds():
    n, bins = 5000, 25
    images = np.array([permute(np.array([0, 1, n // 2]), n, key(seed)) for seed in range(3000)])
    for column in images.T:
        assert deviations(np.bincount(column * bins // n, minlength=bins)) < 5
    first, second = images[:, 0] * 10 // n, images[:, 1] * 10 // n
    assert deviations(np.bincount(first * 10 + second, minlength=100)) < 5
