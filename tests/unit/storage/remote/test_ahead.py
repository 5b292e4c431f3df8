"""Loaders that share a cache with too little room: each can always make a step, or says what it needs."""

import itertools
import pickle
import threading
import time

import numpy as np
import pytest
from remote_sets import FORMATS, write_shards

import dataload
from dataload._util.caches import pickling_for_worker
from dataload.errors import ConfigError, MachineError
from dataload.sources.base import traffics_of
from dataload.storage import Remote
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.client import ObjectClient
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.files import open_shards
from dataload.storage.remote.jobs import LivingFile
from dataload.storage.remote.prefetch import shards as ahead
from dataload.storage.remote.settings import ObjectVersion

obstore = pytest.importorskip("obstore")
NUMBERS = itertools.count()
SHARDS, RECORDS = 16, 6


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The URL of shards in memory, by format, and the bytes of the largest of them."""
    found = {}
    for name in ("syr", "tar", "array_record"):
        directory, url = tmp_path_factory.mktemp(name), f"memory://ahead-{next(NUMBERS)}"
        write_shards(directory, name, SHARDS, RECORDS, 500)
        shards = sorted(directory.glob(f"*.{FORMATS[name][0]}"))
        for path in shards:
            put(url, path)
        pattern = f"{url}/part-{{00..{SHARDS - 1}}}.{FORMATS[name][0]}"
        found[name] = pattern, max(path.stat().st_size for path in shards)
    yield found
    while open_shards().give_up():
        pass


SETTINGS = {"batch_size": 4, "shuffle": False, "epochs": 1}


def put(url, path):
    client, key = client_of(f"{url}/{path.name}", Remote())
    client.put(f"{url}/{path.name}", key, path.read_bytes(), "overwrite")


def read_all(stored, name, cache, **remote):
    """Return the records that a loader of all shards serves."""
    with opened(stored, name, cache, **remote) as source, dataload.Loader(source, **SETTINGS) as loader:
        return [number for batch in loader for number in batch["n"].ravel().tolist()]


def opened(stored, name, cache, **remote):
    remote = {"cache": cache, "mode": "shards", "timeout": 5, **remote}
    return dataload.open(stored[name][0], remote=remote, **FORMATS[name][2])


@pytest.mark.parametrize(
    ("names", "room"),
    [(("syr", "syr"), 1), (("syr", "syr"), 5), (("array_record", "array_record"), 7), (("tar", "array_record"), 5)],
)
def test_two_loaders_and_a_cache_that_holds_some_shards(stored, tmp_path, names, room):
    """Both would lease what they read later, and wait for each other."""
    budget = room * max(stored[name][1] for name in names) + 10
    with (
        opened(stored, names[0], tmp_path, budget=budget) as one,
        opened(stored, names[1], tmp_path, budget=budget) as other,
        dataload.Loader(one, **SETTINGS) as first,
        dataload.Loader(other, **SETTINGS) as second,
    ):
        found = [(one["n"].ravel().tolist(), two["n"].ravel().tolist()) for one, two in zip(first, second, strict=True)]
    assert found == [(batch, batch) for batch in np.arange(SHARDS * RECORDS).reshape(-1, 4).tolist()]
    assert sum(file.stat().st_size for file in (tmp_path / "shards").iterdir()) <= budget
    assert not [*(tmp_path / "jobs").iterdir()]


def test_workers_open_the_shards_that_they_read(stored, tmp_path):
    with opened(stored, "syr", tmp_path, mode="ranges") as source, pickling_for_worker():
        copy = pickle.loads(pickle.dumps(source))
    with copy:
        assert [record["n"].item() for record in copy.read([7, 6])] == [7, 6]
        assert traffics_of(copy)[0].total().requests < SHARDS


def test_each_loader_of_a_source_reads_as_was_chosen_for_it(tmp_path):
    """One reads whole shards; that another reads a few records by range does not change it."""
    url = f"memory://ahead-{next(NUMBERS)}"
    with dataload.create(f"{url}/a.syr", shards=8) as writer:
        writer.extend({"x": np.full(300_000, i % 9, np.uint8), "i": i} for i in range(80))
    with dataload.open(f"{url}/", remote={"cache": tmp_path}) as source:
        (traffic,) = traffics_of(source)
        few = dataload.Loader(source[[3, 60]], batch_size=1, epochs=1)
        with dataload.Loader(source, batch_size=2, epochs=1) as loader, few:
            steps = iter(loader)
            found = [next(steps) for _ in range(20)]
            assert len([*few]) == 2
            found += steps
    assert sorted(i for batch in found for i in batch["i"].ravel().tolist()) == list(range(80))
    assert traffic.total().nbytes < 80 * 350_000


@pytest.mark.slow_suite
def test_a_job_that_others_leave_no_room_says_what_it_needs(stored, tmp_path):
    (tmp_path / "jobs").mkdir(parents=True, mode=0o700)
    size = stored["array_record"][1]
    budget = 2 * size + 10
    content = f'{{"job": 1, "process": 4321, "reads": "others.mdb", "share": 1.0, "need": {2 * size}}}'
    other = LivingFile(str(tmp_path / "jobs"), "job-", content.encode())
    match = (
        rf"the shards of a step take {size:,} bytes and can only be read as a whole, and the other jobs in the "
        r"cache .* leave 10: raise remote\.budget, wait for them, or set remote\.cache to another directory "
        rf"\(.*process 4321 reads others\.mdb and needs {2 * size:,} bytes"
    )
    with (
        opened(stored, "array_record", tmp_path, budget=budget, timeout=1) as source,
        dataload.Loader(source, **SETTINGS) as loader,
        pytest.raises(ConfigError, match=match),
    ):
        next(iter(loader))
    everything = list(range(SHARDS * RECORDS))
    assert read_all(stored, "tar", tmp_path, budget=budget) == everything  # by range
    del other
    assert read_all(stored, "array_record", tmp_path, budget=budget) == everything


def test_a_lease_that_never_ends(stored, tmp_path, monkeypatch):
    """What can be read by range is; for the rest, an error tells after the time-out who has the room."""
    monkeypatch.setattr(ahead, "_ROOM_SECONDS", 0.05)
    monkeypatch.setattr("dataload.storage.remote.jobs._LONGEST_WAIT", 0.1)
    budget = 2 * stored["array_record"][1] + 10
    version = ObjectVersion(budget - 10, "x", True)
    # As of a process that was stopped.
    lease = ShardCache(str(tmp_path), budget).fetch("s3://b/other.tar", version, lambda _: None, lambda: False)
    monkeypatch.setattr("dataload.storage.remote.backend._ROOM_SECONDS", 0.05)
    assert read_all(stored, "tar", tmp_path, budget=budget) == list(range(SHARDS * RECORDS))
    with pytest.raises(MachineError, match=r"has no room for memory://.*shards in use: other\.tar"):
        opened(stored, "array_record", tmp_path, budget=budget, timeout=0.3)
    del lease


def test_files_are_released_until_the_leases_fit(tmp_path):
    class File:
        def __init__(self, number):
            version = ObjectVersion(10, "x", True)
            self.lease = cache.fetch(f"s3://b/{number}.tar", version, lambda _: None, lambda: False)
            shards.touch(self)

        is_open = property(lambda self: self.lease is not None)

        def is_deleted(self):
            return self is files[0]

        def release(self):
            self.lease = None

    cache, shards = ShardCache(str(tmp_path), 100), type(open_shards())()
    files = [File(number) for number in range(3)]
    assert shards.keep(files[0].lease, 20)
    assert shards.keep(files[1].lease, 20)
    shards.touch(files[0])
    lease = files[2].lease
    assert shards.keep(lease, 20)
    assert [file.is_open for file in files] == [True, False, True]
    shards.release_deleted()
    assert [file.is_open for file in files] == [False, False, True]
    assert not shards.keep(lease, 9)
    assert not any(file.is_open for file in files)


def test_a_loader_closed_while_shards_arrive_leaves_none_that_is_incomplete(stored, tmp_path, monkeypatch):
    """The end of the last request of a shard looks like its arrival to whoever counts requests."""
    begun, closed, stream = threading.Event(), threading.Event(), ObjectClient.stream

    def late(self, url, key, version, piece, receive, check=lambda: None):
        if "part-00" not in url and threading.current_thread().name.startswith("dataload-ahead"):
            begun.set()
            closed.wait(10)
            check()
        stream(self, url, key, version, piece, receive, check)

    monkeypatch.setattr(ObjectClient, "stream", late)
    monkeypatch.setattr("dataload.storage.remote.prefetch.ranges._CLOSE_SECONDS", 0.01)
    with opened(stored, "syr", tmp_path) as source:
        with dataload.Loader(source, **SETTINGS) as loader:
            next(iter(loader))
            assert begun.wait(10)
        closed.set()
        while any(thread.name.startswith("dataload-ahead") for thread in threading.enumerate()):
            time.sleep(0.01)
    for path in (tmp_path / "shards").iterdir():
        url = f"{stored['syr'][0].rpartition('/')[0]}/{path.name.partition('~')[0]}"
        client, key = client_of(url, Remote())
        assert path.read_bytes() == client.read(url, key, 1 << 20)[0], path.name
