"""Mixture against a loop that deals from each part's own order, and its proportions against the weights."""

import itertools
import pickle
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
from orders import order

from dataload._util.fingerprint import fingerprint
from dataload.samplers import GlobalShuffle, Mixture, Sequential


def with_ranks(weights, length, *, epoch=0, **settings):
    """Which part stands at each place: a part of one record has no other index."""
    row = weights[0] if isinstance(weights[0], tuple) else weights  # also of weights by position
    parts = len(row)
    return order(Mixture((Sequential(1),) * parts, weights, stop="never", **settings), epoch, length)


def weights_of(row):
    total = sum(map(Fraction, row))
    return [Fraction(weight) / total for weight in row]


IRRATIONAL = (2**0.5, 3**0.5, 5**0.5, 7**0.5)
WEIGHTS = [
    *(((1,), None, 1000), ((1, 1), None, 1000), ((1, 2), None, 1002), ((0.1, 0.2, 0.7), None, 1000)),
    *(((0.25, 0, 0.75), None, 1000), ((1, 1336), None, 1337), ((1, 4998), None, 4999), (IRRATIONAL, None, 10_000)),
    *(((1, 9999), None, 10_000), ((3, 5, 2), 10, 10), ((3, 5, 2), 13, 13), ((1, 1, 1), 4, 4)),
    *(((1e300, 1e300), 2, 2), ((1, 1e-3, 1e-3), 1002, 1002)),
]


@pytest.mark.parametrize(("weights", "window", "stated"), WEIGHTS)
def test_proportions_are_exact_in_every_window(weights, window, stated):
    parts = np.array(with_ranks(weights, 3 * stated + 7, window=window, seed=4))
    counts = np.bincount(parts[:stated], minlength=len(weights))
    for part, share in enumerate(weights_of(weights)):
        assert abs(counts[part] - share * stated) < 1, "not rounded"
        # (places + 1,): how many of the part's came before; the difference a window apart counts a window.
        before = np.concatenate([[0], np.cumsum(parts == part)])
        assert set((before[stated:] - before[:-stated]).tolist()) == {counts[part]}
    assert len(parts) == 3 * stated + 7


def walk(parts, samplers, weights_used, stop, epoch, epochs):
    """Take the next of the part whose turn it is until it is time to stop."""
    firsts = [0, *itertools.accumulate(sampler.records for sampler in samplers)]
    taken, out = Counter(), []
    for part in parts:
        sampler = samplers[part]
        if stop == "first" and taken[part] == len(sampler):
            return out
        again, place = divmod(taken[part], len(sampler))
        index = sampler.indices(np.array([place]), epoch=epoch * epochs[part] + again)[0]
        out.append(int(index) + firsts[part])
        taken[part] += 1
        if stop == "longest" and all(taken[used] >= len(samplers[used]) for used in weights_used):
            return out
    assert stop == "never", "not enough places given"
    return out


DEALS = [
    *(((5,), (1,)), ((1, 1), (1, 1)), ((10, 10), (1, 1)), ((3, 40), (1, 1)), ((7, 5, 30), (2, 1, 4))),
    *(((100, 3, 8), (1, 0, 9)), ((0, 3, 8), (0, 0.5, 0.5)), ((300, 1), (0.3, 0.7))),
    *(((90, 11, 13, 17), (4, 3, 2, 1)), ((700, 900, 40), {0: (2, 1, 1), 77: (1, 3, 0), 150: (1, 5, 0)})),
]


