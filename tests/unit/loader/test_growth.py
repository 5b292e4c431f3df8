"""States of data sets to which shards were added since, and of others that have changed."""

import itertools
import json
import os
import random
import re
from itertools import islice

import numpy as np
import pytest
from samples import sampled
from written import written

import dataload
from dataload import ConfigError, Loader, StateMismatchError
from dataload.loader.growth import summarize
from dataload.samplers import GlobalShuffle
from dataload.streams import MultiStreamLoader


def add(directory, start, stop, per_shard=4):
    """Write the records [start, stop), which are numbered."""
    with dataload.create(directory / "d.syr", append=start > 0, records_per_shard=per_shard) as writer:
        writer.extend({"y": np.array(i)} for i in range(start, stop))


def numbers(batch):
    return batch["y"][batch.get("valid", np.full(len(batch["y"]), True))].tolist()


def take(loaders, steps=None):
    """Return the numbers of the records in the next steps of an epoch, all by default, over all ranks."""
    iterators = [iter(loader) for loader in loaders]
    found = []
    while steps is None or steps:
        batches = [next(each, None) for each in iterators]
        if batches[0] is None:
            break
        found += [number for batch in batches for number in numbers(batch)]
        steps = None if steps is None else steps - 1
    return found


def built(source, world_size, batch_size, **options):
    options = {"seed": 3, **options}
    return [Loader(source, batch_size=batch_size, rank=r, world_size=world_size, **options) for r in range(world_size)]


VIEWS = {
    "files": lambda source: source,
    "a share": lambda source: source.split(0.7, seed=1)[0],
    "a part": lambda source: source.split({"a": 0.6, "b": 0.4}, seed=2)["b"],
    "a condition": lambda source: source.filter(dataload.field("y") != 7),
    "a slice": lambda source: source[3:],
    "a filtered slice": lambda source: source[2:].filter(lambda record: record["y"] % 5 != 0, num_workers=0),
}
ORDERS = {"in order": {}, "global": {"shuffle": True}, "shards": {"shuffle": "shards"}}
CASES = [*itertools.product(VIEWS, ORDERS)]


@pytest.mark.parametrize(("view", "order"), sampled(CASES, CASES[::4]))
def test_an_epoch_ends_with_the_records_that_it_began_with(tmp_path, view, order):
    """After growth, resumes and changes of the number of ranks: each record of an epoch exactly once."""
    chooser = random.Random(f"{view} {order}")
    count = chooser.randrange(30, 60)
    add(tmp_path, 0, count)
    state, expected, served, options = None, None, [], ORDERS[order]
    for _ in range(6):
        with dataload.open(tmp_path) as opened:
            source = VIEWS[view](opened)
            here = sorted(int(record["y"]) for record in source)
            loaders = built(source, chooser.randint(1, 6), chooser.randint(1, 4), tail="pad", **options)
            for loader in loaders if state else ():
                loader.load_state_dict(state, on_growth="finish")
            for _ in range(chooser.choice((0, 1, 1, 2))):  # epochs that are finished
                expected = expected if served else here
                served += take(loaders)
                assert sorted(served) == expected
                served = []
            if chooser.random() < 0.7 or not served:
                expected = expected if served else here
                served += take(loaders, chooser.randint(0, 3))
                if len(served) == len(expected):
                    assert sorted(served) == expected
                    served = []
            state = json.loads(json.dumps(loaders[0].state_dict()))
            assert len(json.dumps(state)) < 1024
            for loader in loaders:
                loader.close()
        if chooser.random() < 0.6:
            more = chooser.randint(1, 12)
            add(tmp_path, count, count + more, per_shard=chooser.randint(1, 5))
            count += more


