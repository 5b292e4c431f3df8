"""Conversions and manifests on an S3 server: what is written, resumed, refused, and asked of the server."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from fault_proxy import FaultProxy, Faults
from number_records import COUNT, Records
from remote_sets import sampled
from typer.testing import CliRunner

import dataload
from dataload.cli.app import app
from dataload.convert import convert, parts
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.sources.find import HEAD_BYTES
from dataload.storage.remote.client import ObjectClient

pytestmark = pytest.mark.slow

FORMATS = {
    "tar": ".tar",
    "syrah": ".syr",
    "array_record": ".array_record",
    "lmdb": ".lmdb",
    "torchrecord": ".torchrecord",
}
OBJECTS = {"tar", "syrah", "array_record"}  # one for each shard


@pytest.fixture
def place(object_server, tmp_path):
    """The URL of a new directory, and how to reach it."""
    remote = {"cache": str(tmp_path / "cache")}
    return f"s3://{object_server.bucket()}/dir", {"storage_options": object_server.storage_options(), "remote": remote}


@pytest.fixture
def proxy(object_server):
    with FaultProxy(object_server.endpoint) as proxy:
        yield proxy


def through(proxy, place):
    """The settings of a place behind a proxy."""
    storage = {**place[1]["storage_options"], "endpoint": proxy.endpoint}
    return {"storage_options": storage, "remote": place[1]["remote"]}


def names(object_server, place):
    bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
    found = object_server.store(bucket).list(prefix).collect()
    return sorted(meta["path"].removeprefix(f"{prefix}/") for meta in found)


def content(object_server, place, name):
    bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
    return bytes(object_server.store(bucket).get(f"{prefix}/{name}").bytes())


def put(object_server, place, name, data):
    bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
    object_server.put(bucket, f"{prefix}/{name}", data)


def numbers(source):
    return [int(record["n"]) for record in source]


def asked(proxy, method, *endings):
    return sum(
        count
        for (verb, key), count in proxy.counts.requests.items()
        if verb == method and (not endings or key.endswith(endings))
    )


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_converted_opens_by_its_url(object_server, proxy, place, tmp_path, name):
    file = f"train{FORMATS[name]}"
    (tmp_path / "local").mkdir()
    here = convert(Records(), tmp_path / "local" / file, shards=3)
    there = convert(Records(), f"{place[0]}/{file}", shards=3, **place[1])
    assert there.journal == f"{place[0]}/.{file}.convert.json"
    assert there.manifest == f"{place[0]}/dataload.json"
    assert (there.records, there.bytes, there.notes, there.format) == (COUNT, here.bytes, here.notes, here.format)
    assert [path.rpartition("/")[2] for path in there.paths] == [path.rpartition("/")[2] for path in here.paths]
    (own,) = json.loads((tmp_path / "local" / "dataload.json").read_text())["data_sets"]
    (found,) = json.loads(content(object_server, place, "dataload.json"))["data_sets"]
    tags = found["shards"].pop("etag")
    assert own["shards"].pop("etag") is None
    assert found == own
    if name in OBJECTS:
        bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
        store = object_server.store(bucket)
        assert tags == [store.head(f"{prefix}/{shard}")["e_tag"] for shard in own["shards"]["name"]]
    else:
        assert tags is None

    options = {"decode": "auto"} if name == "tar" else {}
    place[1]["remote"]["cache"] = str(tmp_path / "other")
    with (
        dataload.open(tmp_path / "local", **options) as local,
        dataload.open(place[0], **through(proxy, place), **options) as remote,
    ):
        assert asked(proxy, "GET", "dataload.json") == 1
        if name in OBJECTS:
            assert not proxy.counts.lists
            assert not asked(proxy, "HEAD", FORMATS[name])
            assert not asked(proxy, "HEAD", "dataload.json", "/dir")
        order = np.random.default_rng(0).permutation(COUNT)
        same(remote.read_batch(order), local.read_batch(order))
        assert remote.fingerprint() == local.fingerprint()
        for first, second in ((local, remote), (remote, local)):
            loader = dataload.Loader(first, batch_size=4, shuffle=True, seed=3)
            batches = list(loader)
            loader = dataload.Loader(first, batch_size=4, shuffle=True, seed=3)
            steps = iter(loader)
            for batch in batches[:2]:
                same(next(steps), batch)
            other = dataload.Loader(second, batch_size=4, shuffle=True, seed=3)
            other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            rest = list(other)
            assert len(rest) == len(batches) - 2
            for batch, expected in zip(rest, batches[2:], strict=True):
                same(batch, expected)
            steps.close()


KILLED = """
import os, signal, sys
from number_records import Records
from dataload.convert import convert