@pytest.mark.parametrize("stop", ["first", "longest"])
@pytest.mark.parametrize(("lengths", "weights"), DEALS)
def test_an_epoch_is_what_a_loop_would_deal(lengths, weights, stop):
    """Also where weights change: parts go on where they are, and one that is dropped need not come to its end."""
    samplers = tuple(GlobalShuffle(length, seed) for seed, length in enumerate(lengths))
    mixture = Mixture(samplers, weights, stop=stop, seed=3)
    parts = with_ranks(weights, 10_000, seed=3)
    last = weights[150] if isinstance(weights, dict) else weights
    used = [part for part, weight in enumerate(last) if weight]
    drawn = Counter(parts[: len(mixture)])
    epochs = {part: -(-drawn[part] // len(samplers[part])) for part in range(len(lengths)) if lengths[part]}
    for epoch in range(3):
        assert order(mixture, epoch) == walk(parts, samplers, used, stop, epoch, epochs)
    assert mixture.records == sum(lengths)


@dataclass(frozen=True)
class Tagged:
    """An order whose indices tell its epoch."""

    length: int
    records: int = 10**9

    def __len__(self):
        return self.length

    def indices(self, positions, *, epoch):
        return positions + 1000 * epoch


@pytest.mark.parametrize("weights", [(5, 1, 3), ((5, 1, 3), (1, 5, 1), (1, 1, 1))])
@pytest.mark.parametrize("stop", ["first", "longest"])
@pytest.mark.parametrize("shortest", [1, 7])
def test_no_epoch_of_a_part_is_used_in_two_of_the_mixture(weights, stop, shortest):
    mixture = Mixture((Tagged(shortest), Tagged(50), Tagged(90)), weights, stop=stop)
    seen = set()
    for epoch in range(6):
        indices = np.array(order(mixture, epoch))
        used = set(zip((indices // 10**9).tolist(), (indices % 10**9 // 1000).tolist(), strict=True))
        assert not used & seen
        seen |= used
        again, counts = np.unique(indices, return_counts=True)
        assert counts.max() == 1, f"{again[counts > 1]} came twice"


def test_weights_by_epoch_and_the_last_stays():
    samplers = (Sequential(1000), Sequential(1000))
    mixture = Mixture(samplers, ((3, 1), (1, 1), (0, 1)), stop="first", window=100)
    assert [(np.array(order(mixture, epoch, 100)) < 1000).sum() for epoch in range(6)] == [75, 50, 0, 0, 0, 0]
    weights = ({0: (1, 0), 50: (0, 1)}, {0: (1, 1), 100: (1, 0)})
    changing = np.array([order(Mixture(samplers, weights, window=100, seed=2), epoch, 150) for epoch in (0, 1, 5)])
    shares = (changing.reshape(3, 3, 50) < 1000).mean(axis=2).tolist()
    assert shares[0] == [1, 0, 0]
    assert shares[1][2] == shares[2][2] == 1
    assert shares[1][:2] == shares[2][:2] == pytest.approx([0.5, 0.5], abs=0.02)


NAMED = {"web": Sequential(400), "books": Sequential(500)}
PARTS = tuple(NAMED.values())
ALIKE = {
    "plain": [Mixture(PARTS, row) for row in ((1, 2), [1.0, 2.0], np.array([1, 2]), (Fraction(1), 2), iter((1, 2)))],
    "rows": [Mixture(PARTS, rows) for rows in (((1, 2), (3, 4)), np.array([[1, 2], [3, 4.0]]), [[1, 2], (3, 4)])],
    "changing": [
        Mixture(NAMED, {0: {"books": 1, "web": 9}, 12: {"web": 1, "books": 2}}, global_batch_size=10),
        Mixture(PARTS, {np.int64(120): np.array([1, 2]), 0: [9, 1]}),
        Mixture(NAMED, ((0, (9, 1)), (120, (1, 2)))),
    ],
    # What does not change is the same as before weights could change, so that its states load.
    "not changing": [Mixture(NAMED, {0: (9, 1)}), Mixture(PARTS, (9, 1))],
    "one row does not change": [Mixture(NAMED, ({0: (9, 1)}, (1, 1))), Mixture(NAMED, ((9, 1), (1, 1)))],
}


@pytest.mark.parametrize("kind", ALIKE)
def test_weights_are_the_same_value_however_they_are_written(kind):
    first = ALIKE[kind][0]
    same = {*ALIKE[kind], replace(first), pickle.loads(pickle.dumps(first)), eval(repr(first))}
    assert same == {first}
    assert len(set(map(fingerprint, same))) == 1
    assert [other for other in ALIKE if ALIKE[other][0] == first] == [kind]


CHANGING = {0: (2, 1, 1), 700: (1, 0, 0), 1234: (1, 3, 6), 5000: (7, 2, 1)}


def test_proportions_are_exact_in_every_window_between_two_changes():
    parts = np.array(with_ranks(CHANGING, 12_000, seed=4))
    assert parts[:700].tolist() == with_ranks(CHANGING[0], 700, seed=4), "a later change changes what was before"
    assert not parts[700:1234].any()
    for row, between in ((CHANGING[1234], parts[1234:5000]), (CHANGING[5000], parts[5000:])):
        counts = np.cumsum(between[:, None] == np.arange(3), axis=0)
        expected = [int(share * 1000) for share in weights_of(row)]
        assert (counts[1000:] - counts[:-1000] == expected).all()
        strays = np.abs(counts[:1000] - np.outer(np.arange(1, 1001), expected) / 1000).max()
        assert strays < 3, "a change leaves the parts unevenly spread"
