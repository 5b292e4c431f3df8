"""Fetching ahead of a loader: the same batches, in the order of the plan, each byte once, and nothing after the end."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
from fault_proxy import Faults
from remote_sets import FORMATS, proxied, sampled, write_shards
from written import written

import dataload
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError, CorruptFileError, WorkerError
from dataload.samplers import PoolShuffle, ShardSequential
from dataload.sources.views.concat import ConcatSource

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_fork_server")]

SHARDS, RECORDS, BYTES = 12, 20, 2000
WINDOWS = 21  # of a shard of tokens
WORKERS = {"serial": {}, "threads": {"num_workers": 2}, "processes": {"num_workers": 2, "executor": "processes"}}


def pairs(names, *chosen):
    """Parametrize with formats, workers and orders so that any two meet; `make test` runs those that are chosen."""
    cells = itertools.product(enumerate(names), enumerate(WORKERS))
    cases = [(name, workers, ("pool", "global")[(row + column) % 2]) for (row, name), (column, workers) in cells]
    assert {*chosen} <= {*cases}
    return pytest.mark.parametrize(("name", "workers", "shuffle"), sampled(cases, chosen))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A directory of shards for each format, by its name."""
    found = {}
    for name in FORMATS:
        found[name] = tmp_path_factory.mktemp("shards")
        write_shards(found[name], name, SHARDS, RECORDS, BYTES)
    return found


@pytest.fixture(scope="module")
def bucket(object_server, shards):
    name = object_server.bucket()
    for kind, directory in shards.items():
        object_server.put_directory(name, directory, f"{kind}/")
    return name


def local(shards, name):
    return dataload.open(str(shards[name] / pattern(name)), **FORMATS[name][2])


def opened(proxy, bucket, name, **remote):
    url = f"s3://{bucket}/{name}/{pattern(name)}"
    return dataload.open(url, storage_options=proxied(proxy), remote=remote, **FORMATS[name][2])


def pattern(name):
    return f"part-{{00..{SHARDS - 1:02}}}.{FORMATS[name][0]}"


def plain(batches):
    return [{name: np.asarray(column).tolist() for name, column in batch.items()} for batch in batches]


def listed_set(object_server, directory, count, suffix):
    """Return a bucket whose directory ``set`` has shards of three records, and a manifest that knows no ETags."""
    for shard in range(count):
        with dataload.create(directory / f"part-{shard:0{len(str(count - 1))}}.{suffix}") as writer:
            writer.extend({"n": np.array(3 * shard + row)} for row in range(3))
    index_shards(str(directory))
    bucket = object_server.bucket()
    object_server.put_directory(bucket, directory, "set/")
    return bucket


def order_of(shuffle, name):
    if shuffle == "pool":
        records = WINDOWS if name == "tokens" else RECORDS
        return {"sampler": PoolShuffle(ShardSequential((records,) * SHARDS, 3), 2 * RECORDS, 3)}
    return {"shuffle": "global", "seed": 3}


def sizes(directory):
    found = [path for path in Path(directory).rglob("*") if path.is_file()]
    return sorted(path.stat().st_size for path in found if "lock" not in path.name)


@pairs(
    FORMATS,
    ("syr", "threads", "global"),
    ("tar", "processes", "global"),
    ("torchrecord", "serial", "pool"),
    ("lmdb", "serial", "global"),
    ("array_record", "threads", "global"),
    ("uncompressed", "threads", "pool"),
    ("tokens", "serial", "pool"),
)
def test_batches_and_resumption(shards, bucket, proxy, tmp_path, name, workers, shuffle):
    settings = {"batch_size": 16, "epochs": 3, **order_of(shuffle, name)}
    with local(shards, name) as source, dataload.Loader(source, **settings) as loader:
        expected = [plain(loader) for _ in range(2)]
        iterator = iter(loader)
        for _ in range(11):
            next(iterator)
        state = loader.state_dict()
        rest = plain(iterator)
    # Readers of the array_record package keep their files. With less room, readers of whole shards wait for seconds.
    part = 0.7 if shuffle == "pool" and name != "array_record" else 1
    budget = int(part * sum(sizes(shards[name]))) + 10_000
    with (
        opened(proxy, bucket, name, cache=tmp_path / "cache", budget=budget) as source,
        dataload.Loader(source, **settings, **WORKERS[workers]) as loader,
    ):
        assert [plain(loader) for _ in range(2)] == expected
        loader.load_state_dict(state)
        assert plain(loader) == rest
    assert sum(sizes(tmp_path / "cache" / "shards")) <= budget


