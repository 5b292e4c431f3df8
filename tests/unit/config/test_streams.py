import functools
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import dataload
from dataload import ConfigError, from_config
from dataload.api import record_loader
from dataload.streams import MultiStreamLoader, RowMixture, StreamSampler

LENGTHS = [4, 3, 5]


@pytest.fixture
def data(tmp_path):
    """Twelve records in three episodes, in as many files."""
    start = 0
    for number, length in enumerate(LENGTHS):
        with dataload.create(tmp_path / f"{number}.syr") as writer:
            for i in range(start, start + length):
                writer.write({"x": np.array([i]), "episode": np.array([number])})
        start += length
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    return tmp_path


def config(data, /, batch_size=2, **sampler):
    return {
        "source": {"path": str(data / "{0..2}.syr")},
        "sampler": {"kind": "streams", **sampler},
        "loader": {"batch_size": batch_size},
    }


@pytest.mark.parametrize("way", [{"lengths": "lengths.npy"}, {"field": "episode"}, {"shards": True}])
def test_every_way_to_say_where_sequences_end(data, way):
    path = data / "job.json.toml"
    settings = config(data, **way)
    lines = [f'[source]\npath = "{settings["source"]["path"]}"\n[sampler]\nkind = "streams"\nmode = "pack"\nchunk = 2']
    lines += [f"{name} = {json.dumps(value)}" for name, value in way.items()]
    path.write_text("\n".join([*lines, "[loader]\nbatch_size = 2\nseed = 5\n"]))
    with from_config(path) as loader:
        expected = StreamSampler(sequence_lengths=LENGTHS, rows=2, chunk=2, mode="pack", seed=5)
        assert loader.batch_sampler == expected
        assert [batch["x"].shape for batch in loader] == [(2, 2, 1)] * 4


def test_keys_of_a_tar_or_the_source_can_say_it(tmp_path):
    with dataload.create(tmp_path / "a.tar") as writer:
        for key in ("b/1", "b/2", "a/1", "a/2", "a/3"):
            writer.write({"__key__": key, "txt": b"x"})
    for key in (True, "^."):
        with from_config(config(tmp_path, key=key) | {"source": {"path": str(tmp_path / "a.tar")}}) as loader:
            assert loader.batch_sampler.sequence_lengths.tolist() == [2, 3]
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 3, 0, 4, 5, 6, 7, 8, 0], np.uint16))
    settings = config(tmp_path) | {
        "source": {"path": str(tmp_path / "tokens.npy"), "options": {"window": 3, "end_token": 0, "ends": "drop"}}
    }
    settings["source"] |= settings["source"].pop("options")
    with from_config(settings) as loader:
        assert loader.batch_sampler.sequence_lengths.tolist() == loader.source.sequence_lengths.tolist()


def test_every_setting_arrives(data, monkeypatch):
    settings = {"chunk": 3, "mode": "independent", "ends": "drop", "random_start": True, "epoch_steps": 7, "seed": 3}
    with from_config(config(data, shards=True, **settings)) as loader:
        assert loader.batch_sampler == StreamSampler(sequence_lengths=LENGTHS, rows=2, **settings)
    with from_config(config(data, 3, shards=True, shuffled_rows=1)) as loader:
        assert isinstance(loader.batch_sampler, RowMixture)
        assert next(iter(loader))["is_stream"].tolist() == [True, True, False]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with from_config(config(data, shards=True)) as loader:
        assert loader.batch_sampler.rows == 4, "of all ranks"
        assert next(iter(loader))["x"].shape == (2, 1)
    with from_config(config(data, 3, shards=True, shuffled_rows=1)) as loader:
        assert [part.rows for part in loader.batch_sampler.parts] == [4, 2], "of all ranks"