@pytest.mark.parametrize("executor", ["threads", "processes"])
@pytest.mark.usefixtures("fork_server")
def test_the_rest_of_an_epoch_is_that_of_a_run_without_growth(tmp_path, executor):
    """Also where workers make the batches, whose orders are those of the whole; for single batches; and once more."""
    add(tmp_path, 0, 20)
    with dataload.open(tmp_path) as source, Loader(source, batch_size=3, shuffle=True, seed=3) as unbroken:
        take([unbroken], 2)
        state = unbroken.state_dict()
        unbroken.load_state_dict(state)
        rest = take([unbroken])
    add(tmp_path, 20, 26)
    options = {"num_workers": 2, "executor": executor, "prefetch": 1}
    with dataload.open(tmp_path) as source, Loader(source, batch_size=3, shuffle=True, seed=3, **options) as loader:
        loader.load_state_dict(state, on_growth="finish")
        assert len(loader) == 7
        assert loader.batch(0, 2)["y"].tolist() == rest[:3]
        assert take([loader], 1) == rest[:3]
        later = loader.state_dict()
        assert (later["source"], later["length"], later["settings"]) == (state["source"], 20, state["settings"])
        loader.load_state_dict(later, on_growth="finish")
        assert take([loader]) == rest[3:]
        assert loader.state_dict()["length"] == 26
        assert len(loader) == 9
        whole = take([loader])
        assert sorted(whole) == [*range(26)]
        with pytest.raises(StateMismatchError, match="shards were added"):
            loader.load_state_dict(later)
        assert len(loader) == 9


def refused(source, state, **options):
    with Loader(source, **{"batch_size": 3, "shuffle": True, "seed": 3, **options}) as loader:
        before = loader.state_dict()
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state, on_growth="finish")
        assert loader.state_dict() == before
    return str(caught.value)


def test_what_the_errors_say(tmp_path):
    add(tmp_path, 0, 20)
    with dataload.open(tmp_path) as source, Loader(source, batch_size=3, shuffle=True, seed=3) as loader:
        take([loader], 2)
        state = loader.state_dict()
    add(tmp_path, 20, 40)
    with dataload.open(tmp_path) as source, Loader(source, batch_size=3, shuffle=True, seed=3) as loader:
        with pytest.raises(StateMismatchError) as caught:
            loader.load_state_dict(state)
        names = [os.path.basename(path) for path in source.paths]
        assert str(caught.value) == (
            "shards were added to the data set after the state was saved: to finish epoch 0 without their records, "
            "pass load_state_dict(state, on_growth='finish'), or start over\n"
            f"  shards: 5 in the state, 10 here; added: {', '.join(names[5:8])} and 2 more"
        )
        with pytest.raises(ConfigError, match="on_growth is 'ignore': choose from error, finish"):
            loader.load_state_dict(state, on_growth="ignore")
        assert "order (the sampler or its seed): GlobalShuffle(length=20, seed=3)" in refused(source, state, seed=4)
        assert "other data or another order" in refused(source, state, shuffle="shards")
        own = {"sampler": GlobalShuffle(40, 3), "shuffle": False}
        message = (
            "to finish the epoch, load it into a loader of the first 5, dataload.open(source.paths[:5]), with "
            "your GlobalShuffle rebuilt for their 20 records"
        )
        assert message in refused(source, state, **own)
        first = dataload.open(source.paths[:5])
        with first, Loader(first, batch_size=3, sampler=GlobalShuffle(20, 3)) as loader:
            loader.load_state_dict(state)
            assert len(take([loader])) == 14
        paths = [*source.paths[:2], *source.paths[3:]]
    with dataload.open(paths) as source:
        expected = f"shards: 5 in the state, 9 here; they differ from number 2 ({names[3]}) on"
        assert expected in refused(source, state)
    with dataload.open(paths[:2]) as source:
        assert "shards: 5 in the state, 2 here; they differ from number 2, which is missing, on" in refused(
            source, state
        )
    with dataload.open(paths) as source:
        settings = state["settings"].partition("; shards: ")[0]
        assert "shards" not in refused(source, {**state, "settings": settings})
        assert "shards" not in refused(source, {**state, "settings": f"{settings}; shards: x"})
        assert "must be text" in refused(source, {**state, "settings": 3})


