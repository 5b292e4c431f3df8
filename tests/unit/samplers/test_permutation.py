"""The keyed bijection: exact, uniform as far as a chi-square sees, and without memory of size n."""

import tracemalloc

import numpy as np
import pytest

from dataload._util.randomness import derive_key
from dataload.samplers.permutation import KEY_WORDS, MAX_LENGTH, permute


def key(seed, epoch=0):
    return derive_key(seed, "test", epoch, words=KEY_WORDS)


def deviations(counts):
    """By how many standard deviations a chi-square of equal expectations misses its mean."""
    counts = np.asarray(counts, float)
    expected = counts.sum() / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return (chi_square - (counts.size - 1)) / np.sqrt(2 * (counts.size - 1))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 9, 31, 32, 33, 1023, 1024, 1025, 4095, 4096, 4097, 10007, 65537])
def test_is_a_bijection(n):
    for seed in range(3):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key(seed))), np.arange(n))


def test_no_positions_no_indices():
    assert permute(np.empty(0, np.int64), 0, key(0)).shape == (0,)
    assert permute(np.empty(0, np.int64), 10**6, key(0)).shape == (0,)


@pytest.mark.parametrize("n", [1000, 10**6, 2**32 - 1, 2**32 + 1, 10**10, MAX_LENGTH])
def test_any_split_of_positions_gives_the_same(n):
    positions = np.random.default_rng(0).integers(0, n, 1000)
    before = positions.copy()
    whole = permute(positions, n, key(1))
    parts = np.concatenate([permute(part, n, key(1)) for part in np.split(positions, [1, 10, 500])])
    assert np.array_equal(whole, parts)
    assert np.array_equal(positions, before)
    assert whole.dtype == np.int64
    assert whole.min() >= 0
    assert whole.max() < n


def test_ten_thousand_million_without_allocating_them():
    tracemalloc.start()
    permute(np.arange(10**10 - 1000, 10**10), 10**10, key(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_handful_of_records_reaches_every_order_equally(n):
    orders = [tuple(permute(np.arange(n), n, key(seed))) for seed in range(6000)]
    _, counts = np.unique(np.array(orders), axis=0, return_counts=True)
    assert len(counts) == [1, 1, 2, 6, 24][n]
    assert deviations(counts) < 4


@pytest.mark.parametrize("n", [3000, 2**15, 100_000])
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
    images = np.array([permute(np.array([0, 1, n // 2]), n, key(seed)) for seed in range(5000)])
    for column in images.T:
        assert deviations(np.bincount(column * bins // n, minlength=bins)) < 5
    first, second = images[:, 0] * 10 // n, images[:, 1] * 10 // n
    assert deviations(np.bincount(first * 10 + second, minlength=100)) < 5


def test_epochs_are_independent():
    n, bins = 100_000, 50
    one, two = (permute(np.arange(n), n, key(0, epoch)) for epoch in (0, 1))
    assert deviations(np.bincount((one - two) % n * bins // n, minlength=bins)) < 5
