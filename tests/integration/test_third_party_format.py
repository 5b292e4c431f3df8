"""A format that another package adds works wherever a built-in one does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import facts, ok
from written import written

import dataload
from dataload.errors import ConfigError


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    """The package, as pip would have installed it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "plugin_package"))
    yield
    sys.modules.pop("countdown_plugin", None)


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "a.countdown2", [{"number": number} for number in range(9, 0, -1)])


def numbers(source):
    return source.read_batch(range(len(source)))["number"].tolist()


def test_open_by_suffix_name_directory_and_content(path, tmp_path):
    unnamed = tmp_path / "unnamed"
    unnamed.write_bytes(path.read_bytes())
    expected = list(range(9, 0, -1))
    for paths in (path, f"countdown2:{unnamed}", unnamed, tmp_path, f"{tmp_path}/*.countdown2"):
        with dataload.open(paths) as source:
            assert type(source).__name__ == "Countdown2Source"
            assert numbers(source) == expected
    assert numbers(dataload.open([path, unnamed])) == 2 * expected


def test_options_are_typed_and_checked(path):
    assert numbers(dataload.open(path, step=4)) == [9, 5, 1]
    with pytest.raises(ConfigError, match=r"format 'countdown2' has no option 'stepp': did you mean 'step'\?"):
        dataload.open(path, stepp=2)
    with pytest.raises(ConfigError, match="step must be at least 1, got 0"):
        dataload.open(path, step=0)
    assert dataload.open(path, step=2).fingerprint() != dataload.open(path).fingerprint()


def test_create(tmp_path):
    written(tmp_path / "x", [{"number": 7}], format="countdown2", width=3)
    assert (tmp_path / "x").read_bytes() == b"C2\n007\n"
    with pytest.raises(ConfigError, match=r"writer of format 'countdown2' has no option 'with': did you mean 'width'"):
        dataload.create(tmp_path / "y.countdown2", **{"with": 3})
    with pytest.raises(ConfigError, match=r"pass format=, one of syrah, .*, countdown2$"):
        dataload.create(tmp_path / "y.unknown")


def test_a_config(path, tmp_path):
    options = {"step": 2, "skip": [5]}
    for source in ({"format": "countdown2", **options}, {"options": options}):
        config = {"source": {"path": str(path), **source}, "loader": {"batch_size": 2}}
        (tmp_path / "train.json").write_text(json.dumps(config))
        with dataload.from_config(tmp_path / "train.json") as loader:
            assert [batch["number"].tolist() for batch in loader] == [[9, 7], [3, 1]]
    with pytest.raises(ConfigError, match="stepp"):
        dataload.from_config({"source": {"path": f"countdown2:{path}", "stepp": 2}, "loader": {"batch_size": 2}})


def test_the_command_line(path, tmp_path):
    found = facts("inspect", path, "-o", "step=2")
    assert (found["format"], found["records"]) == ("countdown2", 5)
    assert found["fields"] == {"number": {"dtype": "int64", "shape": []}}
    assert "9 records in 1 file: all can be read" in ok("verify", path)
    ok("convert", path, tmp_path / "b.syr")
    assert numbers(dataload.open(tmp_path / "b.syr")) == list(range(9, 0, -1))
    ok("convert", tmp_path / "b.syr", tmp_path / "c.countdown2", "--shards", 2, "--to-option", "width=2")
    shards = sorted(tmp_path.glob("c-*.countdown2"))
    assert [shard.read_bytes()[:6] for shard in shards] == [b"C2\n09\n", b"C2\n05\n"]
    np.testing.assert_equal(numbers(dataload.open(shards)), list(range(9, 0, -1)))


def test_a_manifest(path, tmp_path):
    (tmp_path / "d").mkdir()
    ok("convert", path, tmp_path / "d" / "c.countdown2", "--shards", 2)
    assert numbers(dataload.open(tmp_path / "d")) == list(range(9, 0, -1))
    ok("index", "--manifest", tmp_path / "d")
    assert numbers(dataload.open(tmp_path / "d", format="countdown2")) == list(range(9, 0, -1))
