"""The keyed bijection: exact, uniform as far as a chi-square sees, and without memory of size n."""

import tracemalloc

import numpy as np
import pytest
from orders import deviations

from dataload._util.randomness import KEY_WORDS, derive_key, permute, unpermute
from dataload.samplers.common import MAX_LENGTH


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
