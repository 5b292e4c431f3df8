"""Data sets of MosaicML Streaming: see mds/README.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload.errors import ConfigError

GOLDEN = Path(__file__).parent / "mds"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
COMPRESSIONS = ("zstd", "gz", "bz2", "br", "snappy")


def value_of(stored):
    if isinstance(stored, list):
        return [value_of(item) for item in stored]
    if "bytes" in stored:
        return bytes.fromhex(stored["bytes"])
    return (
        stored["value"] if "value" in stored else np.array(stored["values"], stored["dtype"]).reshape(stored["shape"])
    )


def same(found, expected):
    assert [*found] == [*expected]
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        np.testing.assert_equal(found[name], value, name)
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None), name


@pytest.mark.parametrize("name", ["all", "images", *COMPRESSIONS])
@pytest.mark.parametrize("mapped", [True, False])
def test_samples_are_those_of_the_original(name, mapped, tmp_path):
    remote = {"cache": tmp_path, "budget": "1MB"}
    with dataload.open(GOLDEN / name, map=mapped, remote=remote) as source:
        expected = [{key: value_of(value) for key, value in sample.items()} for sample in EXPECTED[name]]
        assert len(source.shard_lengths) > 1 or name == "images"
        for found, wanted in zip(source, expected, strict=True):
            same(found, wanted)
        for index in (2, -1):
            same(source[index], expected[index])
        for key in {*expected[0]} - {"any", "typed", "json"} if name == "all" else ():
            rows = source[1:3].read_batch([1, 0], [key])[key]
            for found, index in zip(rows, (2, 1), strict=True):
                np.testing.assert_equal(found, expected[index][key])
    kept = [file.name for file in (tmp_path / "shards").iterdir()] if name in COMPRESSIONS else []
    assert len(kept) == (4 if name in COMPRESSIONS else 0)


def test_images_as_files():
    with dataload.open(GOLDEN / "images", decode=False) as source:
        record = source[0]
        assert record["jpeg"].startswith(b"\xff\xd8")
        assert record["png"].startswith(b"\x89PNG")


def test_pickles_are_refused():
    with dataload.open(GOLDEN / "pickles") as source:
        assert source.read_batch([0], ["label"])["label"].tolist() == [1]
        with pytest.raises(ConfigError, match=r"column 'object' holds pickles.*allow_pickle=True if you trust"):
            source[0]
    assert dataload.open(GOLDEN / "pickles", allow_pickle=True)[0] == {"label": 1, "object": [1, 2]}


def test_a_decompressed_shard_beside_its_file_is_preferred(tmp_path):
    shutil.copytree(GOLDEN / "gz", tmp_path / "data")
    with dataload.open(tmp_path / "data", remote={"cache": tmp_path / "cache", "budget": "1MB"}) as source:
        first = list(source)
    for found in (tmp_path / "cache" / "shards").iterdir():
        shutil.copy(found, tmp_path / "data" / f"{found.name.partition('.mds')[0]}.mds")
    for packed in (tmp_path / "data").glob("*.gz"):
        packed.unlink()
    with dataload.open(tmp_path / "data" / "index.json") as source:
        assert source.paths[0].endswith(".mds")
        assert list(source) == first
