"""Statistics that are kept beside the data: in parts, used, stale, damaged, and from the command line."""

import hashlib
import io
import json
import os
import re
import shutil

import numpy as np
import pytest
from command_line import facts, ok

import dataload
from dataload.catalog.statistics import DataSetStatistics, LengthsFile
from dataload.codecs import msgpack
from dataload.codecs.npz import build_npy
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.convert.plan import Measuring
from dataload.errors import ConfigError, CorruptFileError, SourceError

LENGTHS = [(i * 37) % 19 + (300 if i > 50 else 0) for i in range(60)]
RECORDS = [
    {"tokens": np.arange(n, dtype=np.int32), "label": np.array(i % 3), "text": "ab"} for i, n in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Five shards of msgpack records."""
    directory = tmp_path_factory.mktemp("original")
    source = dataload.MemorySource(RECORDS)
    (directory / "d").mkdir()
    convert(source, directory / "d/a.array_record", writer_options={"codec": "msgpack"}, shards=5)
    return directory / "d"


@pytest.fixture
def shards(original, tmp_path):
    shutil.copytree(original, tmp_path / "d")
    return tmp_path / "d"


def measured(directory, **options):
    return index_shards(str(directory), measuring=Measuring(), **options)


def content(directory):
    return {
        name: (directory / name).read_bytes()
        for name in os.listdir(directory)
        if name == "dataload.json" or name.startswith(".dataload")
    }


def lengths_file(directory):
    """The only one: other fields have one length, and older files are removed."""
    (path,) = directory.glob(".dataload.lengths-*")
    return path


def test_lengths_are_not_computed_again(shards, monkeypatch):
    report = measured(shards)
    assert (report.unsaved, report.path) == ("", str(shards / "dataload.json"))
    real, decoded = msgpack.decode, []

    def decode(*arguments):
        decoded.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(msgpack, "decode", decode)
    with dataload.open(shards) as source:
        assert dataload.record_lengths(source, "tokens").tolist() == LENGTHS
        assert dataload.record_lengths(source[50:3:-2], "tokens").tolist() == LENGTHS[50:3:-2]
        half = source.split(0.5)[0]
        assert dataload.record_lengths(half, "tokens").tolist() == [LENGTHS[index] for index in half.indices]
        assert dataload.record_lengths(dataload.sources.ConcatSource([source, source[:2]]), "text").tolist() == [2] * 62
    with dataload.open(str(shards / "a-{00003,00001}-of-00005.array_record"), codec="msgpack") as source:
        assert dataload.record_lengths(source, "tokens").tolist() == LENGTHS[36:48] + LENGTHS[12:24]
    config = {
        "source": {"path": str(shards)},
        "sampler": {"kind": "length_buckets", "max_tokens": 1000, "length_of": "tokens"},
        "loader": {},
    }
    with dataload.from_config(config) as loader:
        assert loader.batch_sampler.lengths.tolist() == LENGTHS
    path = str(shards / "a-00000-of-00005.array_record")
    config["source"] = [config["source"], {"path": path, "codec": "msgpack"}]
    config |= {"sampler": {"kind": "mixture", "weights": [1, 1], "length_of": "tokens"}, "loader": {"batch_size": 1}}
    with dataload.from_config(config) as loader:
        one, other = loader.batch_sampler.sampler.weights
    assert one * np.mean(LENGTHS) == pytest.approx(other * np.mean(LENGTHS[:12]))
    assert 0 < len(decoded) < 12, "those that show the fields, and not all of a shard"


@pytest.mark.parametrize("dtype", [">f4", [("a", "<i4"), ("b", ">f8")]])
def test_arrays_of_any_dtype_are_read_before_and_after_they_are_measured(dtype, tmp_path):
    np.save(content := io.BytesIO(), np.zeros(3, dtype))
    with dataload.create(tmp_path / "a.tar") as writer:
        writer.extend({"npy": content.getvalue()} for _ in range(3))
    for path in ("a.tar", "", ""):
        with dataload.open(tmp_path / path, **({"decode": "auto"} if path else {})) as source:
            assert [record["npy"].dtype for record in source] == [dtype] * 3
        measured(tmp_path, options={"decode": "auto"})


def test_stale_statistics_are_not_used(shards):
    measured(shards)
    first, second = (shards / f"a-0000{n}-of-00005.array_record" for n in (1, 2))
    shutil.copy(second, first)
    with dataload.open(str(shards / "a-*.array_record"), codec="msgpack") as source:
        message = r"dataload.json: the statistics of a-.* are not used: a-00001-of-00005.array_record is not the shard"
        with pytest.warns(UserWarning, match=message):
            lengths = dataload.record_lengths(source, "tokens")
    assert lengths.tolist() == LENGTHS[:12] + LENGTHS[24:36] + LENGTHS[24:]
    before = lengths_file(shards)
    measured(shards)
    assert lengths_file(shards) != before


def test_statistics_of_records_that_are_read_differently(shards):
    with dataload.open(str(shards / "a-*.array_record"), codec=lambda data: {"tokens": data[:1]}) as source:
        assert dataload.record_lengths(source, "tokens").tolist() == [1] * 60
        measured(shards)
        with pytest.warns(UserWarning, match=r"are of records read with the options \{'codec': 'msgpack'\}; run"):
            assert dataload.record_lengths(source, "tokens").tolist() == [1] * 60


def test_invalid_statistics_and_lost_lengths(shards):
    measured(shards)
    lengths_file(shards).unlink()
    with dataload.open(shards) as source, pytest.warns(UserWarning, match="with the lengths of 'tokens', is missing"):
        assert dataload.record_lengths(source, "tokens").tolist() == LENGTHS
    manifest = shards / "dataload.json"
    manifest.write_text(manifest.read_text().replace('"nan":0', '"nan":-1'))
    with dataload.open(shards) as source, pytest.warns(UserWarning, match=r"numbers\.nan: expected an integer from 0"):
        assert dataload.record_lengths(source, "tokens").tolist() == LENGTHS


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (b"\x93NUMPY", "the file of lengths has 6 bytes, and"),
        ("flipped", "the file of lengths has another SHA-256 than in dataload.json: run `dataload stats` again"),
        (b"no array", "not a file of lengths: a .npy file must start with"),
        (np.zeros(59, np.uint8), r"a file of 60 lengths has one unsigned integer for each, not uint8 \(59,\): run"),
        (np.zeros(60, np.int8), r"a file of 60 lengths has one unsigned integer for each, not int8 \(60,\)"),
        (np.zeros(60, np.uint8), "the lengths differ from the statistics in dataload.json: run `dataload stats` again"),
        (bytes(9000), "the file of lengths has 9,000 bytes, and 9,000 in dataload.json, for 60 records"),
    ],
)
def test_damaged_lengths(shards, lengths, message):
    measured(shards)
    path, manifest = lengths_file(shards), shards / "dataload.json"
    if isinstance(lengths, str):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        data = lengths if isinstance(lengths, bytes) else build_npy(lengths)
        path.write_bytes(data)
        if data != b"\x93NUMPY":  # a manifest that was made to fit
            table = json.loads(manifest.read_bytes())
            file = LengthsFile.of(len(data), hashlib.sha256(data).hexdigest())
            table["data_sets"][0]["statistics"]["lengths"]["tokens"] = list(file)
            manifest.write_text(json.dumps(table))
            path.rename(shards / file.name)
    with dataload.open(shards) as source, pytest.raises(CorruptFileError, match=message):
        dataload.record_lengths(source, "tokens")


def test_what_is_not_kept(shards, monkeypatch):
    before = content(shards)
    with monkeypatch.context() as patched:  # others are not looked into
        patched.setattr("dataload.sources.discover.is_media_folder", None)
        report = measured(shards / "a-00001-of-00005.array_record", options={"codec": "msgpack"})
    assert "a-00001-of-00005.array_record is not a whole data set of " in report.unsaved
    assert DataSetStatistics.parse(report.data_sets[0].statistics).fields["tokens"].length.total == sum(LENGTHS[12:24])
    codec = {"codec": lambda data: {"size": len(data)}}
    report = measured(shards, options=codec)
    assert re.fullmatch("the option codec=.* cannot be stored in a manifest", report.unsaved)
    assert DataSetStatistics.parse(report.data_sets[0].statistics).fields["size"].numbers.finite == 60
    assert "not asked for" in index_shards(str(shards), measuring=Measuring(save=False)).unsaved
    with pytest.raises(ConfigError, match="parts cannot be kept: it was not asked for"):
        index_shards(str(shards), measuring=Measuring(save=False), part=(1, 2))
    monkeypatch.setattr("dataload.convert.plan.os.access", lambda _, mode: mode != os.W_OK | os.X_OK)
    assert re.search(r"the directory .*d cannot be written to", measured(shards).unsaved)
    monkeypatch.undo()

    def fail(*_):
        raise SourceError("the disk is full")

    monkeypatch.setattr("dataload.convert.indexing.save_lengths", fail)
    assert measured(shards).unsaved == "the disk is full"
    assert {name for name in content(shards) if "index" not in name} == before.keys()
    monkeypatch.undo()
    most = len((shards / "dataload.json").read_bytes())
    monkeypatch.setattr("dataload.catalog.manifest.MOST_BYTES", most)
    with pytest.raises(ConfigError, match=rf"would have .* bytes, and may have {most:,}: keep statistics of"):
        measured(shards)


def test_options_that_are_not_in_the_manifest(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    path = tmp_path / "a.npy"
    index_shards(str(path), format="tokens", options={"window": 10})
    with pytest.raises(ConfigError, match="has 24 records with these options, 11 with those in the manifest: run"):
        measured(path, format="tokens", options={"window": 5})
    assert not measured(path, format="tokens").unsaved
    with dataload.open(tmp_path) as source:
        assert dataload.record_lengths(source, "tokens").tolist() == [10] * 11


def test_the_command(shards, tmp_path):
    output = ok("stats", shards)
    assert re.search(r"tokens +int32 +\(0 to 318\), \d+ different +0 to 318 +0 to 317 ", output)
    assert re.search(r"label .* 3 \(0: 20, 1: 20, 2: 20\)", output)
    assert output.endswith(f"kept in {shards}/dataload.json\n")
    assert re.search(r"text +str +\(\) +2 .* 1 \('ab': 60\)", ok("inspect", shards))
    assert facts("inspect", shards)["statistics"][0]["fields"]["label"]["numbers"]["mean"] == 1
    config = tmp_path / "train.toml"
    config.write_text('[source]\npath = "d"\nfields = ["label"]\n[loader]\nbatch_size = 2\n')
    (found,) = facts("stats", config, "--no-save")
    assert [[*each["statistics"]["fields"]] for each in found["data_sets"]] == [["label"]]
