"""PoolShuffle against the pool that it stands for, run step by step."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataload._util.randomness import KEY_WORDS, derive_key, permute
from dataload.samplers import PoolShuffle, Sequential

SEED, EPOCH = 11, 3


def slot_at(step, size, seed=SEED, epoch=EPOCH):
    """SplitMix64 in Python's own integers, scaled to the pool."""
    wrap = 2**64 - 1
    bits = (step * 0x9E3779B97F4A7C15 + int(derive_key(seed, "pool", epoch, words=1)[0])) & wrap
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & wrap
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & wrap
    return ((bits ^ bits >> 31) >> 32) * size >> 32


def run_pool(length, pool_size, seed=SEED, epoch=EPOCH):
    """Fill a pool, emit and refill a random slot of it at each step, and empty it at the end."""
    coming = iter(range(length))
    pool = list(itertools.islice(coming, pool_size))
    emitted = []
    for step, element in enumerate(coming):
        slot = slot_at(step, len(pool), seed, epoch)
        emitted.append(pool[slot])
        pool[slot] = element
    drain = permute(np.arange(len(pool)), len(pool), derive_key(seed, "pool-drain", epoch, words=KEY_WORDS))
    return np.array(emitted + [pool[slot] for slot in drain], np.int64)


def pool_of(length, pool_size):
    return PoolShuffle(Sequential(length), pool_size, SEED)


@pytest.mark.parametrize("pool_size", [1, 2, 3, 20, 900, 4999, 5000, 5001, 2**31])
def test_windows_and_scattered_positions_in_any_order_with_duplicates(pool_size):
    length = 5000
    expected = run_pool(length, pool_size)
    random = np.random.default_rng(pool_size)
    warm = pool_of(length, pool_size)
    windows = [np.arange(*window) for window in np.sort(random.integers(0, length + 1, (20, 2)), axis=1)]
    scattered = [random.integers(0, length, count) for count in (1, 2, 10, 500)]
    with_gaps = [np.sort(random.choice(length, count, replace=False)) for count in (1, 10, 500)]
    for positions in (*windows, *scattered, *with_gaps):
        for sampler in (warm, pool_of(length, pool_size)):
            assert np.array_equal(sampler.indices(positions, epoch=EPOCH), expected[positions])


@pytest.mark.parametrize("pool_size", [1, 16, 100])
def test_far_into_a_long_order_each_slot_is_looked_for(pool_size):
    length, first = 10**10, 7 * 10**9

    def emitted_at(time):
        slot, step = slot_at(time, pool_size), time - 1
        while slot_at(step, pool_size) != slot:
            step -= 1
        return step + pool_size

    window = np.arange(first, first + 200)
    expected = [emitted_at(time) for time in window.tolist()]
    assert pool_of(length, pool_size).indices(window, epoch=EPOCH).tolist() == expected


def test_threads_that_share_a_sampler():
    """The memory holds two epochs; three take turns."""
    expected = {epoch: run_pool(4000, 30, epoch=epoch) for epoch in range(3)}
    sampler = pool_of(4000, 30)

    def right(task):
        start, epoch = task
        window = np.arange(start, start + 40)
        return np.array_equal(sampler.indices(window, epoch=epoch), expected[epoch][window])

    tasks = list(itertools.product([*range(0, 4000, 40), *range(3960, -1, -40)], range(3)))
    assert all(map(right, tasks))
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, tasks))
