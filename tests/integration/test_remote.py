"""Every format on a server gives what local files give; and forks, faults, changes, secrets, several processes."""

import itertools
import json
import multiprocessing
import operator
import os
import pickle
import shutil
import time
import zipfile
from multiprocessing import forkserver
from pathlib import Path

import credentials
import numpy as np
import pytest
import remote_sets
from fault_proxy import FaultProxy
from object_server import FileServer
from remote_sets import sampled
from written import written

import dataload
from dataload import ConfigError, WorkerError
from dataload._util.caches import pickling_for_worker
from dataload.convert.indexing import index_shards
from dataload.errors import SourceError, SourceNotFoundError, StoreError, UnsupportedFormatError
from dataload.sources.folder.reader import FolderReader
from dataload.testing.compare import difference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_fork_server")]

RECORDS = 60
FORMATS = {
    **remote_sets.FORMATS,
    "tar without an index": ("tar", {"index": False}, {"decode": "auto"}),
    **{suffix: (suffix, {}, {}) for suffix in ("parquet", "arrow", "jsonl")},
}
WHOLE = ("torchrecord", "lmdb", "array_record", "arrow")


def records(number=RECORDS):
    random = np.random.default_rng(0)
    return [{"x": random.integers(0, 255, 3000, np.uint8).astype(np.uint8), "n": row} for row in range(number)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A directory of two shards for each format, by its name."""
    found = {}
    for name, (suffix, options, _) in FORMATS.items():
        directory = tmp_path_factory.mktemp("shards")
        for shard in range(2):
            path = directory / f"part-{shard}.{suffix}"
            if suffix == "npy":
                np.save(path, np.arange(shard, 4000 + 13 * shard, dtype=np.uint16))
                continue
            written(path, records()[shard::2], **options)
        found[name] = directory
    return found


@pytest.fixture(scope="module")
def bucket(server, shards):
    """The URL of a bucket with all of them."""
    name = server.bucket()
    for number, directory in enumerate(shards.values()):
        server.put_directory(name, directory, f"{number}/")
    return server.url(name)


@pytest.fixture
def environment(server, monkeypatch):
    """Credentials in the environment, for other processes too."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    forkserver._forkserver._stop()  # its processes have the environment that was there when it started


def paths(shards, bucket, name):
    suffix = FORMATS[name][0]
    pattern = f"part-{{0,1}}.{suffix}"
    return str(shards[name] / pattern), f"{bucket}/{[*FORMATS].index(name)}/{pattern}"


def remote_of(mode, tmp_path):
    return {"mode": mode} if mode == "ranges" else {"cache": str(tmp_path / "cache"), "part_bytes": 10_000}


def same(one, other):
    return difference(one, other, "values") is None


MODES = [*itertools.product(FORMATS, ["ranges"]), *itertools.product(WHOLE, ["shards"])]


@pytest.mark.parametrize(("name", "mode"), sampled(itertools.product(FORMATS, ["ranges", "shards"]), MODES))
def test_records_and_fingerprint(server, shards, bucket, tmp_path, name, mode):
    local_path, url = paths(shards, bucket, name)
    reading = {"storage_options": server.storage_options(), "remote": remote_of(mode, tmp_path), **FORMATS[name][2]}
    if name in WHOLE and mode == "ranges":
        with pytest.raises(ConfigError, match=r"can only be read as a whole: set remote.mode to 'shards' or 'auto'"):
            dataload.open(url, **reading)
        return
    with dataload.open(local_path, **FORMATS[name][2]) as local, dataload.open(url, **reading) as remote:
        assert len(remote) == len(local) > 0
        assert remote.shard_lengths == local.shard_lengths
        assert remote.fields == local.fields
        assert remote.fingerprint() == local.fingerprint()
        order = np.random.default_rng(1).permutation(len(local))
        assert same(remote.read(order), local.read(order))
        assert same(remote.read_batch(order), local.read_batch(order))
        assert server.secret_key not in repr(remote) + repr(vars(remote)) + str(remote.options)


@pytest.mark.parametrize(
    ("folder", "name", "options"),
    [
        ("mds/all", "", {"fields": ["str", "fixed", "int"]}),
        ("mds/gz", "index.json", {}),
        ("wids", "shards.json", {}),
        ("tfrecord", "examples.tfrecord-{00000..00001}-of-00002", {"codec": "example"}),
    ],
)
def test_data_sets_of_others(server, tmp_path, folder, name, options):
    golden, bucket = Path(__file__).parents[1] / "golden" / folder, server.bucket()
    server.put_directory(bucket, golden, "data/")
    options["remote"] = {"cache": str(tmp_path / "cache"), "budget": "1MB"}
    url = f"{server.url(bucket)}/data/{name}".rstrip("/")
    with (
        dataload.open(str(golden / name), **options) as local,
        dataload.open(url, storage_options=server.storage_options(), **options) as source,
    ):
        assert source.fingerprint() == local.fingerprint()
        order = np.random.default_rng(1).permutation(len(local))
        assert same(source.read(order), local.read(order))
        if folder != "tfrecord":  # whose Examples have different lengths
            settings = {"batch_size": 2, "shuffle": True, "seed": 1, "epochs": 1, "num_workers": 1}
            with dataload.Loader(source, **settings) as one, dataload.Loader(local, **settings) as other:
                assert same(list(one), list(other))


@pytest.mark.parametrize("name", FORMATS)
def test_a_manifest_knows_the_fingerprint(object_server, proxy, shards, tmp_path, name):
    directory, bucket = tmp_path / "data", object_server.bucket()
    suffix, _, options = FORMATS[name]
    shutil.copytree(shards[name], directory)
    stored = {key: value for key, value in options.items() if key != "format"}
    index_shards(str(directory / f"part-*.{suffix}"), format=options.get("format"), options=stored)
    object_server.put_directory(bucket, directory, "with/")
    remote = {"storage_options": remote_sets.proxied(proxy), "remote": {"cache": str(tmp_path / "cache")}}
    with (
        dataload.open(str(directory / f"part-*.{suffix}"), **options) as local,
        dataload.open(f"s3://{bucket}/with", **remote) as source,
    ):
        expected = local.fingerprint()
        assert source.fingerprint() == expected
        assert [*proxy.counts.requests.elements()] == [("GET", f"{bucket}/with/dataload.json")]
    if "decode" in options or "window" in options:
        other = {"decode": {}} if "decode" in options else {"window": 17}
        with (
            dataload.open(str(directory), **other) as local,
            dataload.open(f"s3://{bucket}/with", **remote, **other) as source,
        ):
            assert source.fingerprint() == local.fingerprint() != expected


def test_patterns_lists_and_directories(server, shards, bucket):
    storage = server.storage_options()
    root = f"{bucket}/{[*FORMATS].index('syr')}"
    for wanted in (f"{root}/*.syr", f"{root}/", root, f"syrah:{root}/part-?.syr", f"{bucket}/[0]/p*"):
        with dataload.open(wanted, storage_options=storage) as source:
            assert source.paths == (f"{root}/part-0.syr", f"{root}/part-1.syr")
    with dataload.open([f"{root}/part-1.syr", f"{root}/part-0.syr"], storage_options=storage) as source:
        assert source.paths == (f"{root}/part-1.syr", f"{root}/part-0.syr")
    local = shards["syr"]
    with dataload.open([f"{root}/part-0.syr", f"file://{local}/part-1.syr"], storage_options=storage) as source:
        assert source.paths == (f"{root}/part-0.syr", f"{local}/part-1.syr")
        assert len(source.read(range(RECORDS))) == RECORDS
    with pytest.raises(SourceNotFoundError, match=rf"nothing matches the pattern {root}/\*.tar"):
        dataload.open(f"{root}/*.tar", storage_options=storage)
    for missing in (f"{root}/part-2.syr", f"{root}/part-{{1,2}}.syr", f"{root}/none/"):
        with pytest.raises(SourceNotFoundError, match=f"there is no {root}/(part-2.syr|none/)"):
            dataload.open(missing, storage_options=storage)


@pytest.mark.parametrize("mode", ["ranges", "shards"])
def test_archives_of_files(server, environment, tmp_path, mode, monkeypatch):
    """Their classes are those of all, also in a worker, where archives are opened one by one; a folder is refused."""
    (tmp_path / "shards").mkdir()
    for shard, names in enumerate((["b/0.x", "d/1.x"], ["a/2.x", "d/3.x"])):
        with zipfile.ZipFile(tmp_path / "shards" / f"part-{shard}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.writestr(name, name * 100)
    bucket = server.bucket()
    server.put_directory(bucket, tmp_path / "shards", "data/")
    url = f"{server.url(bucket)}/data"
    options = {"storage_options": {"client_options": {"allow_http": True}}, "pattern": "{label}/{key}.x"}
    with (
        dataload.open(str(tmp_path / "shards" / "part-{0,1}.zip"), pattern="{label}/{key}.x") as local,
        dataload.open(f"{url}/part-{{0,1}}.zip", remote=remote_of(mode, tmp_path), **options) as remote,
    ):
        assert remote.fields == local.fields
        assert remote.fingerprint() == local.fingerprint()
        assert same(remote.read([3, 0, 2]), local.read([3, 0, 2]))
        settings = {"batch_size": 2, "shuffle": True, "epochs": 2, "num_workers": 2}
        loaders = [dataload.Loader(source, **settings) for source in (local, remote)]
        assert same(*map(list, loaders))
        monkeypatch.delattr(FolderReader, "ranges")  # as in a format that does not know them
        assert same(*map(list, loaders))
        with pickling_for_worker():
            sent = pickle.dumps(remote)
        with pickle.loads(sent) as copy:
            assert copy.read_batch([2, 1])["label"].tolist() == [0, 2]
    with pytest.raises(UnsupportedFormatError, match="is a folder of single files at a URL, and each file would be"):
        dataload.open(f"folder:{url}/", **options)


def test_web_servers(shards, tmp_path):
    with FileServer(shards["syr"]) as server, dataload.open(f"{server.endpoint}/part-{{0..1}}.syr") as source:
        with dataload.open(str(shards["syr"])) as local:
            assert same(source.read_batch(range(50)), local.read_batch(range(50)))
            assert source.fingerprint() == local.fingerprint()
        with pytest.raises(ConfigError, match="web servers do not list files, so name them"):
            dataload.open(f"{server.endpoint}/*.syr")
        with pytest.raises(SourceNotFoundError, match=r"there is no http://.*none.syr"):
            dataload.open(f"{server.endpoint}/none.syr")
    for name in ("syr", "lmdb", "torchrecord"):
        written(tmp_path / name / f"d.{name}", records(), shards=2)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "dataload.json").write_text("<html>")
    with FileServer(tmp_path) as server:
        for name in ("syr", "syr/", "lmdb", "torchrecord"):
            url, remote = f"{server.endpoint}/{name}", {"cache": str(tmp_path / "cache")}
            with dataload.open(url, remote=remote) as source, dataload.open(str(tmp_path / name)) as local:
                assert same(source.read_batch(range(RECORDS)), local.read_batch(range(RECORDS)))
        with pytest.raises(SourceNotFoundError, match=r"there is no http://.*page"):
            dataload.open(f"{server.endpoint}/page")
        with pytest.raises(StoreError, match="can replace files, but not check that there is none: pass overwrite"):
            dataload.create(f"{server.endpoint}/new.syr")
        with pytest.raises(ConfigError, match="so shards are not written there: choose a store or a directory"):
            dataload.create(f"{server.endpoint}/new.syr", shards=2)


def test_writing(server, tmp_path):
    """What is written is there when the writer is closed, and is replaced only if asked, also by a late writer."""
    root, options = server.url(server.bucket()), {"storage_options": server.storage_options()}
    options["remote"] = {"cache": str(tmp_path)}
    for name, (suffix, writing, reading) in FORMATS.items():
        if suffix == "npy":
            continue
        url = f"{root}/{[*FORMATS].index(name)}/x.{suffix}"
        with dataload.create(url, **options, **writing) as late, dataload.create(url, **options, **writing) as writer:
            late.extend(records(2))
            writer.extend(records(5))
            with pytest.raises(SourceNotFoundError):
                dataload.open(url, **options)
            writer.close()
            with pytest.raises(ConfigError, match="exists:"):
                late.close()
        with dataload.open(url, **options, **reading) as source:
            assert [int(record["n"]) for record in source] == [*range(5)]
        with pytest.raises(ConfigError, match=f"{url} exists"):
            dataload.create(url, **options, **writing)
        written(url, records(3), overwrite=True, **options, **writing)
        with dataload.open(url, **options, **reading) as source:
            assert len(source) == 3
    assert not list((tmp_path / "uploads").iterdir())


@pytest.mark.parametrize("rule", [{"shards": 2}, {"records_per_shard": 3}])
def test_writing_shards(server, tmp_path, rule):
    root, storage, remote = server.url(server.bucket()), server.storage_options(), {"cache": str(tmp_path)}
    with dataload.create(f"{root}/x.tar", storage_options=storage, remote=remote, **rule) as writer:
        writer.extend(records(5))
        with pytest.raises(SourceNotFoundError):
            dataload.open(root, storage_options=storage)
    assert writer.paths == tuple(f"{root}/x-0000{i}-of-00002.tar" for i in range(2))
    with dataload.open(root, storage_options=storage, remote=remote) as source:  # by the manifest
        order = [0, 2, 4, 1, 3] if "shards" in rule else [*range(5)]
        assert [int(record["n"]) for record in source] == order
    with pytest.raises(ConfigError, match=r"x-00000-of-00002\.tar exists"):
        dataload.create(f"{root}/x.tar", storage_options=storage, remote=remote, **rule)
    assert not list((tmp_path / "uploads").iterdir())


def test_wrong_credentials(server, bucket):
    secret, good = "a5secret5that5is5wrong==", server.storage_options()
    name = "account_key" if server.scheme == "az" else "secret_access_key"
    without = {key: value for key, value in good.items() if "key" not in key}
    for storage in ({**good, name: secret}, {**without, "skip_signature": True}):
        begun = time.monotonic()
        with pytest.raises(SourceError, match=r"cannot look up .*403") as caught:
            dataload.open(f"{bucket}/0/part-0.syr", storage_options=storage)
        assert time.monotonic() - begun < 10  # not repeated
        assert secret not in str(caught.value) + repr(vars(caught.value)) + repr(caught.value.__cause__)
    with pytest.raises(ConfigError, match=r"storage_options do not fit s3://b: .*'wrong'") as caught:
        dataload.open("s3://b/x.syr", storage_options={"wrong": secret})
    assert secret not in str(caught.value) + repr(vars(caught.value))


@pytest.mark.parametrize("provider", [pytest.param("text", marks=pytest.mark.slow_suite), "function"])
def test_credentials_that_expire(server, shards, bucket, tmp_path, monkeypatch, provider):
    monkeypatch.setenv("TEST_CREDENTIALS", json.dumps(server.credentials()))
    monkeypatch.setenv("TEST_CALLS", str(tmp_path / "calls"))
    storage = {name: value for name, value in server.storage_options().items() if "key" not in name}
    storage["credential_provider"] = "credentials:short_lived" if provider == "text" else credentials.short_lived
    url, remote = paths(shards, bucket, "syr")[1], {"mode": "ranges"}
    with dataload.open(url, storage_options=storage, remote=remote) as source:
        assert server.secret_key.encode() not in pickle.dumps(source)
        with dataload.Loader(source, batch_size=5) as loader:
            assert len(list(loader)) == RECORDS // 5
            assert server.secret_key not in json.dumps(loader.state_dict(), default=repr)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(operator.getitem, (source, 3))["n"] == source[3]["n"]
            pool.close()
            pool.join()
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) > len(set(calls)) > 1  # renewed, and in other processes too


