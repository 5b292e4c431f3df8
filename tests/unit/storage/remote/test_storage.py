"""Files in a store in memory: looked up, listed, matched, read, written; and requests that fail."""

import itertools
import os
import sys
import threading

import numpy as np
import pytest

import dataload
from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError, SourceError, SourceNotFoundError
from dataload.sources.tar.writer import write_index
from dataload.storage import Remote, absolute, base_name, is_url, join, local_path, parent, reading_tables, storage_of
from dataload.storage.paths import is_web_url
from dataload.storage.remote.cache import CacheFullError
from dataload.storage.remote.client import ObjectClient
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.files import open_shards
from dataload.storage.remote.jobs import Board, Coming

obstore = pytest.importorskip("obstore")
NUMBERS = itertools.count()


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
    assert (base_name("s3://bucket/a/.."), base_name("a/b/..")) == ("..", "a")
    assert (join("s3://bucket/a/", "b.tar"), absolute(url)) == (url, url)
    assert (is_url(url), is_url("tar:x")) == (True, False)
    assert [path for path in ("HTTPS://a/b", "http://a", "httpd/a", "s3://http/a") if is_web_url(path)] == [
        *("HTTPS://a/b", "http://a")
    ]
    paths = ("file:///a%20b", "file://localhost/x", "/x", url)
    assert [*map(local_path, paths)] == ["/a b", "/x", "/x", url]


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


PATTERNS = {
    "a/*.tar": ["a/x-0.tar", "a/x-1.tar"],
    "a/.*": ["a/.hidden.tar"],
    "*/x-[1-9].tar": ["a/x-1.tar"],
    "b/?/y.tar": ["b/c/y.tar", "b/d/y.tar"],
    "*": ["a", "b", "top"],
    "none/*": [],
    "*/none": [],
}


def test_patterns(root):
    for pattern, found in PATTERNS.items():
        assert opened(root).glob(f"{root}/{pattern}") == [f"{root}/{name}" for name in found], pattern


@pytest.mark.parametrize(("pattern", "method"), [("b/*/*.tar", "list"), ("b/*/y.tar", "head")])
def test_patterns_of_many_directories_are_asked_for_together(root, pattern, method, monkeypatch):
    real, both = getattr(ObjectClient, method), threading.Barrier(2)

    def asked(client, url, key):
        if key.count("/"):
            both.wait(10)
        return real(client, url, key)

    monkeypatch.setattr(ObjectClient, method, asked)
    assert len(opened(root).glob(f"{root}/{pattern}")) == 2


def test_files_are_not_flushed_before_their_upload(root, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    with dataload.create(f"{root}/a/x-0.tar", overwrite=True) as writer:
        writer.write({"txt": "a"})
    assert len(dataload.open(f"{root}/a/x-0.tar")) == 1
    assert not flushed


def test_reading(root):
    storage, url = opened(root, part_bytes=7), f"{root}/data"
    data = bytes(range(256)) * 10
    put(url, data)
    assert storage.read(url) == data
    found = storage.read_ranges(url, np.array([5, 2550, 0, 3000, 0]), np.array([10, 20, 0, 5, 4]))
    assert found == [data[5:15], data[2550:], b"", b"", data[:4]]
    with storage.open(url) as file:
        assert (file.size, file.read(2555, 10), file.read(9999, 1)) == (2560, data[2555:], b"")
        buffer = bytearray(b"....")
        assert [file.read_into(2560 + by, buffer) for by in (1, 0, -2)] == [0, 0, 2]
        assert buffer == data[2558:] + b".."
    file = storage.map(url)
    offsets, lengths = np.array([700, 0, 2559, 5]), np.array([3, 0, 1, 300])
    expected = [data[start : start + length] for start, length in zip(offsets, lengths, strict=True)]
    assert file.copies(offsets, lengths) == list(file.gather_ranges(offsets, lengths)) == expected
    assert file.gather_every(1, 3, 5, np.array([4, 0])).tobytes() == data[13:18] + data[1:6]
    with pytest.raises(CorruptFileError, match="row 0: a range outside the 2560 bytes"):
        file.read(2559, 2)
    file.release()
    assert file.read(0, 2) == data[:2]
    assert not file.is_written()
    put(url, data[::-1])
    with pytest.raises(CorruptFileError, match=f"{url}: the file has been rewritten since it was opened"):
        file.read(0, 3)


@pytest.fixture
def calls(monkeypatch):
    """The calls of obstore: their names, in order."""
    found = []

    def noted(name, real):
        def call(*given, **options):
            found.append(name)
            return real(*given, **options)

        return call

    for name in ("get", "head", "list", "put"):
        monkeypatch.setattr(obstore, name, noted(name, getattr(obstore, name)))
    return found


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, 3, ["get"]),
        (0, 4, ["get"]),
        (0, 2, ["get", "get"]),  # the first says how long it is
        (1, 2, ["head", "get"]),
    ],
)
def test_the_begin_of_an_object_that_is_not_known_takes_one_request(root, calls, offset, length, expected):
    storage = opened(root)
    assert storage.read_ranges(f"{root}/top", np.array([offset]), np.array([length])) == [b"top"[offset:][:length]]
    assert calls == expected
    assert storage.exists(f"{root}/top")
    assert storage.list(f"{root}/a") == ["x-0.tar", "x-1.tar"]
    del calls[:]
    for name in ("none", "a/none"):
        with pytest.raises(SourceNotFoundError):
            storage.read_ranges(f"{root}/{name}", np.array([0]), np.array([length]))
    assert calls == ["get"], "a listing says what is missing"
    assert storage.read_ranges(f"{root}/top", np.array([0]), np.array([2])) == [b"to"]
    assert calls == ["get", "get"], "the version is known"


