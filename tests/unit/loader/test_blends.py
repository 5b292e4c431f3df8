"""Sources that join a mixture or leave it between a state and the loader that loads it."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import flow

import dataload
from dataload import Loader, StateMismatchError

pytestmark = pytest.mark.timeout(90)  # many short runs, which take long on a busy machine

LENGTHS = {"a": 50, "b": 300, "c": 9, "d": 70}
STARTS = dict(zip(LENGTHS, itertools.accumulate(LENGTHS.values(), initial=0), strict=False))


def mixed(weights, rank=0, world_size=1, **options):
    sources = {name: dataload.MemorySource({"x": STARTS[name] + np.arange(LENGTHS[name])}) for name in weights}
    options = {"stop": "never", **options}
    return Loader(
        dataload.mix(sources, {name: float(weight) for name, weight in weights.items()}, **options),
        batch_size=24 // world_size,
        shuffle=True,
        seed=3,
        rank=rank,
        world_size=world_size,
    )


def served(iterators, steps):
    """The records of some steps of all ranks."""
    return [np.concatenate([next(each)["x"] for each in iterators]).tolist() for _ in range(steps)]


def states(loader):
    return json.loads(json.dumps(loader.state_dict()))


def check_passes(rows):
    """No record of a pass is lost or repeated: the number of times differs by one at most."""
    for name, start in STARTS.items():
        own = [x - start for x in rows if start <= x < start + LENGTHS[name]]
        times = np.bincount(own, minlength=LENGTHS[name])
        assert np.ptp(times) <= 1, name


def shares_of(rows):
    return np.bincount(np.searchsorted([*STARTS.values()], rows, side="right") - 1, minlength=len(STARTS))


@pytest.mark.slow_suite
@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 9), st.booleans()), min_size=2, max_size=6))
def test_sources_come_and_go_at_the_end(stages):
    """A stage is a job on some ranks: its last source is retired, or another joins, and it serves some steps."""
    names, state, rows = ["a", "b"], None, []
    base = {"a": 1, "b": 2}
    for world_size, steps, joins in stages:
        retired = None
        if state is not None and joins and len(names) < 4:
            names = [*LENGTHS][: len(names) + 1]
        elif state is not None and len(names) > 1:
            retired = names[-1]
        ranks = [mixed({n: base.get(n, 0) for n in names}, rank, world_size) for rank in range(world_size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [*map(iter, ranks)]
        weights = {name: 0.0 if name == retired else 1.0 + i for i, name in enumerate(names)}
        for loader in ranks:
            loader.change_weights(weights)
        found = list(itertools.chain(*served(iterators, steps)))
        rates = np.array([weights.get(name, 0) for name in LENGTHS])
        (model,) = flow(rates, np.full(4, np.inf), [len(found)])
        assert np.abs(shares_of(found) - model).max() < 5
        rows += found
        (state,) = [json.loads(text) for text in {json.dumps(loader.state_dict()) for loader in ranks}]
        if retired is not None:
            names = names[:-1]
            break  # what comes back later begins anew
    check_passes(rows)
    if retired is not None:
        without = mixed({n: base.get(n, 0) for n in names})
        without.load_state_dict(state)
        goes_on = mixed({n: base.get(n, 0) for n in [*names, retired]})
        goes_on.load_state_dict(state)
        one, other = [iter(without)], [iter(goes_on)]
        assert served(one, 3) == served(other, 3)
        fresh = mixed({n: base.get(n, 0) for n in names})
        fresh.load_state_dict(states(without))
        assert served([iter(fresh)], 2) == served(other, 2)


def test_the_order_before_is_not_known_without_a_source_that_gave():
    whole = mixed({"a": 1, "b": 2, "c": 1})
    iterators = [iter(whole)]
    served(iterators, 2)
    whole.change_weights({"a": 1, "b": 2, "c": 0})
    without = mixed({"a": 1, "b": 2})
    without.load_state_dict(states(whole))
    assert without.batch(0, 2)["x"].tolist() == whole.batch(0, 2)["x"].tolist()
    with pytest.raises(dataload.WorkerError, match="the weights before position 48 are not in the state"):
        without.batch(0, 1)


def test_other_sources_are_refused_by_name(monkeypatch):
    first = states(mixed({"a": 1, "b": 2}))
    mixed({"a": 1, "b": 2, "d": 0}).load_state_dict(first)
    with monkeypatch.context() as patch:
        patch.setitem(STARTS, "a", STARTS["a"] + 1)
        with pytest.raises(StateMismatchError, match="other data or another order"):
            mixed({"a": 1, "b": 2, "d": 0}).load_state_dict(first)
    alone = mixed({"a": 1, "b": 2})
    next(iter(alone))
    alone.change_weights({"a": 1, "b": 0})
    mixed({"a": 1}).load_state_dict(states(alone))
    loader = mixed({"a": 1, "b": 2, "c": 1})
    iterators = [iter(loader)]
    served(iterators, 1)
    plain = states(loader)
    with pytest.raises(
        StateMismatchError, match=r"other data or another order.*Add new sources at the end, with weight 0"
    ):
        mixed({"a": 1, "b": 2, "c": 1, "d": 1}).load_state_dict(plain)
    loader.change_weights({"a": 1, "b": 2, "c": 1})
    state = states(loader)
    for weights, message in [
        ({"a": 1, "b": 2}, r"(?s)leave out only sources that were retired.*only in the state: number 2$"),
        ({"a": 1, "b": 2, "c": 1, "d": 1}, r"(?s)with weight 0 in the mix.*only here, with a weight: d$"),
        ({"a": 1, "b": 5, "c": 1}, r"(?s)only in the state: number 1\n  only here, with a weight: b$"),
    ]:
        with pytest.raises(StateMismatchError, match=message):
            mixed(weights).load_state_dict(state)
    later = mixed({"a": 1, "b": 2, "c": 1})
    later.change_weights({"a": 1, "b": 2, "c": 0}, at=5)  # until then, it gives records
    with pytest.raises(StateMismatchError, match="only in the state: number 2"):
        mixed({"a": 1, "b": 2}).load_state_dict(states(later))
    with pytest.raises(StateMismatchError, match="the state has weights of 3 sources"):
        mixed({"d": 1}).load_state_dict(state)
