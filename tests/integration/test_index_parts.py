"""Manifests in parts: in any order, again, for several data sets, and what is not merged."""

from __future__ import annotations

import itertools
import os
import re
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

import dataload
from dataload.cli.app import app
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Five shards of Syrah and, in another directory, two data sets of LMDB, whose records have no codec."""
    directory = tmp_path_factory.mktemp("original")
    source = dataload.MemorySource([{"x": np.arange(i, i + 4.0), "n": np.array(i)} for i in range(17)])
    for name in ("syrah", "lmdb [1]"):
        (directory / name).mkdir()
    convert(source, directory / "syrah/a.syr", shards=5)
    convert(source, directory / "lmdb [1]/a.lmdb", shards=2)
    convert(source, directory / "lmdb [1]/b.lmdb", shards=3)
    return directory


@pytest.fixture
def shards(original, tmp_path):
    shutil.copytree(original / "syrah", tmp_path / "d")
    (tmp_path / "d/dataload.json").unlink()
    (tmp_path / "d/.a.syr.convert.json").unlink()
    return tmp_path / "d"


def run_parts(directory, order, count=3, **options):
    return [index_shards(str(directory), part=(number, count), **options) for number in order]


def one_run(directory):
    index_shards(str(directory))
    expected = (directory / "dataload.json").read_bytes()
    (directory / "dataload.json").unlink()
    return expected


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_parts_in_any_order_and_twice(shards, order):
    expected = one_run(shards)
    reports = run_parts(shards, order) + run_parts(shards, order[:2])
    assert sorted(len(entry.names) for report in reports[:3] for entry in report.data_sets) == [1, 2, 2]
    assert {os.path.basename(report.path) for report in reports} == {f".dataload.json.{n}-of-3" for n in (1, 2, 3)}
    assert not (shards / "dataload.json").exists()
    merged = index_shards(str(shards), merge=True)
    assert (shards / "dataload.json").read_bytes() == expected
    assert merged.path == str(shards / "dataload.json")
    assert merged.resumed == 5
    assert [name for name in os.listdir(shards) if name.startswith(".")] == []


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_several_data_sets(original, tmp_path, count):
    directory = tmp_path / "lmdb [1]"
    shutil.copytree(original / "lmdb [1]", directory)
    index_shards(str(directory))
    expected = (directory / "dataload.json").read_bytes()
    run_parts(directory, range(1, count + 1), count)
    index_shards(str(directory), merge=True)
    assert (directory / "dataload.json").read_bytes() == expected


def test_a_part_that_was_interrupted_resumes(shards):
    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parts(shards, [2], progress=stop)
    assert run_parts(shards, [2])[0].resumed >= 1


def test_a_receipt_that_is_missing(shards):
    with pytest.raises(SourceNotFoundError, match=r"no part of an index of .*d has finished: run the parts"):
        index_shards(str(shards), merge=True)
    run_parts(shards, [2])
    with pytest.raises(ConfigError, match=r"parts 1/3, 3/3 have no receipt: run them, again if need be"):
        index_shards(str(shards), merge=True)


@pytest.mark.parametrize("cut", [0, 50, -1])
def test_a_torn_receipt(shards, cut):
    run_parts(shards, [1, 2, 3])
    receipt = shards / ".dataload.json.2-of-3"
    receipt.write_bytes(receipt.read_bytes().rstrip()[:cut])
    with pytest.raises(CorruptFileError, match=r"2-of-3: the receipt of a part is damaged: run part 2/3 again"):
        index_shards(str(shards), merge=True)
    run_parts(shards, [2])
    index_shards(str(shards), merge=True)


def test_receipts_of_two_plans(shards):
    run_parts(shards, [1, 2, 3])
    run_parts(shards, [1], 2)
    message = r"d has receipts of 2 and of 3 parts: delete those that are wrong \(\.dataload\.json\.\*\)"
    with pytest.raises(ConfigError, match=message):
        index_shards(str(shards), merge=True)


OTHER = r"\d-of-3 is the receipt of other shards, options or parts than there are now: run part \d/3 again"


@pytest.mark.parametrize("change", ["another part", "a new shard"])
def test_the_receipt_of_other_shards(shards, change):
    run_parts(shards, [1, 2, 3])
    if change == "another part":
        shutil.copy(shards / ".dataload.json.1-of-3", shards / ".dataload.json.2-of-3")
    else:
        shutil.copy(shards / "a-00000-of-00005.syr", shards / "b.syr")
    with pytest.raises(ConfigError, match=OTHER):
        index_shards(str(shards), merge=True)


def test_the_receipt_of_other_options(original, tmp_path):
    shutil.copytree(original / "lmdb [1]", tmp_path / "d")
    run_parts(tmp_path / "d", [1, 2, 3])
    with pytest.raises(ConfigError, match=OTHER):
        index_shards(str(tmp_path / "d"), options={"codec": "msgpack"}, merge=True)
    index_shards(str(tmp_path / "d"), merge=True)


def test_a_shard_that_has_changed(shards):
    run_parts(shards, [1, 2, 3])
    shard = shards / "a-00003-of-00005.syr"
    with dataload.create(shard, overwrite=True) as writer:
        writer.write({"x": np.zeros(4), "n": np.array(0)})
    message = r"cannot merge, because a shard has changed since it was indexed: a-00003-of-00005\.syr has .* in "
    with pytest.raises(ConfigError, match=message):
        index_shards(str(shards), merge=True)
    run_parts(shards, [3])
    index_shards(str(shards), merge=True)


def test_arguments_that_make_no_sense(shards):
    with pytest.raises(ConfigError, match=re.escape("merge describes no shards: pass it without part")):
        index_shards(str(shards), part=(1, 2), merge=True)
    with pytest.raises(ConfigError, match="cannot split 5 shards into 6 parts"):
        run_parts(shards, [1], 6)


def test_the_command(shards):
    expected = one_run(shards)

    def run(*options):
        return CliRunner().invoke(app, ["index", "--manifest", str(shards), *options])

    for part in ("2/2", "1/2"):
        assert run("--part", part).exit_code == 0
    result = run("--merge")
    assert result.exit_code == 0, result.stderr
    assert "17 records in 5 shards" in result.output
    assert (shards / "dataload.json").read_bytes() == expected
