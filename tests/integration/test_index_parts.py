"""Manifests in parts: in any order, again, for several data sets, and what is not merged."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
from command_line import ok

import dataload
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


def merge(directory, **options):
    return index_shards(str(directory), merge=True, **options)


def one_run(directory):
    index_shards(str(directory))
    expected = (directory / "dataload.json").read_bytes()
    (directory / "dataload.json").unlink()
    return expected


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_parts_in_any_order_and_twice(shards, order):
    expected = one_run(shards)
    reports = run_parts(shards, order) + run_parts(shards, order[:2])
    assert sorted(len(entry.names) for report in reports[:3] for entry in report.data_sets) == [1, 2, 2]
    assert {os.path.basename(report.path) for report in reports} == {f".dataload.json.{n}-of-3" for n in (1, 2, 3)}
    assert not (shards / "dataload.json").exists()
    merged = merge(shards)
    assert (shards / "dataload.json").read_bytes() == expected
    assert (merged.path, merged.resumed) == (str(shards / "dataload.json"), 5)
    assert [name for name in os.listdir(shards) if name.startswith(".")] == []


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_several_data_sets(original, tmp_path, count):
    directory = tmp_path / "lmdb [1]"
    shutil.copytree(original / "lmdb [1]", directory)
    index_shards(str(directory))
    expected = (directory / "dataload.json").read_bytes()
    run_parts(directory, range(1, count + 1), count)
    merge(directory)
    assert (directory / "dataload.json").read_bytes() == expected


def test_a_part_that_was_interrupted_resumes_and_one_that_is_missing_is_named(shards):
    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(SourceNotFoundError, match=r"no part of an index of .*d has finished: run the parts"):
        merge(shards)
    with pytest.raises(KeyboardInterrupt):
        run_parts(shards, [2], progress=stop)
    assert run_parts(shards, [2])[0].resumed >= 1
    with pytest.raises(ConfigError, match=r"parts 1/3, 3/3 have no receipt: run them, again if need be"):
        merge(shards)


@pytest.mark.parametrize("cut", [0, 50, -1])
def test_a_torn_receipt(shards, cut):
    run_parts(shards, [1, 2, 3])
    receipt = shards / ".dataload.json.2-of-3"
    receipt.write_bytes(receipt.read_bytes().rstrip()[:cut])
    with pytest.raises(CorruptFileError, match=r"2-of-3: the receipt of a part is damaged: run part 2/3 again"):
        merge(shards)
    run_parts(shards, [2])
    merge(shards)


def test_receipts_of_two_plans(shards):
    run_parts(shards, [1, 2, 3])
    run_parts(shards, [1], 2)
    message = r"d has receipts of 2 and of 3 parts: delete those that are wrong \(\.dataload\.json\.\*\)"
    with pytest.raises(ConfigError, match=message):
        merge(shards)


OTHER = r"\d-of-3 is the receipt of other shards, options or parts than there are now: run part \d/3 again"


def test_the_receipt_of_other_shards_or_options(shards, original, tmp_path):
    run_parts(shards, [1, 2, 3])
    shutil.copy(shards / ".dataload.json.1-of-3", shards / ".dataload.json.2-of-3")
    with pytest.raises(ConfigError, match=OTHER):
        merge(shards)
    run_parts(shards, [2])
    shutil.copy(shards / "a-00000-of-00005.syr", shards / "b.syr")
    with pytest.raises(ConfigError, match=OTHER):
        merge(shards)
    shutil.copytree(original / "lmdb [1]", tmp_path / "lmdb")
    run_parts(tmp_path / "lmdb", [1, 2, 3])
    with pytest.raises(ConfigError, match=OTHER):
        merge(tmp_path / "lmdb", options={"codec": "msgpack"})
    merge(tmp_path / "lmdb")


def test_a_shard_that_has_changed(shards):
    run_parts(shards, [1, 2, 3])
    shard = shards / "a-00003-of-00005.syr"
    with dataload.create(shard, overwrite=True) as writer:
        writer.write({"x": np.zeros(4), "n": np.array(0)})
    message = r"cannot merge, because a shard has changed since it was indexed: a-00003-of-00005\.syr has .* in "
    with pytest.raises(ConfigError, match=message):
        merge(shards)
    run_parts(shards, [3])
    merge(shards)


def test_arguments_that_make_no_sense(shards):
    with pytest.raises(ConfigError, match="merge describes no shards: pass it without part"):
        merge(shards, part=(1, 2))
    with pytest.raises(ConfigError, match="cannot split 5 shards into 6 parts"):
        run_parts(shards, [1], 6)


def test_the_command(shards):
    expected = one_run(shards)
    for part in ("2/2", "1/2"):
        ok("index", "--manifest", shards, "--part", part)
    assert "17 records in 5 shards" in ok("index", "--manifest", shards, "--merge")
    assert (shards / "dataload.json").read_bytes() == expected
