"""Orders from configs: every kind of sampler, against the same sampler built by hand."""

import re

import numpy as np
import pytest
from written import written

import dataload
from dataload._util.randomness import derive_key
from dataload.config import parse_value, read_config
from dataload.errors import ConfigError
from dataload.loader.order import shuffled
from dataload.samplers import Mixture, PoolShuffle, Weighted, blend_weights
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset
from dataload.sources.memory import MemorySource, RangeSource
from dataload.sources.views.concat import ConcatSource

SHARDS = (7, 5, 8)
"""Records of the files that most tests read."""

LENGTHS = [1 + i * 7 % 5 for i in range(20)]
WEIGHTS = [float(i % 4) for i in range(20)]
ONE = {"path": "a.syr"}
TWO = [{"path": "a.syr"}, {"path": "b.syr"}]


def settings(sampler, *overrides, source=ONE, loader=None):
    return read_config({"source": source, "sampler": sampler, "loader": loader or {"batch_size": 4}}, overrides)


def options(sampler, source, *, loader=None):
    several = isinstance(source, ConcatSource)
    return settings(sampler, source=TWO if several else ONE, loader=loader).loader_options(source)


def build(sampler, source, *, seed=0):
    return options(sampler, source, loader={"batch_size": 4, "seed": seed})["sampler"]


class Files(RangeSource):
    """The numbers 0 ... n - 1, said to lie in several files."""

    def __init__(self, *lengths):
        super().__init__(sum(lengths))
        self._lengths = lengths

    @property
    def shard_lengths(self):
        return self._lengths


FILES = Files(*SHARDS)
PARTS = ConcatSource([Files(3, 9), RangeSource(8)])


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kind": "sequential"}, Sequential(20)),
        ({"kind": "global_shuffle"}, GlobalShuffle(20, 5)),
        ({"kind": "global_shuffle", "seed": 6}, GlobalShuffle(20, 6)),
        (
            {"kind": "global_shuffle", "parent": {"kind": "subset", "stop": 7}},
            GlobalShuffle(7, 5, Subset(Sequential(20), slice(7))),
        ),
        ({"kind": "shard_sequential"}, ShardSequential(SHARDS, 5)),
        ({"kind": "shard_sequential", "seed": 0}, ShardSequential(SHARDS, 0)),
        ({"kind": "pool_shuffle"}, PoolShuffle(ShardSequential(SHARDS, 5), 1024, 5)),
        (
            {"kind": "pool_shuffle", "pool_size": 6, "parent": {"kind": "sequential"}, "seed": 2},
            PoolShuffle(Sequential(20), 6, 2),
        ),
        ({"kind": "lanes", "lanes": 4}, Lanes(ShardSequential(SHARDS, 5), 4, None, 5)),
        (
            {"kind": "lanes", "lanes": 2, "pool_size": 3, "parent": {"kind": "sequential"}, "seed": 1},
            Lanes(Sequential(20), 2, 3, 1),
        ),
        ({"kind": "subset", "start": -4}, Subset(Sequential(20), range(16, 20))),
        ({"kind": "subset", "start": 1, "stop": 9, "step": 3}, Subset(Sequential(20), slice(1, 9, 3))),
        ({"kind": "subset", "step": -1}, Subset(Sequential(20), range(19, -1, -1))),
        (
            {"kind": "subset", "indices": [3, -1, 3], "parent": {"kind": "shard_sequential"}},
            Subset(ShardSequential(SHARDS, 5), [3, 19, 3]),
        ),
        ({"kind": "repeat", "times": 3}, Repeat(GlobalShuffle(20, 5), 3)),
        ({"kind": "repeat", "times": 2, "parent": {"kind": "sequential"}}, Repeat(Sequential(20), 2)),
        ({"kind": "weighted", "weights": WEIGHTS}, Weighted(WEIGHTS, 20, 5)),
        (
            {"kind": "weighted", "weights": WEIGHTS, "num_samples": 9, "replacement": False, "seed": 1},
            Weighted(WEIGHTS, 9, 1, replacement=False),
        ),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_table_stands_for_a_sampler(table, expected):
    assert build(table, FILES, seed=5) == expected