def test_a_version_that_was_seen_stays_the_one_that_is_read(root):
    storage, url = opened(root), f"{root}/a/x-0.tar"
    assert storage.size(url) == 9
    put(url, b"rewritten")
    assert "x-0.tar" in storage.list(f"{root}/a")
    with pytest.raises(CorruptFileError, match="the file has been rewritten since it was opened"):
        storage.read(url)


def test_versions_are_listed_or_looked_up_at_once(root, calls, monkeypatch):
    paths, storage = [f"{root}/a/{name}" for name in ("x-0.tar", "x-1.tar", ".hidden.tar")], opened(root)
    monkeypatch.setattr("dataload.storage.remote.backend._FEWEST_LISTED", 3)
    assert [version.size for version in storage.versions(paths)] == [9, 9, 13]
    assert calls == ["list"]
    head, both = obstore.head, threading.Barrier(2)

    def waits(*given):
        both.wait(10)
        return head(*given)

    monkeypatch.setattr(obstore, "head", waits)
    storage = opened(root)
    assert [version.size for version in storage.versions(paths[:2])] == [9, 9]
    assert calls == ["list", "head", "head"]


def test_lists_are_limited(root, monkeypatch):
    monkeypatch.setattr("dataload.storage.remote.requests._LONGEST", len("a/.hidden.tar"))
    monkeypatch.setattr("dataload.storage.remote.requests._MOST_NAMES", 3)
    assert opened(root).list(f"{root}/a") == ["x-0.tar", "x-1.tar"]
    monkeypatch.setattr("dataload.storage.remote.requests._MOST_NAMES", 2)
    with pytest.raises(
        SourceError, match=r"/a: it has more than 2 names; write a manifest .* or name the shards: {000"
    ):
        opened(root).list(f"{root}/a")
    monkeypatch.setattr("dataload.storage.remote.requests._LONGEST", len("a/.hidden.tar") - 1)
    with pytest.raises(SourceError, match="returned a name or an ETag of more than 12 characters"):
        opened(root).list(f"{root}/a")


def test_a_changed_object_that_a_manifest_lists(root):
    storage, url = opened(root), f"{root}/a/x-0.tar"
    storage._remote.expect(url, 9, "another")
    with pytest.raises(CorruptFileError, match=f"if the shards are right, run `dataload index --manifest {root}/a`"):
        storage.read(url)


def test_an_object_is_replaced_only_if_it_is_the_version_that_was_read(root):
    storage, url = opened(root), f"{root}/a/new"
    assert not storage.exists(url)
    assert storage.load(url) is None
    assert storage.list(f"{root}/a") == ["x-0.tar", "x-1.tar"]
    other = opened(root)
    first = other.replace(url, b"1", None)
    with pytest.raises(FileExistsError):
        storage.replace(url, b"2", None)
    assert storage.exists(url), "what was known of the directory was wrong"
    second = other.replace(url, b"3", first)
    assert storage.load(url) == (b"3", second)
    with pytest.raises(FileExistsError):
        other.replace(url, b"4", first)
    part = storage.create(f"{root}/b/new")
    other.replace(f"{root}/b/new", b"5", None)
    assert storage.list(f"{root}/b") == ["c", "d", "new"]
    write(part)
    with pytest.raises(ConfigError, match="new exists"):
        part.publish()
    part.abort()


