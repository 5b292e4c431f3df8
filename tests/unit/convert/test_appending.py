"""Shards added to a data set that a manifest lists."""

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload import ConfigError
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards

FORMATS = {
    "d.syr": {},
    "d.tar": {},
    "d.array_record": {"codec": "tensorprotos"},
    "d.lmdb": {"codec": "tensorprotos"},
    "d.torchrecord": {},
    "d.tfrecord": {"codec": "tensorprotos"},
    "d.parquet": {},
    "d.arrow": {},
    "d.jsonl.gz": {},
}


def records(start, stop):
    """Records whose field "x" differs in length."""
    return [{"x": np.arange(i, 2 * i + 5, dtype=np.float32), "y": np.array(i)} for i in range(start, stop)]


def written(path, start, stop, **options):
    made = records(start, stop)
    if ".jsonl" in str(path):
        made = [{"x": each["x"].tolist(), "y": int(each["y"])} for each in made]
    with dataload.create(path, **options) as writer:
        writer.extend(made)
    return writer


def numbers(path, **options):
    with dataload.open(path, **options) as source:
        return [int(record["y"]) for record in source]


def decoding(name):
    return {"decode": "auto"} if name == "d.tar" else {}


def listed(directory):
    (entry,) = json.loads((directory / "dataload.json").read_bytes())["data_sets"]
    return entry


@pytest.mark.parametrize("name", ["d.npy", "d.bin"])
def test_shards_of_tokens_are_files_with_indexes(tmp_path, name):
    documents, options = [np.arange(n, n + 3 + n % 4) for n in range(9)], {"format": "tokens", "dtype": "int32"}
    (tmp_path / "shards").mkdir()
    with dataload.create(tmp_path / "shards" / name, records_per_shard=3, **options) as writer:
        writer.extend(documents[:6])
    with dataload.create(tmp_path / "shards", append=True, **options) as appended:
        appended.extend(documents[6:])
    assert listed(tmp_path / "shards")["shards"]["records"] == [3, 3, 3]
    for start, path in enumerate([*writer.paths, *appended.paths]):
        with dataload.create(tmp_path / name, overwrite=True, **options) as alone:
            alone.extend(documents[3 * start :][:3])
        for suffix in (name[1:], ".idx"):
            assert Path(path).with_suffix(suffix).read_bytes() == (tmp_path / f"d{suffix}").read_bytes()
    assert len(os.listdir(tmp_path / "shards")) == 7


@pytest.mark.parametrize("name", FORMATS)
def test_new_shards_come_last_and_the_manifest_is_that_of_an_index(tmp_path, name):
    """Fields, statistics, lengths and hashes are those that an index and a pass over the whole find."""
    written(tmp_path / name, 0, 7, records_per_shard=3, **FORMATS[name])
    index_shards(str(tmp_path), options=decoding(name), measuring=Measuring())
    before = listed(tmp_path)["shards"]["name"]
    writer = written(tmp_path, 7, 12, append=True, records_per_shard=2)
    assert len(writer) == 5
    assert [os.path.basename(path) for path in writer.paths] == listed(tmp_path)["shards"]["name"][3:]
    written(tmp_path / name, 12, 13, append=True)
    written(tmp_path / listed(tmp_path)["pattern"], 13, 15, append=True, shards=5)
    assert numbers(tmp_path, **decoding(name)) == [*range(7), 7, 8, 9, 10, 11, 12, 13, 14]
    assert listed(tmp_path)["shards"]["name"][:3] == before
    assert listed(tmp_path)["shards"]["records"] == [3, 3, 1, 2, 2, 1, 1, 1, 1]
    entry = listed(tmp_path)
    index_shards(str(tmp_path), options=decoding(name), measuring=Measuring())
    assert listed(tmp_path) == entry
    assert entry["statistics"]["lengths"]
    names = os.listdir(tmp_path)
    assert sum(each.startswith(".dataload.lengths") for each in names) == len(entry["statistics"]["lengths"])
    assert not [each for each in names if each.startswith(f".{name}")]
    assert numbers(tmp_path / entry["pattern"], **FORMATS[name], **decoding(name)) == [*range(15)]


TOLD = ("numbered", "one", "named", "digits", "capitals")


