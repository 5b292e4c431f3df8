"""Epochs of a loader whose data are behind faults: equal batches, or an error in time; and no secret anywhere."""

import gc
import itertools
import json
import logging
import pickle
import shutil
import time
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from fault_proxy import FaultProxy, Faults
from object_server import FileServer
from remote_sets import sampled

import dataload
from dataload.convert.indexing import index_shards
from dataload.errors import ChangedFileError, ConfigError, DataloadError, StoreError, WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("new_fork_server")]

RECORDS = 96
SETTINGS = {"batch_size": 8, "shuffle": True, "seed": 5, "num_workers": 2}
FAULTS = {
    "busy": Faults(busy=0.2),
    "cut": Faults(cut=0.2),
    "short": Faults(short=0.2),
    "all": Faults(busy=0.1, cut=0.1, short=0.1, latency=0.01),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Four shards with a manifest, of 20 kB records."""
    path = tmp_path_factory.mktemp("data")
    for shard in range(4):
        with dataload.create(path / f"part-{shard}.syr") as writer:
            rows = range(shard, RECORDS, 4)
            writer.extend({"x": np.random.default_rng(row).bytes(20_000), "n": row} for row in rows)
    index_shards(str(path))
    return path


def local(directory, **settings):
    with dataload.open(directory) as source, dataload.Loader(source, **settings) as loader:
        return [plain(batch) for batch in loader]


@pytest.fixture(scope="module")
def expected(directory):
    return local(directory, **SETTINGS)


@pytest.fixture(scope="module")
def expected_in_order(directory):
    return local(directory, batch_size=8)


@pytest.fixture(scope="module")
def url(server, directory):
    bucket = server.bucket()
    server.put_directory(bucket, directory, "d/")
    return f"{server.url(bucket)}/d"


def plain(batch):
    return [*map(bytes, batch["x"])], batch["n"].tolist()


def options(mode, tmp_path, **others):
    cache = {} if mode == "ranges" else {"cache": str(tmp_path / "cache")}
    return {"mode": mode, "part_bytes": 40_000, **cache, **others}


def epoch(server, proxy, url, remote, **settings):
    storage = server.storage_options(proxy.endpoint)
    with (
        dataload.open(url, storage_options=storage, remote=remote) as source,
        dataload.Loader(source, **{**SETTINGS, **settings}) as loader,
    ):
        return [plain(batch) for batch in loader]


@contextmanager
def begun_epoch(server, proxy, url, mode, tmp_path, timeout=120, **settings):
    """Give the batches of an epoch in the order of the records; those of later shards take time to arrive."""
    budget = {} if mode == "ranges" else {"budget": RECORDS // 4 * 30_000}  # one shard
    remote, storage = options(mode, tmp_path, timeout=timeout, **budget), server.storage_options(proxy.endpoint)
    with (
        dataload.open(url, storage_options=storage, remote=remote) as source,
        dataload.Loader(source, batch_size=8, **settings) as loader,
    ):
        if mode == "ranges":
            source.read(range(0, RECORDS, RECORDS // 4))  # opens all shards
            proxy.faults = Faults(latency=0.1, keys="part-[1-3]")
        yield iter(loader)


@pytest.mark.parametrize(
    ("faults", "mode"), sampled(itertools.product(FAULTS, ["ranges", "shards"]), [("all", "shards")])
)
def test_an_epoch_behind_faults(server, url, expected, tmp_path, faults, mode):
    with FaultProxy(server.endpoint, FAULTS[faults]) as proxy:
        assert epoch(server, proxy, url, options(mode, tmp_path)) == expected
        assert proxy.counts.faults.total() > 3


@pytest.mark.parametrize("mode", ["ranges", "shards"])
@pytest.mark.parametrize(
    ("seconds", "timeout"),
    [(0.4, 8), pytest.param(60, 120, marks=[pytest.mark.remote, pytest.mark.timeout(180)])],
    ids=["short", "a minute"],
)
def test_an_outage_that_ends(server, url, expected_in_order, tmp_path, seconds, timeout, mode):
    if seconds > 1 and not url.startswith("s3:"):
        pytest.skip("a minute is waited once for each mode")
    with FaultProxy(server.endpoint) as proxy, begun_epoch(server, proxy, url, mode, tmp_path, timeout) as batches:
        found = [plain(next(batches))]
        proxy.outage(seconds)
        begun = time.monotonic()
        found += [plain(batch) for batch in batches]
        assert found == expected_in_order
        assert proxy.counts.faults["outage"] > 0
        assert time.monotonic() - begun >= 0.9 * seconds


@pytest.mark.parametrize(
    ("on_error", "mode"),
    sampled(itertools.product(["raise", "skip"], ["ranges", "shards"]), [("skip", "ranges")]),
)
def test_an_outage_that_does_not_end(server, url, tmp_path, mode, on_error):
    """No record is at fault, so none is skipped, and none is read once more to find the one that is."""
    match = rf"cannot read bytes \d+ to \d+ of {url}/part-\d.syr: .*\(\d+ attempts in .* s; the options timeout"
    with (
        FaultProxy(server.endpoint) as proxy,
        begun_epoch(server, proxy, url, mode, tmp_path, 2, on_error=on_error) as batches,
    ):
        next(batches)
        proxy.outage()
        begun = time.monotonic()
        with pytest.raises(WorkerError, match=match) as caught:
            list(batches)
        assert type(caught.value.__cause__) is StoreError
        assert time.monotonic() - begun < 3  # a second time would take 4


@pytest.mark.parametrize("mode", ["ranges", "shards"])
def test_an_object_that_changes_in_an_epoch(server, url, tmp_path, mode):
    with FaultProxy(server.endpoint) as proxy, begun_epoch(server, proxy, url, mode, tmp_path) as batches:
        next(batches)
        proxy.faults = Faults(etag='"another"', keys="part-[23]")
        proxy.drop_connections()
        with pytest.raises(WorkerError, match=rf"{url}/part-[23].syr: the file has been rewritten since it") as caught:
            list(batches)
        assert type(caught.value.__cause__) is ChangedFileError


# Behind the proxy, a server that takes any credentials.


@pytest.fixture
def open_server(directory, tmp_path):
    root = tmp_path / "served"
    for bucket in ("bucket", "account/bucket"):
        shutil.copytree(directory, root / bucket / "d")
    with FileServer(root) as server:
        yield server


def s3_options(proxy, **others):
    return {"endpoint": proxy.endpoint, "region": "r", "client_options": {"allow_http": True}, **others}


def test_credentials_that_expire_in_an_epoch(open_server, expected_in_order):
    calls = []

    def provider():
        calls.append(datetime.now(UTC) + timedelta(seconds=0.4))
        keys = {"access_key_id": "key", "secret_access_key": "secret", "token": str(calls[-1].timestamp())}
        return {**keys, "expires_at": calls[-1]}

    shards = "s3://bucket/d/part-{0,1,2,3}.syr"
    with FaultProxy(open_server.endpoint, Faults(expiring=True, latency=0.15)) as proxy:
        storage = s3_options(proxy, credential_provider=provider)
        with dataload.open(shards, storage_options=storage) as source, dataload.Loader(source, batch_size=8) as loader:
            assert [plain(batch) for batch in loader] == expected_in_order
            assert len([expiry for expiry in calls if expiry < datetime.now(UTC)]) > 1
        assert not proxy.counts.faults
        storage = s3_options(proxy, access_key_id="key", secret_access_key="secret", token=str(calls[0].timestamp()))
        with pytest.raises(StoreError, match=r"cannot look up .* 403 .*|ExpiredToken"):
            dataload.open("s3://bucket/d/part-0.syr", storage_options=storage)
        assert proxy.counts.faults["expired"] == 1  # not repeated


SECRETS = {"access_key_id": "AKIA5RECOGNIZE", "secret_access_key": "5ecret-of-5ecrets", "token": "70ken-of-70kens"}
SIGNATURE = "5igned-5ignature"
STORES = {
    "s3": ("s3://bucket/d/part-{0,1,2,3}.syr", lambda proxy: s3_options(proxy, **SECRETS)),
    "az": (
        "az://bucket/d/part-{0,1,2,3}.syr",
        lambda proxy: {
            "endpoint": f"{proxy.endpoint}/account",
            "account_name": "account",
            "sas_key": f"sv=2024&sp=r&sig={SIGNATURE}",
            "client_options": {"allow_http": True},
        },
    ),
}


def texts_of(error):
    """Return all that is told of an error, and of those behind it."""
    found = "".join(traceback.format_exception(error))
    while error is not None:
        found += repr(error) + str(error) + repr(vars(error)) + repr(pickle.dumps(error))
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize(
    ("store", "given", "mode"),
    sampled(
        itertools.product(STORES, ["options", "environment"], ["ranges", "shards"]),
        [("s3", "environment", "shards")],
    ),
)
def test_no_secret_is_told(open_server, tmp_path, monkeypatch, caplog, capfd, store, given, mode):
    caplog.set_level(logging.DEBUG)
    gc.collect()  # the clients of the test before, which have its environment
    pattern, make_options = STORES[store]
    told, remote = {}, options(mode, tmp_path)
    failing_soon = {**remote, "timeout": 0.6, "retries": 1}

    def failing(name, call, kind=DataloadError):
        with pytest.raises(kind) as caught:
            call()
        told[name] = texts_of(caught.value)

    with FaultProxy(open_server.endpoint) as proxy:
        storage = make_options(proxy)
        if given == "environment":
            prefix = "AWS" if store == "s3" else "AZURE_STORAGE"
            for name, secret in storage.items():
                variable = {"token": "SESSION_TOKEN"}.get(name, name.upper())
                monkeypatch.setenv(f"{prefix}_{variable}", str(secret))
            storage = {"client_options": {"allow_http": True}}
        with dataload.open(pattern, storage_options=storage, remote=remote) as source:
            told["source"] = repr(source) + repr(vars(source)) + repr(source.options) + source.fingerprint()
            with dataload.Loader(source, **SETTINGS) as loader, dataload.analysis.record_timeline(loader) as timeline:
                assert len(list(loader)) == RECORDS // 8
                timeline.save_trace(tmp_path / "timeline.json")
                told["loader"] = json.dumps(loader.state_dict(), default=repr)
                told["loader"] += repr(loader) + repr(vars(loader)) + repr(loader.statistics())
                told["timeline"] = (tmp_path / "timeline.json").read_text()
            if given == "environment":
                told["pickle"] = repr(pickle.dumps(source))
            else:
                failing("pickle", lambda: pickle.dumps(source), ConfigError)
        for fault in ("busy", "cut", "short", "stall", "expiring"):
            proxy.faults = Faults(**{fault: 1})
            again = {**failing_soon, "mode": "ranges"}
            failing(fault, lambda: dataload.open(pattern, storage_options=storage, remote=again)[0])  # noqa: B023
        proxy.outage()
        failing("outage", lambda: dataload.open(pattern, storage_options=storage, remote=failing_soon))
    told["log"], (told["stdout"], told["stderr"]) = caplog.text, capfd.readouterr()
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert bool(cached) == (mode == "shards")
    told |= {str(path): repr(path.read_bytes()) for path in cached}
    for name, text in told.items():
        for secret in (*SECRETS.values(), SIGNATURE):
            assert secret not in text, f"{name} tells a secret"