def progress(done, total):
    if done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

convert(Records(), sys.argv[1], shards=3, progress=progress, remote={"cache": sys.argv[3]})
"""


def killed(place, object_server, file, at):
    arguments = [f"{place[0]}/{file}", str(at), place[1]["remote"]["cache"]]
    run_killed(object_server, KILLED, *arguments)


def run_killed(object_server, code, *arguments):
    """Run a program that kills itself, with the credentials in its environment."""
    environment = {
        "AWS_ACCESS_KEY_ID": object_server.access_key,
        "AWS_SECRET_ACCESS_KEY": object_server.secret_key,
        "AWS_ENDPOINT": object_server.endpoint,
        "AWS_REGION": "us-east-1",
    }
    support = os.path.join(os.path.dirname(os.path.dirname(__file__)), "support")
    path = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment, "PYTHONPATH": path}, check=False
    )
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", sampled(FORMATS, ["tar", "lmdb"]))
def test_a_killed_conversion_resumes(object_server, proxy, place, name):
    file, suffix = f"train{FORMATS[name]}", FORMATS[name]
    # In the third of the shards, which have 7, 8 and 8 records, while a thread completes the second.
    killed(place, object_server, file, 16)
    first, second = (f"train-0000{shard}-of-00003{suffix}" for shard in range(2))
    found = {key.split("/")[0] for key in names(object_server, place)}
    assert {key for key in found if not key.endswith(".idx")} - {second} == {first, f".{file}.convert.json"}
    match = rf"has no train-0000(1-of-00003\{suffix} \(and 1 more\)|2-of-00003\{suffix}): finish the conversion"
    with pytest.raises(SourceNotFoundError, match=match):
        dataload.open(place[0], **place[1])
    with pytest.raises(ConfigError, match=r"exists( \(and 1 more\))?: choose another name, or pass resume=True"):
        convert(Records(), f"{place[0]}/{file}", shards=3, **place[1])

    place[1]["remote"]["cache"] += "-of-another-node"
    report = convert(Records(), f"{place[0]}/{file}", shards=3, resume=True, **through(proxy, place))
    assert report.resumed in (7, 15)
    assert not [key for (method, key) in proxy.counts.requests if method == "PUT" and first in key]
    with dataload.open(place[0], **place[1], **({"decode": "auto"} if name == "tar" else {})) as source:
        assert numbers(source) == [*range(COUNT)]
    assert [key for key in names(object_server, place) if key.startswith(".")] == [f".{file}.convert.json"]

    proxy.reset()
    again = convert(Records(), f"{place[0]}/{file}", shards=3, resume=True, **through(proxy, place))
    assert again.resumed == COUNT
    assert not asked(proxy, "PUT")


@pytest.mark.parametrize("kill_at", sampled([0, 1, 7, 15, 22, 23], [0, 7, 23]))
def test_wherever_it_is_killed(object_server, place, kill_at):
    killed(place, object_server, "part-{shard}.syr", kill_at)
    if kill_at > 15:  # then the first shard is there; the names do not tell how many there are to be
        with pytest.raises(
            SourceNotFoundError, match=r"unfinished conversion \(\.part-N\.syr\.convert\.json\): finish"
        ):
            dataload.open(place[0], **place[1])
    report = convert(Records(), f"{place[0]}/part-{{shard}}.syr", shards=3, resume=True, **place[1])
    assert report.resumed <= kill_at
    with dataload.open(place[0], **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]
    assert not os.listdir(os.path.join(place[1]["remote"]["cache"], "uploads")), "what was killed has left nothing"


def test_a_shard_that_changed_is_written_again(object_server, place):
    destination = f"{place[0]}/a.syr"
    convert(Records(), destination, shards=3, **place[1])
    first = f"{place[0]}/a-00000-of-00003.syr"
    good = content(object_server, place, "a-00000-of-00003.syr")
    put(object_server, place, "a-00000-of-00003.syr", b"x" * len(good))
    match = rf"{first}: .* manifest of its directory lists; .* run `dataload index --manifest {place[0]}`"
    with dataload.open(place[0], **place[1]) as source, pytest.raises(CorruptFileError, match=match):
        source[0]
    report = convert(Records(), destination, shards=3, resume=True, **place[1])
    assert report.notes == (f"{first} has changed since it was finished and was written again",)
    assert content(object_server, place, "a-00000-of-00003.syr") == good
    with dataload.open(place[0], **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]


def test_nothing_is_overwritten_unasked(object_server, place):
    put(object_server, place, "a-00001-of-00002.syr", b"precious")
    with pytest.raises(ConfigError, match=r"a-00001-of-00002.syr exists: choose another name, or pass overwrite=True"):
        convert(Records(), f"{place[0]}/a.syr", shards=2, **place[1])
    assert names(object_server, place) == ["a-00001-of-00002.syr"]

    def progress(done, total):
        if 12 < done < total:
            put(object_server, place, "b-00001-of-00002.syr", b"precious")

    with pytest.raises(ConfigError, match=r"b-00001-of-00002.syr exists"):
        convert(Records(), f"{place[0]}/b.syr", shards=2, progress=progress, **place[1])
    assert content(object_server, place, "b-00001-of-00002.syr") == b"precious"
    report = convert(Records(), f"{place[0]}/b.syr", shards=2, overwrite=True, **place[1])
    with dataload.open(report.pattern, **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]


def test_two_conversions_to_one_url(place, tmp_path):
    destination, reports = f"{place[0]}/a.syr", []
    elsewhere = {**place[1], "remote": {"cache": str(tmp_path / "other node")}}

    def progress(done, total):
        if done >= 7 and not reports:
            reports.append(None)
            with pytest.raises(SourceError, match=r"another process is writing to .*convert.json \(process \d+ on "):
                convert(Records(), destination, shards=3, resume=True, **place[1])
            with pytest.raises(ConfigError, match=r"unfinished conversion: pass resume=True to continue it, or overwr"):
                convert(Records(), destination, shards=3, **elsewhere)
            reports[:] = [convert(Records(), destination, shards=3, resume=True, **elsewhere)]

    with pytest.raises(
        (SourceError, ConfigError), match=r"a-0000[01]-of-00003.syr exists|has taken over .*convert.json"
    ):
        convert(Records(), destination, shards=3, progress=progress, **place[1])
    with dataload.open(reports[0].pattern, **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]
    assert convert(Records(), destination, shards=3, resume=True, **place[1]).resumed == COUNT


def on_node(place, tmp_path, number):
    return {**place[1], "remote": {"cache": str(tmp_path / f"node {number}")}}


@pytest.mark.parametrize("name", sampled(FORMATS, ["array_record", "torchrecord"]))
def test_parts_on_several_nodes(object_server, place, tmp_path, name):
    file, destination = f"train{FORMATS[name]}", f"{place[0]}/train{FORMATS[name]}"
    (tmp_path / "local").mkdir()
    convert(Records(), tmp_path / "local" / file, shards=5)
    for number in (3, 1, 3):
        part = convert(Records(), destination, shards=5, part=(number, 3), **on_node(place, tmp_path, number))
        assert part.manifest is None
    assert part.resumed == part.records == 10
    assert part.journal == f"{place[0]}/.{file}.convert.3-of-3.json"
    with pytest.raises(ConfigError, match=r"parts 2/3 have no receipt, or have not finished: run them"):
        convert(Records(), destination, shards=5, merge=True, **place[1])
    with pytest.raises(SourceNotFoundError, match=r"finish the conversion or the copy"):
        dataload.open(place[0], **place[1])
    convert(Records(), destination, shards=5, part=(2, 3), **on_node(place, tmp_path, 2))
    merged = convert(Records(), destination, shards=5, merge=True, **place[1])
    assert merged.records == COUNT
    (own,) = json.loads((tmp_path / "local" / "dataload.json").read_text())["data_sets"]
    (found,) = json.loads(content(object_server, place, "dataload.json"))["data_sets"]
    assert any(found["shards"].pop("etag") or [None]) == (name in OBJECTS)
    assert own["shards"].pop("etag") is None
    assert found == own
    assert [key for key in names(object_server, place) if key.startswith(".")] == [f".{file}.convert.json"]
    assert json.loads(content(object_server, place, f".{file}.convert.json")).keys().isdisjoint({"part", "parts"})
    assert convert(Records(), destination, shards=5, merge=True, **place[1]).resumed == COUNT
    assert convert(Records(), destination, shards=5, part=(2, 3), **place[1]).resumed == 9
    assert convert(Records(), destination, shards=5, resume=True, **place[1]).resumed == COUNT
    with dataload.open(place[0], **place[1], **({"decode": "auto"} if name == "tar" else {})) as source:
        assert numbers(source) == [*range(COUNT)]


def test_two_runs_of_a_part_on_two_nodes(place, tmp_path):
    destination, reports = f"{place[0]}/a.syr", []

    def progress(done, total):
        if done >= 4 and not reports:
            reports.append(None)
            with pytest.raises(SourceError, match=r"another process is writing to .*2-of-3.json \(process \d+ on "):
                convert(Records(), destination, shards=5, part=(2, 3), **place[1])
            reports[:] = [convert(Records(), destination, shards=5, part=(2, 3), **on_node(place, tmp_path, 2))]

    with pytest.raises((SourceError, ConfigError), match=r"a-0000\d-of-00005.syr exists|has taken over .*2-of-3.json"):
        convert(Records(), destination, shards=5, part=(2, 3), progress=progress, **place[1])
    for number in (1, 2, 3):
        convert(Records(), destination, shards=5, part=(number, 3), **place[1])
    convert(Records(), destination, shards=5, merge=True, **place[1])
    with dataload.open(place[0], **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]


@pytest.mark.parametrize("begun", ["before it is listed", "after it is listed"])
def test_two_parts_that_begin_at_once(place, tmp_path, monkeypatch, begun):
    destination, looked = f"{place[0]}/a.syr", []
    existing = parts._existing

    def look(plan, remote):
        found = existing(plan, remote) if begun.startswith("after") else None
        if not looked:
            looked.append(None)
            convert(Records(), destination, shards=5, part=(2, 3), **on_node(place, tmp_path, 2))
        return existing(plan, remote) if found is None else found

    monkeypatch.setattr(parts, "_existing", look)
    for number in (1, 3):
        convert(Records(), destination, shards=5, part=(number, 3), **place[1])
    assert looked
    assert convert(Records(), destination, shards=5, merge=True, **place[1]).records == COUNT


def test_an_object_that_was_replaced_is_not_merged(object_server, place):
    destination = f"{place[0]}/a.syr"
    for number in (1, 2):
        convert(Records(), destination, shards=2, part=(number, 2), **place[1])
    good = content(object_server, place, "a-00001-of-00002.syr")
    put(object_server, place, "a-00001-of-00002.syr", b"x" * len(good))
    with pytest.raises(
        ConfigError, match=r"a-00001-of-00002.syr is missing, or has changed since .*: run its part aga"
    ):
        convert(Records(), destination, shards=2, merge=True, **place[1])
    assert "dataload.json" not in names(object_server, place)
    assert convert(Records(), destination, shards=2, part=(2, 2), **place[1]).resumed == 0
    assert content(object_server, place, "a-00001-of-00002.syr") == good
    convert(Records(), destination, shards=2, merge=True, **place[1])


def test_the_first_of_two_conversions_ends_when_the_second_takes_over(place, tmp_path):
    destination = f"{place[0]}/a.syr"
    elsewhere = {**place[1], "remote": {"cache": str(tmp_path / "other node")}}

    class Interrupted(Exception):
        pass

    def stop(done, total):
        if done > 7:
            raise Interrupted

    def progress(done, total):
        if 7 < done < 15:  # in the second shard
            with pytest.raises(Interrupted):
                convert(Records(), destination, shards=3, resume=True, progress=stop, **elsewhere)

    with pytest.raises(SourceError, match=r"another conversion has taken over .*convert.json: wait until it has ended"):
        convert(Records(), destination, shards=3, progress=progress, **place[1])
    report = convert(Records(), destination, shards=3, resume=True, **place[1])
    with dataload.open(report.pattern, **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]


@pytest.fixture
def large(monkeypatch):
    """Records that make an object of several parts."""
    monkeypatch.setattr("dataload.storage.remote.part.LARGEST_PUT", 1 << 20)
    return [{"n": index, "x": np.full(4 << 20, index, np.uint8)} for index in range(3)]


def test_large_objects(object_server, proxy, place, large):
    proxy.faults = Faults(busy=0.3, attempts=2)
    report = convert(large, f"{place[0]}/a.syr", **through(proxy, place))
    assert asked(proxy, "PUT", "/a.syr") >= 2
    assert asked(proxy, "POST", "/a.syr") >= 2
    assert proxy.counts.faults["busy"]
    proxy.faults = Faults()
    with dataload.open(place[0], **place[1]) as source:
        assert numbers(source) == [0, 1, 2]
    proxy.reset()
    with pytest.raises(ConfigError, match=r"a.syr exists"):
        convert(large, f"{place[0]}/a.syr", **through(proxy, place))
    assert not asked(proxy, "POST")
    digest = json.loads(content(object_server, place, "dataload.json"))["data_sets"][0]["shards"]["sha256"]
    assert digest == [hashlib.sha256(content(object_server, place, "a.syr")).hexdigest()]
    assert convert(large[:2], f"{place[0]}/a.syr", overwrite=True, **place[1]).bytes < report.bytes


def test_a_large_object_does_not_replace_one_that_appears_during_its_upload(
    object_server, proxy, place, large, monkeypatch
):
    url = f"{place[0]}/a.syr"
    real = ObjectClient.head
    asked_for = []

    def head(client, url, key):
        found = real(client, url, key)
        asked_for.append(url)
        if asked_for.count(url) == 2:  # once by `create`, once before the upload
            put(object_server, place, "a.syr", b"precious")
        return found

    monkeypatch.setattr(ObjectClient, "head", head)
    writer = dataload.create(url, **through(proxy, place))
    writer.extend(large)
    with pytest.raises(ConfigError, match=r"a.syr exists: choose another name"):
        writer.close()
    assert content(object_server, place, "a.syr") == b"precious"
    assert asked(proxy, "DELETE", "/a.syr") == 1, "the parts are deleted"


KILLED_IN_AN_UPLOAD = """
import os, signal, sys
import numpy as np
import dataload.storage.remote.part
from dataload.convert import convert
from dataload.storage.remote.client import ObjectClient

