"""Manifests in parts: in any order, again, for several data sets, and what is not merged."""

import os
import shutil

import numpy as np
import pytest
from command_line import ok

import dataload
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError, SourceNotFoundError


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


UNFINISHED = "parts {} have not finished with these shards and options: run them, again if need be"


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
    assert {os.path.basename(report.path) for report in reports} == {
        f".dataload.json.index.{n}-of-3.log" for n in (1, 2, 3)
    }
    assert not (shards / "dataload.json").exists()
    merged = merge(shards)
    assert (shards / "dataload.json").read_bytes() == expected
    assert (merged.path, merged.resumed) == (str(shards / "dataload.json"), 5)
    assert [name for name in os.listdir(shards) if name.startswith(".")] == []


def test_a_part_that_was_interrupted_resumes_and_one_that_is_missing_is_named(shards):
    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(SourceNotFoundError, match=r"no part of an index of .*d has run: run the parts"):
        merge(shards)
    with pytest.raises(KeyboardInterrupt):
        run_parts(shards, [2], progress=stop)
    assert run_parts(shards, [2])[0].resumed >= 1
    with pytest.raises(ConfigError, match=UNFINISHED.format("1/3, 3/3")):
        merge(shards)


def test_logs_of_two_plans(shards):
    run_parts(shards, [1, 2, 3])
    run_parts(shards, [1], 2)
    message = r"d has logs of 2 and of 3 parts: delete those that are wrong \(\.dataload\.json\.index\.\*\)"
    with pytest.raises(ConfigError, match=message):
        merge(shards)


def test_the_command(shards):
    expected = one_run(shards)
    for part in ("2/2", "1/2"):
        ok("index", "--manifest", shards, "--part", part)
    assert "17 records in 5 shards" in ok("index", "--manifest", shards, "--merge")
    assert (shards / "dataload.json").read_bytes() == expected
