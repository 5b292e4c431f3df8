"""Conversions and indexes in an object store, which is in memory."""

import itertools

import numpy as np
import pytest

import dataload
from dataload.convert import convert
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError
from dataload.storage import Remote, storage_of

COUNT = 9
NUMBERS = itertools.count()


def source_of(count=COUNT, start=0):
    return dataload.MemorySource([{"x": np.arange(i, i + 3.0)} for i in range(start, start + count)])


def first_of(path):
    with dataload.open(path) as source:
        return [int(record["x"][0]) for record in source]


def stop_at(number):
    def progress(done, _):
        if done >= number:
            raise KeyboardInterrupt

    return progress


class Folder:
    """A folder of the store that no other test uses."""

    def __init__(self):
        self.url = f"memory://conversions-{next(NUMBERS)}"

    @property
    def storage(self):
        return storage_of(self.url, Remote.of(None, None))  # which knows no earlier listing

    def names(self):
        return {name for name in self.storage.list(self.url) if not name.startswith(".")}

    def put(self, name, data):
        self.storage.replace(f"{self.url}/{name}", data, None)


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    """Start the threads for requests, which live as long as the process."""
    pytest.importorskip("obstore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        convert(source_of(), f"{Folder().url}/a.syr", shards=3)


@pytest.fixture
def folder(threads, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Folder()


def test_options_of_the_store(folder):
    with pytest.raises(ConfigError, match="storage_options must be a table of options, got str"):
        convert(source_of(), f"{folder.url}/a.syr", storage_options="x")


SHARDS = {f"a-0000{number}-of-00003.syr" for number in range(3)}


def test_a_conversion_that_was_interrupted_goes_on_and_is_not_begun_again(folder):
    target = f"{folder.url}/a.syr"
    with pytest.raises(KeyboardInterrupt):
        convert(source_of(), target, shards=3, progress=stop_at(4))
    assert "dataload.json" not in folder.names()
    with pytest.raises(ConfigError, match=r"unfinished conversion|exists"):
        convert(source_of(), target, shards=3)
    left = min(SHARDS - folder.names())
    folder.put(left, b"uploaded by a run that was killed before it noted that")
    report = convert(source_of(), target, shards=3, resume=True)
    assert 0 < report.resumed < COUNT
    assert folder.names() == {*SHARDS, "dataload.json"}
    assert first_of(folder.url) == first_of(report.pattern) == [*range(COUNT)]
    with pytest.raises(ConfigError, match=r"a-00000-of-00003\.syr exists \(and 2 more\)"):
        convert(source_of(), target, shards=3)
    convert(source_of(start=5), target, shards=3, overwrite=True)
    assert first_of(folder.url) == [*range(5, 5 + COUNT)]


def test_files_of_others_are_not_replaced(folder):
    folder.put("a-00001-of-00003.syr", b"mine")
    for settings in ({}, {"part": (1, 3)}):
        with pytest.raises(ConfigError, match=r"a-00001-of-00003\.syr exists"):
            convert(source_of(), f"{folder.url}/a.syr", shards=3, **settings)
    assert folder.names() == {"a-00001-of-00003.syr"}


def test_parts_are_merged(folder):
    for number in (2, 1, 2):
        convert(source_of(), f"{folder.url}/a.syr", shards=3, part=(number, 2))
    report = convert(source_of(), f"{folder.url}/a.syr", shards=3, merge=True)
    assert (report.records, report.resumed) == (COUNT, COUNT)
    assert first_of(folder.url) == [*range(COUNT)]
    assert [name for name in folder.storage.list(folder.url) if "-of-2" in name] == []


def test_an_index_that_was_interrupted_goes_on(folder):
    convert(source_of(), f"{folder.url}/a.syr", shards=3)
    data, _ = folder.storage.load(f"{folder.url}/dataload.json")
    folder.storage.remove(f"{folder.url}/dataload.json")
    with pytest.raises(KeyboardInterrupt):
        index_shards(folder.url, progress=stop_at(1))
    assert index_shards(folder.url).resumed >= 1
    assert folder.storage.load(f"{folder.url}/dataload.json")[0] == data
    for number in (2, 1):
        index_shards(folder.url, part=(number, 2))
    assert index_shards(folder.url, merge=True).resumed == 3
    assert folder.storage.load(f"{folder.url}/dataload.json")[0] == data
