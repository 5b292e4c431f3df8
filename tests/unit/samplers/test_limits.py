"""Components with a limit of passes: beside a model in which each gives records as a liquid until it is used up."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import flow, order

from dataload import ConfigError
from dataload.samplers import GlobalShuffle, Mixture, Sequential, blend_weights
from dataload.samplers.batch import positions_of
from dataload.samplers.common import MAX_LENGTH

pytestmark = pytest.mark.timeout(90)  # many short runs, which take long on a busy machine

INF = float("inf")


def passes_of(sampler, start):
    """The indices of a component, from one of its passes on."""
    for number in itertools.count(start):
        yield from sampler.indices(np.arange(len(sampler)), epoch=number).tolist()


def walked(samplers, parts, starts):
    """The indices that parts give in turn, each of its own passes in order."""
    firsts = [0, *itertools.accumulate(map(len, samplers))]
    coming = [*map(passes_of, samplers, starts)]
    return [next(coming[part]) + firsts[part] for part in parts]


limits = st.sampled_from([0.3, 0.5, 1, 2, 3.7, 5, INF, INF])


@st.composite
def limited(draw):
    count = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 400), min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([0.01, 0.3, 1, 2, 7]), min_size=count, max_size=count))
    most = draw(st.lists(limits, min_size=count, max_size=count))
    samplers = tuple(GlobalShuffle(n, i) if i % 3 else Sequential(n) for i, n in enumerate(lengths))
    return Mixture(samplers, weights, draw(st.sampled_from(["first", "longest", "never"])), seed=4, max_epochs=most)


@settings(max_examples=30)
@given(limited(), st.integers(0, 5), st.data())
def test_each_component_gives_its_share_until_it_is_used_up(mixture, epoch, data):
    lengths, count = np.array([len(each) for each in mixture.samplers]), min(len(mixture), 2000)
    most = np.floor(np.array(mixture.max_epochs or (INF,) * len(lengths)) * lengths)
    whole = mixture.indices(np.arange(count), epoch=epoch)
    parts = np.searchsorted(np.cumsum(lengths), whole, side="right")
    counts = np.cumsum(parts[:, None] == np.arange(len(lengths)), axis=0)
    assert (counts <= most).all()
    model = flow(np.array(mixture.weights), most, range(1, count + 1))
    assert np.abs(counts - model).max(initial=0) < 4, "some component is too far from its share"
    # Each record of a pass is given once, in the order of the component's passes.
    passes = [epoch * int(n) for n in -(-mixture.given(len(mixture), epoch=0)[0] // lengths)]
    assert whole.tolist() == walked(mixture.samplers, parts.tolist(), passes)
    some = data.draw(st.lists(st.integers(0, max(0, count - 1)), max_size=20)) if count else []
    again = pickle.loads(pickle.dumps(mixture))
    assert again.indices(np.array(some, np.int64), epoch=epoch).tolist() == whole[some].tolist()
    for index in whole[some[:3]].tolist():
        found = positions_of(mixture, index, epoch=epoch, below=count)
        assert found.tolist() == np.flatnonzero(whole == index).tolist()


@settings(max_examples=30)
@given(limited())
def test_an_epoch_ends_at_the_latest_when_all_are_used_up(mixture):
    lengths = np.array([len(each) for each in mixture.samplers])
    most = np.floor(np.array(mixture.max_epochs or (INF,) * len(lengths)) * lengths)
    if len(mixture) == MAX_LENGTH:
        assert mixture.stop == "never"
        assert np.isinf(most).any()
        return
    given_there = mixture.given(len(mixture), epoch=0)[0]
    assert given_there.sum() == len(mixture)
    if mixture.stop == "never":
        assert given_there.tolist() == most.tolist()
    elif mixture.stop == "longest":
        assert (given_there >= np.minimum(most, lengths)).all()
        before = mixture.given(len(mixture) - 1, epoch=0)[0] if len(mixture) else given_there - 1
        assert (before < np.minimum(most, lengths)).any() or not len(mixture)
    else:
        assert (given_there <= lengths).all()
        assert (given_there == lengths).any() or given_there.tolist() == most.tolist()


@pytest.mark.parametrize("most", [1.25, 2.5, INF])
def test_a_component_that_grows_ends_its_pass_first_and_keeps_its_limit(most):
    before, after = (
        Mixture((GlobalShuffle(length, 1), Sequential(4)), (1, 2), "never", max_epochs=(most, INF)) for length in (5, 8)
    )
    for position in range(45):
        changes = after.grown(before, np.array([1, 0]), position, epoch=0)
        mixture = after.with_changes(changes, {(0, 1): before.samplers[0]})
        records, passes = before.given(position, epoch=0)
        assert mixture.given(position, epoch=0)[0].tolist() == records.tolist()
        assert mixture.given(position, epoch=0)[1] == pytest.approx(passes)
        ended = -(-int(records[0]) // 5)
        first = [*itertools.islice(passes_of(before.samplers[0], 0), ended * 5)]
        expected = [*first, *itertools.islice(passes_of(after.samplers[0], ended), 80)]
        if most < INF:
            expected = expected[: int(most * 5 if ended > most else ended * 5 + (most - ended) * 8)]
        found = mixture.indices(np.arange(position, 200), epoch=0)
        own = found[found < 8].tolist()
        assert own == expected[records[0] :][: len(own)]
        assert most == INF or len(own) == len(expected) - records[0]
        for index in (0, 4, 7, 8, 9):
            at = positions_of(mixture, index, epoch=0, below=200)
            assert at[at >= position].tolist() == (position + np.flatnonzero(found == index)).tolist()


@pytest.mark.parametrize("later", [1, 2, 4, 13, 30])
def test_a_component_that_grows_twice_ends_the_pass_that_it_is_in(later):
    mixtures = [Mixture((GlobalShuffle(length, 1), Sequential(4)), (1, 2), "never") for length in (5, 8, 9)]
    small, middle, large = mixtures
    samplers = [each.samplers[0] for each in mixtures]
    for position in range(20):
        changes = middle.grown(small, np.array([1, 0]), position, epoch=0)
        grown = middle.with_changes(changes, {(0, 1): samplers[0]})
        changes = large.grown(grown, np.array([2, 0]), position + later, epoch=0)
        found = large.with_changes(changes, {(0, 1): samplers[0], (0, 2): samplers[1]})
        first = -(-int(small.given(position, epoch=0)[0][0]) // 5)
        drawn = int(grown.given(position + later, epoch=0)[0][0])
        second = -(-max(0, drawn - 5 * first) // 8)
        expected = [*itertools.islice(passes_of(samplers[0], 0), 5 * first)]
        expected += itertools.islice(passes_of(samplers[1], first), 8 * second)
        expected += itertools.islice(passes_of(samplers[2], first + second), 50)
        served = found.indices(np.arange(position + later, 120), epoch=0)
        own = served[served < 9].tolist()
        assert own == expected[drawn:][: len(own)]


def test_passes_of_few_records():
    mixture = Mixture((Sequential(1), Sequential(0), Sequential(3)), (1, 0, 1), "never")
    assert mixture.given(8, epoch=0)[1].tolist() == [4, 0, 4 / 3]


def test_the_changes_from_a_position_on():
    mixture = Mixture((Sequential(9), Sequential(9)), (1, 1), "never").changed(40, (0, 1)).changed(60, (1, 1))
    for position, changed in ((39, [40, 60]), (40, [40, 60]), (59, [40, 60]), (60, [60]), (61, [60])):
        assert [each.position for each in mixture.changes_at(position, epoch=0)] == changed


def test_shares_go_to_the_others_in_proportion():
    mixture = Mixture(
        {"a": Sequential(100), "b": Sequential(10), "c": Sequential(100)}, (1, 2, 3), "never", max_epochs={"b": 2}
    )
    assert mixture.max_epochs == (INF, 2, INF)
    assert mixture.shares(0, epoch=0).tolist() == [1 / 6, 2 / 6, 3 / 6]
    assert mixture.shares(100, epoch=0).tolist() == [1 / 4, 0, 3 / 4]
    parts = np.digitize(order(mixture, 0, 460), (100, 110))
    assert np.bincount(parts[:60], minlength=3)[1] == 20
    assert np.abs(np.bincount(parts[60:], minlength=3) - (100, 0, 300)).max() <= 1
    ended = Mixture((Sequential(3), Sequential(2)), (1, 1), "never", max_epochs=2)
    assert len(ended) == 10
    assert ended.shares(10, epoch=0).tolist() == [0, 0]
    assert sorted(order(ended, 1)) == sorted([0, 1, 2, 3, 4] * 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": 0}, "max_epochs must be numbers above 0"),
        ({"max_epochs": (1, -2)}, "max_epochs must be numbers above 0"),
        ({"max_epochs": (1, "2")}, "max_epochs must be numbers above 0"),
        ({"max_epochs": True}, "max_epochs must be numbers above 0"),
        ({"max_epochs": (1, 2, 3)}, "one number for all, or for each of the 2 samplers"),
        ({"max_epochs": {"c": 1}}, "for each of the 2 samplers, or numbers by the names of some"),
        ({"max_epochs": 1, "window": 100}, "window must be None or 'any' with max_epochs"),
    ],
)
def test_limits_that_are_none_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Mixture({"a": Sequential(9), "b": Sequential(9)}, (1, 1), "never", **settings)


def test_weights_that_leave_only_what_is_used_up_are_refused():
    mixture = Mixture((Sequential(9), Sequential(9)), (1, 1), "never", max_epochs=(1, INF))
    assert mixture.changed(40, (0, 1)).shares(41, epoch=0).tolist() == [0, 1]
    with pytest.raises(
        ConfigError, match="weights change at position 40, and stop='never' with max_epochs ends epochs at 40"
    ):
        mixture.changed(40, (1, 0))
    parts = (Sequential(9), Sequential(9))
    assert len(Mixture(parts, {0: (0, 1), 9: (1, 0)}, "never", max_epochs=1)) == 18
    with pytest.raises(ConfigError, match=r"weights change at position 10, and .* with max_epochs ends epochs at 9"):
        Mixture(parts, {0: (0, 1), 10: (1, 0)}, "never", max_epochs=1)
    with pytest.raises(ConfigError, match="max_epochs ends an epoch at position 4, and all end at 9 with stop='long"):
        Mixture(parts, [(1, 0), (0, 1)], "longest", max_epochs=(1, 0.5))


def test_weights_by_temperature_and_least_share():
    assert np.allclose(blend_weights([100, 900]), [0.1, 0.9])
    assert np.allclose(blend_weights([100, 900], temperature=2), [0.25, 0.75])
    lengths = np.array([5, 70, 900.0])
    assert np.allclose(blend_weights(lengths, temperature=1 / 0.3), lengths**0.3 / (lengths**0.3).sum())
    raised = blend_weights([1, 40, 59, 0, 900], min_share=0.05)
    assert raised[3] == 0
    assert min(each for each in raised if each) == 0.05
    assert sum(raised) == pytest.approx(1)
    assert raised[2] / raised[4] == pytest.approx(59 / 900)
    assert blend_weights([1, 2, 97], min_share=1 / 3) == pytest.approx((1 / 3,) * 3)
    for wrong, message in [
        ({"temperature": 0.3}, r"temperature must be at least 1: .*, so sizes \*\* 0.3 is temperature=1 / 0.3"),
        ({"min_share": 0.6}, "min_share must be from 0 to 1 / 2"),
        ({"min_share": -0.1}, "min_share must be from 0 to 1 / 2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            blend_weights([1, 2], **wrong)
