"""Mixtures and concatenations of which some sources have grown, beside a model and a run without growth."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from orders import flow
from samples import sampled

import dataload
from dataload import Loader, StateMismatchError
from dataload.samplers import GlobalShuffle, Mixture, servings_of

pytestmark = pytest.mark.timeout(90)  # many short runs, which take long on a busy machine

NAMES = ("a", "b", "c")
FIRST = {"a": 0, "b": 10_000, "c": 20_000}
SHARDS, LENGTH = 14, {"a": 12, "b": 36, "c": 8}  # records of a shard
BEGIN = (2, 4, 3)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The files of each source; one with fewer of them has not grown yet."""
    found = {}
    for name in NAMES:
        path = tmp_path_factory.mktemp(name) / "d.syr"
        with dataload.create(path, records_per_shard=LENGTH[name]) as writer:
            writer.extend({"y": np.array(FIRST[name] + i)} for i in range(SHARDS * LENGTH[name]))
        found[name] = dataload.open(path.parent).paths
    return found


def parts(shards, counts):
    return {name: dataload.open(paths[:n]) for (name, paths), n in zip(shards.items(), counts, strict=False)}


def mixed(shards, counts, weights=(1, 2, 1), **options):
    some = parts(shards, counts)
    return dataload.mix(some, dict(zip(some, map(float, weights), strict=True)), **{"stop": "never", **options})


def loaders_of(source, world_size=1, rows=48, **options):
    options = {"shuffle": True, "seed": 3, "tail": "pad", **options}
    made = {"batch_size": rows // world_size, "world_size": world_size, **options}
    return [Loader(source, rank=rank, **made) for rank in range(world_size)]


def rows_of(iterators):
    """The records of the next step by position, or None."""
    batches = [next(each, None) for each in iterators]
    if batches[0] is None:
        return None
    rows = [batch["y"][batch["valid"]].tolist() for batch in batches]
    return [row for some in itertools.zip_longest(*rows) for row in some if row is not None]


def epoch_of(iterators):
    return [*iter(lambda: rows_of(iterators), None)]


def state_of(loaders):
    (text,) = {json.dumps(loader.state_dict()) for loader in loaders}
    return json.loads(text)


def load(loaders, state):
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state, on_growth="finish")


stages = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 6]),  # ranks
        st.tuples(*[st.sampled_from([0, 0, 1, 2])] * 3),  # growth before they start
        st.none() | st.tuples(*[st.sampled_from([0, 1, 2, 9])] * 3).filter(any),  # a change when they have
        st.integers(0, 9),  # steps until they end or are killed
        st.booleans(),  # killed: the next ones begin with the state that they began with
    ),
    min_size=2,
    max_size=7,
)
limits = st.sampled_from([None, {"b": 1.5}, {"a": 3.2, "c": 4}])


@pytest.mark.slow_suite
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(stages=stages, shuffle=st.sampled_from(["global", "shards", False]), max_epochs=limits)
def test_each_pass_is_over_what_its_source_had_when_it_began(shards, stages, shuffle, max_epochs):
    counts, state, served = np.array(BEGIN), None, []
    for ranks, growth, change, steps, killed in stages:
        counts = np.minimum(SHARDS, counts + growth)
        loaders = loaders_of(mixed(shards, counts, max_epochs=max_epochs), ranks, shuffle=shuffle)
        load(loaders, state)
        for loader in loaders if change is not None else ():
            free = [1, 0, 0] if max_epochs is None else [0, 0, 1] if "b" in max_epochs else [0, 1, 0]
            loader.change_weights(np.maximum(change, free).tolist())  # the epoch is not to end
        iterators = [*map(iter, loaders)]
        found = [(rows_of(iterators), counts) for _ in range(steps)]
        after = state_of(loaders)
        again = loaders_of(loaders[0].source, shuffle=shuffle)
        load(again, after)
        assert state_of(again) == after
        given_so_far = loaders[0].statistics().sources
        assert rows_of([iter(again[0])]) == rows_of(iterators)
        if not killed:
            served, state = served + found, after
            check(served, max_epochs or {}, given_so_far)