def test_a_shard_that_was_rewritten_is_found_among_many(tmp_path):
    add(tmp_path, 0, 100, per_shard=1)
    with dataload.open(tmp_path) as source, Loader(source, batch_size=3, shuffle=True, seed=3) as loader:
        state = loader.state_dict()
        assert len(json.dumps(state)) < 700
        paths = source.paths
    written(paths[57], [{"y": np.array(1)}], overwrite=True)
    add_to = [*paths, paths[0].replace("00000", "more")]
    written(add_to[-1], [{"y": np.array(1)}])
    for files in (paths, add_to, paths[:70]):
        with dataload.open(files) as source:
            assert f"they differ from number 56 ({os.path.basename(paths[56])}) on" in refused(source, state)


def test_states_of_earlier_releases(tmp_path):
    """They have fingerprints of the same data, so they prove growth, but not what else has changed."""
    add(tmp_path, 0, 20)
    with dataload.open(tmp_path) as source, Loader(source, batch_size=3, shuffle=True, seed=3) as loader:
        take([loader], 2)
        state = loader.state_dict()
    old = {**state, "settings": state["settings"].partition("; shards: ")[0]}
    add(tmp_path, 20, 26)
    with dataload.open(tmp_path) as source:
        for saved in (
            old,
            {n: v for n, v in old.items() if n not in ("settings", "missing", "step_size")} | {"version": 1},
        ):
            with Loader(source, batch_size=3, shuffle=True, seed=3) as loader:
                loader.load_state_dict(saved, on_growth="finish")
                assert len(take([loader])) == 14
    with dataload.open(source.paths[1:]) as source:
        assert "source (the data set)" in refused(source, old)


@pytest.mark.parametrize(("shards", "groups"), [(1, 1), (31, 31), (32, 32), (33, 17), (64, 32), (65, 17)])
def test_a_state_has_the_checksums_of_at_most_32_groups_of_shards(shards, groups):
    assert re.fullmatch(rf"{shards} ([0-9a-f]{{4}}){{{groups}}}", summarize([("name", 7)] * shards, [shards]))


def test_selections_that_growth_changes_are_refused(tmp_path):
    """An exact split deals most records anew, and a list of indices may name new records among the old ones."""
    views = {
        "exact": lambda source: source.split({"a": 0.5, "b": 0.5}, exact=True)["a"],
        "indices": lambda source: source[[len(source) - 1, 0, 3, 5, 8]],
        "backwards": lambda source: source[::-1],
    }
    add(tmp_path, 0, 20)
    states = {}
    with dataload.open(tmp_path) as source:
        for name, view in views.items():
            with Loader(view(source), batch_size=1, shuffle=True, seed=3) as loader:
                take([loader], 2)
                states[name] = loader.state_dict()
    add(tmp_path, 20, 40)
    with dataload.open(tmp_path) as source:
        for name, view in views.items():
            assert "other data or another order" in refused(view(source), states[name], batch_size=1)


@pytest.mark.parametrize("kind", ["pool_shuffle", "packing", None])
def test_configs_build_their_samplers_again(tmp_path, kind):
    sampler = {
        "pool_shuffle": {"kind": "pool_shuffle", "pool_size": 7, "parent": {"kind": "shard_sequential"}},
        "packing": {"kind": "packing", "row_length": 60, "length_of": "x"},
        None: None,
    }[kind]
    data = tmp_path / "data"
    data.mkdir()

    def write(start, stop):
        with dataload.create(data / "d.syr", append=start > 0, records_per_shard=4) as writer:
            writer.extend({"x": np.full(i % 9 + 1, i), "y": np.array(i)} for i in range(start, stop))

    loader_options = {"batch_size": 1 if kind == "packing" else 3, "seed": 1}
    field = "x" if kind == "packing" else "y"
    config = {"source": {"path": str(data), "fields": [field]}, "loader": loader_options}
    if sampler is None:
        config["loader"]["shuffle"] = True
    else:
        config["sampler"] = sampler

    def found(loader):
        return [int(i) for batch in loader for i in np.unique(batch[field]) if i]

    write(0, 40)
    with dataload.from_config(config) as loader:
        first = found(islice(loader, 2))
        state = loader.state_dict()
    write(40, 60)
    with dataload.from_config(config) as loader:
        loader.load_state_dict(state, on_growth="finish")
        assert sorted(first + found(loader)) == [*range(1, 40)]
        assert sorted(found(loader)) == [*range(1, 60)]