def test_the_answer_to_a_put_may_be_lost(root, monkeypatch):
    monkeypatch.setattr("dataload.storage.remote.requests.time.sleep", lambda _: None)
    put, attempts = obstore.put, []

    def lost(*given, **more):
        attempts.append(given)
        result = put(*given, **more)
        if len(attempts) == 1:
            raise obstore.exceptions.GenericError("connection closed")
        return result

    monkeypatch.setattr(obstore, "put", lost)
    storage, url = opened(root), f"{root}/a/new"
    condition = storage.replace(url, b"data", None)
    assert len(attempts) == 2
    storage.replace(url, b"more", condition)
    for data in (b"more", b"mere", b"longer"):
        with pytest.raises(FileExistsError):  # at the first attempt, so it is another's
            storage.replace(url, data, None)
    assert storage.load(url)[0] == b"more"


def test_large_objects_are_put_in_parts(root, monkeypatch):
    for name, value in {"LARGEST_PUT": 3, "_SMALLEST_PART": 2, "_MOST_PARTS": 3}.items():
        monkeypatch.setattr(f"dataload.storage.remote.files.{name}", value)
    put, sizes = obstore.put, []

    def noted(store, key, data, **more):
        sizes.append(more.get("chunk_size", 0))
        return put(store, key, data, **more)

    monkeypatch.setattr(obstore, "put", noted)
    storage = opened(root, part_bytes=1, connections=1)
    for size, part in ((3, 0), (4, 2), (10, 4)):
        with storage.create(f"{root}/new/{size}") as file:
            write(file, bytes(size))
            file.publish()
        assert (sizes.pop(), opened(root).read(f"{root}/new/{size}")) == (part, bytes(size))
    with storage.create(f"{root}/new/x") as file:
        write(file, bytes(10))
        opened(root).replace(f"{root}/new/x", b"another's", None)
        with pytest.raises(ConfigError, match="new/x exists"):
            file.publish()
    assert opened(root).read(f"{root}/new/x") == b"another's"
    with storage.create(f"{root}/new/x", overwrite=True) as file:
        write(file, bytes(10))
        file.publish()
    assert opened(root).read(f"{root}/new/x") == bytes(10)