def check(served, most, statistics):
    """Each source serves its passes one after another, each record of each exactly once, up to its limit."""
    left, passes, records = ({name: make() for name in NAMES} for make in (set, int, int))
    size = dict.fromkeys(NAMES, 1)
    for rows, counts in served:
        for row in rows:
            name = NAMES[row // 10_000]
            if not left[name]:
                size[name] = int(counts[NAMES.index(name)]) * LENGTH[name]
                left[name] = set(range(FIRST[name], FIRST[name] + size[name]))
                passes[name] += 1
            assert row in left[name], "a record of a pass was repeated, or the next pass has begun"
            left[name].remove(row)
            records[name] += 1
    for name in NAMES:
        epochs = passes[name] - len(left[name]) / size[name]
        assert epochs <= most.get(name, np.inf)
        assert statistics[name].records == records[name]
        assert statistics[name].epochs == pytest.approx(epochs)


def test_the_proportions_stay_and_planned_weights_come(shards):
    """Growth changes no weight, neither that of now nor one that was changed or planned for later."""
    loader = loaders_of(mixed(shards, BEGIN))[0]
    iterator = [iter(loader)]
    rows_of(iterator)
    loader.change_weights([1, 0, 1], at=20)
    grown = loaders_of(mixed(shards, (5, 8, 9)))[0]
    load([grown], loader.state_dict())
    iterator = [iter(grown)]
    rows = [row for _ in range(19) for row in rows_of(iterator)]
    assert rows[:12] == [10018, 3, 20008, 10021, 20004, 12, 10024, 10003, 10069, 14, 20014, 10115], (
        "part of every state"
    )
    for row in set(rows):  # the inverse knows passes of before the growth and after it
        index = (0, 60, 348)[row // 10_000] + row % 10_000
        found = [
            48 * (each.step - 1) + each.row
            for each in servings_of(grown.batch_sampler, index, epoch=0, steps=range(1, 20))
        ]
        assert found == [place for place, other in enumerate(rows) if other == row]
    (model,) = flow(np.array([1, 2, 1]), np.full(3, np.inf), [len(rows)])
    assert np.abs(np.bincount(np.array(rows) // 10_000, minlength=3) - model).max() < 4
    rows = [row for _ in range(19) for row in rows_of(iterator)]
    assert np.bincount(np.array(rows) // 10_000, minlength=3)[1] == 0
    again = loaders_of(mixed(shards, (6, 8, 9)))[0]
    load([again], grown.state_dict())
    assert rows_of([iter(again)])[:12] == [48, 20036, 4, 20059, 20051, 8, 20044, 21, 24, 20047, 57, 20016]


@pytest.mark.parametrize("stop", ["first", "longest", None])
@pytest.mark.parametrize(
    ("shuffle", "executor"),
    sampled([("global", "processes"), ("shards", "threads"), (False, "threads")], [("shards", "threads")]),
)
@pytest.mark.usefixtures("fork_server")
def test_an_epoch_with_an_end_ends_as_without_growth(shards, stop, shuffle, executor):
    def source(counts):
        if stop is None:
            return dataload.concat([*parts(shards, counts).values()])
        return mixed(shards, counts, stop=stop)

    small, later = source(BEGIN), source((3, 4, 6))
    loader = loaders_of(small, 1, shuffle=shuffle)[0]
    iterators = [iter(loader)]
    rows_of(iterators)
    if stop is not None:
        loader.change_weights([1, 3, 1])
    state, rest = state_of([loader]), epoch_of(iterators)
    options = {"num_workers": 1, "executor": executor}
    loaders = loaders_of(later, 2, shuffle=shuffle, **options)
    load(loaders, state)
    iterators = [*map(iter, loaders)]
    first = rows_of(iterators)
    middle = state_of(loaders)
    assert (middle["source"], middle["order"]) == (state["source"], state["order"])
    found = [first, *epoch_of(iterators)]
    assert [row for rows in found for row in rows] == [row for rows in rest for row in rows]
    end = state_of(loaders)
    whole = epoch_of([*map(iter, loaders)])
    others = loaders_of(later, 3, shuffle=shuffle)
    load(others, end)
    assert [sorted(rows) for rows in epoch_of([*map(iter, others)])] == [sorted(rows) for rows in whole]
    if stop is None:
        assert sorted(row for rows in whole for row in rows) == sorted(int(record["y"]) for record in later)
    for each in loaders:
        each.close()


@pytest.mark.parametrize("in_memory", [(), ("b",), ("b", "c")])
@pytest.mark.parametrize("changes", [False, True])
def test_sources_may_grow_and_join_at_once(shards, in_memory, changes):
    def source(counts, weights):
        some = parts(shards, counts)
        some |= {name: dataload.MemorySource([*some[name]]) for name in in_memory if name in some}
        return dataload.mix(some, dict(zip(some, weights, strict=True)), stop="never")

    loader = loaders_of(source(BEGIN[:2], (1, 2)))[0]
    next(iter(loader))
    if changes:
        loader.change_weights([1, 3])
    state = state_of([loader])
    both = loaders_of(source((5, 4, 3), (1, 2, 0)))[0]
    load([both], state)
    both.change_weights({"a": 1, "b": 2, "c": 1})
    rows = rows_of([iter(both)])
    assert [*map(len, (rows, {*rows}))] == [48, 48]
    assert any(row >= 20_000 for row in rows)


def test_a_source_may_join_in_the_epoch_after_growth(shards):
    loader = loaders_of(mixed(shards, BEGIN[:2], (1, 2), stop="first"))[0]
    next(iter(loader))
    grown = loaders_of(mixed(shards, (5, 4), (1, 2), stop="first"))[0]
    load([grown], state_of([loader]))
    epoch_of([iter(grown)])  # as it began
    grown.change_weights({"a": 1, "b": 1})
    both = loaders_of(mixed(shards, (5, 4, 3), (1, 2, 0), stop="first"))[0]
    both.load_state_dict(state_of([grown]))
    assert rows_of([iter(both)]) == rows_of([iter(grown)])


def test_a_loader_with_a_log_names_a_new_file_and_knows_what_it_has(shards, tmp_path):
    options = {"changes": tmp_path / "one.jsonl"}
    loader = loaders_of(mixed(shards, BEGIN), **options)[0]
    rows_of([iter(loader)])
    with pytest.raises(dataload.ConfigError, match="another order: name another file"):
        loaders_of(mixed(shards, (5, 4, 3)), **options)
    grown = loaders_of(mixed(shards, (5, 4, 3)), changes=tmp_path / "two.jsonl")[0]
    load([grown], state_of([loader]))
    iterators = [iter(grown)]
    served = [rows_of(iterators) for _ in range(2)]
    grown.change_weights([1, 1, 1])
    served += [rows_of(iterators) for _ in range(2)]
    known = loaders_of(mixed(shards, (5, 4, 3)))[0]
    load([known], state_of([grown]))
    known.load_changes(tmp_path / "two.jsonl")
    assert [known.batch(0, step)["y"].tolist() for step in range(1, 5)] == served
    with pytest.raises(dataload.WorkerError, match="the weights before position 48 are not in the state"):
        known.batch(0, 0)


def refusal(source, state, on_growth="finish", **options):
    (loader,) = loaders_of(source, **options)
    before = loader.state_dict()
    with pytest.raises(StateMismatchError) as caught:
        loader.load_state_dict(state, on_growth=on_growth)
    assert loader.state_dict() == before
    return str(caught.value)


def test_what_the_errors_say(shards):
    (loader,) = loaders_of(mixed(shards, BEGIN))
    next(iter(loader))
    state = loader.state_dict()
    grown = mixed(shards, (4, 4, 3))
    message = refusal(grown, state, "error")
    assert "so that each source ends its pass without their records, pass load_state_dict(state, on_growth=" in message
    assert "shards: 9 in the state, 11 here; added: d-00002-of-00014.syr, d-00003-of-00014.syr" in message
    (loose,) = loaders_of(mixed(shards, BEGIN), in_order=False)
    missing = {**state, "missing": [0], "position": 96, "step_size": 48}
    assert "the state lacks steps of in_order=False" in refusal(grown, missing, in_order=False)
    loose.close()
    without_second = {name: [paths[0], *paths[2:]] for name, paths in shards.items()}
    assert "they differ from number 1 (d-00002-of-00014.syr) on" in refusal(mixed(without_second, BEGIN), state)
    own = Mixture([GlobalShuffle(72, 0), GlobalShuffle(180, 1)], (1, 1), "never")
    (loader,) = loaders_of(dataload.concat([*parts(shards, (6, 5)).values()]), sampler=own, shuffle=False)
    next(iter(loader))
    state, own = loader.state_dict(), Mixture([GlobalShuffle(84, 0), GlobalShuffle(180, 1)], (1, 1), "never")
    message = refusal(dataload.concat([*parts(shards, (7, 5)).values()]), state, sampler=own, shuffle=False)
    assert "a loader of the sources as they were, with your Mixture rebuilt for their 252 records" in message


def test_a_state_without_room_for_the_numbers_of_shards_finds_the_one_source_that_has_grown(shards):
    numbers, paths = np.random.default_rng(0).integers(1, SHARDS - 1, 30), shards["c"]

    def source(counts):
        return dataload.mix([(dataload.open(paths[:n]), 1.0) for n in counts.tolist()], stop="never")

    (loader,) = loaders_of(source(numbers))
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1024
    numbers[-1] += 1
    grown = source(numbers)
    for saved in (state, {**state, "settings": state["settings"].rpartition(" ")[0]}):
        (later,) = loaders_of(grown)
        load([later], saved)
        assert len(rows_of([iter(later)])) == 48
    numbers[0] += 1
    assert "too many numbers for the state, so only one source may have grown" in refusal(source(numbers), saved)
    load(loaders_of(source(numbers)), state)