def test_names_follow_those_that_are_there(tmp_path):
    for directory, names in {
        "numbered": ["part_0007.syr", "part_0009.syr"],
        "one": ["one.syr"],
        "named": ["b.syr", "a.syr"],
        "digits": ["00.syr", "01.syr"],
        "capitals": ["A.SYR"],
    }.items():
        (tmp_path / directory).mkdir()
        for number, name in enumerate(names):
            written(tmp_path / directory / name, number, number + 1)
        index_shards(str(tmp_path / directory))
        before = numbers(tmp_path / directory)
        written(tmp_path / directory, 5, 6, append=True)
        assert numbers(tmp_path / directory) == [*before, 5]
    new = {name: listed(tmp_path / name)["shards"]["name"][-1] for name in TOLD}
    starts = {name: each.partition("-append-")[0] for name, each in new.items()}
    assert starts == dict(zip(TOLD, ("part_0010", "one-00001", "a-00002", "02", "A-00001"), strict=True))
    patterns = {name: listed(tmp_path / name)["pattern"] for name in starts}
    assert patterns == dict(zip(TOLD, ("*.syr", "one*.syr", "*.syr", "[0-9]*.syr", "A*.SYR"), strict=True))


def test_names_without_a_suffix(tmp_path):
    for name in ("a1", "a10"):
        written(tmp_path / name, 0, 4, format="syrah", records_per_shard=2)
    for start, name in enumerate(("a1", "a1-*", "a1-{00000..00001}-of-00002", "a1-00001-of-00002"), start=4):
        written(tmp_path / name, start, start + 1, append=True)
    with pytest.raises(ConfigError, match=r"names 2 of the data sets in .*, which has a1-\[0-9\]\*, a10-\{"):
        dataload.create(tmp_path / "a1*", append=True)
    assert [len(dataload.open(f"{tmp_path}/{name}-*")) for name in ("a1", "a10")] == [8, 4]
    assert numbers(tmp_path / "a1-[0-9]*") == [*range(8)]


def test_keys_are_numbered_on(tmp_path):
    written(tmp_path / "d.tar", 0, 3, shards=1)
    written(tmp_path, 3, 5, append=True)
    with dataload.open(tmp_path, decode="auto") as source:
        assert [record["__key__"] for record in source] == [f"{i:08d}" for i in range(5)]


def test_what_a_data_set_needs_to_grow(tmp_path):
    written(tmp_path / "d.syr", 0, 3)
    message = rf"append=True needs a dataload.json.*has none: run `dataload index --manifest {tmp_path}`"
    for path in (tmp_path, tmp_path / "d.syr"):
        with pytest.raises(ConfigError, match=message):
            dataload.create(path, append=True)
    index_shards(str(tmp_path))
    with pytest.raises(ConfigError, match="append=True keeps what is there: leave overwrite out"):
        dataload.create(tmp_path, append=True, overwrite=True)
    with pytest.raises(ConfigError, match=r"'.*e\.syr' names 0 of the data sets in .*, which has d\.syr: name one"):
        dataload.create(tmp_path / "e.syr", append=True)
    written(tmp_path / "val.syr", 0, 2, shards=2)
    with pytest.raises(ConfigError, match=r"names 2 of the data sets in .*, which has d\.syr, val-\{00000..00001\}-of"):
        dataload.create(tmp_path, append=True)
    with pytest.raises(ConfigError, match=r"d\.syr has the format 'syrah': pass format='syrah'"):
        dataload.create(tmp_path / "d.syr", append=True, format="tar")
    written(tmp_path / "val.syr", 2, 4, append=True)
    written(tmp_path / "val-{00000..00001}-of-00002.syr", 4, 5, append=True)
    assert numbers(tmp_path / "val-[0-9]*.syr") == [*range(5)]
    assert numbers(tmp_path / "d.syr") == [*range(3)]


def test_options_are_those_of_the_data_set(tmp_path):
    written(tmp_path / "d.lmdb", 0, 2, shards=1, codec="tensorprotos")
    with pytest.raises(ConfigError, match="the data set has codec='tensorprotos', which its new shards must have"):
        dataload.create(tmp_path, append=True, codec="example")
    written(tmp_path, 2, 3, append=True, codec="tensorprotos")
    assert numbers(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"x": np.zeros(3, np.float32)}, "the record has no field 'y', which the data set has"),
        ({"x": np.zeros(3, np.float32), "y": np.array(1), "z": np.array(1)}, "the record has a field 'z', which"),
        ({"x": np.zeros(3), "y": np.array(1)}, r"the field 'x' is float64 \(3\) in the record, and float32"),
        ({"x": np.zeros((3, 2), np.float32), "y": np.array(1)}, r"the field 'x' is float32 \(3, 2\) in the record"),
    ],
)
def test_records_have_the_fields_of_the_data_set(tmp_path, record, message):
    written(tmp_path / "d.syr", 0, 2, shards=1)
    before = sorted(os.listdir(tmp_path))
    writer = dataload.create(tmp_path, append=True)
    with pytest.raises(ConfigError, match=rf"{message}.*: write records with the same fields as d-00000-of-00001\.syr"):
        writer.write(record)
    writer.abort()
    assert sorted(os.listdir(tmp_path)) == before
    assert numbers(tmp_path) == [0, 1]


