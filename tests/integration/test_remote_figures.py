"""What a loader says about its downloads, beside what a proxy has counted; and what looking at data at URLs costs."""

import itertools
import json

import pytest
from command_line import ok
from fault_proxy import Faults
from remote_sets import FORMATS, proxied, sampled, write_shards

import dataload
from dataload.convert.indexing import index_shards
from dataload.samplers import ShardSequential

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_fork_server")]

SHARDS, RECORDS, BYTES = 6, 40, 2000
WORKERS = {"serial": {}, "threads": {"num_workers": 2}, "processes": {"num_workers": 2, "executor": "processes"}}


def each_worker(values, *chosen):
    """Parametrize with the kinds of workers and `values`, of which `make test` has only one for each kind."""
    return sampled(itertools.product(WORKERS, values), [*zip(WORKERS, chosen, strict=True)])


@pytest.fixture(scope="module")
def bucket(object_server, tmp_path_factory):
    """A bucket with a directory of shards for each format, by its name; and again with a manifest."""
    bucket = object_server.bucket()
    for name, (suffix, _, _) in FORMATS.items():
        directory = tmp_path_factory.mktemp("shards")
        write_shards(directory, name, SHARDS, RECORDS, BYTES)
        object_server.put_directory(bucket, directory, f"{name}/")
        if suffix != "npy":
            index_shards(str(directory))
            object_server.put_directory(bucket, directory, f"{name}-listed/")
    return bucket


def opened(proxy, url, **remote):
    return dataload.open(url, storage_options=proxied(proxy), remote=remote)


def url_of(bucket, name="syr"):
    return f"s3://{bucket}/{name}/part-{{00..{SHARDS - 1:02}}}.{FORMATS[name][0]}"


def arguments_of(name):
    """Return the reader's options for the command line."""
    return [
        text
        for option, value in FORMATS[name][2].items()
        for text in (("-o", f"window={value}") if option == "window" else (f"--{option}", value))
    ]


def in_order(**settings):
    return {"batch_size": 16, "epochs": 1, "sampler": ShardSequential((RECORDS,) * SHARDS, 3), **settings}


@pytest.mark.parametrize(("workers", "mode"), each_worker(["ranges", "shards"], "shards", "ranges", "shards"))
def test_counts_are_those_of_the_server(bucket, proxy, tmp_path, workers, mode):
    remote = {"mode": "ranges"} if mode == "ranges" else {"cache": tmp_path}
    with opened(proxy, url_of(bucket), **remote) as source:
        proxy.reset()
        with dataload.Loader(source, **in_order(**WORKERS[workers])) as loader:
            nbytes = sum(batch["x"].nbytes for batch in loader)
            found = loader.statistics().downloads
    assert found.requests == proxy.counts.requests.total() > 0
    assert found.nbytes == proxy.counts.bytes.total() > 0
    assert 0 < found.transfer_seconds < found.request_seconds
    assert found.nbytes >= nbytes
    assert (found.retries, found.throttled, found.shards_found, found.shards_again) == (0, 0, 0, 0)
    assert found.shards_downloaded == (SHARDS if mode == "shards" else 0)
    assert found.connections == 16
    used = found.nbytes - found.wasted_bytes
    assert 0 <= used - nbytes < 0.1 * nbytes  # other fields, and in shards the tables


@pytest.mark.parametrize("kind", ["busy", "cut", "short"])
def test_faults(bucket, proxy, tmp_path, kind):
    with opened(proxy, url_of(bucket), cache=tmp_path, part_bytes=20_000) as source:
        proxy.reset()
        proxy.faults = Faults(**{kind: 0.3})
        with dataload.Loader(source, **in_order()) as loader:
            list(loader)
            found = loader.statistics()
    counted = proxy.counts.faults[kind]
    assert found.downloads.retries == counted > 3
    assert found.downloads.throttled == (counted if kind == "busy" else 0)
    assert (found.downloads.wasted_bytes > 0) == (kind == "short")  # of small answers that are cut, nothing arrives
    if kind == "busy" and found.wait_share > 0.05:
        assert "the store throttles" in found.verdict


def inspect(proxy, monkeypatch, cache, url, *arguments):
    monkeypatch.setenv("AWS_ENDPOINT", proxy.endpoint)
    proxy.reset()
    return ok("inspect", url, "-o", f"remote.cache={cache}", "-o", "remote.budget=1GB", *arguments)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("listed", [True, False])
def test_inspect_costs_a_handful_of_requests(bucket, proxy, tmp_path, monkeypatch, name, listed):
    if listed and name == "tokens":
        pytest.skip("manifests list no tokens")
    url = f"s3://{bucket}/{name}-listed" if listed else url_of(bucket, name)
    arguments = [] if listed else arguments_of(name)
    facts = json.loads(inspect(proxy, monkeypatch, tmp_path, url, *arguments, "--json"))
    size = max(facts["shards"][0]["bytes"], 1 << 16)
    assert facts["bytes"] == sum(shard["bytes"] for shard in facts["shards"]) > 0
    assert (facts["fingerprint"], facts["remote"]["mode"], facts["remote"]["budget"]) == (None, "auto", 10**9)
    assert facts["remote"]["cache"] == str(tmp_path)
    requests = proxy.counts.requests.total() + proxy.counts.lists.total()
    lists = 2000 * proxy.counts.lists.total()  # bytes of answers that hold no data
    assert facts["remote"]["requests"] == requests
    assert 0 <= proxy.counts.bytes.total() - facts["remote"]["bytes"] <= lists
    if listed:
        touched = {key for _, key in proxy.counts.requests} | {*proxy.counts.lists}
        assert not any(f"part-{shard:02}" in key for key in touched for shard in range(1, SHARDS))
        assert requests <= (9 if name == "zstandard" else 8)  # whose footer may be compressed
        assert proxy.counts.bytes.total() < 4 * size  # the tables of some formats are read beside the shard
    else:
        assert requests <= (7 if name == "zstandard" else 6) * SHARDS + 2


def test_inspect_says_where_data_come_from_and_computes_the_fingerprint_on_request(
    bucket, proxy, object_server, tmp_path, monkeypatch
):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    secret = ["-o", f"storage_options.secret_access_key={object_server.secret_key}"]
    url = f"s3://{bucket}/syr-listed"
    text = inspect(proxy, monkeypatch, tmp_path, url, *secret)
    count = proxy.counts.requests.total()
    cost = f"{count} requests, {proxy.counts.bytes.total() / 1000:.1f} kB"
    assert text.splitlines()[2] == f"remote: mode auto, cache {tmp_path}, budget 1.0 GB; this took {cost}"
    assert "fingerprint" not in text
    facts = json.loads(inspect(proxy, monkeypatch, tmp_path, url, *secret, "--json", "--fingerprint"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", object_server.secret_key)
    with opened(proxy, url_of(bucket), mode="ranges") as source:
        assert facts["fingerprint"] == source.fingerprint()
    assert object_server.secret_key not in text + json.dumps(facts)
    text = inspect(proxy, monkeypatch, tmp_path, url, *secret, "-o", "remote.mode=ranges", "--fingerprint")
    assert "\nremote: mode ranges; this took " in text
    assert f"fingerprint {facts['fingerprint']};" in text