def test_a_forked_child_is_refused(shards, bucket, environment):
    url = paths(shards, bucket, "syr")[1]
    with dataload.open(url, remote={"mode": "ranges"}) as source:
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()

        def child():
            for use in (lambda: source.read([0]), lambda: dataload.open(url)):
                try:
                    use()
                except SourceError as error:
                    answers.put(str(error))

        process = context.Process(target=child)
        process.start()
        for text in (answers.get(), answers.get()):  # it does not hang
            assert "this process was forked by one that had read from a URL" in text
            assert "'forkserver' or 'spawn'" in text
        process.join()
        process.close()
        answers.close()
        with (
            dataload.Loader(source, batch_size=5, num_workers=2, executor="fork") as loader,
            pytest.raises(WorkerError, match="this process was forked"),
        ):
            next(iter(loader))


@pytest.mark.parametrize("name", ["syr", "lmdb", "array_record"])
def test_a_budget_of_one_shard(server, shards, bucket, tmp_path, name):
    local_path, url = paths(shards, bucket, name)
    size = max(path.stat().st_size for path in Path(shards[name]).rglob("*") if path.is_file())
    reading = {"storage_options": server.storage_options(), **FORMATS[name][2]}
    remote = {"cache": str(tmp_path), "budget": int(1.5 * size)}
    with dataload.open(url, remote=remote, **reading) as source, dataload.open(local_path, **FORMATS[name][2]) as local:
        for order in (range(RECORDS), range(RECORDS - 1, -1, -7)):
            for start in range(0, len(order), 5):
                assert same(source.read(order[start : start + 5]), local.read(order[start : start + 5]))
            assert sum(path.stat().st_size for path in (tmp_path / "shards").iterdir()) <= remote["budget"]
    with pytest.raises(ConfigError, match="and the budget of the cache"):
        dataload.open(url, remote={**remote, "budget": 1000, "mode": "shards"}, **reading)


