"""PoolShuffle against the pool that it stands for, run step by step."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataload._util.randomness import derive_key
from dataload.samplers import PoolShuffle, Sequential
from dataload.samplers.permutation import KEY_WORDS, permute

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


@pytest.mark.parametrize(("length", "pool_size"), [(24, 1), (24, 2), (24, 7), (24, 23), (24, 24), (24, 1000), (2, 1)])
def test_every_window_is_the_running_pool_s(length, pool_size):
    expected = run_pool(length, pool_size)
    warm = pool_of(length, pool_size)
    for start, stop in itertools.combinations(range(length + 1), 2):
        window = np.arange(start, stop)
        cold = pool_of(length, pool_size)
        assert np.array_equal(cold.indices(window, epoch=EPOCH), expected[start:stop]), (start, stop)
        assert np.array_equal(warm.indices(window, epoch=EPOCH), expected[start:stop]), (start, stop)


@pytest.mark.parametrize("pool_size", [1, 2, 3, 64, 1000, 4999, 5000, 5001, 10**6, 2**31])
def test_random_windows_warm_and_cold(pool_size):
    length = 5000
    expected = run_pool(length, pool_size)
    random = np.random.default_rng(pool_size)
    warm = pool_of(length, pool_size)
    for start, stop in np.sort(random.integers(0, length + 1, (60, 2)), axis=1):
        window = np.arange(start, stop)
        assert np.array_equal(warm.indices(window, epoch=EPOCH), expected[start:stop])
        assert np.array_equal(pool_of(length, pool_size).indices(window[:30], epoch=EPOCH), expected[start:stop][:30])


@pytest.mark.parametrize("pool_size", [3, 20, 900])
def test_scattered_positions_in_any_order_with_duplicates(pool_size):
    length = 20_000
    expected = run_pool(length, pool_size)
    random = np.random.default_rng(0)
    sampler = pool_of(length, pool_size)
    for count in (1, 2, 10, 500):
        positions = random.integers(0, length, count)
        assert np.array_equal(sampler.indices(positions, epoch=EPOCH), expected[positions])
        with_gaps = np.sort(random.choice(length, count, replace=False))
        assert np.array_equal(pool_of(length, pool_size).indices(with_gaps, epoch=EPOCH), expected[with_gaps])


@pytest.mark.parametrize("pool_size", [500, 70_000])
def test_more_than_one_block_of_hashes(pool_size):
    # 65,536 steps are computed at once; a pool beyond that is sorted and looked for in wider numbers.
    length = 200_000
    expected = run_pool(length, pool_size)
    assert np.array_equal(pool_of(length, pool_size).indices(np.arange(length), epoch=EPOCH), expected)
    warm = pool_of(length, pool_size)
    for start in (65_535, 65_536, 131_000, 199_990):
        window = np.arange(start, min(start + 70_000, length))
        assert np.array_equal(warm.indices(window, epoch=EPOCH), expected[window])
        assert np.array_equal(pool_of(length, pool_size).indices(window, epoch=EPOCH), expected[window])


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


def test_epochs_interleaved():
    # The memory holds two; three take turns here, forwards and backwards.
    expected = {epoch: run_pool(3000, 50, epoch=epoch) for epoch in range(3)}
    sampler = pool_of(3000, 50)
    for start in [*range(0, 3000, 100), *range(2900, -1, -100)]:
        for epoch in range(3):
            window = np.arange(start, start + 100)
            assert np.array_equal(sampler.indices(window, epoch=epoch), expected[epoch][window])


def test_threads_that_share_a_sampler():
    expected = {epoch: run_pool(4000, 30, epoch=epoch) for epoch in range(2)}
    sampler = pool_of(4000, 30)

    def right(task):
        start, epoch = task
        window = np.arange(start, start + 40)
        return np.array_equal(sampler.indices(window, epoch=epoch), expected[epoch][window])

    tasks = [(start, epoch) for start in range(0, 4000, 40) for epoch in range(2)] * 3
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(right, tasks))
