"""Indexes of wids: see wids/README.md."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from object_server import FileServer

import dataload
from dataload.errors import CorruptFileError, SourceNotFoundError, UnsupportedFormatError

GOLDEN = Path(__file__).parent / "wids"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def index(directory, shardlist, **more):
    path = directory / "x.json"
    path.write_text(json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shardlist, **more}))
    return path


def test_samples_are_those_of_the_original():
    with dataload.open(GOLDEN / "shards.json", decode="auto") as source:
        assert source.shard_lengths == (3, 0, 4)
        assert list(source) == EXPECTED
        assert source.read_batch([6, 0], ["cls"])["cls"].tolist() == [30, 0]
        assert pickle.loads(pickle.dumps(source)).read([4, 1]) == [EXPECTED[4], EXPECTED[1]]


def test_archives_open_when_they_are_read(tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "part-1.tar").unlink()
    with dataload.open(tmp_path / "shards.json", decode="auto") as source:
        assert len(source) == 7
        assert source[5] == EXPECTED[5]
    with pytest.raises(SourceNotFoundError), dataload.open(tmp_path / "shards.json", missing="skip") as source:
        len(source)


def test_names_are_relative_to_the_index_or_its_base(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "data")
    for path in (
        index(tmp_path, [{"url": "data/part-0.tar", "nsamples": 3}]),
        index(tmp_path, [{"url": "part-0.tar", "nsamples": 3}], base="data"),
        index(tmp_path, [{"url": f"file://{tmp_path}/data/part-0.tar", "nsamples": 3}]),
        index(tmp_path, [{"url": str(tmp_path / "data/part-0.tar"), "nsamples": 3}]),
    ):
        assert list(dataload.open(path, decode="auto")) == EXPECTED[:3]


def test_an_index_that_contradicts_an_archive(tmp_path):
    shutil.copy(GOLDEN / "part-0.tar", tmp_path)
    path = index(tmp_path, [{"url": "./part-0.tar", "nsamples": 4}])
    with pytest.raises(CorruptFileError, match=r"part-0\.tar: the archive has 3 samples, and 4 in .*x\.json: "):
        dataload.open(path)[0]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"shardlist": []}, "it lists no archive"),
        ({"shardlist": [{"url": "a.tar", "nsamples": -1}]}, "or one without a number of samples"),
        ({"shardlist": [{"url": "a.tar", "nsamples": "3"}]}, "or one without a number of samples"),
        ({"shardlist": [{"url": "a.tar"}]}, "KeyError 'nsamples'"),
        ({"shardlist": [{"url": "file:/a.tar", "nsamples": 3}], "base": "d"}, "ConfigError file:/a.tar was a URL"),
        ({"shardlist": 3}, "TypeError"),
    ],
)
def test_a_damaged_index(tmp_path, changes, match):
    with pytest.raises(CorruptFileError, match=rf"x\.json: expected an index of wids, with a shardlist: .*{match}"):
        dataload.open(index(tmp_path, **changes))


def test_an_index_that_is_too_large_or_of_others(tmp_path):
    path = index(tmp_path, [{"url": "a.tar", "nsamples": 1}])
    with path.open("a") as file:
        file.truncate(1 << 30)
    with pytest.raises(CorruptFileError, match=r"x\.json: an index has at most [\d,]+ bytes"):
        dataload.open(path)
    for more in ({"wids_version": 2}, {"datasets": [{"source_url": "http://x/y.json"}]}):
        with pytest.raises(UnsupportedFormatError, match=r"expected wids_version 1 and no list of other data sets"):
            dataload.open(index(tmp_path, [], **more))


ELSEWHERE = [
    "http://elsewhere/a.tar",
    "https://me:secret@there/a.tar?token=secret",
    "s3://b/a.tar",
    "file:///etc/a.tar",
]


@pytest.mark.usefixtures("object_server")  # starts obstore's threads, which live as long as the process
def test_an_index_at_a_url_names_what_its_host_has(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "d")
    http = {"client_options": {"allow_http": True}}
    with FileServer(tmp_path) as server:
        url = f"{server.endpoint}/d/x.json"
        for name in [*ELSEWHERE, "//other/a.tar"]:
            index(tmp_path / "d", [{"url": name, "nsamples": 3}])
            with pytest.raises(CorruptFileError, match=r"/d/x\.json: it must not name this file: '.*tar' is ") as e:
                dataload.open(url, format="wids", storage_options=http)
            assert "secret" not in str(e.value)
        for name in ("/d/part-0.tar", f"{server.endpoint}/d/part-0.tar", "part-0.tar"):
            index(tmp_path / "d", [{"url": name, "nsamples": 3}])
            with dataload.open(url, format="wids", storage_options=http) as source:
                assert source.paths == (f"{server.endpoint}/d/part-0.tar",)