def test_configs(server, shards, bucket, tmp_path):
    storage = server.storage_options()
    lines = ["[source]", f'path = "{bucket}/0/*.syr"', "[source.storage]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in storage.items() if isinstance(value, str)]
    lines += ["[source.storage.client_options]", "allow_http = true", "[remote]", 'cache = "kept"', 'budget = "1GB"']
    (tmp_path / "c.toml").write_text("\n".join([*lines, "[loader]", "batch_size = 20"]))
    with dataload.from_config(tmp_path / "c.toml") as loader:
        assert len(list(loader)) == 3
    assert len(os.listdir(tmp_path / "kept" / "shards")) == 2
    for change, match in [("remote.mode=fast", "remote.mode"), ("remote.budget=none", "remote.budget")]:
        with pytest.raises(ConfigError, match=match):
            dataload.from_config(tmp_path / "c.toml", overrides=[change])


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in FORMATS for mode in ("ranges", "auto") if mode == "auto" or name not in WHOLE],
)
def test_what_is_downloaded_to_learn_lengths_is_limited(server, shards, bucket, tmp_path, name, mode):
    remote = {"mode": mode, **({} if mode == "ranges" else {"cache": str(tmp_path / "cache")})}
    with FaultProxy(server.endpoint) as proxy:
        reading = {"storage_options": server.storage_options(proxy.endpoint), **FORMATS[name][2]}

        def open_source(scan):
            dataload.open(paths(shards, bucket, name)[1], remote={**remote, "scan": scan}, **reading).close()

        if name not in (*WHOLE, "tar without an index", "jsonl"):
            open_source(1)
            return
        with pytest.raises(ConfigError, match=r"only the whole of .*part-0.* tells its number of records, and .* 1,"):
            open_source(1000)
        # Of 180,000: heads, and what tells that a file has to be read as a whole.
        assert proxy.counts.bytes.total() < 100_000
        open_source("2MB")
