"""Weights that the loop changes: what follows is the same after any stop, on any ranks, and loses no record."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from orders import flow

import dataload
from dataload import ConfigError, Loader, StateMismatchError
from dataload.samplers import BatchSampler, GlobalShuffle, Mixture, Sequential, servings_of

pytestmark = pytest.mark.timeout(90)  # many short runs, which take long on a busy machine

LENGTHS = (40, 300, 7, 90)
STARTS = np.cumsum((0, *LENGTHS))


def mixed(stop="never", weights=(1, 2, 1, 0), max_epochs=None):
    sources = {f"s{n}": dataload.RangeSource(int(STARTS[n + 1]), start=int(STARTS[n])) for n in range(4)}
    return dataload.mix(sources, dict(zip(sources, map(float, weights), strict=True)), stop=stop, max_epochs=max_epochs)


def ranks(world_size, *, stop="never", rows=24, max_epochs=None, **settings):
    return [
        Loader(
            mixed(stop, max_epochs=max_epochs),
            batch_size=rows // world_size,
            shuffle=True,
            seed=3,
            rank=rank,
            world_size=world_size,
            **settings,
        )
        for rank in range(world_size)
    ]


def row(values):
    return {f"s{n}": float(value) for n, value in enumerate(values)}


def steps_of(loaders, count, changes=(), first=0):
    """The global batch of each of some steps, with changes made after as many steps: sorted rows of all ranks."""
    found, iterators = [], [iter(loader) for loader in loaders]
    for step in range(first, first + count):
        for loader in loaders:
            for at, weights in changes:
                if at == step:
                    loader.change_weights(weights)
        batches = [next(iterator)["index"] for iterator in iterators]
        assert len({len(batch) for batch in batches}) == 1
        found.append(np.sort(np.concatenate(batches)).tolist())
    return found


weights = st.lists(st.sampled_from([0, 0.001, 1, 2, 9]), min_size=4, max_size=4).filter(any).map(row)


@settings(phases=[Phase.explicit, Phase.generate])
@given(
    st.lists(st.tuples(st.integers(0, 29), weights), max_size=4, unique_by=lambda change: change[0]),
    st.lists(st.integers(1, 29), max_size=3, unique=True).map(sorted),
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=4, max_size=4),
    st.sampled_from([None, {"s0": 1.5, "s2": 4}]),
)
def test_a_run_that_is_stopped_goes_on_as_one_that_is_not(changes, stops, sizes, max_epochs):
    if max_epochs:  # the epoch is not to end
        changes = [(at, {**values, "s1": max(values["s1"], 1.0)}) for at, values in changes]
    whole = steps_of(ranks(1, max_epochs=max_epochs), 30, changes)
    state, found = None, []
    for (first, stop), size in zip(itertools.pairwise([0, *stops, 30]), sizes, strict=False):
        loaders = ranks(size, max_epochs=max_epochs)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(state))
        found += steps_of(loaders, stop - first, changes, first)
        states = {json.dumps(loader.state_dict()) for loader in loaders}
        assert len(states) == 1, "ranks have other states"
        (state,) = states
    assert found == whole
    # No record of a pass is lost or repeated: whatever the weights, a source gives its passes one after another.
    served = np.concatenate(whole)
    for start, length in zip(STARTS.tolist(), LENGTHS, strict=False):
        times = np.bincount(served[(served >= start) & (served < start + length)] - start, minlength=length)
        assert times.max() - times.min() <= 1
    most = np.array([60, np.inf, 28, np.inf] if max_epochs else [np.inf] * 4)
    assert (np.bincount(np.digitize(served, STARTS[1:-1]), minlength=4) <= most).all()
    for number, (at, values) in enumerate(sorted(changes, key=lambda change: change[0])):
        end = min([other for other, _ in changes if other > at], default=30)
        before, there = (
            np.bincount(np.digitize([index for batch in steps for index in batch], STARTS[1:-1]), minlength=4)
            for steps in (whole[:at], whole[at:end])
        )
        (model,) = flow(np.array([*values.values()]), most - before, [there.sum()])
        assert np.abs(there - model).max() < 5, number


@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"num_workers": 1, "executor": "processes"}, {"in_order": False}]
)
def test_batches_made_ahead_are_made_again(options):
    changes = [(3, row((0, 0, 0, 1))), (9, row((1, 1, 1, 1)))]
    expected = steps_of(ranks(1), 14, changes)
    (loader,) = ranks(1, **options)
    with loader:
        assert steps_of([loader], 14, changes) == expected


@pytest.mark.parametrize("stop", ["first", "longest"])
def test_epochs_end_where_the_weights_of_the_change_say(stop):
    (loader,), epochs = ranks(1, stop=stop), []
    for epoch in range(4):
        rows = []
        for batch in loader:
            rows += batch["index"].tolist()
            if epoch == 1 and len(rows) == 24:
                loader.change_weights(row((1, 3, 0, 1)))
                state = loader.state_dict()
        epochs.append(rows)
    used = np.array([[np.isin(np.arange(*STARTS[n : n + 2]), rows).mean() for n in range(4)] for rows in epochs])
    for rows in epochs:
        counts = np.bincount(rows, minlength=STARTS[-1])
        spread = [np.ptp(counts[slice(*STARTS[n : n + 2])]) for n in range(4)]
        assert max(spread) <= 1, "a record was lost or repeated"
        assert stop == "longest" or counts.max() == 1
    served = [len(servings_of(loader.batch_sampler, index, epoch=1)) for index in range(STARTS[-1])]
    assert np.array_equal(served, np.bincount(epochs[1], minlength=STARTS[-1]))
    if stop == "longest":
        assert (used[:, 1] == 1).all()
        assert (used[2:, [0, 3]] == 1).all()
    assert not used[2:, 2].any(), "a retired source goes on"
    (again,) = ranks(1, stop=stop)
    again.load_state_dict(state)
    assert [[*itertools.chain(*(batch["index"].tolist() for batch in again))] for _ in range(3)] == [
        epochs[1][24:],
        *epochs[2:],
    ]


@pytest.mark.parametrize("following", [0, 1])
def test_a_change_after_the_last_batch_leaves_the_epoch_as_long_as_it_was(following):
    (loader,) = ranks(1, stop="first")
    for step, _ in enumerate(loader, 1):
        loader.set_epoch(following)
        if step == len(loader):
            loader.change_weights(row((0, 1, 0, 1)))  # makes the next epoch longer
            state = loader.state_dict()
    (again,) = ranks(1, stop="first")
    again.load_state_dict(state)
    assert (step, loader.epoch) == (2, following)
    assert [b["index"].tolist() for b in loader] == [b["index"].tolist() for b in again]


def test_a_change_of_a_later_step_is_part_of_the_state_and_one_before_it_leaves_it():
    (loader,) = ranks(1)
    iterator = iter(loader)
    next(iterator)
    loader.change_weights(row((0, 0, 0, 1)), at=5)
    loader.change_weights(row((1, 0, 0, 0)))
    (again,) = ranks(1)
    again.load_state_dict(loader.state_dict())
    rest = [next(iterator)["index"] for _ in range(8)]
    assert [np.unique(np.digitize(batch, STARTS[1:-1])).tolist() for batch in rest] == [[0]] * 4 + [[3]] * 4
    assert [batch["index"].tolist() for batch, _ in zip(again, range(8), strict=False)] == [b.tolist() for b in rest]
    loader.load_state_dict(ranks(1)[0].state_dict())
    assert np.array_equal(next(iter(loader))["index"], next(iter(ranks(1)[0]))["index"]), "the changes are forgotten"


def test_what_cannot_be_changed_says_why():
    plain = Loader(dataload.RangeSource(9), batch_size=3)
    with pytest.raises(ConfigError, match=r"only a mixture has weights: pass dataload\.mix"):
        plain.change_weights([1.0])
    (loader,) = ranks(1)
    for wrong, message in [
        ({"s0": 1.0}, "missing: 's1', 's2', 's3'"),
        ({1.0, 2.0, 3.0, 4.0}, "must have an order"),
        ([1, 2], "one weight for each of the 4 samplers"),
        ([0, 0, 0, 0], "must not all be zero"),
        ([[1, 1, 1, 1]], "must be a list of one or more numbers|one weight for each"),
    ]:
        with pytest.raises(ConfigError, match=message):
            loader.change_weights(wrong)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ConfigError, match="at must be"):
        loader.change_weights([1, 1, 1, 1], at=0)
    loader.change_weights([1, 1, 1, 1])
    state = loader.state_dict()
    with pytest.raises(StateMismatchError, match="the state has weights of 4 sources, and this loader has no mixture"):
        plain.load_state_dict(state)
    for changes in ([{}], [{**state["changes"][0], "sources": "?"}], [{**state["changes"][0], "widths": [0, -8]}], 5):
        with pytest.raises(StateMismatchError, match="changes in the state must be those of a mixture"):
            loader.load_state_dict({**state, "changes": changes})


def test_states_are_small():
    """Under 1 KiB without changes; then 32 bytes a source for the last change, however many there were."""
    parts = tuple(Sequential(100) for _ in range(1000))
    source = dataload.concat([dataload.RangeSource(100)] * 1000)
    loader = Loader(source, sampler=Mixture(parts, [1 / n for n in range(1, 1001)], "never"), batch_size=8)
    iterator = iter(loader)
    next(iterator)
    assert len(json.dumps(loader.state_dict())) < 1024
    for n in range(5):
        loader.change_weights(np.random.default_rng(n).random(1000))
        next(iterator)
    assert len(json.dumps(loader.state_dict())) < 1024 + 32 * 1000


def test_a_mixture_tells_what_each_source_has_given_and_that_it_forgot():
    mixture = Mixture((GlobalShuffle(40, 0), Sequential(30)), (1, 1), "never")
    changed = mixture.changed(50, (0, 1)).changed(10, (3, 1), epoch=1)
    assert changed.given(0, epoch=0)[0].tolist() == [0, 0]
    assert [each.tolist() for each in changed.given(70, epoch=0)] == [[25, 45], [25 / 40, 45 / 30]]
    served = changed.indices(np.arange(70), epoch=0)
    assert np.bincount(np.digitize(served, [40])).tolist() == [25, 45]
    kept = mixture.with_changes(changed.changes_at(60, epoch=0)[:1])
    assert np.array_equal(kept.indices(np.arange(50, 70), epoch=0), served[50:])
    later = mixture.with_changes([*changed.changed(65, (1, 1)).changes[1:2]])
    assert later.indices(np.arange(65, 70), epoch=0).shape == (5,)
    with pytest.raises(ConfigError, match=r"the weights before position 65 are not in the state"):
        later.indices(np.arange(60, 70), epoch=0)
    assert [BatchSampler(sampler=later, batch_size=8, origin=n).first_step(0) for n in (0, 1)] == [9, 8]
    with pytest.raises(ConfigError, match=r"the weights before epoch 1 are not in the state"):
        mixture.with_changes(changed.changes[1:]).indices(np.arange(3), epoch=0)


def test_where_a_record_was_served_is_known_from_the_change_of_the_state_on():
    (first,), (second,) = ranks(1), ranks(1)
    steps_of([first], 8, [(3, row([1, 1, 1, 0])), (5, row([3, 1, 1, 0]))])
    second.load_state_dict(first.state_dict())
    batches = steps_of([second], 20, first=8)
    for index in range(0, 350, 7):
        served = servings_of(second.batch_sampler, index, epoch=0, steps=range(5, 28))
        found = [each.step for each in served if each.step >= 8]
        assert found == [8 + step for step, batch in enumerate(batches) for record in batch if record == index]
        for steps in (range(3), range(8), range(4, 8)):
            with pytest.raises(ConfigError, match="the weights before position 120 are not in the state"):
                servings_of(second.batch_sampler, index, epoch=0, steps=steps)


def test_a_batch_tells_the_source_of_each_row():
    parts = {"a": dataload.MemorySource({"x": np.arange(50)}), "b": dataload.MemorySource({"x": np.arange(100, 150)})}
    source = dataload.mix(parts, {"a": 1, "b": 3}, with_source=True)
    assert source.fields["source"].dtype == "int32"
    for options in ({}, {"transform": dict}, {"fields": ["source", "x"]}):
        batch = next(iter(Loader(source, batch_size=16, shuffle=True, **options)))
        assert batch["source"].tolist() == (batch["x"] >= 100).astype(int).tolist()
        assert batch["source"].dtype == np.int32
    assert next(iter(Loader(source, batch_size=16, fields=["x"]))).keys() == {"x"}
    assert next(iter(Loader(source, batch_size=16, fields=["source"]))).keys() == {"source"}
    assert source.fingerprint() == dataload.mix(parts, {"a": 1, "b": 3}).fingerprint()
    twice = dataload.mix({dataload.MemorySource({"source": np.arange(5)}): 1}, with_source=True)
    plain = dataload.mix([([1, 2], 1)], with_source=True)
    for read in (plain.read, plain.read_batch):
        with pytest.raises(ConfigError, match="with_source adds a field, and the records are of type"):
            read([0])
    with pytest.raises(ConfigError, match="with_source adds the field 'source', which the records have"):
        twice.read([0])
    with pytest.raises(ConfigError, match="with_source adds the field 'source', which the records have"):
        _ = twice.fields


def test_statistics_tell_what_each_source_has_given_in_the_whole_run(monkeypatch):
    parts = {name: dataload.MemorySource({"tokens": np.zeros((40, 8), np.int32)}) for name in ("a", "b")}
    loaders = [
        Loader(dataload.mix(parts, {"a": 1, "b": 1}, stop="never"), batch_size=10, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    iterators = [*map(iter, loaders)]
    for loader, iterator in zip(loaders, iterators, strict=True):
        next(iterator)
        loader.change_weights({"a": 0, "b": 3})
        next(iterator)
        found = loader.statistics().sources
        assert [found[name].records for name in "ab"] == [10, 30]
        assert [found[name].epochs for name in "ab"] == [0.25, 0.75]
        assert [found[name].tokens for name in "ab"] == [80, 240]
        assert [found[name].share for name in "ab"] == [0, 1]
        assert json.loads(json.dumps(loader.statistics().to_json()))["sources"]["b"]["records"] == 30
    again = Loader(dataload.mix(parts, {"a": 1, "b": 1}, stop="never"), batch_size=5)
    again.load_state_dict(loaders[0].state_dict())
    assert again.statistics().sources["b"] == dataclasses.replace(found["b"])
    unnamed = Loader(dataload.mix([(dataload.RangeSource(9), 2), (dataload.RangeSource(9), 1)]), batch_size=3)
    assert unnamed.statistics().sources.keys() == {"0", "1"}
    assert unnamed.statistics().sources["0"].tokens is None
    assert Loader(dataload.RangeSource(9), batch_size=3).statistics().sources is None
    monkeypatch.delattr(Mixture, "given")  # which takes a while for thousands of sources
    assert unnamed.progress().step == 0
