"""What a newcomer does wrong, and what is said, as soon as something is built where that is possible."""

import builtins
import gzip
import inspect
import pkgutil
import re
import sys

import numpy as np
import pytest
from written import written

import dataload
from dataload import ConfigError, Loader
from dataload._util.interactive import INSTEAD
from dataload.convert import convert
from dataload.samplers import BucketBatchSampler
from dataload.streams import MultiStreamLoader

SOURCE = dataload.MemorySource({"x": np.arange(8), "label": np.arange(8)})


class NoSample:
    def __call__(self):
        return 0


def two(a, b, token="secret"):
    return a


def yields(sample):
    yield sample


async def waits(batch):
    return batch


def first(**settings):
    return next(iter(Loader(SOURCE, **{"batch_size": 2, **settings})))


def build(**settings):
    return Loader(SOURCE, batch_size=2, **settings)


def streams(**settings):
    settings = {"make_stream": iter, "sequences": [[{"x": 1}] * 4], "batch_size": 1, **settings}
    return next(iter(MultiStreamLoader(**settings)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    written(tmp_path / "train.syr", [{"x": np.array(i)} for i in range(4)])
    written(tmp_path / "train.tar", [{"txt": "a", "id.json": b"1"} for _ in range(2)])
    (tmp_path / "train.toml").write_text('[source]\npath = "train.syr"\n[loader]\nbatch_size = 2\n')
    np.savez(tmp_path / "a.npz", x=np.arange(8))
    np.save(tmp_path / "a.npy", np.ones((4, 2)))
    (tmp_path / "a.json").write_text('[{"x": 1}]')
    for name in ("a.txt", "a.tsv", "a.png"):
        (tmp_path / name).write_text("a line\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a line\n"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    for name in ("README.md", "LICENSE"):
        (tmp_path / "notes" / name).write_text("about the data")
    for name in ("train", "val"):
        (tmp_path / "splits" / name).mkdir(parents=True)
        (tmp_path / "splits" / name / "a.jsonl").write_text('{"x": 1}\n')
    monkeypatch.chdir(tmp_path)


# What is called, and what is said; .* stands for any text.

MISTAKES = r"""
dataload.open("trian.syr")
    SourceNotFoundError: there is no trian.syr: the directory .* exists; did you mean 'train.syr' in it?
dataload.from_config("trian.toml")
    ConfigError: cannot read the config trian.toml: the directory .* exists; did you mean 'train.toml' in it?
dataload.open("zebra")
    SourceNotFoundError: but has no entry of that name
dataload.open("empty")
    SourceNotFoundError: the directory empty has no files with a suffix of a known format
dataload.open("notes")
    SourceNotFoundError: suffix of a known format: it has LICENSE, README.md (README and LICENSE are not data
dataload.open("splits")
    SourceNotFoundError: suffix of a known format; open one of its data sets: train, val
dataload.open("a.npz")
    UnsupportedFormatError: a.npz is not in a known format: .*; pass dict(numpy.load(path)): a dict of arrays is
dataload.open("a.npy")
    UnsupportedFormatError: but not a one-dimensional array of integers; pass numpy.load(path, mmap_mode='r') to
dataload.open("a.json")
    UnsupportedFormatError: byte 0 has b'[{"x": 1'; if it has one object a line, pass format='jsonl'; else pass the list
dataload.open("train.toml")
    UnsupportedFormatError: byte 0 has b'[source]'; if it is a config, dataload.from_config makes its loader
dataload.open("a.tsv")
    UnsupportedFormatError: pass format='csv', delimiter='\t'
dataload.open("a.png")
    UnsupportedFormatError: open its folder, with pattern='{key}.*' if it has no classes
dataload.open("a.txt")
    UnsupportedFormatError: byte 0 has b'a line\n'; pass format='text': a record is then the file, a line or
dataload.open("a.txt.gz")
    UnsupportedFormatError: pass format='text': a record is then the file, a line or a paragraph (records=)
dataload.open("empty", format="tar")
    SourceNotFoundError: has no files with a suffix of format 'tar'
dataload.open("")
    ConfigError: '' is not a path
dataload.open("a\0b.syr")
    ConfigError: 'a\x00b.syr' is not a path
dataload.open(5)
    TypeError: a path must be text or a path object, got 5 (int)
dataload.open(None)
    TypeError: a path must be text or a path object, got None (NoneType)
dataload.open(b"train.syr")
    TypeError: a path must be text or a path object, got b'train.syr' (bytes)
dataload.open(SOURCE)
    TypeError: a path must be text or a path object, got MemorySource(8 records)
dataload.create(b"train.syr")
    TypeError: a path must be text or a path object, got b'train.syr' (bytes)
Loader(b"train.syr", batch_size=2)
    TypeError: a path is not a source: pass dataload.open('train.syr')
SOURCE.read_batch("x")
    TypeError: indices must be integers: 'str' object
dataload.create("out-*.tar")
    ConfigError: 'out-*.tar' is a pattern, which cannot be written to: name one file, or .* ('out-{00..07}.tar')
convert(SOURCE, "out-*.tar")
    ConfigError: 'out-*.tar' is a pattern, which cannot be written to
dataload.create("out-{0..3}.tar")
    ConfigError: 'out-{0..3}.tar' names 4 files: pass shards=4 to write all of them
convert("train.syr", "out.tar")
    TypeError: a path is not a source: pass dataload.open('train.syr')
dataload.create("empty", format="tar", overwrite=True)
    ConfigError: empty is a directory, and the format writes a file: choose another name, or delete it
dataload.MemorySource("abc")
    TypeError: a MemorySource takes a list of records, columns or a table, got 'abc'
dataload.MemorySource(None)
    TypeError: a MemorySource takes a list of records, columns or a table, got None
dataload.MemorySource({"x": 1})
    ConfigError: column 'x' is 1: expected an array or a list, with a value for each record
dataload.MemorySource({"x": np.array(1)})
    ConfigError: column 'x' is array(1): expected an array or a list
dataload.MemorySource({"x": "abc"})
    ConfigError: column 'x' is 'abc': expected an array or a list
dataload.RangeSource("10")
    ConfigError: a RangeSource takes integers, got '10', start=0, step=1
SOURCE["x"]
    TypeError: got 'x'; for several records pass a list or an array, for fields read_batch(indices, fields)
SOURCE[(1, 2)]
    TypeError: an index must be an integer or a slice, got (1, 2)
SOURCE.read_batch([1], "label")
    ConfigError: fields must be a list of names, got the text 'label'
dataload.open("train.syr").read_batch([1], "x")
    ConfigError: fields must be a list of names, got the text 'x'
dataload.open("train.tar", decode={"flac": "audio"})
    ConfigError: decode names the extension 'flac', which no file in TarSource('train.tar', decode=
build(transform=NoSample())
    ConfigError: transform is called with a sample, and NoSample() does not fit: too many positional arguments
build(transform=lambda a, b, c: a)
    ConfigError: transform is called with a sample and its context, and .*: missing a required argument: 'c'
build(transform=5)
    ConfigError: transform must be a function of a sample, got 5
build(transform=yields)
    ConfigError: transform must return its result: define it without yield and async
build(batch_transform=waits)
    ConfigError: batch_transform must return its result: define it without yield and async
convert(SOURCE, "out.syr", map=yields)
    ConfigError: map must return its result: define it without yield and async
build(sampler=[0, 1])
    TypeError: indices(positions, epoch=); list does not have both: for chosen records, pass source[indices]
build(collate="pad")
    ConfigError: collate must be a function or policies by field such as {'tokens': 'pad'}, got 'pad'
build(collate=two)
    ConfigError: collate is called with a list of samples, and two(a, b, token) does not fit: missing .* argument: 'b'
build(batch_transform="x")
    ConfigError: batch_transform must be a function of a batch, got 'x'
build(batch_transform=lambda a, b: a)
    ConfigError: batch_transform is called with a batch, and .*: missing a required argument: 'b'
convert(SOURCE, "out.syr", map=NoSample())
    ConfigError: map is called with a sample, and NoSample() does not fit
streams(batch_transform=lambda a, b: a)
    ConfigError: batch_transform is called with a batch, and .*: missing a required argument: 'b'
streams(make_stream=NoSample())
    ConfigError: make_stream is called with a sequence, and NoSample() does not fit
first(tail="drop", global_batch_size=9, batch_size=None)
    UserWarning: Loader(8 records, 9 rows per step, .*) has no batches: it has no records, or too few for a step, which
first(transform=lambda sample: None)
    WorkerError: returned None instead of a sample: does it end without `return sample`?
first(collate=lambda samples: None)
    WorkerError: failed in collate: ConfigError: .* None instead of a batch: does it end without `return`?
first(batch_transform=lambda batch: None)
    WorkerError: failed in batch_transform: ConfigError: batch_transform returned None instead of a batch
streams(batch_transform=lambda batch: None)
    WorkerError: failed in batch_transform: ConfigError: batch_transform returned None instead of a batch
streams(collate=lambda samples: None)
    WorkerError: failed in collate: ConfigError: collate returned None instead of a batch
build().load_state_dict("{}")
    StateMismatchError: the state of a Loader is a dict, found str: if it is JSON, pass json.loads(...) of it
build(sampler=BucketBatchSampler(lengths=[1] * 8, batch_size=2))
    ConfigError: BucketBatchSampler chooses the order and the batches: leave batch_size out
dataload.open("train.tar", typo=1)
    ConfigError: format 'tar' has no option 'typo': choose from cache, .*, decode, index,
dataload.open("train.tar", decod="auto")
    ConfigError: format 'tar' has no option 'decod': did you mean 'decode'? Choose from
dataload.open("train.tar", map=two)
    ConfigError: got <function two at .*>: a function of samples is passed to dataload.Loader as transform=, or
dataload.open("train.tar", transform=two)
    ConfigError: has no option 'transform': a function of samples is passed to dataload.Loader as transform=, or
dataload.open("train.tar", streaming=True)
    ConfigError: has no option 'streaming': leave it out
dataload.create("out.tar", maxcount=10)
    ConfigError: has no option 'maxcount': it is records_per_shard=
build(num_worker=2)
    TypeError: Loader has no argument 'num_worker': did you mean 'num_workers'? Choose from batch_size,.* seed, shuffle,
build(drop_last=True)
    TypeError: Loader has no argument 'drop_last': drop_last=True is tail='drop', .*; dataload.torch.DataLoader takes
SOURCE.map(two)
    AttributeError: 'MemorySource' object has no attribute 'map': a function of samples is passed to dataload.Loader
SOURCE.shuffle(1000)
    AttributeError: 'shuffle': the loader shuffles: dataload.Loader(source, shuffle=True, seed=0)
SOURCE.take(3)
    AttributeError: 'take': it is source[:n]
SOURCE.column_names
    AttributeError: 'column_names': it is list(source.fields)
build().dataset
    AttributeError: 'Loader' object has no attribute 'dataset': it is loader.source
len(MultiStreamLoader(iter, [[{"x": 1}]], batch_size=1))
    TypeError: a MultiStreamLoader learns its number of steps at the end of an epoch: count batches, or stop after n
dataload.DataLoader
    AttributeError: no attribute 'DataLoader': it is dataload.Loader; dataload.torch.DataLoader takes torch's arguments
dataload.convert(SOURCE, "train.tar")
    TypeError: dataload.convert is a package: write dataload.convert.convert(source, path)
convert(SOURCE, "out.tar", engine=4)
    ConfigError: engine=4: pass 'local' or an engine, such as
dataload.windows(SOURCE, [8], offsets=["x"])
    ConfigError: offsets must be a mapping or None, got ['x']
dataload.Collate("pad")
    ConfigError: policies must be a mapping, got 'pad'
dataload.load_dataset
    AttributeError: no attribute 'load_dataset': it is dataload.open(path)
"""


@pytest.mark.parametrize(("call", "error", "message"), re.findall(r"(.+)\n    (\w+): (.+)", MISTAKES))
def test_mistakes(here, call, error, message):
    kind = getattr(dataload.errors, error, None) or getattr(builtins, error)
    with pytest.raises(kind, match=re.escape(message).replace(r"\.\*", ".*")):
        eval(call, {**globals(), "convert": convert, "BucketBatchSampler": BucketBatchSampler})


HABITS = [(place, name) for place, names in INSTEAD.items() for name in names if place != "sampler"]


@pytest.mark.parametrize(("place", "name"), HABITS)
def test_a_name_of_another_library_says_what_to_write_instead(monkeypatch, place, name):
    if f"dataload.{name}" in sys.modules:  # as imported by another test
        monkeypatch.delattr(dataload, name)
    uses = {
        "module": lambda: getattr(dataload, name),
        "option": lambda: dataload.sources.Options.parse({name: 1}, "format 'x'"),
        "loader argument": lambda: build(**{name: 1}),
        "source": lambda: getattr(SOURCE, name),
        "loader": lambda: getattr(build(), name),
    }
    with pytest.raises((AttributeError, ConfigError, TypeError)) as caught:
        uses[place]()
    assert f"{name!r}: {INSTEAD[place][name]}" in str(caught.value)


def test_what_the_advice_names_exists():
    """The attributes, arguments and functions in the advice are those of dataload."""
    pytest.importorskip("jax")  # which one of them needs
    text = " ".join(advice for names in INSTEAD.values() for advice in names.values())
    for path in set(re.findall(r"dataload\.[\w.]+", text)):
        pkgutil.resolve_name(path.rstrip("."))
    for object_name, found in (("source", SOURCE), ("loader", build())):
        for name in set(re.findall(rf"\b{object_name}\.(\w+)", text)):
            assert hasattr(found, name), f"{object_name}.{name}"
    arguments = {*inspect.signature(Loader).parameters, *inspect.signature(dataload.create).parameters}
    known = arguments | {"fields", "decode", "map", "cache", "lengths"}
    assert set(re.findall(r"\b([a-z_]+)=(?!=)", text)) - known - FOREIGN == set()


FOREIGN = {"drop_last", "pin_memory", "multiprocessing_context", "drop_remainder", "parent", "weight"}


def test_a_table_of_decoders_may_name_more_extensions(here):
    assert dataload.open("train.tar", decode={"flac": "audio", "json": "json"})[0]["id.json"] == 1


@pytest.mark.parametrize(("url", "named"), [("s3://", "bucket"), ("https://", "server")])
def test_urls_without_a_name(url, named):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=f"the URL {url} names no {named}: expected {url}NAME/PATH"):
        dataload.open(url)
