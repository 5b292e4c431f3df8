"""Conversions and manifests on an S3 server: what is written, resumed, refused, and asked of the server."""

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import obstore
import pytest
from command_line import run
from fault_proxy import FaultProxy, Faults
from number_records import COUNT, Records
from remote_sets import sampled

import dataload
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards
from dataload.errors import ConfigError, CorruptFileError, SourceError, SourceNotFoundError
from dataload.storage.remote.backend import RemoteStorage

sys.path.append(str(Path(__file__).parents[1] / "children"))
import conversions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fork_server")]

FORMATS = {"syrah": ".syr"} | {name: f".{name}" for name in ("tar", "array_record", "lmdb", "torchrecord")}
OBJECTS = {"tar", "syrah", "array_record"}  # one for each shard
SHARDS = [f"a-0000{shard}-of-00003.syr" for shard in range(3)]


class Place:
    """A directory of a new bucket, as nodes with caches of their own see it, also through a proxy."""

    def __init__(self, server, proxy, tmp_path):
        self.bucket, self.server, self.proxy, self.tmp_path = server.bucket(), server, proxy, tmp_path
        self.url = f"s3://{self.bucket}/dir"
        self.cache = tmp_path / "cache"

    @property
    def store(self):
        """A client, whose connections are closed when nobody has it any more."""
        return self.server.store(self.bucket)

    def options(self, *, node=None, proxied=False):
        """Return how to reach it, from this node or another one."""
        cache = self.cache if node is None else self.tmp_path / f"node {node}"
        endpoint = self.proxy.endpoint if proxied else None
        return {"storage_options": self.server.storage_options(endpoint), "remote": {"cache": str(cache)}}

    def convert(self, name="a.syr", records=None, *, node=None, proxied=False, **options):
        records = Records() if records is None else records
        return convert(records, f"{self.url}/{name}", **options, **self.options(node=node, proxied=proxied))

    def open(self, *, proxied=False, **options):
        return dataload.open(self.url, **self.options(proxied=proxied), **options)

    def index(self, *, node=None, proxied=False, codec=None, **options):
        codec = {"codec": codec} if codec else {}
        return index_shards(self.url, options={**codec, **self.options(node=node, proxied=proxied)}, **options)

    def numbers(self, **options):
        with self.open(**options) as source:
            return [int(record["n"]) for record in source]

    def names(self):
        return sorted(meta["path"].removeprefix("dir/") for meta in self.store.list("dir").collect())

    def content(self, name):
        return bytes(self.store.get(f"dir/{name}").bytes())

    def put(self, name, data):
        self.store.put(f"dir/{name}", data)

    def manifest(self):
        """Return the data sets of the manifest without the ETags of their shards, and these."""
        return without_etags(self.content("dataload.json"))

    def asked(self, method, *endings):
        """Return the number of requests that went through the proxy."""
        requests = self.proxy.counts.requests.items()
        return sum(n for (verb, key), n in requests if verb == method and (not endings or key.endswith(endings)))


@pytest.fixture
def place(object_server, tmp_path):
    with FaultProxy(object_server.endpoint) as proxy:
        yield Place(object_server, proxy, tmp_path)


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def without_etags(text):
    entries = json.loads(text)["data_sets"]
    return entries, [entry["shards"].pop("etag") for entry in entries]


