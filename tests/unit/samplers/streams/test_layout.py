"""Sequences one after another, against plain lists; and whole sequences dealt to rows, against the best possible."""

import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataload._util.randomness import derive_key, permute
from dataload.samplers.streams.layout import Shuffled, balance


def array(values):
    return np.array(values, np.int64)


def key(number):
    return derive_key(number, "test", words=2)


def assert_found(layout, expected, places):
    found = layout.find(array(places))
    assert found.sequences.shape == found.within.shape == np.shape(places)
    pairs = zip(found.sequences.ravel().tolist(), found.within.ravel().tolist(), strict=True)
    assert list(pairs) == [expected[place] for place in np.ravel(array(places)).tolist()]


@pytest.mark.parametrize("count", [63, 64, 65, 2047, 2048, 2049, 6144, 20_000])
def test_an_order_of_many_sequences_is_found_from_anywhere_and_by_threads(count):
    units = np.random.default_rng(0).integers(0, 3, count)
    order = permute(np.arange(count), count, key(1)).tolist()
    expected = [(sequence, within) for sequence in order for within in range(units[sequence])]
    total = len(expected)
    for asked in (
        [[0], [total - 1], range(total)],
        [[total - 1], [0]],
        [[total // 2, 1], np.arange(total).reshape(-1, 1, 1)],
    ):
        layout = Shuffled(units, key(1))
        small = len(pickle.dumps(layout))
        for places in asked:
            assert_found(layout, expected, places)
        assert len(pickle.dumps(layout)) == small, "what it has computed is not pickled"

    def ask(number, layout=Shuffled(units, key(1))):  # noqa: B008 - shared by all threads
        for start in range(37 * number, total, 4 * 37):
            assert_found(layout, expected, range(start, min(start + 100, total)))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


def loads(units, rows, order):
    """The units of each row, after a look at what `balance` has dealt."""
    by_row, bounds = balance(array(units), rows, array(order))
    assert sorted(by_row.tolist()) == list(range(len(units)))
    assert len(bounds) == rows + 1
    assert (bounds[0], bounds[-1]) == (0, len(units))
    parts = [by_row[start:stop].tolist() for start, stop in itertools.pairwise(bounds.tolist())]
    assert [sorted(part, key=order.index) for part in parts] == parts
    return [sum(units[sequence] for sequence in part) for part in parts]


def best(units, rows):
    """The least that the fullest row can have."""
    deals = itertools.product(range(rows), repeat=len(units))
    return min(max(np.bincount(deal, units, minlength=rows), default=0) for deal in deals)


@given(
    units=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    rows=st.integers(1, 3),
    draw=st.randoms(use_true_random=False),
)
@example([5, 5, 4, 4, 3, 3, 3], 3, random.Random(0))
def test_rows_have_about_equally_much(units, rows, draw):
    order = list(range(len(units)))
    draw.shuffle(order)
    found = loads(units, rows, order)
    assert max(found) <= (4 / 3 - 1 / (3 * rows)) * best(units, rows) + 1e-9