def streams(count, **options):
    lists = [[100 * i + j for j in range(i % 3 + 1)] for i in range(count)]
    return MultiStreamLoader(iter, lists, seed=5, **{"batch_size": 2, "mode": "split", **options})


def values(loader, steps=None):
    found = []
    for batch in loader:
        found += batch["data"][batch["valid"]].tolist()
        steps = None if steps is None else steps - 1
        if steps == 0:
            break
    return found


def test_streams_of_a_list_that_has_grown():
    whole = {count: [100 * i + j for i in range(count) for j in range(i % 3 + 1)] for count in (7, 11)}
    for executor in ("threads", "processes"):
        with streams(7) as loader:
            first, state = values(loader, 3), loader.state_dict()
        with streams(11, num_workers=2, executor=executor) as loader:
            with pytest.raises(StateMismatchError) as caught:
                loader.load_state_dict(state)
            assert str(caught.value) == (
                "4 sequences were added after the state was saved: pass load_state_dict(state, on_growth='finish'), or "
                "start over\n  sequences: 7 in the state, 11 here"
            )
            loader.load_state_dict(state, on_growth="finish")
            again = loader.state_dict()
            assert again["sequences"] == state["sequences"]
            assert sorted(first + values(loader)) == whole[7]
            assert sorted(values(loader)) == whole[11]
            loader.load_state_dict([again], on_growth="finish")
            assert sorted(first + values(loader)) == whole[7]
            end = loader.state_dict()
            loader.load_state_dict(end)
            assert sorted(values(loader)) == whole[11]
    with streams(7) as loader:
        first = loader.state_dict()
        values(loader)
        second = loader.state_dict()  # the epoch has not begun
    with streams(11) as loader:
        for unbegun in (second, first):
            loader.load_state_dict(state, on_growth="finish")  # of the first epoch
            loader.load_state_dict(unbegun, on_growth="finish")
            assert sorted(values(loader)) == whole[11]


def test_independent_streams_end_no_epoch_together():
    with streams(7, mode="independent") as loader:
        values(loader, 3)
        state = loader.state_dict()
    with (
        streams(11, mode="independent") as loader,
        pytest.raises(
            StateMismatchError, match=r"mode='independent' end no epoch together: continue with sequences\[:7\]"
        ),
    ):
        loader.load_state_dict(state, on_growth="finish")


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_loader_with_the_arguments_of_torch(tmp_path, shuffle):
    torch = pytest.importorskip("torch")
    from dataload.torch import DataLoader

    def loader_of(source):
        generator = torch.Generator()
        generator.manual_seed(len(source))  # the state has the seed
        return DataLoader(source, batch_size=3, shuffle=shuffle, generator=generator)

    add(tmp_path, 0, 20)
    with dataload.open(tmp_path) as source, loader_of(source) as loader:
        first = take([loader], 2)
        state = loader.state_dict()
    add(tmp_path, 20, 26)
    with dataload.open(tmp_path) as source:
        with loader_of(source) as loader:
            with pytest.raises(StateMismatchError, match="shards were added to the data set after the state was saved"):
                loader.load_state_dict(state)
            loader.load_state_dict(state, on_growth="finish")
            assert sorted(first + take([loader])) == [*range(20)]
            assert sorted(take([loader])) == [*range(26)]
        sampler = torch.utils.data.RandomSampler(range(26))
        with DataLoader(source, batch_size=3, sampler=sampler) as loader, pytest.raises(StateMismatchError):
            loader.load_state_dict(state, on_growth="finish")