def test_a_refused_record_adds_no_shard(tmp_path):
    written(tmp_path / "d.syr", 0, 2, shards=1)
    with dataload.create(tmp_path, append=True, shards=3) as writer, pytest.raises(ConfigError, match="stores fields"):
        writer.extend([*records(2, 3), 7])
    assert numbers(tmp_path) == [0, 1, 2]


def test_nothing_changes_before_the_end_and_without_records(tmp_path):
    written(tmp_path / "d.syr", 0, 2, shards=1)
    before = (tmp_path / "dataload.json").read_bytes()
    writer = dataload.create(tmp_path, append=True)
    writer.extend(records(2, 4))
    writer.abort()
    written(tmp_path, 2, 2, append=True)
    assert (tmp_path / "dataload.json").read_bytes() == before
    assert len(os.listdir(tmp_path)) == 2


def test_what_a_killed_run_left_is_not_read_and_removed(tmp_path):
    written(tmp_path / "d.tar", 0, 2, shards=1)
    before = (tmp_path / "dataload.json").read_bytes()
    (lost,) = written(tmp_path, 2, 4, append=True).paths
    (tmp_path / "dataload.json").write_bytes(before)  # as if the run had ended just before it
    assert numbers(tmp_path, decode="auto") == [0, 1]
    index_shards(str(tmp_path))
    assert numbers(tmp_path, decode="auto") == [0, 1]
    (kept,) = written(tmp_path, 4, 5, append=True).paths
    assert numbers(tmp_path, decode="auto") == [0, 1, 4]
    found = {each for each in os.listdir(tmp_path) if "append" in each}
    assert found == {os.path.basename(kept), os.path.basename(kept).replace(".tar", ".idx")}
    assert not os.path.exists(lost)


def test_a_data_set_that_is_gone_does_not_grow(tmp_path):
    written(tmp_path / "d.syr", 0, 2, shards=1)
    with dataload.create(tmp_path, append=True) as writer:
        writer.extend(records(2, 3))
        (tmp_path / "dataload.json").unlink()
        with pytest.raises(ConfigError, match=r"d-00000-of-00001.syr is no longer in dataload.json"):
            writer.close()
    assert not (tmp_path / "dataload.json").exists()


def test_a_conversion_that_is_resumed_keeps_what_was_appended(tmp_path):
    source = dataload.MemorySource(records(0, 4))
    convert(source, tmp_path / "d.syr", shards=2)
    written(tmp_path, 4, 6, append=True)
    convert(source, tmp_path / "d.syr", shards=2, resume=True)
    assert numbers(tmp_path) == [*range(6)]
    convert(source, tmp_path / "d.syr", shards=2, overwrite=True)
    assert numbers(tmp_path) == [*range(4)]


def append_rounds(directory, first):
    for start in range(first, first + 12, 3):
        written(directory, start, start + 3, append=True, records_per_shard=2)


@pytest.mark.usefixtures("fork_server")
def test_several_processes_append_at_the_same_time(tmp_path):
    written(tmp_path / "d.syr", 0, 2, shards=1)
    index_shards(str(tmp_path), measuring=Measuring())
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=append_rounds, args=(tmp_path, first)) for first in (100, 200, 300)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = numbers(tmp_path)
    assert found[:2] == [0, 1]
    for first in (100, 200, 300):  # each run's records follow one another, and its runs are in order
        assert [number for number in found if first <= number < first + 100] == [*range(first, first + 12)]
    threes = [found[i : i + 3] for i in range(2, len(found), 3)]
    assert all(three == [three[0], three[0] + 1, three[0] + 2] for three in threes)
    entry = listed(tmp_path)
    index_shards(str(tmp_path), measuring=Measuring())
    assert listed(tmp_path) == entry


@pytest.mark.parametrize("measuring", [None, Measuring()])
@pytest.mark.parametrize("pattern", ["", "d-*.syr"])
def test_an_index_keeps_what_was_appended_meanwhile(tmp_path, measuring, pattern):
    """It listed the shards that it had found, and the next append deleted the others."""
    written(tmp_path / "d.syr", 0, 2, shards=1)

    def progress(done, _):
        if not done:
            written(tmp_path, 2, 4, append=True)

    report = index_shards(str(tmp_path / pattern), measuring=measuring, progress=progress)
    assert report.unsaved == ("" if measuring is None else "shards were added meanwhile, so run it again")
    written(tmp_path, 4, 5, append=True)
    assert numbers(tmp_path) == [*range(5)]
    assert "statistics" not in listed(tmp_path)
    index_shards(str(tmp_path), measuring=measuring)
    assert numbers(tmp_path) == [*range(5)]
    assert ("statistics" in listed(tmp_path)) == (measuring is not None)
