import json

import numpy as np
import pytest

import dataload
from dataload import ConfigError, from_config
from dataload.config import json_schema
from dataload.streams import RowMixture, StreamSampler

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


def test_keys_of_a_tar_can_say_it(tmp_path):
    with dataload.create(tmp_path / "a.tar") as writer:
        for key in ("b/1", "b/2", "a/1", "a/2", "a/3"):
            writer.write({"__key__": key, "txt": b"x"})
    for key in (True, "^."):
        with from_config(config(tmp_path, key=key) | {"source": {"path": str(tmp_path / "a.tar")}}) as loader:
            assert loader.batch_sampler.sequence_lengths.tolist() == [2, 3]


def test_a_source_may_know_its_sequences(tmp_path):
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 3, 0, 4, 5, 6, 7, 8, 0], np.uint16))
    settings = config(tmp_path) | {
        "source": {"path": str(tmp_path / "tokens.npy"), "options": {"window": 3, "end_token": 0, "ends": "drop"}}
    }
    settings["source"] |= settings["source"].pop("options")
    with from_config(settings) as loader:
        assert loader.batch_sampler.sequence_lengths.tolist() == loader.source.sequence_lengths.tolist()


def test_every_setting_arrives(data):
    settings = {"chunk": 3, "mode": "independent", "ends": "drop", "random_start": True, "epoch_steps": 7, "seed": 3}
    with from_config(config(data, shards=True, **settings)) as loader:
        assert loader.batch_sampler == StreamSampler(sequence_lengths=LENGTHS, rows=2, **settings)


def test_rows_are_those_of_all_ranks(data, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with from_config(config(data, shards=True)) as loader:
        assert loader.batch_sampler.rows == 4
        assert next(iter(loader))["x"].shape == (2, 1)


def test_some_rows_from_anywhere(data):
    with from_config(config(data, 3, shards=True, shuffled_rows=1)) as loader:
        assert isinstance(loader.batch_sampler, RowMixture)
        assert next(iter(loader))["is_stream"].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("sampler", "key", "message"),
    [
        ({}, "sampler.lengths", "lengths is missing, and the source does not know its sequences: give lengths"),
        ({"shards": True, "field": "episode"}, "sampler.shards", "contradicts field: leave one out"),
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


def test_the_schema_knows_it():
    assert '"const": "streams"' in json.dumps(json_schema())