dataload.storage.remote.part.LARGEST_PUT = 1 << 20
real = ObjectClient.put_parts

def put_parts(client, url, key, read, part_bytes, **options):
    def some():
        parts = read()
        yield next(parts)
        yield next(parts)
        os.kill(os.getpid(), signal.SIGKILL)

    return real(client, url, key, some, 5 << 20, **options)

ObjectClient.put_parts = put_parts
records = [{"n": index, "x": np.full(4 << 20, index, np.uint8)} for index in range(3)]
convert(records, sys.argv[1], remote={"cache": sys.argv[2], "part_bytes": 5 << 20})
"""


def test_a_conversion_killed_during_a_large_upload(object_server, place, large):
    run_killed(object_server, KILLED_IN_AN_UPLOAD, f"{place[0]}/a.syr", place[1]["remote"]["cache"])
    assert names(object_server, place) == [".a.syr.convert.json"]
    with pytest.raises(SourceNotFoundError):
        dataload.open(place[0], **place[1])
    with pytest.raises(ConfigError, match=r"\.a\.syr\.convert\.json is the journal of an unfinished conversion: pass"):
        convert(large, f"{place[0]}/a.syr", **place[1])
    convert(large, f"{place[0]}/a.syr", resume=True, **place[1])
    with dataload.open(place[0], **place[1]) as source:
        assert numbers(source) == [0, 1, 2]
    assert names(object_server, place) == [".a.syr.convert.json", "a.syr", "dataload.json"]
    assert not os.listdir(os.path.join(place[1]["remote"]["cache"], "uploads"))


def manifest_without_etags(text):
    table = json.loads(text)
    tags = [entry["shards"].pop("etag") for entry in table["data_sets"]]
    return table, tags


@pytest.mark.parametrize("name", FORMATS)
def test_indexing(object_server, proxy, place, tmp_path, name):
    (tmp_path / "local").mkdir()
    report = convert(Records(), tmp_path / "local" / f"a{FORMATS[name]}", shards=3)
    os.unlink(tmp_path / "local" / "dataload.json")
    os.unlink(report.journal)
    bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
    object_server.put_directory(bucket, tmp_path / "local", f"{prefix}/")
    codec = {"codec": "tensorprotos"} if name in ("lmdb", "array_record") else {}
    index_shards(str(tmp_path / "local"), options=codec)
    found = index_shards(place[0], options={**codec, **through(proxy, place)})
    assert found.path == f"{place[0]}/dataload.json"
    local, _ = manifest_without_etags((tmp_path / "local" / "dataload.json").read_text())
    remote, tags = manifest_without_etags(content(object_server, place, "dataload.json"))
    assert remote == local
    assert all(tags) == (name in OBJECTS)
    data = sum(size for key, size in proxy.counts.bytes.items() if "-of-" in key and not key.endswith(".idx"))
    heads = 0 if name in OBJECTS else 3 * HEAD_BYTES  # what a directory contains does not show in its name
    recorded = data - report.bytes - heads  # what the first says of its codec
    assert 0 <= recorded < 2000, "each shard is read once"
    with dataload.open(place[0], **place[1]) as one, dataload.open(tmp_path / "local") as other:
        same(one.read_batch(range(COUNT)), other.read_batch(range(COUNT)))
        assert one.fingerprint() == other.fingerprint()
    assert object_server.secret_key not in json.dumps(remote)


def test_indexing_is_resumed(object_server, proxy, place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("dataload.convert.indexing._MOST_THREADS", 1)
    report = convert(Records(), f"{place[0]}/a.syr", shards=3, **place[1])
    options = {**through(proxy, place), "remote": {"retries": 0}}
    proxy.faults = Faults(cut=1, keys="a-00002")
    with pytest.raises(SourceError, match=r"cannot read bytes .* of .*a-00002"):
        index_shards(place[0], options=options)
    proxy.faults = Faults()
    (journal,) = (tmp_path / "home" / "dataload" / "indexing").iterdir()
    assert object_server.secret_key not in journal.read_text()
    proxy.reset()
    found = index_shards(place[0], options=options)
    assert found.resumed == 2
    read = [key for key, size in proxy.counts.bytes.items() if size > 3000 and "-of-" in key]
    assert [key.rpartition("/")[2] for key in read] == ["a-00002-of-00003.syr"]
    assert not [*(tmp_path / "home" / "dataload" / "indexing").iterdir()]
    assert not [*(tmp_path / "home" / "dataload" / "shards").iterdir()], "nobody asked to keep them"
    put(object_server, place, "a-00001-of-00003.syr", content(object_server, place, "a-00000-of-00003.syr"))
    assert index_shards(report.pattern, options=options).data_sets[0].records == (7, 7, 8)
    with dataload.open(place[0], **place[1]) as source:
        assert len(source) == 22


def test_two_nodes_that_write_one_manifest(object_server, proxy, place, tmp_path, monkeypatch):
    from dataload.storage.remote.storage import RemoteStorage

    real, other = RemoteStorage.replace, []

    def replace(storage, path, data, version):
        if path.endswith("dataload.json") and not other:
            other.append(None)
            convert(
                Records(), f"{place[0]}/b.syr", storage_options=place[1]["storage_options"], remote={"cache": tmp_path}
            )
        return real(storage, path, data, version)

    monkeypatch.setattr(RemoteStorage, "replace", replace)
    convert(Records(), f"{place[0]}/a.syr", **place[1])
    table = json.loads(content(object_server, place, "dataload.json"))
    assert [entry["pattern"] for entry in table["data_sets"]] == ["a.syr", "b.syr"]


def test_a_lost_answer(object_server, place, monkeypatch):
    """The server has written the object, and the client does not know: it asks what is there."""
    import obstore

    real, failed = obstore.put, set()

    def put_and_lose(store, path, *arguments, **options):
        result = real(store, path, *arguments, **options)
        if path not in failed:
            failed.add(path)
            raise obstore.exceptions.GenericError("connection closed")
        return result

    monkeypatch.setattr(obstore, "put", put_and_lose)
    convert(Records(), f"{place[0]}/a.syr", shards=2, **place[1])
    assert len(failed) == 4  # two shards, the journal, the manifest
    with dataload.open(place[0], **place[1]) as source:
        assert numbers(source) == [*range(COUNT)]


def test_no_secrets(object_server, place):
    options = {"storage_options": place[1]["storage_options"]}
    report = convert(Records(), f"{place[0]}/a.syr", shards=2, writer_options=options, remote=place[1]["remote"])
    index_shards(place[0], options=place[1])
    written = b"".join(content(object_server, place, name) for name in names(object_server, place))
    text = written.decode(errors="replace") + repr(report) + repr(pickle.dumps(report))
    for _, _, files in os.walk(place[1]["remote"]["cache"]):
        assert not [name for name in files if name.endswith(".journal")]
    for secret in (object_server.secret_key, object_server.endpoint):
        assert secret not in text


def test_commands(object_server, place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    convert(Records(), tmp_path / "a.syr")
    storage = {name: value for name, value in place[1]["storage_options"].items() if name != "client_options"}
    run = CliRunner()

    def invoke(*arguments, flag="--option"):
        options = [part for name, value in storage.items() for part in (flag, f"storage_options.{name}={value}")]
        return run.invoke(app, [*arguments, *options])

    result = invoke("convert", str(tmp_path / "a.syr"), f"{place[0]}/b.tar", "--shards", "2", flag="--to-option")
    assert result.exit_code == 0, result.output
    assert f"23 records in {place[0]}/b-{{00000..00001}}-of-00002.tar" in result.output.replace("\n", "")
    bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
    written = content(object_server, place, "b-00000-of-00002.idx")
    object_server.store(bucket).delete([f"{prefix}/b-00000-of-00002.idx", f"{prefix}/dataload.json"])
    result = invoke("index", f"{place[0]}/b-00000-of-00002.tar")
    assert result.exit_code == 0, result.output
    assert content(object_server, place, "b-00000-of-00002.idx") == written
    result = invoke("index", f"{place[0]}/b-00000-of-00002.tar", "--directory", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "b-00000-of-00002.idx").read_bytes() == written
    result = invoke("index", "--manifest", place[0])
    assert result.exit_code == 0, result.output
    assert f"{place[0]}/dataload.json: b-{{00000..00001}}-of-00002.tar: 23 records in 2 shards" in result.output
    result = run.invoke(app, ["index", place[0], "--option", "codec=x"])
    assert "without --manifest, --option takes storage_options and remote only, got 'codec'" in result.output
    assert object_server.secret_key not in result.output


def test_a_manifest_in_parts(object_server, place, tmp_path):
    convert(Records(), f"{place[0]}/a.syr", shards=5, **place[1])
    expected = content(object_server, place, "dataload.json")
    forget(object_server, place, "dataload.json", ".a.syr.convert.json")
    for number in (3, 1, 2, 3):
        index_shards(place[0], part=(number, 3), options=on_node(place, tmp_path, number))
    assert {f".dataload.json.{number}-of-3" for number in (1, 2, 3)} <= {*names(object_server, place)}
    third = content(object_server, place, "a-00004-of-00005.syr")
    put(object_server, place, "a-00004-of-00005.syr", b"x" * len(third))
    with pytest.raises(ConfigError, match=r"has changed since it was indexed: a-00004-of-00005.syr has the ETag"):
        index_shards(place[0], merge=True, options=place[1])
    put(object_server, place, "a-00004-of-00005.syr", third)
    index_shards(place[0], part=(3, 3), options=place[1])
    index_shards(place[0], merge=True, options=place[1])
    assert content(object_server, place, "dataload.json") == expected
    assert not [name for name in names(object_server, place) if name.startswith(".")]


def odd_twice(sample):
    if sample["n"] in {3, 4}:
        raise LookupError("no label")
    return [sample, sample] if sample["n"] % 2 else dataload.DROP


@pytest.mark.parametrize("suffix", [".tar", ".lmdb"])
def test_a_function_and_parts(object_server, place, tmp_path, suffix):
    options = {"shards": 5, "map": odd_twice, "on_error": "skip"}
    (tmp_path / "local").mkdir()
    here = convert(Records(), tmp_path / "local" / f"a{suffix}", **options)
    for number in (2, 1):
        convert(Records(), f"{place[0]}/a{suffix}", part=(number, 2), **options, **place[1])
    there = convert(Records(), f"{place[0]}/a{suffix}", merge=True, **options, **place[1])
    assert (there.records, there.skipped, there.bytes) == (here.records, 2, here.bytes) == (20, 2, here.bytes)
    (own,) = json.loads((tmp_path / "local" / "dataload.json").read_text())["data_sets"]
    (found,) = json.loads(content(object_server, place, "dataload.json"))["data_sets"]
    assert (found["shards"]["sha256"], found["map"]) == (own["shards"]["sha256"], own["map"])
    with dataload.open(place[0], **place[1], **({"decode": "auto"} if suffix == ".tar" else {})) as remote:
        assert numbers(remote) == [n for n in range(1, COUNT, 2) if n != 3 for _ in range(2)]


def forget(object_server, place, *keys):
    bucket, _, prefix = place[0].removeprefix("s3://").partition("/")
    for key in keys:
        object_server.store(bucket).delete(f"{prefix}/{key}")
