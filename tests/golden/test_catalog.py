"""Manifests, journals, receipts and lengths of version 0.2: see catalog/README.md."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload.catalog.manifest import Manifest
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards
from dataload.convert.ledger import Journal

GOLDEN = Path(__file__).parent / "catalog"
FINGERPRINTS = {
    "a-{00000..00002}-of-00003.syr": "3a809f611f065c614e158202ca24e751",
    "b.tar": "fc685c0ec2911695978374f241113a62",
    "c.tfrecord": "ea018966a8aecbbad2da5fe3ce2595ef",
}
MANIFESTS = ["complete/dataload.json", "index_parts/.dataload.json.1-of-2"]
JOURNALS = [
    "complete/.a.syr.convert.json",
    "complete/.b.tar.convert.json",
    "unfinished/.a.syr.convert.json",
    "parts/.a.syr.convert.json",
    "parts/.a.syr.convert.1-of-2.json",
]


def records(count):
    return dataload.MemorySource([{"x": np.full(i % 3 + 1, i, np.int32), "label": i % 2} for i in range(count)])


@pytest.fixture
def copied(tmp_path):
    def copy(name):
        for path in (GOLDEN / name).iterdir():
            shutil.copy(path, tmp_path)  # with other times
        return tmp_path

    return copy


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_read_and_written_byte_for_byte(name):
    data = (GOLDEN / name).read_bytes()
    assert Manifest.parse(data, name).to_bytes() == data


@pytest.mark.parametrize("name", JOURNALS)
def test_journals_are_read_and_written_byte_for_byte(name):
    data = (GOLDEN / name).read_bytes()
    assert Journal.parse(data, name).to_bytes() == data


@pytest.mark.parametrize("pattern", FINGERPRINTS)
def test_fingerprints_with_a_manifest_and_without_are_those_of_then(pattern, copied):
    directory = copied("complete")
    options = {"codec": "npz"} if pattern.endswith(".tfrecord") else {}
    with dataload.open(directory / pattern, **options) as source:
        assert source.fingerprint() == FINGERPRINTS[pattern]
    [names] = [e["shards"]["name"] for e in manifest_of(directory)["data_sets"] if e["pattern"] == pattern]
    for path in directory.iterdir():
        if path.name not in ("dataload.json", *names):
            path.unlink()
    listed = manifest_of(directory)
    listed["data_sets"] = [each for each in listed["data_sets"] if each["pattern"] == pattern]
    (directory / "dataload.json").write_text(json.dumps(listed))
    with dataload.open(directory) as source:
        assert source.fingerprint() == FINGERPRINTS[pattern]


def manifest_of(directory):
    return json.loads((directory / "dataload.json").read_bytes())


def journal_of(path):
    journal = json.loads(path.read_bytes())
    for shard in journal["finished"].values():
        shard["mtime_ns"] = 0
    return journal


def test_the_same_commands_write_the_same_bytes(tmp_path):
    convert(records(10), tmp_path / "a.syr", shards=3)
    convert(records(4), tmp_path / "b.tar")
    convert(records(4), tmp_path / "c.tfrecord", writer_options={"codec": "npz"})
    index_shards(str(tmp_path / "a-{00000..00002}-of-00003.syr"), measuring=Measuring())
    written, then = ({path.name for path in each.iterdir()} for each in (tmp_path, GOLDEN / "complete"))
    assert written == then
    for name in then:
        if name.endswith(".convert.json"):
            assert journal_of(tmp_path / name) == journal_of(GOLDEN / "complete" / name)
            assert len((tmp_path / name).read_bytes()) == len((GOLDEN / "complete" / name).read_bytes())
        else:
            assert (tmp_path / name).read_bytes() == (GOLDEN / "complete" / name).read_bytes(), name


def test_a_complete_conversion_has_nothing_to_do(copied):
    report = convert(records(10), copied("complete") / "a.syr", shards=3, resume=True)
    assert (report.resumed, report.records) == (10, 10)


def test_an_unfinished_conversion_goes_on(copied):
    directory = copied("unfinished")
    report = convert(records(10), directory / "a.syr", shards=5, resume=True)
    assert (report.resumed, report.records) == (8, 10)
    with dataload.open(directory) as source:
        assert [record["label"] for record in source] == [i % 2 for i in range(10)]
    assert len(list(directory.iterdir())) == 5 + 2


def test_parts_go_on(copied):
    directory = copied("parts")
    assert convert(records(10), directory / "a.syr", shards=3, part=(1, 2)).resumed == 3
    assert convert(records(10), directory / "a.syr", shards=3, part=(2, 2)).resumed == 0
    report = convert(records(10), directory / "a.syr", shards=3, merge=True)
    assert (report.resumed, report.records) == (10, 10)
    assert len(list(directory.iterdir())) == 3 + 2


def test_an_index_in_parts_goes_on(copied):
    directory = copied("index_parts")
    receipt, (measured, *_) = directory / ".dataload.json.1-of-2", manifest_of(GOLDEN / "complete")["data_sets"]
    listed = json.loads(receipt.read_bytes())
    listed["data_sets"][0]["statistics"] = measured["statistics"]
    receipt.write_text(json.dumps(listed))  # as of a run that measured lengths, which no manifest names
    shutil.copy(next((GOLDEN / "complete").glob("*.npy")), directory)
    (directory / ".dataload.json.2-of-2").write_text("cut")
    index_shards(str(directory), part=(1, 2))
    index_shards(str(directory), part=(2, 2))
    index_shards(str(directory), merge=True)
    [now] = manifest_of(directory)["data_sets"]
    assert now["shards"] == manifest_of(GOLDEN / "complete")["data_sets"][0]["shards"]
    assert len(list(directory.iterdir())) == 3 + 1