def test_what_a_store_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(obstore.store, "from_url", lambda base, **given: told.append((base, given)))
    for name in ("AWS_ALLOW_HTTP", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    options = {"timeout": 6, "retries": 7}
    for given in ({}, {"endpoint": "http://here"}, {"client_options": {"timeout": "1s"}, "retry_config": {"x": 1}}):
        client_of("s3://told/x", Remote.of(given, options))
    limits = {"timeout": "1500ms", "read_timeout": "500ms", "connect_timeout": "500ms"}
    once = {"max_retries": 0}
    assert told == [
        ("s3://told", {"client_options": limits, "retry_config": once}),
        (
            "s3://told",
            {"client_options": {**limits, "allow_http": True}, "retry_config": once, "endpoint": "http://here"},
        ),
        ("s3://told", {"client_options": {**limits, "timeout": "1s"}, "retry_config": {"x": 1}}),
    ]
    monkeypatch.setenv("AWS_ALLOW_HTTP", "True")
    client_of("s3://told/y", Remote.of({}, options))
    assert told[-1][1]["client_options"] == {**limits, "allow_http": True}


def write(part, data=b"data"):
    with part.create() as stream:
        stream.write(data)


def test_one_writer_does_not_delete_what_another_has_written(root, tmp_path):
    first, second = (opened(root, cache=tmp_path).create(f"{root}/new", overwrite=True) for _ in range(2))
    write(first, b"first")
    write(second, b"second")
    first.publish()
    second.publish()
    assert opened(root).read(f"{root}/new") == b"second"
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_home_that_cannot_be_written_is_not_needed_to_write(root, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with opened(root).create(f"{root}/new") as part:
        write(part)
        part.publish()
    with opened(root).lock(f"{root}/new"):
        assert opened(root).read(f"{root}/new") == b"data"
    assert list(tmp_path.iterdir()) == []


def test_whole_files_need_a_mode_and_a_place(root, monkeypatch):
    for use in (lambda storage: storage.map(f"{root}/top", whole=True), lambda storage: storage.lease(f"{root}/top")):
        with pytest.raises(ConfigError, match=r"can only be read as a whole: set remote.mode"):
            use(opened(root, mode="ranges"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "relative")
    with pytest.raises(ConfigError, match=r"there is no home directory to keep shards in: set remote.cache"):
        opened(root).lease(f"{root}/top")
    assert opened(root).budget() == 0
    for mode in ("auto", "ranges"):
        storage = opened(root, mode=mode)
        assert storage.open(f"{root}/top").read(0, 9) == storage.map(f"{root}/top").read(0, 3) == b"top"


def test_without_room_shards_are_read_by_ranges(root, tmp_path, monkeypatch):
    monkeypatch.setattr("dataload.storage.remote.files._SECONDS_BETWEEN_TRIES", 0)
    monkeypatch.setattr("dataload.storage.remote.backend._ROOM_SECONDS", 0)
    storage = opened(root, cache=tmp_path, budget=12)
    held = storage.lease(f"{root}/a/x-0.tar")
    file = storage.map(f"{root}/a/x-1.tar")
    assert file.read(0, 9) == b"a/x-1.tar"
    assert len([*(tmp_path / "shards").iterdir()]) == 1
    match = r"no room for .*x-1.tar, which needs 9 bytes, 6 more than the budget leaves"
    with pytest.raises(CacheFullError, match=match):
        opened(root, cache=tmp_path, budget=12, timeout=0.1).lease(f"{root}/a/x-1.tar")
    del held
    assert file.read(0, 9) == b"a/x-1.tar"
    assert [path.name.partition("~")[0] for path in (tmp_path / "shards").iterdir()] == ["x-1.tar"]


def test_files_read_as_a_whole_take_turns_in_a_cache_that_holds_some(root, tmp_path):
    while open_shards().give_up():
        pass
    storage, paths = (
        opened(root, cache=tmp_path, budget=22, timeout=0.5),
        [f"{root}/{name}" for name in PATTERNS["a/*.tar"]],
    )
    files = [storage.map(path, whole=True) for path in [*paths, f"{root}/a/.hidden.tar"]]
    for turn, open_then in ((0, [True, False, True]), (1, [True, True, False]), (2, [False, True, True])):
        assert files[turn].read(0, 2) == b"a/"
        assert [file.is_open for file in files] == open_then


def test_a_shard_that_the_plan_does_not_want_is_read_by_range(root, tmp_path):
    storage, url = opened(root, cache=tmp_path), f"{root}/top"
    storage._remote.boards["mode"] = "ranges"  # that a loader has chosen
    assert storage.map(url).read(0, 3) == b"top"
    assert not (tmp_path / "shards").exists()
    del storage._remote.boards["mode"]
    board = storage._remote.boards["board"] = Board(str(tmp_path), [url])
    board.set(0, Coming.NEVER)
    assert storage.map(url).read(0, 3) == b"top"
    assert [*(tmp_path / "shards").iterdir()] == []
    assert storage.map(url, whole=True).read(0, 3) == b"top"


def test_shards_that_are_scanned_may_take_so_many_bytes(root, tmp_path):
    paths = [f"{root}/{name}" for name in PATTERNS["a/*.tar"]]
    storage = opened(root, cache=tmp_path, scan=18)
    with storage._remote.learning(paths):
        assert storage.lease(paths[0]).size == 9
    storage = opened(root, cache=tmp_path, scan=17)
    message = (
        r"only the whole of .*x-1.tar tells .* all 2 shards take up to 18 bytes, more than the 17 that remote.scan"
    )
    with storage._remote.learning(paths):
        assert storage.lease(paths[0]).size == 9, "it is here already"
        with pytest.raises(ConfigError, match=message):
            storage.lease(paths[1])
    assert storage.lease(paths[1]).size == 9


def test_the_largest_shard_must_fit_into_the_budget(root, tmp_path):
    paths = [f"{root}/top", f"{root}/a/x-0.tar"]
    opened(root, cache=tmp_path, budget=9).check_sizes(paths)
    with pytest.raises(ConfigError):
        opened(root, cache=tmp_path, budget=8).check_sizes(paths)


def test_tables_download_nothing(root, tmp_path):
    file = opened(root, cache=tmp_path).map(f"{root}/top")
    with reading_tables():
        assert file.read(0, 3) == b"top"
    assert not [*(tmp_path / "shards").iterdir()]
    assert file.read(0, 3) == b"top"
    assert len([*(tmp_path / "shards").iterdir()]) == 1


def test_without_obstore(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingDependencyError, match=r"s3:// URLs needs obstore.*pip install 'dataload\[remote\]'"):
        storage_of("s3://bucket/x").exists("s3://bucket/x")


class Failing:
    """Calls that fail so many times before they are made."""

    def __init__(self, error, times, call=obstore.head):
        self.error, self.left, self.calls, self.call = error, times, 0, call

    def __call__(self, *arguments, **options):
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return self.call(*arguments, **options)


@pytest.fixture
def look_up(monkeypatch):
    """A function that asks for the size of an object, and lets the store fail."""
    monkeypatch.setattr("dataload.storage.remote.requests.time.sleep", lambda _: None)
    monkeypatch.setattr("dataload.storage.remote.requests.can_be_interrupted", lambda: False)  # pytest keeps fixtures
    put("memory://failing/x", b"12345")

    def look_up(call, remote=None):
        monkeypatch.setattr(obstore, "head", call)
        remote = remote or Remote.of({"secret_key": "tops3cret"}, {"retries": 3})
        return storage_of("memory://failing/x", remote).size("memory://failing/x")

    return look_up


def test_failures_that_pass_and_that_do_not(look_up):
    for secret, shown in (("k3y", "k3y"), ("k3ys", r"\*\*\*")):
        refused = Failing(obstore.exceptions.PermissionDeniedError(f"for {secret}"), 9)
        with pytest.raises(SourceError, match=f": for {shown}$"):
            look_up(refused, Remote.of({"secret_key": secret}))
    passing = Failing(obstore.exceptions.GenericError("503 Service Unavailable"), 3)
    assert (look_up(passing), passing.calls) == (5, 4)
    call = Failing(obstore.exceptions.GenericError("busy: tops3cret at http://h/x?sig=abc <?xml?> tops3cret"), 9)
    match = (
        r"^cannot look up memory://failing/x: busy: \*\*\* at http://h/x\?... \(4 attempts in 0.0 s; the options time"
    )
    with pytest.raises(SourceError, match=match):
        look_up(call)
    assert call.calls == 4


class Answer:
    """An answer of an object in parts, of which the first attempts may break."""

    def __init__(self, answer, parts, breaks=0):
        self.meta, self.parts, self.breaks = answer.meta, parts, breaks

    def stream(self, **_):
        yield self.parts[0]
        if self.breaks:
            self.breaks -= 1
            raise OSError("connection closed")
        yield from self.parts[1:]


def test_an_answer_that_is_too_short(monkeypatch):
    url = "memory://failing/x"
    put(url, b"12345")
    get = obstore.get
    monkeypatch.setattr(obstore, "get", lambda *given, **more: Answer(get(*given, **more), [b"1234"]))
    with pytest.raises(SourceError, match=f"cannot read bytes 0 to 5 of {url}: 4 of 5 bytes arrived"):
        storage_of(url, Remote.of(None, {"retries": 1})).read(url)


@pytest.mark.parametrize(
    ("name", "writer", "reader", "record"),
    [
        ("x.tar", {"index": False}, {}, {"x": bytes(10_000)}),
        ("x.tfrecord", {}, {}, bytes(10_000)),
        ("x.jsonl", {}, {}, {"x": "a" * 10_000}),
        ("x.npy", {"format": "tokens"}, {"format": "tokens", "window": 5000, "end_token": 1}, [0] * 4999 + [1]),
    ],
)
def test_opening_downloads_a_file_that_it_scans_for_reading_too(tmp_path, name, writer, reader, record):
    with dataload.create(tmp_path / name, **writer) as made:
        made.extend([record] * 20)
    put(url := f"memory://scanned-{next(NUMBERS)}/{name}", (tmp_path / name).read_bytes())
    remote = {"cache": tmp_path / "cache", "mode": "shards"}
    with dataload.open(url, remote=remote, **reader) as source, dataload.Loader(source, batch_size=5) as loader:
        assert len([*loader]) >= 4
        downloads = loader.statistics().downloads
    assert (downloads.shards_downloaded, downloads.nbytes) == (0, 0), "since the loader was made"
    if name == "x.tar":
        put(other := f"memory://scanned-{next(NUMBERS)}/{name}", (tmp_path / name).read_bytes())
        assert write_index(other, remote=(settings := Remote.of(None, remote))) == 20
        assert settings.traffic.total().shards_downloaded == 1
