"""Sequences one after another, against plain lists; and whole sequences dealt to rows, against the best possible."""

import itertools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataload._util.randomness import derive_key
from dataload.samplers.common import permute
from dataload.samplers.streams.layout import Listed, Shuffled, balance


def array(values):
    return np.array(values, np.int64)


def key(number):
    return derive_key(number, "test", words=2)


def laid_out(units, order):
    """(sequence, units before) at each place."""
    return [(sequence, within) for sequence in order for within in range(units[sequence])]


def assert_found(layout, expected, places):
    found = layout.find(array(places))
    assert found.sequences.shape == found.within.shape == np.shape(places)
    pairs = zip(found.sequences.ravel().tolist(), found.within.ravel().tolist(), strict=True)
    assert list(pairs) == [expected[place] for place in np.ravel(array(places)).tolist()]


UNITS = st.lists(st.integers(0, 5) | st.sampled_from([0, 40]), max_size=300)


@given(units=UNITS, seed=st.integers(0, 99), data=st.data())
def test_places_are_those_of_a_list(units, seed, data):
    order = permute(np.arange(len(units)), len(units), key(seed))
    expected = laid_out(units, order.tolist())
    layouts = (Shuffled(array(units), key(seed)), Listed(array(units)[order], order))
    plain = Listed(array(units))
    for _ in range(3):  # what one question leaves behind is there for the next
        places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=40) if expected else st.just([]))
        for layout in layouts:
            assert_found(layout, expected, places)
        assert_found(plain, laid_out(units, range(len(units))), places)


@pytest.mark.parametrize("count", [63, 64, 65, 2047, 2048, 2049, 6144, 20_000])
def test_an_order_of_many_sequences_is_found_from_anywhere_and_by_threads(count):
    units = np.random.default_rng(0).integers(0, 3, count)
    expected = laid_out(units.tolist(), permute(np.arange(count), count, key(1)).tolist())
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


def test_sequences_may_be_longer_than_any_memory():
    units = [10**12 + i for i in range(200)]
    order = permute(np.arange(200), 200, key(3)).tolist()
    starts = list(itertools.accumulate((units[sequence] for sequence in order), initial=0))
    for layout in (Shuffled(array(units), key(3)), Listed(array(units)[array(order)], array(order))):
        for slot in (0, 1, 63, 64, 150, 199):
            found = layout.find(array([starts[slot], starts[slot + 1] - 1]))
            assert found.sequences.tolist() == [order[slot]] * 2
            assert found.within.tolist() == [0, units[order[slot]] - 1]


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


@pytest.mark.parametrize(
    ("units", "rows", "expected"),
    [
        ([5, 5, 4, 4, 3, 3, 3], 3, [8, 8, 11]),  # three rows could have nine each: the bound is reached
        ([], 3, [0, 0, 0]),
        ([0, 0, 0], 2, [0, 0]),
        ([7], 4, [0, 0, 0, 7]),
    ],
)
def test_rows_that_no_order_makes_equal(units, rows, expected):
    assert sorted(loads(units, rows, list(range(len(units))))) == expected


def test_equally_long_sequences_are_dealt_in_the_order_given():
    by_row, bounds = balance(array([2] * 6), 3, array([3, 1, 5, 0, 2, 4]))
    assert (by_row.tolist(), bounds.tolist()) == ([3, 0, 1, 2, 5, 4], [0, 2, 4, 6])