@pytest.mark.parametrize(
    ("sampler", "key", "message"),
    [
        ({}, "sampler.lengths", "lengths is missing, and the source does not know its sequences: give lengths"),
        ({"shards": True, "field": "episode"}, "sampler.shards", "field and shards both tell where sequences end"),
        ({"shards": True, "shuffled_rows": 2}, "sampler.shuffled_rows", "below loader.batch_size, 2, .*; got 2"),
        ({"field": "speaker"}, "sampler.field", "speaker"),
        ({"shards": True, "mode": "slit"}, "sampler.mode", "split"),
        ({"shards": True, "epoch_steps": 3}, "sampler.epoch_steps", "for endless rows"),
        ({"lengths": "lengths.txt"}, "sampler.lengths", "npy"),
    ],
)
def test_what_is_wrong_is_named(data, sampler, key, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_config(config(data, **sampler))
    assert caught.value.key == key


def items(sequence):
    """A stream: three items of a sequence, of which the name is a number."""
    yield from range(int(sequence) * 10, int(sequence) * 10 + 3)


def numbers():
    return ["1", "2", "3"]


def iterators(*, loader=None, **sampler):
    return {
        "sampler": {"kind": "iterators", "make_stream": f"{__name__}:items", **sampler},
        "loader": {"batch_size": 2, **(loader or {})},
    }


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """This module, which pytest loads without a place in `sys.modules` of its plain name."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(items=items, numbers=numbers))


def serve(settings):
    with from_config(settings) as loader:
        assert isinstance(loader, MultiStreamLoader)
        return [batch["data"].tolist() for batch in loader]


def test_a_config_of_iterators_builds_a_multi_stream_loader(tmp_path, monkeypatch):
    settings = iterators(sequences=numbers(), mode="split", shuffle=False)
    with MultiStreamLoader(items, numbers(), batch_size=2, mode="split", shuffle=False) as loader:
        expected = [batch["data"].tolist() for batch in loader]
    assert serve(settings) == expected
    assert serve(iterators(sequences=f"{__name__}:numbers", mode="split", shuffle=False)) == expected
    (tmp_path / "names.txt").write_text("1\n 2\n\n3\n")
    path = tmp_path / "train.json"
    path.write_text(json.dumps(iterators(sequences="names.txt", mode="split", shuffle=False)))
    monkeypatch.chdir("/")
    assert serve(path) == expected, "the file is relative to the config"


def test_every_setting_of_iterators_arrives(monkeypatch):
    made = []

    @functools.wraps(MultiStreamLoader.__init__)
    def note(self, **options):
        made.append(options)

    monkeypatch.setattr(MultiStreamLoader, "__init__", note)
    loader = {"seed": 3, "num_workers": 2, "executor": "spawn", "prefetch": 5}
    loader |= {"timeout": 9, "epochs": 2, "tail": "drop", "batch_transform": "builtins:dict", "rank": 1}
    loader |= {"world_size": 2}
    sampler = {"mode": "split", "shuffle": False, "chunk": 4, "ends": "pad"}
    from_config(iterators(sequences=["1"], loader={**loader, "collate": {"x": "pad"}}, **sampler))
    expected = {**loader, **sampler, "batch_size": 2, "make_stream": items, "sequences": ("1",)}
    expected |= {"batch_transform": dict, "collate": {"x": "pad"}}
    assert made == [expected]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (iterators(), r"^config: sampler\.sequences is missing: expected a value$"),
        (iterators(sequences=[]), r"^config: sampler\.sequences is \[\]: expected text or a list"),
        (iterators(sequences=["1"], make_stream="x"), r"sampler\.make_stream is 'x': expected a function as 'package"),
        (iterators(sequences=["1"], make_stream="math:x"), r"^sampler\.make_stream is 'math:x': math has no 'x'"),
        (iterators(sequences="none.txt"), r"^sampler\.sequences: cannot read none\.txt: No such file or directory"),
        (iterators(sequences="/dev/null"), r"^sampler\.sequences: cannot read /dev/null: it is a device"),
        (iterators(sequences="empty.txt"), r"^sampler\.sequences: sequences .*empty"),
        (iterators(sequences="binary.txt"), r"binary\.txt: it is not UTF-8 text \(invalid start byte\)"),
        (iterators(sequences=__file__.replace(".py", ".npy")), r"^sampler\.sequences: cannot read .*No such file"),
        (iterators(sequences=["1"], mode="pack"), r"sampler\.mode is 'pack': choose from independent, split$"),
        (iterators(sequences=["1"], mode="split", loader={"tail": "partial"}), r"^loader\.tail: tail is 'partial': "),
        (
            iterators(sequences=["1"], loader={"exclude": [1]}),
            r"^loader\.exclude: exclude does not apply to sampler\.kind 'iterators': remove it$",
        ),
        (iterators(sequences=["1"], loader={"shuffle": False}), r"^loader\.shuffle: .*: set sampler\.shuffle$"),
        (iterators(sequences=["1"], loader={"num_workers": "auto"}), r">= 0, got 'auto'"),
        (
            {"source": {"path": "a.syr"}, **iterators(sequences=["1"])},
            r"^source does not apply to sampler\.kind 'iterators', whose streams read the data",
        ),
        ({**iterators(sequences=["1"]), "loader": {}}, r"^loader\.batch_size: batch_size must be an integer >= 1"),
    ],
)
def test_what_is_wrong_with_iterators_is_named(settings, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=match):
        from_config(settings)


def test_tools_that_look_at_the_order_refuse_iterators():
    with pytest.raises(ConfigError, match=r"^sampler\.kind is 'iterators': streams have no order of records"):
        record_loader(iterators(sequences=["1"]))