def test_a_manifest_opens_any_number_of_shards_with_one_request(object_server, proxy, tmp_path):
    bucket, storage = listed_set(object_server, tmp_path, 40, "syr"), proxied(proxy)
    proxy.reset()
    with dataload.open(f"s3://{bucket}/set", storage_options=storage, remote={"mode": "ranges"}) as source:
        assert (len(source), source.shard_lengths, [*source.fields]) == (120, (3,) * 40, ["n"])
        assert [*proxy.counts.requests.elements()] == [("GET", f"{bucket}/set/dataload.json")]
        assert not proxy.counts.lists
        with dataload.Loader(source, batch_size=7, shuffle="global", epochs=1) as loader:
            assert sorted(row for batch in loader for row in batch["n"].tolist()) == [*range(120)]
    manifest = tmp_path / "dataload.json"
    found = json.loads(manifest.read_text())
    found["data_sets"][0]["shards"]["records"][:2] = [4, 2]
    manifest.write_text(json.dumps(found))
    object_server.put(bucket, "set/dataload.json", manifest)
    match = r"dataload\.json: part-00\.syr has 3 records, and 4 in the manifest: if the shards are right, run `data"
    with (
        dataload.open(f"s3://{bucket}/set", storage_options=storage) as source,
        pytest.raises(CorruptFileError, match=match),
    ):
        source[0]


