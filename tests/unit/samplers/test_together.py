"""The shuffles of many sources evaluated together against the order of each; and shares of any size against a count."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import order

from dataload.samplers import GlobalShuffle, Mixture, Repeat, Sequential, together
from dataload.samplers.common import MAX_LENGTH
from dataload.samplers.mixture_weights import Quotas
from dataload.samplers.together import Orders
from dataload.storage.core import core

LENGTHS = [1, 2, 3, 17, 1023, 1024, 1025, 1500, 65_536, 65_537, 10**6]
LONG = [2**31 + 5, 2**32 - 1, 2**32, 2**32 + 1, 2**47 - 1, 2**47 + 1, MAX_LENGTH]


@given(st.data())
def test_orders_together_are_the_orders_one_by_one(data):
    known = st.sampled_from(LENGTHS) if data.draw(st.booleans()) else st.sampled_from(LENGTHS + LONG)
    kinds = [st.builds(Sequential, known), st.builds(GlobalShuffle, known, st.integers(-3, 3))]
    kinds.append(st.builds(lambda n, seed: Repeat(GlobalShuffle(n, seed), 2), st.sampled_from(LENGTHS[:5]), st.just(1)))
    samplers = data.draw(st.lists(st.one_of(kinds), min_size=1, max_size=6))
    # A few are evaluated in another way, and small ones in blocks.
    more = [[], [Sequential(1)] * 20, [GlobalShuffle(1000 + seed, seed) for seed in range(20)]]
    samplers += data.draw(st.sampled_from(more))
    orders = Orders(tuple(samplers))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for _ in range(3):  # a later call finds what the one before has prepared
        components = rng.integers(0, len(samplers), 300)
        lengths = np.array([*map(len, samplers)])
        ends = np.minimum(MAX_LENGTH, 3 * lengths)
        draws, firsts = rng.integers(0, ends[components]), rng.integers(0, 5, len(samplers))
        if data.draw(st.booleans()):  # one pass of each, as at the start
            draws %= lengths[components]
        expected = []
        for component, draw in zip(components.tolist(), draws.tolist(), strict=True):
            number, place = divmod(draw, len(samplers[component]))
            place = np.array([place])
            expected += samplers[component].indices(place, epoch=int(firsts[component]) + number).tolist()
        assert orders.indices(components, draws, firsts).tolist() == expected
        orders = pickle.loads(pickle.dumps(orders)) if data.draw(st.booleans()) else orders


def test_an_order_is_the_same_after_an_interrupt_while_a_pass_was_prepared(monkeypatch):
    orders, zeros = Orders((GlobalShuffle(5, 0), GlobalShuffle(2000, 1))), np.zeros(2, np.int64)
    components, draws = np.array([0, 0, 1, 1]), np.array([0, 3, 5, 1999])
    expected = orders.indices(components, draws, zeros).tolist()

    def interrupted(*args):
        core().put_keys(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(together, "core", lambda: SimpleNamespace(put_keys=interrupted, permute=core().permute))
        with pytest.raises(KeyboardInterrupt):
            orders.indices(components, draws, zeros + 1)
    assert orders.indices(components, draws, zeros).tolist() == expected


ROWS = {
    "two": (0.3, 0.7),
    "equal": (1.0,) * 7,
    "halves": tuple(0.5**n for n in range(40)),
    "by rank": tuple(1 / n**1.2 for n in range(1, 400)),
    "rare": (1.0, 1e-9, 0.5, 0.0, 1e-4),
    "far apart": (1e300, 1e-300, 0.0, 1e299),
    "one": (0.0, 2.0),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_window_of_any_length_has_the_shares(row):
    shares = np.array(row) / np.sum(row)
    for first in (0, 10**12 - 9, 2**47):
        quotas, places = Quotas(row, 5), first + np.arange(50_000)
        components, draws = quotas.turns(places)
        before = quotas.draws(first)
        assert before.sum() == first
        assert np.abs(before - shares * first).max() < 4, "the positions before are not its share"
        for component, share in enumerate(shares.tolist()):
            is_own = components == component
            # Draws follow each other, from those before on.
            assert draws[is_own].tolist() == list(range(before[component], before[component] + is_own.sum()))
            strays = np.concatenate([[0], np.cumsum(is_own - share)])
            assert strays.max() - strays.min() < 5, "some window is too far from its share"
        for length in (first, first + 1, first + 20_000, first + 50_000):
            assert quotas.draws(length).sum() == length
            counted = np.bincount(components[: length - first], minlength=len(row))
            assert (quotas.draws(length) - before == counted).all()


def test_any_places_in_any_order_are_those_of_the_whole():
    row, rng = ROWS["by rank"], np.random.default_rng(0)
    quotas = Quotas(row, 1, limits=np.arange(len(row)) + 1000)
    whole = quotas.turns(np.arange(100_000))
    assert len(pickle.dumps(quotas)) < 16 * len(row) + 1000
    for _ in range(3):
        places = rng.integers(0, 100_000, 500)
        again = pickle.loads(pickle.dumps(quotas)).turns(places)
        assert [found.tolist() for found in again] == [found[places].tolist() for found in whole]


def test_no_limit_is_passed_by_the_rounding_of_weights_that_are_far_apart():
    limits = np.array([151, 34, 351, 1626, 1299])
    components, _ = Quotas([1e-15, 1.0, 0.3, 0.3, 0.1], 1, limits=limits).turns(np.arange(limits.sum()))
    assert np.bincount(components).tolist() == limits.tolist()


SMALL, RARE = (1.0, 1e-5, 0.3), (1.0, 1e-4, 0.3)


def test_weights_that_fit_no_window_have_their_shares_in_any_number_of_positions():
    parts = tuple(GlobalShuffle(1000, seed) for seed in range(3))
    mixture = Mixture(parts, SMALL, "never", seed=3)
    assert order(mixture, 1, 5000) == order(Mixture(parts, SMALL, "never", seed=3, window="any"), 1, 5000)
    found = np.bincount(np.array(order(mixture, 0, 300_000)) // 1000)
    assert np.abs(found - np.array(SMALL) / sum(SMALL) * 300_000).max() < 4
    # What is not refused keeps its window, unless the other rule is named.
    assert order(Mixture(parts, (1, 1, 2)), 0, 100) != order(Mixture(parts, (1, 1, 2), window="any"), 0, 100)


def test_the_repr_of_many_components_is_short():
    many = Mixture([GlobalShuffle(9, n) for n in range(65)], [1] * 65, "never", 7)
    assert repr(many) == "Mixture(65 samplers, stop='never', seed=7)"
    few = Mixture([Sequential(9)] * 64, [1] * 64)
    assert eval(repr(few)) == few
