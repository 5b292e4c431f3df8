"""Directories that lack some of their shards are not opened as if they were complete."""

import json

import pytest

import dataload
from dataload.errors import SourceNotFoundError
from dataload.sources.shard_files import check_complete
from dataload.storage import Remote
from dataload.storage.remote.client import client_of

obstore = pytest.importorskip("obstore")


@pytest.fixture(scope="module", autouse=True)
def threads_of_obstore():
    """Start the threads of obstore, which live as long as the process."""
    obstore.store.MemoryStore().put("a", b"")


def write(path, n):
    with dataload.create(path) as writer:
        writer.write({"n": n})


def test_a_local_directory_without_some_shards(tmp_path):
    for shard in (0, 2):
        write(tmp_path / f"a-{shard:05d}-of-00004.syr", shard)
    match = r"has no a-00001-of-00004.syr \(and 1 more\): finish the conversion or the copy.*name them by a pattern"
    with pytest.raises(SourceNotFoundError, match=match):
        dataload.open(tmp_path)
    with dataload.open(f"{tmp_path}/*.syr") as source:
        assert len(source) == 2
    write(tmp_path / "a-00001-of-00004.syr", 1)
    with pytest.raises(SourceNotFoundError, match=r"has no a-00003-of-00004.syr: finish"):
        dataload.open(tmp_path)
    write(tmp_path / "a-00003-of-00004.syr", 3)
    with dataload.open(tmp_path) as source:
        assert [int(record["n"]) for record in source] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("journal", "complete"),
    [
        ({"shards": [["a", 0, 1], ["b", 1, 2]], "finished": {"a": {}}}, False),
        ({"shards": [["a", 0, 1]], "finished": {"a": {}}}, True),
        ({"shards": 3, "finished": {}}, True),
        ([], True),
    ],
)
def test_the_journal_of_an_unfinished_conversion_at_a_url(journal, complete):
    url, remote = "memory://incomplete/d", Remote()
    client, key = client_of(f"{url}/.x.convert.json", remote)
    obstore.put(client._store, key, json.dumps(journal).encode())
    if complete:
        check_complete(url, ["a"], remote)
    else:
        match = r"d has the shards of an unfinished conversion \(.x.convert.json\): finish the conversion"
        with pytest.raises(SourceNotFoundError, match=match):
            check_complete(url, ["a"], remote)
