"""What a newcomer does wrong, and what is said, as soon as something is built where that is possible."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

import dataload
from dataload import ConfigError, Loader, MultiStreamLoader, SourceNotFoundError, StateMismatchError, WorkerError
from dataload.convert import convert
from dataload.samplers import BucketBatchSampler

SOURCE = dataload.MemorySource({"x": np.arange(8), "label": np.arange(8)})


class NoSample:
    def __call__(self):
        return 0


def two(a, b, token="secret"):
    return a


def first(**settings):
    return next(iter(Loader(SOURCE, batch_size=2, **settings)))


def build(**settings):
    return Loader(SOURCE, batch_size=2, **settings)


def streams(**settings):
    settings = {"make_stream": iter, "sequences": [[{"x": 1}] * 4], "batch_size": 1, **settings}
    return next(iter(MultiStreamLoader(**settings)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    with dataload.create(tmp_path / "train.syr") as writer:
        writer.extend({"x": np.array(i)} for i in range(4))
    with dataload.create(tmp_path / "train.tar") as writer:
        writer.extend({"txt": "a", "id.json": b"1"} for _ in range(2))
    (tmp_path / "train.toml").write_text('[source]\npath = "train.syr"\n[loader]\nbatch_size = 2\n')
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)


MISTAKES = {
    # paths
    "close name": (
        lambda: dataload.open("trian.syr"),
        SourceNotFoundError,
        "there is no trian.syr: the directory .* exists; did you mean 'train.syr' in it?",
    ),
    "close config": (
        lambda: dataload.from_config("trian.toml"),
        ConfigError,
        "cannot read the config trian.toml: the directory .* exists; did you mean 'train.toml' in it?",
    ),
    "nothing alike": (lambda: dataload.open("zebra"), SourceNotFoundError, "nothing of that name is in it"),
    "empty directory": (
        lambda: dataload.open("empty"),
        SourceNotFoundError,
        "the directory empty has no files with a suffix of a known format",
    ),
    "no such shards": (
        lambda: dataload.open("empty", format="tar"),
        SourceNotFoundError,
        "has no files with a suffix of format 'tar'",
    ),
    "empty path": (lambda: dataload.open(""), ConfigError, "'' is not a path"),
    "nul": (lambda: dataload.open("a\0b.syr"), ConfigError, r"'a\x00b.syr' is not a path"),
    "number": (lambda: dataload.open(5), TypeError, "paths are text, path objects or a list of these, got 5 (int)"),
    "none": (
        lambda: dataload.open(None),
        TypeError,
        "paths are text, path objects or a list of these, got None (NoneType)",
    ),
    "bytes": (
        lambda: dataload.open(b"train.syr"),
        TypeError,
        "paths are text, path objects or a list of these, got b'train.syr' (bytes)",
    ),
    "source": (
        lambda: dataload.open(SOURCE),
        TypeError,
        "paths are text, path objects or a list of these, got MemorySource(8 records)",
    ),
    # destinations
    "create pattern": (
        lambda: dataload.create("out-*.tar"),
        ConfigError,
        "'out-*.tar' is a pattern, which cannot be written to: name one file, or list the shards ('out-{00..07}.tar')",
    ),
    "convert pattern": (
        lambda: convert(SOURCE, "out-*.tar"),
        ConfigError,
        "'out-*.tar' is a pattern, which cannot be written to",
    ),
    "create range": (
        lambda: dataload.create("out-{0..3}.tar"),
        ConfigError,
        "'out-{0..3}.tar' names 4 files: pass shards=4 to write all of them",
    ),
    "convert path": (
        lambda: convert("train.syr", "out.tar"),
        TypeError,
        "a path is no source: pass dataload.open('train.syr')",
    ),
    "create over directory": (
        lambda: dataload.create("empty", format="tar", overwrite=True),
        ConfigError,
        "empty is a directory, and the format writes a file: choose another name, or delete it",
    ),
    # sources
    "text in memory": (
        lambda: dataload.MemorySource("abc"),
        TypeError,
        "a MemorySource takes a list of records, columns or a table, got 'abc'",
    ),
    "none in memory": (
        lambda: dataload.MemorySource(None),
        TypeError,
        "a MemorySource takes a list of records, columns or a table, got None",
    ),
    "scalar column": (
        lambda: dataload.MemorySource({"x": 1}),
        ConfigError,
        "column 'x' is 1: expected an array or a list, with a value for each record",
    ),
    "array without axis": (
        lambda: dataload.MemorySource({"x": np.array(1)}),
        ConfigError,
        "column 'x' is array(1): expected an array or a list",
    ),
    "text as column": (
        lambda: dataload.MemorySource({"x": "abc"}),
        ConfigError,
        "column 'x' is 'abc': expected an array or a list",
    ),
    "range of text": (
        lambda: dataload.RangeSource("10"),
        ConfigError,
        "a RangeSource takes integers, got '10', start=0, step=1",
    ),
    "column as index": (
        lambda: SOURCE["x"],
        TypeError,
        "got 'x'; for several records use read(indices), for fields read_batch(indices, fields)",
    ),
    "list as index": (lambda: SOURCE[[1, 2]], TypeError, "an index must be an integer or a slice, got [1, 2]"),
    "text as fields": (
        lambda: SOURCE.read_batch([1], "label"),
        ConfigError,
        "fields must be a list of names, got the text 'label'",
    ),
    "text as fields of files": (
        lambda: dataload.open("train.syr").read_batch([1], "x"),
        ConfigError,
        "fields must be a list of names, got the text 'x'",
    ),
    "decoder of nothing": (
        lambda: dataload.open("train.tar", decode={"flac": "audio"}),
        ConfigError,
        "decode names the extension 'flac', which no file in TarSource('train.tar', decode=",
    ),
    # functions
    "transform without sample": (
        lambda: build(transform=NoSample()),
        ConfigError,
        "transform is called with a sample, and NoSample() does not fit: too many positional arguments",
    ),
    "transform of three": (
        lambda: build(transform=lambda a, b, c: a),
        ConfigError,
        "transform is called with a sample and its context, and ",
    ),
    "transform is called": (lambda: build(transform=5), ConfigError, "a transform is a function of a sample, got 5"),
    "collate of two": (
        lambda: build(collate=two),
        ConfigError,
        "collate is called with a list of samples, and two(a, b, token) does not fit: missing a required argument: 'b'",
    ),
    "batch_transform is text": (
        lambda: build(batch_transform="x"),
        ConfigError,
        "batch_transform must be a function of a batch, got 'x'",
    ),
    "batch_transform of two": (
        lambda: build(batch_transform=lambda a, b: a),
        ConfigError,
        "batch_transform is called with a batch, and ",
    ),
    "map without sample": (
        lambda: convert(SOURCE, "out.syr", map=NoSample()),
        ConfigError,
        "map is called with a sample, and NoSample() does not fit",
    ),
    "streams of two": (
        lambda: streams(batch_transform=lambda a, b: a),
        ConfigError,
        "batch_transform is called with a batch, and ",
    ),
    "make_stream of none": (
        lambda: streams(make_stream=NoSample()),
        ConfigError,
        "make_stream is called with a sequence, and NoSample() does not fit",
    ),
    "transform forgets": (
        lambda: first(transform=lambda sample: None),
        WorkerError,
        "returned None instead of a sample: does it end without `return sample`?",
    ),
    "collate forgets": (
        lambda: first(collate=lambda samples: None),
        WorkerError,
        "failed in collate: ConfigError: collate returned None instead of a batch: does it end without `return`?",
    ),
    "batch_transform forgets": (
        lambda: first(batch_transform=lambda batch: None),
        WorkerError,
        "failed in batch_transform: ConfigError: batch_transform returned None instead of a batch",
    ),
    "streams forget": (
        lambda: streams(batch_transform=lambda batch: None),
        WorkerError,
        "failed in batch_transform: ConfigError: batch_transform returned None instead of a batch",
    ),
    "collate of streams forgets": (
        lambda: streams(collate=lambda samples: None),
        WorkerError,
        "failed in collate: ConfigError: collate returned None instead of a batch",
    ),
    "text as state": (
        lambda: build().load_state_dict("{}"),
        StateMismatchError,
        "the state of a Loader is a dict, found str: if it is JSON, pass json.loads(...) of it",
    ),
    # samplers
    "batch sampler as sampler": (
        lambda: build(sampler=BucketBatchSampler(lengths=[1] * 8, batch_size=2)),
        TypeError,
        "BucketBatchSampler makes batches: pass it as batch_sampler=",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(here, mistake):
    call, error, message = MISTAKES[mistake]
    pattern = re.escape(message).replace(r"\.\*", ".*") if "the directory" in message else re.escape(message)
    with pytest.raises(error, match=pattern):
        call()


@pytest.mark.parametrize(
    "function",
    [
        dict,
        np.asarray,
        functools.partial(lambda a, sample: sample, 1),
        lambda *all: all[0],
        lambda sample, scale=2: sample,
    ],
    ids=["class", "numpy", "partial", "any", "default"],
)
def test_functions_that_fit(function):
    assert len(Loader(SOURCE, batch_size=2, transform=function, collate=lambda samples, *rest: samples)) == 4


@pytest.mark.parametrize(
    "given", [{"RANK": "3", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "0"}, {"RANK": "-1", "WORLD_SIZE": "2"}]
)
def test_ranks_of_the_environment(monkeypatch, given):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=f"the environment has RANK='{given['RANK']}', .*, and RANK from 0 to WORLD_SIZE - 1"
    ):
        build()


def test_a_table_of_decoders_may_name_more_extensions(here):
    assert dataload.open("train.tar", decode={"flac": "audio", "json": "json"})[0]["id.json"] == 1


@pytest.mark.parametrize(("url", "named"), [("s3://", "bucket"), ("https://", "server")])
def test_urls_without_a_name(url, named):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=f"the URL {url} names no {named}: expected {url}NAME/PATH"):
        dataload.open(url)
