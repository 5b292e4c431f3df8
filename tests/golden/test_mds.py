"""Data sets of MosaicML Streaming: see mds/README.md."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden_values import assert_same, value_of

import dataload
from dataload.errors import ConfigError

GOLDEN = Path(__file__).parent / "mds"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
COMPRESSIONS = ("zstd", "gz", "bz2", "br", "snappy")


@pytest.mark.parametrize("name", ["all", "images", *COMPRESSIONS])
@pytest.mark.parametrize("mapped", [True, False])
def test_samples_are_those_of_the_original(name, mapped, tmp_path):
    remote = {"cache": tmp_path, "budget": "1MB"}
    with dataload.open(GOLDEN / name, map=mapped, remote=remote) as source:
        expected = value_of(EXPECTED[name])
        assert len(source.shard_lengths) > 1 or name == "images"
        assert_same(list(source), expected)
        assert_same([source[2], source[-1]], [expected[2], expected[-1]])
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