def test_a_seed_goes_down_to_the_tables_that_have_none():
    inner = {"kind": "shard_sequential"}
    table = {"kind": "pool_shuffle", "pool_size": 2, "seed": 7, "parent": {"kind": "repeat", "times": 2}}
    assert build(table, FILES, seed=5) == PoolShuffle(Repeat(GlobalShuffle(20, 7), 2), 2, 7)
    table = {"kind": "lanes", "lanes": 2, "parent": {"kind": "global_shuffle", "seed": 8, "parent": inner}}
    assert build(table, FILES, seed=5) == Lanes(GlobalShuffle(20, 8, ShardSequential(SHARDS, 8)), 2, None, 5)


@pytest.mark.parametrize("lengths", [(5000,) * 4, (10**6,) * 4, (3, 4)])
def test_a_pool_shuffle_is_by_default_what_shuffle_shards_gives(lengths):
    assert build({"kind": "pool_shuffle"}, Files(*lengths), seed=3) == shuffled(Files(*lengths), "shards", 3)


def test_the_settings_of_a_mixture():
    table = {
        "kind": "mixture",
        "weights": [[1, 1], [0.5, 1.5]],
        "stop": "longest",
        "window": 8,
        "seed": 2,
        "samplers": [{"kind": "pool_shuffle", "pool_size": 4}, {"kind": "subset", "stop": 5}],
    }
    seed = int(derive_key(2, "mixture-part", 0, words=1)[0])
    expected = Mixture(
        (PoolShuffle(ShardSequential((3, 9), seed), 4, seed), Subset(Sequential(8), slice(5))),
        ((1.0, 1.0), (0.5, 1.5)),
        stop="longest",
        seed=2,
        window=8,
        lengths=(12, 8),
    )
    assert build(table, PARTS) == expected


def test_a_mixture_by_length():
    parts = ConcatSource([MemorySource([{"x": np.zeros(n)} for n in lengths]) for lengths in ([4, 8], [2])])
    table = {"kind": "mixture", "length_of": "x", "window": 100}
    assert build({**table, "weights": [3, 1]}, parts).weights == (0.5, 0.5)
    assert build({**table, "weights": [[3, 1], [0, 1]]}, parts).weights == ((0.5, 0.5), (0.0, 0.5))
    changing = {**table, "weights": {"0": [3, 1], "3": [0, 1]}, "stop": "never", "global_batch_size": 2}
    assert build(changing, parts).weights == ((0, (0.5, 0.5)), (6, (0.0, 0.5)))
    empty = ConcatSource([MemorySource([{"x": np.zeros(1)}]), MemorySource([{"x": np.zeros(0)}])])
    with pytest.raises(ConfigError, match=r"^sampler\.length_of: all records of source\[1\] have the length 0"):
        build({**table, "weights": [1, 1]}, empty)


def test_limits_temperature_and_least_share_of_a_mixture():
    table = {"kind": "mixture", "samplers": [{"kind": "sequential"}] * 2, "stop": "longest"}  # of 12 and 8 records
    assert build({**table, "weights": [1, 1], "max_epochs": 2}, PARTS).max_epochs == (2, 2)
    assert build({**table, "weights": [1, 1], "max_epochs": [float("inf"), 1.5]}, PARTS).max_epochs[1] == 1.5
    assert build({**table, "temperature": 1}, PARTS).weights == pytest.approx((0.6, 0.4))
    assert build({**table, "temperature": 2}, PARTS).weights == blend_weights([12, 8], temperature=2)
    rows = {**table, "weights": [[1, 9], [1, 1]], "min_share": 0.2}
    assert build(rows, PARTS).weights == (blend_weights([1, 9], min_share=0.2), (0.5, 0.5))
    parts = ConcatSource([MemorySource([{"x": np.zeros(n)} for n in lengths]) for lengths in ([4, 8], [2, 2])])
    by_tokens = build({**table, "temperature": 1, "min_share": 0.3, "length_of": "x"}, parts).weights
    assert by_tokens == pytest.approx((0.7 / 6, 0.3 / 2)), "12 and 4 tokens are 75% and 25%"
    for wrong in ({}, {"weights": [1, 1], "temperature": 2}):
        with pytest.raises(ConfigError, match=r"^sampler\.weights: give either weights, or temperature"):
            build({**table, **wrong}, PARTS)
    with pytest.raises(ConfigError, match=r"sampler\.temperature is 0.3: expected a number >= 1"):
        build({**table, "temperature": 0.3}, PARTS)