@pytest.fixture
def cache_home(tmp_path, monkeypatch):
    """The user's cache directory, which worker processes have, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    forkserver._forkserver._stop()
    yield tmp_path / "home"
    forkserver._forkserver._stop()


@pytest.mark.parametrize("workers", sampled(WORKERS, ["serial", "threads"]))
def test_auto_chooses_says_so_and_readers_follow(bucket, proxy, cache_home, shards, workers, caplog):
    """The budget that is wanted for all shards, which the user's cache directory has."""
    settings = {"batch_size": 16, **order_of("global", "syr"), "epochs": 1}
    with local(shards, "syr") as source, dataload.Loader(source, **settings) as loader:
        expected = plain(loader)
    caplog.set_level("INFO", "dataload")
    total = sum(sizes(shards["syr"]))
    with opened(proxy, bucket, "syr", budget=total) as source:
        source[0]
        assert not cache_home.exists()
        proxy.reset()
        with dataload.Loader(source, **settings, **WORKERS[workers]) as loader:
            assert plain(loader) == expected
        assert total <= proxy.counts.bytes.total() < 1.2 * total  # tables, too
    assert sum(sizes(cache_home / "dataload" / "shards")) == total
    first = f"s3://{bucket}/syr/part-00.syr"
    assert [record.message for record in caplog.records] == [
        f"{first} and 11 more are read as shards: the data take {total:,} bytes and fit into the budget of {total:,}"
    ]
    with opened(proxy, bucket, "syr", budget=total // 4) as source:
        with (
            dataload.Loader(source, **settings, **WORKERS[workers]) as loader,
            pytest.raises(
                ConfigError, match=r"records of about 2,0\d\d bytes are read in an order .* shuffle in a pool"
            ),
        ):
            next(iter(loader))
        with dataload.Loader(source, **{**settings, "shuffle": False}, **WORKERS[workers]) as loader:
            assert len(list(loader)) == len(expected)
    assert sum(sizes(cache_home / "dataload" / "shards")) <= total


@pytest.mark.remote
@pytest.mark.parametrize("suffix", sampled(["syr", "tar"], ["syr"]))
def test_versions_of_many_shards_take_few_requests(object_server, proxy, tmp_path, suffix):
    bucket = listed_set(object_server, tmp_path, 104, suffix)
    storage = proxied(proxy)
    proxy.reset()
    with (
        dataload.open(f"s3://{bucket}/set", storage_options=storage, remote={"mode": "ranges"}) as source,
        dataload.Loader(source, batch_size=60, shuffle="global", epochs=1) as loader,
    ):
        assert sum(len(batch) for batch in loader) > 0
    heads = sum(count for (method, _), count in proxy.counts.requests.items() if method == "HEAD")
    assert (heads, proxy.counts.lists.total()) == (1 + (suffix == "tar"), 1)  # of the first shard, opened before


@pairs(
    ("syr", "tar", "uncompressed", "tokens"),
    ("syr", "processes", "pool"),
    ("tar", "serial", "global"),
    ("tokens", "threads", "pool"),
)
def test_ranges(shards, bucket, proxy, name, workers, shuffle):
    settings = {"batch_size": 16, "epochs": 2, **order_of(shuffle, name)}
    with local(shards, name) as source, dataload.Loader(source, **settings) as loader:
        expected = [plain(loader) for _ in range(2)]
    with opened(proxy, bucket, name, mode="ranges") as source:
        with dataload.Loader(source, **settings, **WORKERS[workers]) as loader:
            assert [plain(loader) for _ in range(2)] == expected
        assert not threads("dataload-ahead-range")


@pytest.mark.parametrize(
    "remote", [{"mode": "ranges"}, pytest.param({"mode": "shards", "budget": "1MB"}, marks=pytest.mark.slow_suite)]
)
def test_sources_of_sources_are_fetched_ahead(shards, bucket, proxy, tmp_path, remote):
    def parts(open_one):
        return ConcatSource([open_one("syr")[::2], open_one("uncompressed"), open_one("syr")[3:200]])

    settings = {"batch_size": 16, "shuffle": "global", "seed": 3}
    with parts(lambda name: local(shards, name)) as source:
        expected = plain(dataload.Loader(source, epochs=1, **settings))
    remote = {"cache": tmp_path, **remote} if remote["mode"] == "shards" else remote
    with parts(lambda name: opened(proxy, bucket, name, **remote)) as source:
        with dataload.Loader(source, **settings) as loader:  # without a last epoch, after which threads might end
            assert plain(loader) == expected
            iterator = iter(loader)
            next(iterator)
            running = [thread.name for thread in threads("dataload-ahead")]
            assert sum(name.endswith(("plan-0", "ranges-0")) for name in running) == 3
        assert not threads("dataload-ahead")


def test_the_shards_of_one_batch_are_read_at_the_same_time(bucket, proxy):
    with opened(proxy, bucket, "syr", mode="ranges") as source:
        len(source)
        proxy.reset()
        proxy.faults = Faults(latency=0.05)
        batch = source.read_batch(np.arange(SHARDS) * RECORDS)
    assert batch["n"].ravel().tolist() == [shard * RECORDS for shard in range(SHARDS)]
    assert proxy.counts.most_at_once > SHARDS // 2


@pytest.mark.parametrize("workers", sampled(["serial", "threads"], ["serial"]))
def test_ranges_are_requested_ahead_and_once(object_server, proxy, tmp_path, workers):
    bucket, size = object_server.bucket(), 256 << 10
    written(tmp_path / "part-00.syr", [{"x": np.full(size, row, np.uint8)} for row in range(48)])
    object_server.put(bucket, "part-00.syr", tmp_path / "part-00.syr")
    proxy.faults = Faults(latency=0.05)
    storage = proxied(proxy)
    with dataload.open(f"s3://{bucket}/part-00.syr", storage_options=storage, remote={"mode": "ranges"}) as source:
        len(source)
        proxy.reset()
        settings = {"batch_size": 2, "shuffle": "global", "seed": 3, "epochs": 1, **WORKERS[workers]}
        with dataload.Loader(source, **settings) as loader:
            rows = [int(row[0]) for batch in loader for row in batch["x"]]
    assert sorted(rows) == [*range(48)]
    # Without reading ahead, a batch of two records makes at most two requests at a time.
    assert proxy.counts.most_at_once > 8
    assert proxy.counts.bytes.total() < 1.25 * 48 * size


def requests(proxy, name):
    """The shards that were requested as a whole, in the order of their first parts."""
    found = [
        key.rpartition("-")[2].partition(".")[0] for key, span in proxy.counts.ranges if span.startswith("bytes=0-")
    ]
    return [int(number) for number in dict.fromkeys(found)]


RANK = """
import json, sys, dataload
from dataload.samplers import PoolShuffle, ShardSequential
rank, urls, endpoint, cache, shards, records = json.loads(sys.argv[1])
storage = {"endpoint": endpoint, "client_options": {"allow_http": True}}
order = PoolShuffle(ShardSequential((records,) * shards, 3), 2 * records, 3)
with dataload.open(urls, storage_options=storage, remote={"cache": cache}) as source:
    len(source)
    print("ready", flush=True)
    sys.stdin.readline()
    with dataload.Loader(source, batch_size=8, sampler=order, epochs=2, rank=rank, world_size=2) as loader:
        rows = [row for epoch in range(2) for batch in loader for row in batch["n"].ravel().tolist()]
    print(json.dumps(rows), flush=True)
"""


def test_two_ranks_fetch_each_byte_once(bucket, proxy, tmp_path, shards):
    urls = f"s3://{bucket}/syr/{pattern('syr')}"
    given = [json.dumps([rank, urls, proxy.endpoint, str(tmp_path), SHARDS, RECORDS]) for rank in range(2)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, each], **pipes) for each in given]
    assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
    proxy.reset()
    rows = [json.loads(rank.communicate("\n")[0]) for rank in ranks]
    assert sorted(rows[0] + rows[1]) == sorted([*range(SHARDS * RECORDS)] * 2)
    assert proxy.counts.bytes.total() == sum(sizes(shards["syr"]))
    assert os.listdir(tmp_path / "plans") == []