def decoding(name):
    return {"decode": "auto"} if name == "tar" else {}


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_converted_opens_by_its_url(place, local, name):
    file = f"train{FORMATS[name]}"
    here = convert(Records(), local / file, shards=3)
    there = place.convert(file, shards=3)
    assert there.journal == f"{place.url}/.{file}.convert.json"
    assert there.manifest == f"{place.url}/dataload.json"
    assert (there.records, there.bytes, there.notes, there.format) == (COUNT, here.bytes, here.notes, here.format)
    assert [path.rpartition("/")[2] for path in there.paths] == [path.rpartition("/")[2] for path in here.paths]
    own, none = without_etags((local / "dataload.json").read_text())
    found, tags = place.manifest()
    assert (found, none) == (own, [None])
    names = own[0]["shards"]["name"]
    assert tags == ([[place.store.head(f"dir/{shard}")["e_tag"] for shard in names]] if name in OBJECTS else [None])

    place.cache = place.tmp_path / "other"
    with dataload.open(local, **decoding(name)) as one, place.open(proxied=True, **decoding(name)) as remote:
        assert place.asked("GET", "dataload.json") == 1
        if name in OBJECTS:
            assert not place.proxy.counts.lists
            assert not place.asked("HEAD", FORMATS[name], "dataload.json", "/dir")
        order = np.random.default_rng(0).permutation(COUNT)
        same(remote.read_batch(order), one.read_batch(order))
        assert remote.fingerprint() == one.fingerprint()
        for first, second in ((one, remote), (remote, one)):
            loaders = [dataload.Loader(source, batch_size=4, shuffle=True, seed=3) for source in (first, first, second)]
            batches = list(loaders[0])
            with loaders[1] as stopped:
                for _, _ in zip(range(2), stopped, strict=False):
                    state = json.loads(json.dumps(stopped.state_dict()))
            loaders[2].load_state_dict(state)
            for batch, expected in zip(loaders[2], batches[2:], strict=True):
                same(batch, expected)