def test_sources_of_a_mixture_have_names(tmp_path):
    for name, start in {"web": 0, "books": 100}.items():
        written(tmp_path / f"{name}.syr", [{"x": np.int64(i)} for i in range(start, start + 40)])
    unnamed = [{"path": str(tmp_path / f"{name}.syr")} for name in ("web", "books")]
    named = [{**table, "name": name} for table, name in zip(unnamed, ("web", "books"), strict=True)]

    def loader(source, **settings):
        sampler = {"kind": "mixture", "stop": "never", "with_source": True, **settings}
        return dataload.from_config({"source": source, "sampler": sampler, "loader": {"batch_size": 10}})

    row, changed = {"books": 1, "web": 4}, {"0": {"web": 1, "books": 4}, "30": {"books": 1, "web": 0}}
    for by_name, in_order in (
        ({"weights": row, "max_epochs": {"books": 2}}, {"weights": [4, 1], "max_epochs": [float("inf"), 2]}),
        (
            {"weights": [row, changed], "min_share": 0.3},
            {"weights": [[4, 1], {"0": [1, 4], "30": [0, 1]}], "min_share": 0.3},
        ),
    ):
        with loader(named, **by_name) as one, loader(unnamed, **in_order) as other:
            assert [one.batch(0, step)["x"].tolist() for step in range(8)] == [
                other.batch(0, step)["x"].tolist() for step in range(8)
            ]
            one.load_state_dict(other.state_dict())
    with loader(named, weights=row) as one:
        batches = iter(one)
        first = next(batches)
        assert (first["source"] == (first["x"] >= 100)).all()
        assert first["source"].dtype == np.int32
        one.change_weights({"web": 0, "books": 1})
        assert (next(batches)["source"] == 1).all()
        assert one.statistics().sources.keys() == {"web", "books"}
    with loader(named[0], weights=[1]) as one:
        assert next(iter(one))["source"].tolist() == [0] * 10


# What is found wrong when the data are there. Each line is a table and the error that it leads to.

FIT = r"""
{kind='repeat', times=281474976710656} => times: times must be an integer in
{kind='subset', indices=[3, 20]} => indices: .*index 20 is out of range for 20 records
{kind='weighted', weights=[1, 2]} => weights: weights must have one value for each of the 20 records, got 2
{kind='weighted', weights=[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]} => weights: weights must .* zero
{kind='weighted', weights='/no/such.npy'} => weights: cannot read /no/such\.npy: No such file
{kind='length_buckets', length_of='index'} => length_of: field 'index' of record 0 has no length
{kind='length_buckets', length_of='x'} => length_of: a record has no field 'x': choose from index
{kind='length_buckets', lengths='lengths.npy', boundaries=[2, 3]} => boundaries: boundaries must reach the longest
{kind='length_buckets', lengths='lengths.npy', boundaries=[-1, 9]} => boundaries[0]: .* must be an integer >= 0, got -1
{kind='packing', lengths='lengths.npy', row_length=4} => row_length: row_length must be at least 5, the length of
{kind='packing', lengths='lengths.npy', row_length=8, sampler={kind='subset', indices=[20]}} => sampler.indices: .*20
"""
FIT_PARTS = r"""
{kind='mixture', weights=[1, 1000], window=10} => window: window must be 'any' or at least 1001, so that weights\[0\]
{kind='mixture', weights=[1, 1], samplers=[{kind='sequential'}, {kind='subset', indices=[8]}]} => samplers[1].indices:
{kind='mixture', weights=[1, 1], samplers=[{kind='subset', stop=0}, {kind='sequential'}]} => samplers[0]: .* is empty
"""


@pytest.mark.parametrize(("source", "lines"), [(FILES, FIT), (PARTS, FIT_PARTS)])
def test_a_table_that_does_not_fit_the_data(tmp_path, monkeypatch, source, lines):
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS)
    for line in lines.strip().split("\n"):
        table, expected = line.split(" => ")
        key, _, message = expected.partition(":")
        with pytest.raises(ConfigError, match=rf"^sampler\.{re.escape(key)}:.*{message}") as error:
            options(parse_value(table), source)
        assert error.value.key == f"sampler.{key}"


def test_arrays_that_do_not_fit(tmp_path):
    def refuse(array, match):
        np.save(tmp_path / "a.npy", array)
        with pytest.raises(ConfigError, match=match) as error:
            options({"kind": "length_buckets", "lengths": str(tmp_path / "a.npy")}, FILES)
        assert error.value.key == "sampler.lengths"

    refuse(np.ones(19, int), "lengths must have one value for each of the 20 records, got 19")
    refuse(np.ones(20), "lengths must be integers, one per record")
    refuse(-np.ones(20, int), "lengths must be 0 or more, got -1 for record 0")
    refuse(np.ones((20, 1), int), r"a\.npy holds an array of shape \(20, 1\): expected one dimension")
    (tmp_path / "text.npy").write_text("1 2 3")
    with pytest.raises(
        ConfigError, match=r"^sampler\.indices: .*text\.npy is not a \.npy array: a \.npy file must start with"
    ):
        build({"kind": "subset", "indices": str(tmp_path / "text.npy")}, FILES)


