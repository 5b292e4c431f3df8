"""Files in a store in memory: looked up, listed, matched, read, written; and requests that fail."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError, SourceError, SourceNotFoundError
from dataload.storage import Remote, absolute, base_name, is_url, join, local_path, parent, reading_tables, storage_of
from dataload.storage.remote import files
from dataload.storage.remote.cache import CacheFullError
from dataload.storage.remote.client import Piece, client_of
from dataload.storage.remote.ranges_ahead import RangesAhead, StepRanges
from dataload.storage.remote.settings import ObjectVersion

obstore = pytest.importorskip("obstore")
NUMBERS = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def threads_of_obstore():
    """They live as long as the process, so they start before a test counts what it leaves behind."""
    obstore.store.MemoryStore().put("a", b"")


@pytest.fixture
def root():
    """The URL of a store with some objects."""
    url = f"memory://store-{next(NUMBERS)}"
    for name in ("a/x-0.tar", "a/x-1.tar", "a/.hidden.tar", "b/c/y.tar", "b/d/y.tar", "top"):
        put(f"{url}/{name}", name.encode())
    return url


def put(url, data):
    client, key = client_of(url, Remote())
    client.put(url, key, data, "overwrite")


def opened(root, **options):
    return storage_of(root, Remote.of(None, {"timeout": 2, **options}))


def test_paths():
    url = "s3://bucket/a/b.tar"
    assert (base_name(url), base_name("s3://bucket/a/"), parent(url)) == ("b.tar", "a", "s3://bucket/a")
    assert (join("s3://bucket/a/", "b.tar"), absolute(url)) == (url, url)
    assert is_url(url)
    assert not is_url("tar:x")
    assert [local_path(path) for path in ("file:///a%20b", "file://localhost/x", "/x", url)] == [
        "/a b",
        "/x",
        "/x",
        url,
    ]


def test_what_exists(root):
    storage = opened(root)
    assert [storage.exists(f"{root}/{name}") for name in ("top", "a", "a/", "a/x-0.tar", "x", "a/x")] == [
        *(True, True, True, True, False, False)
    ]
    assert [storage.is_directory(f"{root}/{name}") for name in ("", "top", "a", "b/c")] == [True, False, True, True]
    assert storage.list(f"{root}/a") == ["x-0.tar", "x-1.tar"]
    assert storage.list(f"{root}/b") == ["c", "d"]
    assert (storage.size(f"{root}/top"), storage.size(f"{root}/a")) == (3, 31)
    for method in (storage.list, storage.size, storage.read, storage.identity, storage.map, storage.open):
        with pytest.raises(SourceNotFoundError, match=f"there is no {root}/none"):
            method(f"{root}/none")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a/*.tar", ["a/x-0.tar", "a/x-1.tar"]),
        ("a/.*", ["a/.hidden.tar"]),
        ("*/x-[1-9].tar", ["a/x-1.tar"]),
        ("b/?/y.tar", ["b/c/y.tar", "b/d/y.tar"]),
        ("*", ["a", "b", "top"]),
        ("none/*", []),
        ("*/none", []),
    ],
)
def test_patterns(root, pattern, found):
    assert opened(root).glob(f"{root}/{pattern}") == [f"{root}/{name}" for name in found]


def test_reading(root):
    storage, url = opened(root, part_bytes=7), f"{root}/data"
    data = bytes(range(256)) * 10
    put(url, data)
    assert storage.read(url) == data
    assert storage.read_ranges(url, np.array([5, 2550, 0, 3000]), np.array([10, 20, 0, 5])) == [
        *(data[5:15], data[2550:], b"", b"")
    ]
    with storage.open(url) as file:
        assert (file.size, file.read(2555, 10), file.read(9999, 1)) == (2560, data[2555:], b"")
        buffer = bytearray(4)
        assert (file.read_into(2558, buffer), bytes(buffer)) == (2, data[2558:] + b"\0\0")
    file = storage.map(url)
    offsets, lengths = np.array([700, 0, 2559, 5]), np.array([3, 0, 1, 300])
    expected = [data[start : start + length] for start, length in zip(offsets, lengths, strict=True)]
    assert file.copies(offsets, lengths) == list(file.gather_ranges(offsets, lengths)) == expected
    assert file.gather_every(1, 3, 5, np.array([4, 0])).tobytes() == data[13:18] + data[1:6]
    with pytest.raises(CorruptFileError, match="row 0: a range outside the 2560 bytes"):
        file.read(2559, 2)
    file.release()
    assert file.read(0, 2) == data[:2]


def test_a_changed_object(root):
    file = opened(root).map(f"{root}/top")
    put(f"{root}/top", b"TOP")
    with pytest.raises(CorruptFileError, match=f"{root}/top: the file has been rewritten since it was opened"):
        file.read(0, 3)


def test_writing_and_deleting(root):
    url = f"{root}/new/x"
    with opened(root).create(url) as part:
        with part.create() as stream:
            stream.write(b"data")
        assert not opened(root).exists(url)
        part.publish()
    assert opened(root).read(url) == b"data"
    with pytest.raises(ConfigError, match=f"{url} exists: choose another name, or pass overwrite=True"):
        opened(root).create(url)
    storage = opened(root)
    storage.remove(url)
    assert not storage.exists(url)
    storage.remove(f"{root}/a")
    storage.remove(f"{root}/a")
    assert not opened(root).exists(f"{root}/a")
    with storage.lock(url), pytest.raises(SourceError, match=f"another process is writing to {url}"):
        storage.lock(url).__enter__()


def test_one_writer_does_not_delete_what_another_has_written(root, tmp_path):
    first, second = (opened(root, cache=tmp_path).create(f"{root}/new", overwrite=True) for _ in range(2))
    for part, data in ((first, b"first"), (second, b"second")):
        with part.create() as stream:
            stream.write(data)
    first.publish()
    second.publish()
    assert opened(root).read(f"{root}/new") == b"second"
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_writer_without_a_cache_leaves_nothing(root, monkeypatch, tmp_path):
    monkeypatch.setattr("dataload.storage.table_cache.user_directory", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with opened(root).create(f"{root}/new") as part:
        with part.create() as stream:
            stream.write(b"data")
        part.publish()
    assert list(tmp_path.iterdir()) == []


def test_formats_that_need_whole_files(root):
    for use in (lambda storage: storage.map(f"{root}/top", whole=True), lambda storage: storage.lease(f"{root}/top")):
        with pytest.raises(ConfigError, match=r"can only be read as a whole: set remote.mode"):
            use(opened(root, mode="ranges"))


def test_without_a_place_for_shards(root, monkeypatch):
    monkeypatch.setattr("dataload.storage.table_cache.user_directory", lambda: None)
    with pytest.raises(ConfigError, match=r"there is no home directory to keep shards in: set remote.cache"):
        opened(root).lease(f"{root}/top")


def test_local_copies_are_called_by_their_url(root, tmp_path):
    storage, url = opened(root, cache=tmp_path), f"{root}/top"
    for mapped in (True, False):
        for whole in (True, False):
            file = storage.map(url, mapped=mapped, whole=whole)
            assert (file.path, file.size, file.read(0, 3)) == (url, 3, b"top")
            file.release()
            assert file.read(1, 2) == b"op"
    with storage.open(url) as file:
        assert (file.path, file.read(0, 9)) == (url, b"top")
    with open(storage.lease(url).path, "rb") as file:
        assert file.read() == b"top"


def test_without_room_shards_are_read_by_ranges(root, tmp_path):
    storage = opened(root, cache=tmp_path, budget=12)
    held = storage.lease(f"{root}/a/x-0.tar")
    file = storage.map(f"{root}/a/x-1.tar")
    assert file.read(0, 9) == b"a/x-1.tar"
    assert len([*(tmp_path / "shards").iterdir()]) == 1
    match = r"no room for .*x-1.tar, which needs 9 bytes, 6 more than the budget leaves"
    with pytest.raises(CacheFullError, match=match):
        opened(root, cache=tmp_path, budget=12, timeout=0.1).lease(f"{root}/a/x-1.tar")
    del held
    file._next_try = 0
    assert file.read(0, 9) == b"a/x-1.tar"
    assert [path.name.partition("~")[0] for path in (tmp_path / "shards").iterdir()] == ["x-1.tar"]


def test_tables_download_nothing(root, tmp_path):
    file = opened(root, cache=tmp_path).map(f"{root}/top")
    with reading_tables():
        assert file.read(0, 3) == b"top"
    assert not [*(tmp_path / "shards").iterdir()]
    assert file.read(0, 3) == b"top"
    assert len([*(tmp_path / "shards").iterdir()]) == 1


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"s3:// URLs needs obstore.*pip install 'dataload\[remote\]'"):
        storage_of("s3://bucket/x").exists("s3://bucket/x")


class Failing:
    """Calls that fail so many times before they succeed."""

    def __init__(self, error, times):
        self.error = error
        self.left = times
        self.calls = 0

    def __call__(self):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr("dataload.storage.remote.attempts.time.sleep", lambda _: None)
    monkeypatch.setattr("dataload.storage.remote.attempts.can_be_interrupted", lambda: False)  # pytest keeps fixtures
    return client_of("memory://failing/x", Remote.of({"secret_key": "tops3cret"}, {"retries": 3}))[0]


def test_failures_that_pass(client):
    call = Failing(obstore.exceptions.GenericError("503 Service Unavailable"), 3)
    assert (client._attempts.make("read", "memory://x", call), call.calls) == ("done", 4)


def test_failures_that_do_not_pass(client):
    call = Failing(obstore.exceptions.GenericError("busy: tops3cret at http://h/x?sig=abc <?xml?> tops3cret"), 9)
    match = r"^cannot read: busy: \*\*\* at http://h/x\?... \(4 attempts in 0.0 s; the options timeout and retries"
    with pytest.raises(SourceError, match=match):
        client._attempts.make("read", "memory://x", call)
    assert call.calls == 4


@pytest.mark.parametrize(
    "error",
    [
        obstore.exceptions.PermissionDeniedError("no"),
        obstore.exceptions.GenericError("Client error with status 400 Bad Request"),
        obstore.exceptions.GenericError("Server returned non-2xx status code: 405 Method Not Allowed"),
        obstore.exceptions.GenericError("Received non-partial response when range requested"),
        ValueError("Could not parse path"),
    ],
)
def test_failures_that_cannot_pass(client, error):
    call = Failing(error, 1)
    with pytest.raises(SourceError, match=r"^cannot read: "):
        client._attempts.make("read", "memory://x", call)
    assert call.calls == 1


def test_an_answer_that_is_too_short(client, monkeypatch):
    put("memory://failing/x", b"12345")
    data = obstore.get(client._store, "x")

    class Short:
        meta = data.meta

        def stream(self, *, min_chunk_size):
            return iter([b"1234"])

    monkeypatch.setattr(client._obstore, "get", lambda *_, **__: Short())
    with pytest.raises(SourceError, match="cannot read bytes 0 to 5 of memory://failing/x: 4 of 5 bytes arrived"):
        storage_of("memory://failing/x", Remote.of(None, {"retries": 1})).read("memory://failing/x")


def test_requests_are_counted_for_the_source_that_makes_them(monkeypatch):
    monkeypatch.setattr("dataload.storage.remote.attempts.time.sleep", lambda _: None)
    url, seen = "memory://counted/x", []
    put(url, b"0123456789")
    remotes = [Remote(), Remote()]
    remotes[0].traffic.listeners.append(seen.append)
    assert storage_of(url, remotes[0]).read(url) == b"0123456789"
    found = remotes[0].traffic.total()
    assert (found.requests, found.nbytes, found.wasted_bytes, found.retries, found.throttled) == (2, 10, 0, 0, 0)
    assert found.request_seconds > found.transfer_seconds > 0
    assert [request.what for request in seen] == [f"look up {url}", f"read bytes 0 to 10 of {url}"]
    assert [each.ended - each.begun for each in seen] == pytest.approx([found.request_seconds / 2] * 2, abs=1)
    assert remotes[1].traffic.total().requests == 0
    clients = [client_of(url, remote)[0] for remote in remotes]
    assert clients[0]._pool is clients[1]._pool  # and still one client
    call = Failing(obstore.exceptions.GenericError("Server returned non-2xx status code: 503 Service Unavailable"), 2)
    clients[1]._attempts.make("read", url, call)
    found = remotes[1].traffic.total()
    assert (found.requests, found.retries, found.throttled) == (3, 2, 2)
    assert pickle.loads(pickle.dumps(remotes[0])).traffic.total().requests == 0


def test_answers_that_fail_are_wasted(monkeypatch):
    url, parts, calls = "memory://counted/y", [b"01234", b"56789"], []
    put(url, b"".join(parts))
    remote = Remote()
    client, key = client_of(url, remote)
    version = client.head(url, key)
    meta = obstore.get(client._store, key).meta

    class Breaking:
        def __init__(self):
            self.meta = meta

        def stream(self, **_):
            calls.append(None)
            yield parts[0]
            if len(calls) == 1:
                raise OSError("connection closed")
            yield parts[1]

    monkeypatch.setattr("dataload.storage.remote.attempts.time.sleep", lambda _: None)
    monkeypatch.setattr(client._obstore, "get", lambda *_, **__: Breaking())
    client.stream(url, key, version, Piece(0, 10, 0), lambda *_: None, lambda: None)
    found = remote.traffic.total()
    assert (found.requests, found.retries, found.nbytes, found.wasted_bytes) == (3, 1, 15, 5)


def test_versions_without_etags(root):
    client, key = client_of(f"{root}/top", Remote())
    found = client.head(f"{root}/top", key)
    assert isinstance(found, ObjectVersion)
    meta = {"size": 3, "e_tag": None, "last_modified": __import__("datetime").datetime(2024, 1, 1)}
    assert ObjectVersion.of(meta, "memory://x") == ObjectVersion(3, "2024-01-01T00:00:00", False)


def test_a_new_shard_may_have_the_number_of_one_that_has_gone():
    class File:
        is_open = True

        def release(self):
            self.is_open = False

    shards = files._OpenShards()
    for _ in range(1000):
        shards.touch(File())
    kept = File()  # in most runs where one of them was
    shards.touch(kept)
    assert shards.give_up()
    assert not kept.is_open
    assert not shards.give_up()


def test_ranges_of_no_bytes_are_fetched_by_nobody():
    """Records may be empty; their readers need no request."""
    url, none = "memory://ahead/x", np.array([3, 5])
    steps = iter([StepRanges([(url, none, np.zeros(2, np.int64))])])
    ahead = RangesAhead({url: ObjectVersion(10, '"a"', has_etag=True)}, steps, Remote())
    try:
        assert ahead.fill(url, np.empty(0, np.uint8), none, none).tolist() == [0, 1]
    finally:
        ahead.close()


def test_a_home_that_cannot_be_written_is_not_needed_to_write(root, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    with opened(root).create(f"{root}/new") as part:
        with part.create() as stream:
            stream.write(b"data")
        part.publish()
    with opened(root).lock(f"{root}/new"):
        assert opened(root).read(f"{root}/new") == b"data"