def convert_and_kill(place, file, at):
    """Convert in a process that is killed after so many records."""
    arguments = {"args": (Records(), f"{place.url}/{file}", at), "kwargs": {"shards": 3, **place.options()}}
    process = multiprocessing.get_context("forkserver").Process(target=conversions.run, **arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()


@pytest.mark.parametrize("kill_at", sampled([0, 1, 7, 15, 22, 23], [0, 23]))
def test_wherever_it_is_killed(place, kill_at):
    convert_and_kill(place, "part-{shard}.syr", kill_at)
    if kill_at > 15:  # then the first shard is there; the names do not tell how many there are to be
        with pytest.raises(SourceNotFoundError, match=r"unfinished conversion \(\.part-N\.syr\.convert\.json\): fin"):
            place.open()
    assert place.convert("part-{shard}.syr", shards=3, resume=True).resumed <= kill_at
    assert place.numbers() == [*range(COUNT)]
    assert not os.listdir(place.cache / "uploads"), "what was killed has left nothing"


def test_a_shard_that_changed_is_written_again(place):
    place.convert(shards=3)
    good = place.content(SHARDS[0])
    place.put(SHARDS[0], b"x" * len(good))
    match = rf"{SHARDS[0]}: .* manifest of its directory; .* run `dataload index --manifest {place.url}`"
    with place.open() as source, pytest.raises(CorruptFileError, match=match):
        source[0]
    report = place.convert(shards=3, resume=True)
    first = f"{place.url}/{SHARDS[0]}"
    assert report.notes == (f"{first} has changed since it was finished and was written again",)
    assert place.content(SHARDS[0]) == good
    assert place.numbers() == [*range(COUNT)]


@pytest.mark.parametrize(
    ("suffix", "options"),
    [("lmdb", {}), ("lmdb", {"codec": bytes}), ("torchrecord", {}), ("torchrecord", {"db_num": 1})],
)
def test_folders_of_an_unfinished_overwrite_are_refused(place, suffix, options):
    """The manifest has no ETags of their objects, and their sizes may be equal."""
    names = [f"a-0000{shard}-of-00002.{suffix}" for shard in range(2)]
    records, others = ([{"x": Records()[n]["x"], "n": n + more} for n in range(12)] for more in (0, 100))
    place.convert(f"a.{suffix}", dataload.MemorySource(records), shards=2)
    old = [place.content(f"{name}/data.mdb") for name in names]
    with place.open(**options) as before:
        place.convert(f"a.{suffix}", dataload.MemorySource(others), shards=2, overwrite=True)
        assert [len(place.content(f"{name}/data.mdb")) for name in names] == [*map(len, old)]
        with place.open(**options) as after:
            assert len([*after]) == 12
        place.put(f"{names[0]}/data.mdb", old[0])  # as if the second had been overwritten first
        match = rf"{names[0]} has another content than in the manifest: if the shards .* {place.url}`"
        with pytest.raises(CorruptFileError, match=match), place.open(**options) as mixed:
            mixed[0]
        if not options:  # else all shards were downloaded before
            with pytest.raises(CorruptFileError, match=match.replace(*names)):
                before[6]


def test_nothing_is_overwritten_unasked(place):
    place.put(SHARDS[1], b"precious")
    with pytest.raises(ConfigError, match=rf"{SHARDS[1]} exists"):
        place.convert(shards=3)
    assert place.names() == [SHARDS[1]]
    place.store.delete(f"dir/{SHARDS[1]}")

    def progress(done, total):
        if 7 < done < 15:
            place.put(SHARDS[1], b"precious")

    with pytest.raises(ConfigError, match=f"{SHARDS[1]} exists"):
        place.convert(shards=3, progress=progress)
    assert place.content(SHARDS[1]) == b"precious"
    place.convert(shards=3, overwrite=True)
    assert place.numbers() == [*range(COUNT)]


@pytest.mark.parametrize(("part", "log"), [(None, ".a.syr.convert.log"), ((2, 3), ".a.syr.convert.2-of-3.log")])
def test_two_conversions_to_one_url(place, part, log, monkeypatch):
    """The second on this node is refused; one on another node ends before the first, which then finds its files."""
    monkeypatch.setattr("dataload.catalog.ledger._MOST_LINES", 1)
    options, inner = {"shards": 5, "part": part}, []

    def progress(done, total):
        if done <= 5 or inner:
            return
        inner.append(None)
        while not [name for name in place.names() if name.startswith(log) and name.endswith("-00000")]:
            pass  # a thread completes the first shard
        with pytest.raises(SourceError, match=r"another process is writing to .*\.(json|log) \(process \d+ on "):
            place.convert(resume=part is None, **options)
        if part is None:
            with pytest.raises(ConfigError, match="exists: choose another name, or pass resume=True to continue"):
                place.convert(node=2, **options)
        inner[:] = [place.convert(node=2, resume=part is None, **options)]

    with pytest.raises((SourceError, ConfigError), match=r"a-0000\d-of-00005.syr exists|has taken over .*\.log"):
        place.convert(progress=progress, **options)
    assert inner[0].resumed == (4 if part is None else 5)
    if part is None:
        assert place.convert(shards=5, resume=True).resumed == COUNT
    else:
        for number in (1, 2, 3):
            place.convert(shards=5, part=(number, 3))
        place.convert(shards=5, merge=True)
    assert place.numbers() == [*range(COUNT)]


@pytest.mark.parametrize("begun", ["before it is listed", "after it is listed"])
def test_two_parts_that_begin_at_once(place, monkeypatch, begun):
    looked, real = [], RemoteStorage.list

    def look(storage, path):
        found = real(storage, path) if begun.startswith("after") else None
        if not looked:
            looked.append(path)
            place.convert(shards=5, part=(2, 3), node=2)
        return real(storage, path) if found is None else found

    monkeypatch.setattr(RemoteStorage, "list", look)
    for number in (1, 3):
        place.convert(shards=5, part=(number, 3))
    assert looked == [place.url]
    assert place.convert(shards=5, merge=True).records == COUNT


def test_the_first_of_two_conversions_ends_when_the_second_takes_over(place):
    class Interrupted(Exception):
        pass

    def stop(done, total):
        if done > 7:
            raise Interrupted

    def progress(done, total):
        if 7 < done < 15:  # in the second shard
            with pytest.raises(Interrupted):
                place.convert(shards=3, node=2, resume=True, progress=stop)

    with pytest.raises(SourceError, match=r"another process \(process \d+ on .*\) has taken over .*convert\.log: wait"):
        place.convert(shards=3, progress=progress)
    place.convert(shards=3, resume=True)
    assert place.numbers() == [*range(COUNT)]


@pytest.fixture
def large(monkeypatch):
    """Records that make an object of several parts."""
    monkeypatch.setattr("dataload.storage.remote.files.LARGEST_PUT", 1 << 20)
    return [{"n": index, "x": np.full(4 << 20, index, np.uint8)} for index in range(3)]


@pytest.mark.slow_suite
def test_large_objects(place, large):
    place.proxy.faults = Faults(busy=0.3, attempts=2)
    report = place.convert(records=large, proxied=True)
    assert place.asked("PUT", "/a.syr") >= 2
    assert place.asked("POST", "/a.syr") >= 2
    assert place.proxy.counts.faults["busy"]
    place.proxy.faults = Faults()
    assert place.numbers() == [0, 1, 2]
    place.proxy.reset()
    with pytest.raises(ConfigError, match=r"a.syr exists"):
        place.convert(records=large, proxied=True)
    assert not place.asked("POST")
    assert place.manifest()[0][0]["shards"]["sha256"] == [hashlib.sha256(place.content("a.syr")).hexdigest()]
    assert place.convert(records=large[:2], overwrite=True).bytes < report.bytes


def test_a_large_object_does_not_replace_one_that_appears_during_its_upload(place, large, monkeypatch):
    real, asked_for = obstore.head, []

    def head(store, path):
        try:
            return real(store, path)
        finally:
            asked_for.append(path)
            if asked_for.count("dir/a.syr") == 2:  # once by `create`, once before the upload
                place.put("a.syr", b"precious")

    monkeypatch.setattr(obstore, "head", head)
    writer = dataload.create(f"{place.url}/a.syr", **place.options(proxied=True))
    writer.extend(large)
    with pytest.raises(ConfigError, match=r"a.syr exists: choose another name"):
        writer.close()
    assert place.content("a.syr") == b"precious"
    assert place.asked("DELETE", "/a.syr") == 1, "the parts are deleted"


KILLED_IN_AN_UPLOAD = """
import os, signal, sys
import numpy as np
import dataload.storage.remote.files
from dataload.convert import convert
from dataload.storage.remote.client import ObjectClient

dataload.storage.remote.files.LARGEST_PUT = 1 << 20
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


@pytest.mark.remote
def test_a_conversion_killed_during_a_large_upload(place, large):
    command = [sys.executable, "-c", KILLED_IN_AN_UPLOAD, f"{place.url}/a.syr", str(place.cache)]
    environment = {**os.environ, **place.server.environment()}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert place.names() == [".a.syr.convert.json", ".a.syr.convert.log/claim"]
    with pytest.raises(SourceNotFoundError):
        place.open()
    with pytest.raises(
        ConfigError, match=r"\.a\.syr\.convert\.json is the journal of an unfinished conversion: pass"
    ) as e:
        place.convert(records=large)
    assert e.value.key == "resume"
    place.convert(records=large, resume=True)
    assert place.numbers() == [0, 1, 2]
    assert place.names() == [".a.syr.convert.json", "a.syr", "dataload.json"]
    assert not os.listdir(place.cache / "uploads")


def test_indexing_is_resumed(place, tmp_path, monkeypatch):
    home, secret = tmp_path / "home" / "dataload", place.server.secret_key
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("dataload.convert.indexing.usable_cpus", lambda: 1)
    place.convert(shards=3)
    options = {**place.options(proxied=True), "remote": {"retries": 0}}
    place.proxy.faults = Faults(cut=1, keys="a-00002")
    with pytest.raises(SourceError, match=r"cannot read bytes .* of .*a-00002"):
        index_shards(place.url, options=options)
    place.proxy.faults = Faults()
    (journal,) = (home / "indexing").iterdir()
    assert secret not in journal.read_text()
    place.proxy.reset()
    assert index_shards(place.url, options=options).resumed == 2
    read = [key for key, size in place.proxy.counts.bytes.items() if size > 3000 and "-of-" in key]
    assert [key.rpartition("/")[2] for key in read] == [SHARDS[2]]
    assert not [*(home / "indexing").iterdir(), *(home / "shards").iterdir()], "nobody asked to keep them"
    place.put(SHARDS[1], place.content(SHARDS[0]))
    assert index_shards(f"{place.url}/a-*.syr", options=options).data_sets[0].records == (7, 7, 8)
    assert place.numbers() == [*range(7), *range(7), *range(15, 23)]


def test_two_nodes_that_write_one_manifest(place, monkeypatch):
    """The other writes between the read and the write of the first."""
    real, other = obstore.put, []

    def put(store, path, *arguments, **options):
        if path.endswith("dataload.json") and not other:
            other.append(None)
            place.convert("b.syr", node=2)
        return real(store, path, *arguments, **options)

    monkeypatch.setattr(obstore, "put", put)
    place.convert()
    assert [entry["pattern"] for entry in place.manifest()[0]] == ["a.syr", "b.syr"]


@pytest.mark.parametrize("slow", [False, True])
def test_requests_of_a_conversion_to_many_shards(place, monkeypatch, slow):
    if slow:  # each shard takes longer than a segment of the log waits for the next
        monkeypatch.setattr("dataload.catalog.ledger._MOST_LINES", 1)
    place.convert(shards=20, records=[{"n": i} for i in range(20)], proxied=True)
    assert (place.asked("PUT", ".syr"), place.asked("HEAD", ".syr")) == (20, 0), "the directory was listed once"
    # The journal twice, the claim twice, a segment of the log, the manifest; of slow shards a claim and a segment each.
    assert place.asked("PUT") <= 20 * (3 if slow else 1) + 6
    assert (place.proxy.counts.requests + place.proxy.counts.lists).total() <= 20 * (3 if slow else 1) + 18


def test_no_secrets(place):
    options, url = place.options(), f"{place.url}/a.syr"
    writer = {"storage_options": options["storage_options"]}
    report = convert(Records(), url, shards=2, writer_options=writer, remote=options["remote"])
    place.index()
    written = b"".join(place.content(name) for name in place.names())
    text = written.decode(errors="replace") + repr(report) + repr(pickle.dumps(report))
    assert not [*place.cache.rglob("*.journal")]
    for secret in (place.server.secret_key, place.server.endpoint):
        assert secret not in text


def test_commands(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    convert(Records(), tmp_path / "a.syr")
    storage = {k: v for k, v in place.server.storage_options().items() if k != "client_options"}

    def command(*arguments, flag="--option"):
        options = [part for name, value in storage.items() for part in (flag, f"storage_options.{name}={value}")]
        result = run(*arguments, *options)
        assert result.exit_code == 0, result.output
        assert place.server.secret_key not in result.output
        return result.output

    output = command("convert", tmp_path / "a.syr", f"{place.url}/b.tar", "--shards", 2, flag="--to-option")
    assert f"23 records in {place.url}/b-{{00000..00001}}-of-00002.tar" in output.replace("\n", "")
    index, tar = "b-00000-of-00002.idx", f"{place.url}/b-00000-of-00002.tar"
    written = place.content(index)
    place.store.delete([f"dir/{index}", "dir/dataload.json"])
    command("index", tar)
    assert place.content(index) == written
    command("index", tar, "--directory", tmp_path)
    assert (tmp_path / index).read_bytes() == written
    described = f"{place.url}/dataload.json: b-{{00000..00001}}-of-00002.tar: 23 records in 2 shards"
    assert described in command("index", "--manifest", place.url)


def append_at(url, options, first):
    for start in range(first, first + 6, 3):
        with dataload.create(url, append=True, records_per_shard=2, **options) as writer:
            writer.extend({"n": np.array(i), "x": np.zeros(i % 5)} for i in range(start, start + 3))


@pytest.mark.parametrize("name", sampled(FORMATS, ["syrah", "lmdb"]))
def test_shards_are_appended_at_a_url(place, name):
    place.convert(f"a{FORMATS[name]}", [{"n": np.array(i), "x": np.zeros(i % 5)} for i in range(4)], shards=2)
    place.index(measuring=Measuring(), codec=None)
    append_at(place.url, place.options(), 4)
    assert place.numbers(**decoding(name)) == [*range(10)]
    found = place.manifest()
    assert found[0][0]["statistics"]["fields"]["n"]["numbers"]["maximum"] == 9
    place.index(measuring=Measuring())
    assert place.manifest() == found


@pytest.mark.slow_suite
def test_several_nodes_append_at_the_same_time(place):
    """Whoever finds another manifest than it has read adds to that one."""
    place.convert("a.syr", [{"n": np.array(i), "x": np.zeros(i % 5)} for i in range(2)], shards=1)
    place.proxy.faults = Faults(latency=0.02)
    context = multiprocessing.get_context("forkserver")
    options = [place.options(node=node, proxied=True) for node in range(3)]
    arguments = [(place.url, each, 100 * (node + 1)) for node, each in enumerate(options)]
    processes = [context.Process(target=append_at, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = place.numbers()
    assert sorted(found) == [0, 1, *(first + i for first in (100, 200, 300) for i in range(6))]
    assert all(found[i] + 2 == found[i + 1] + 1 == found[i + 2] for i in range(2, 20, 3))
    asked = place.asked("PUT", "dataload.json")
    assert asked >= 6