def write(path, first, lengths):
    """Records of one file: x, as long as it says and full of the record's number, and the number itself."""
    written(path, [{"x": np.full(length, i), "y": i} for i, length in enumerate(lengths, first)])


@pytest.fixture
def data(tmp_path):
    """Three files of 20 records in all."""
    ends = np.cumsum(SHARDS)
    for number, end in enumerate(ends.tolist()):
        write(tmp_path / f"{number}.syr", end - SHARDS[number], LENGTHS[end - SHARDS[number] : end])
    return tmp_path


SOURCE = '[source]\npath = "*.syr"\nfields = ["y"]\n'
SOURCES = '[[source]]\npath = "[01].syr"\nfields = ["y"]\n[[source]]\npath = "2.syr"\nfields = ["y"]\n'


def test_rows_of_all_ranks(data):
    path = data / "train.toml"
    path.write_text(f'{SOURCE}[sampler]\nkind = "streams"\nshards = true\n[loader]\nglobal_batch_size = 6\nrank = 1\n')
    with dataload.from_config(path, overrides=["loader.world_size=3"]) as loader:
        assert (loader.batch_sampler.rows, loader.batch_sampler.rows_per_step) == (6, 2)
    match = r"^loader\.global_batch_size: global_batch_size is 6, which 4 ranks cannot share equally: give a multiple"
    with pytest.raises(ConfigError, match=match) as e:
        dataload.from_config(path, overrides=["loader.world_size=4"])
    assert (e.value.key, e.value.value) == ("loader.global_batch_size", 6)


def test_what_the_loader_refuses_is_named_as_in_the_config(data, monkeypatch):
    (data / "train.toml").write_text(
        '[source]\npath = "*.syr"\n[sampler]\nkind = "packing"\nrow_length = 8\nlength_of = "x"\n'
        "[loader]\nbatch_size = 3\n"
    )
    with pytest.raises(ConfigError, match=r"^loader\.collate: packed rows are laid out by dataload\.Pack"):
        dataload.from_config(data / "train.toml", overrides=["loader.collate.x=pad"])
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^loader\.rank: the environment has RANK='5', WORLD_SIZE='2': "):
        dataload.from_config(data / "train.toml")


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["source[1].fields=[z]"], r"^source\[1\]\.fields: .*'z'"),
        (["source[1].decode=auto"], r"^source\[1\]\.decode: format 'syrah' has no option 'decode'"),
        (["source[0].format=syra"], r"^source\[0\]\.format: there is no format 'syra': did you mean 'syrah'\?"),
        (["source[0].codec=math:sqr"], r"^source\[0\]\.codec is 'math:sqr': math has no 'sqr'"),
        (["source={path='x', format='syrahh'}"], r"^source\.format: there is no format 'syrahh'"),
    ],
)
def test_what_a_source_refuses_is_named_as_in_the_config(data, overrides, match):
    (data / "train.toml").write_text(SOURCES + "[loader]\nbatch_size = 3\n")
    with pytest.raises(ConfigError, match=match):
        dataload.from_config(data / "train.toml", overrides=overrides)


def test_a_config_that_fails_late_closes_what_it_opened(monkeypatch):
    closed = []

    class Noting(RangeSource):
        def close(self):
            closed.append(len(self))

    monkeypatch.setattr("dataload.api.open_source", lambda path, **_: Noting(int(path)))
    config = {"source": [{"path": "3"}, {"path": "4"}], "loader": {"batch_size": 4}}
    with pytest.raises(ConfigError, match=r"^sampler\.indices: "):
        dataload.from_config({**config, "sampler": {"kind": "subset", "indices": [7]}})
    assert closed == [3, 4]
    loader = dataload.from_config(config)
    assert closed == [3, 4]
    loader.close()
    assert closed == [3, 4, 3, 4], "nobody else has opened them"
    source = dataload.from_config(config).source
    assert (closed, source[6]["index"]) == ([3, 4, 3, 4], 3), "a loader that was only dropped leaves its source"