def test_a_resumed_job_fetches_only_what_it_reads(bucket, proxy, tmp_path):
    settings = {"batch_size": 16, "sampler": ShardSequential((RECORDS,) * SHARDS, 3), "epochs": 1}
    with (
        opened(proxy, bucket, "syr", cache=tmp_path / "first") as source,
        dataload.Loader(source, **settings) as loader,
    ):
        rows = [batch["n"].ravel() // RECORDS for batch in loader]
        loader.set_epoch(0)
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        state = loader.state_dict()
    with opened(proxy, bucket, "syr", cache=tmp_path / "second", connections=1) as source:
        with dataload.Loader(source, **settings) as loader:
            loader.load_state_dict(state)
            proxy.reset()
            list(loader)
        assert requests(proxy, "syr") == [*dict.fromkeys(np.concatenate(rows[10:]).tolist())]


def test_an_error_comes_after_the_good_batches(object_server, shards, proxy, tmp_path):
    bucket = object_server.bucket()
    object_server.put_directory(bucket, shards["syr"], "syr/")
    settings = {"batch_size": 5, "epochs": 1}
    with opened(proxy, bucket, "syr", cache=tmp_path) as source, dataload.Loader(source, **settings) as loader:
        len(source)
        object_server.put(bucket, "syr/part-02.syr", b"another file")
        iterator = iter(loader)
        for step in range(8):
            assert next(iterator)["n"].ravel().tolist() == [*range(5 * step, 5 * step + 5)]
        match = r"step 8 of epoch 0 failed.*\n?.*part-02\.syr: the file has been rewritten"
        with pytest.raises(WorkerError, match=match):
            next(iterator)


@pytest.mark.parametrize("ends", sampled(["close", "drop"], ["drop"]))
def test_the_end_of_a_loader_ends_the_requests(bucket, proxy, shards, tmp_path, ends):
    with opened(proxy, bucket, "syr", cache=tmp_path, part_bytes=10_000) as source:
        len(source)
        proxy.faults = Faults(stall=1, keys=r"part-(0[^0]|1)")
        loader = dataload.Loader(source, batch_size=1)
        next(iter(loader))
        assert proxy.stalled.wait(20)
        if ends == "close":
            loader.close()
        del loader  # while requests stall
        assert not threads("dataload-ahead-plan")
        asked = proxy.counts.requests.total()
        proxy.resume()  # requests that had begun end by themselves
        for thread in threads("dataload-ahead"):
            thread.join(20)
        assert not threads("dataload-ahead")
        assert proxy.counts.requests.total() == asked < SHARDS * 5
        assert not open_parts()
        assert sum(sizes(tmp_path / "shards")) < sum(sizes(shards["syr"])) / 2


def threads(prefix):
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def open_parts():
    """Return the unfinished downloads that this process has open."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if ".part" in link]


INTERRUPTED = """
import json, sys, dataload
urls, endpoint, cache = json.loads(sys.argv[1])
storage = {"endpoint": endpoint, "client_options": {"allow_http": True}}
source = dataload.open(urls, storage_options=storage, remote={"cache": cache} if cache else {"mode": "ranges"})
loader = dataload.Loader(source, batch_size=1)
iterator = iter(loader)
next(iterator)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("cached", sampled([True, False], [True]))
def test_an_interrupt_leaves_nothing(object_server, proxy, tmp_path, cached):
    bucket = object_server.bucket()
    written(tmp_path / "part-00.syr", [{"x": np.full(20_000, row, np.uint8)} for row in range(8)])
    for shard in range(4):
        object_server.put(bucket, f"part-0{shard}.syr", tmp_path / "part-00.syr")
    # The first shard arrives at once, all others after a minute.
    proxy.faults = Faults(rate=2500, keys="part-0[1-3]")
    given = [f"s3://{bucket}/part-{{00..03}}.syr", proxy.endpoint, str(tmp_path / "cache") if cached else None]
    command = [sys.executable, "-c", INTERRUPTED, json.dumps(given)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.communicate()[1].count("Traceback") == 1
        assert time.monotonic() - begun < 20
    assert child.returncode == -signal.SIGINT
    if cached:
        assert [path.name[:11] for path in (tmp_path / "cache" / "shards").iterdir()] == ["part-00.syr"]
        assert not list((tmp_path / "cache" / "plans").iterdir())
