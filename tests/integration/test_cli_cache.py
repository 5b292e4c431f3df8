"""``dataload cache`` on caches that processes read from and download into."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from command_line import facts, ok, run
from typer.testing import CliRunner
from written import written

import dataload
from dataload.cli.app import app
from dataload.convert import convert
from dataload.convert.indexing import Measuring, index_shards
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.settings import ObjectVersion

SIZE = 1000
READER = """
import os, sys
from dataload.storage import LocalStorage
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.settings import ObjectVersion
root, name, downloads = sys.argv[1:]

def download(descriptor):
    os.pwrite(descriptor, name[-1].encode() * 1000, 0)
    if downloads:
        print("", flush=True)
        sys.stdin.read()

lease = ShardCache(root, None).fetch(name, ObjectVersion(1000, '"x"', True), download, lambda: False)
print(lease.path, flush=True)
sys.stdin.read()
"""


def cache(*arguments):
    return run("cache", *arguments)


def fill(root, name, data=None, tag='"x"', age=0):
    """Put a shard into the cache as a reader that has ended would."""
    data = name[-1].encode() * SIZE if data is None else data
    version = ObjectVersion(len(data), tag, True)
    lease = ShardCache(str(root), None).fetch(name, version, lambda into: os.pwrite(into, data, 0), lambda: False)
    os.utime(lease.path, (time.time() - age,) * 2)
    return lease.path


def shards(root):
    return sorted(name.partition("~")[0] for name in os.listdir(root / "shards"))


@contextlib.contextmanager
def started(program):
    """Give a function that starts a program with some arguments, and returns it once it has printed a line."""
    processes = []

    def start(*arguments):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def reader(tmp_path):
    """Start processes that hold a lease, or a download."""
    with started(READER) as start:
        yield lambda name, downloads="": start(tmp_path, name, downloads)


def test_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for command, expected in [
        (["status"], f"{tmp_path}/dataload\nnothing is kept\n"),
        (["prune", "--all"], "deleted 0 files (0 bytes); 0 files (0 bytes) left, 0 in use"),
        (["verify"], "none damaged of 0 shards (0 by SHA-256, 0 by MD5, 0 by length)"),
    ]:
        done = cache(*command)
        assert done.exit_code == 0
        assert expected in done.stdout
    assert not list(tmp_path.iterdir())  # nothing is created


def test_without_a_home_directory(monkeypatch):
    monkeypatch.setattr("dataload.cli.cache.node_directory", lambda remote: None)
    done = cache("status")
    assert (done.exit_code, "there is no home directory with a cache: name it with --cache" in done.stderr) == (2, True)


@pytest.mark.slow
def test_status_of_a_cache_in_use(tmp_path, reader):
    fill(tmp_path, "s3://b/a", age=7250)
    reader("s3://b/b")
    reader("s3://b/c", "slowly")
    killed = reader("s3://b/d", "slowly")
    killed.kill()
    killed.wait()
    os.truncate(next((tmp_path / "shards").glob(".d~*")), 9)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x.dataload-index").write_bytes(bytes(10))
    found = facts("cache", "status", "--cache", tmp_path)
    assert found["shards"] == {"count": 2, "bytes": 2 * SIZE}
    assert found["in_use"] == found["downloading"] == {"count": 1, "bytes": SIZE}
    assert found["left_over"] == {"count": 1, "bytes": 9}
    assert found["tables"] == {"count": 1, "bytes": 10}
    assert 7250 <= found["seconds_unused"]["most"] < 7400
    assert sorted((file["name"].partition("~")[0], file["in_use"]) for file in found["files"]) == [
        (".c", True), (".d", False), ("a", False), ("b", True)
    ]  # fmt: skip
    rows = [re.split(r"  +", line.strip()) for line in cache("status", "--cache", tmp_path).stdout.splitlines()]
    assert rows[0] == [str(tmp_path)]
    assert sorted([*row[:4], *row[5:]] for row in rows[2:]) == [
        ["download", "c", "1", "1.0 kB", "a process"],
        ["download", "d", "1", "9 bytes"],
        ["shard", "a", "1", "1.0 kB"],
        ["shard", "b", "1", "1.0 kB", "a process"],
        ["table", "x", "1", "10 bytes"],
    ]
    assert "2 hours ago" in str(rows)


@pytest.mark.slow_suite
@pytest.mark.slow
def test_pruning_a_cache_in_use(tmp_path, reader):
    for age, name in enumerate(("new", "middle", "old")):
        fill(tmp_path, f"s3://b/{name}", age=100 * age)
    leased, downloading = reader("s3://b/leased"), reader("s3://b/partial", "slowly")
    os.utime(tmp_path / "shards" / ShardCache.name("s3://b/leased", ObjectVersion(SIZE, '"x"', True)), (1, 1))
    done = cache("prune", "--cache", tmp_path, "--budget", "4kB")
    assert "deleted 1 file (1.0 kB); 4 files (4.0 kB) left, 2 in use" in done.stdout
    assert shards(tmp_path) == [".partial", "leased", "middle", "new"]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x.dataload-index").touch()
    cache("prune", "--cache", tmp_path, "--budget", "2kB")
    assert len(os.listdir(tmp_path / "tables")) == 1
    cache("prune", "--cache", tmp_path)
    assert shards(tmp_path) == [".partial", "leased"]
    for process in (leased, downloading):
        process.kill()
        process.wait()
    assert cache("prune", "--cache", tmp_path).exit_code == 0
    assert shards(tmp_path) == []
    assert os.listdir(tmp_path / "tables") == []


@pytest.mark.slow
def test_verifying_a_cache_in_use(tmp_path, reader):
    data = b"z" * SIZE
    fill(tmp_path, "s3://b/plain")
    fill(tmp_path, "s3://b/hashed", data, f'"{hashlib.md5(data).hexdigest()}"')
    short, flipped = fill(tmp_path, "s3://b/short"), fill(tmp_path, "s3://b/flipped", data, f'"{"0" * 32}"')
    reader("s3://b/short")
    done = cache("verify", "--cache", tmp_path)
    assert (done.exit_code, done.stderr) == (
        1, "error: 1 damaged of 4 shards (0 by SHA-256, 2 by MD5, 2 by length)\n"
    )  # fmt: skip
    assert done.stdout.startswith(f"{flipped}: its MD5 is {hashlib.md5(data).hexdigest()}, and the object's is 0")
    done = cache("verify", "--cache", tmp_path, "--no-md5")
    assert (done.exit_code, done.stdout) == (0, "none damaged of 4 shards (0 by SHA-256, 0 by MD5, 4 by length)\n")
    os.truncate(short, 10)
    done = cache("verify", "--cache", tmp_path, "--delete")
    assert done.exit_code == 1
    assert f"{short}: it has 10 bytes, and the object has 1000 (deleted)\n" in done.stdout
    assert shards(tmp_path) == ["hashed", "plain"]
    assert cache("verify", "--cache", tmp_path).exit_code == 0
    assert facts("cache", "verify", "--cache", tmp_path) == {
        "directory": str(tmp_path),
        "shards": 2,
        "checked": {"sha256": 0, "md5": 1, "length": 1, "unknown": 0},
        "ok": True,
        "bad": [],
    }


@pytest.mark.slow_suite
def test_hashes_of_manifests_and_etags(object_server, tmp_path):
    (tmp_path / "data").mkdir()
    for shard in range(3):
        written(tmp_path / "data" / f"part-{shard}.syr", [{"x": shard + row} for row in range(100)])
    ok("index", "--manifest", tmp_path / "data")
    bucket, storage = object_server.bucket(), object_server.storage_options()
    object_server.put_directory(bucket, tmp_path / "data", "d/")
    url, kept = f"s3://{bucket}/d", tmp_path / "cache"
    options = [f"--option=storage_options.{name}={json.dumps(value)}" for name, value in storage.items()]
    with dataload.open(url, storage_options=storage, remote={"cache": kept}) as source:
        expected = source.read(range(300))
        answer = cache("verify", "--cache", kept)
        assert (answer.exit_code, "(0 by SHA-256, 3 by MD5, 0 by length)" in answer.stdout) == (0, True)
        answer = cache("verify", url, "--cache", kept, *options)
        assert (answer.exit_code, "(3 by SHA-256, 0 by MD5, 0 by length)" in answer.stdout) == (0, True)
    damaged = next(path for path in (kept / "shards").iterdir() if path.name.startswith("part-1"))
    damaged.chmod(0o600)
    with open(damaged, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    answer = cache("verify", url, "--cache", kept, "--delete", *options)
    assert (answer.exit_code, answer.stdout.startswith(f"{damaged}: its SHA256 is")) == (1, True)
    assert shards(kept) == ["part-0.syr", "part-2.syr"]
    with dataload.open(url, storage_options=storage, remote={"cache": kept}) as source:
        assert source.read(range(300)) == expected
    assert shards(kept) == ["part-0.syr", "part-1.syr", "part-2.syr"]


@pytest.mark.slow
def test_what_has_no_manifest(object_server, tmp_path):
    bucket = object_server.bucket()
    object_server.put(bucket, "x.syr", b"x")
    options = [f"--option=storage_options.{k}={json.dumps(v)}" for k, v in object_server.storage_options().items()]
    for path, message in [
        (f"s3://{bucket}/x.syr", f"s3://{bucket}/x.syr has no manifest: name its directory"),
        (str(tmp_path), f"{tmp_path} is not a URL, so its shards are not in the cache"),
    ]:
        done = cache("verify", path, "--cache", tmp_path, *(options if path.startswith("s3") else []))
        assert (done.exit_code, message in done.stderr) == (2, True)


OLD = 1e9  # seconds since 1970
WAITING = """
import sys
import dataload
from dataload.convert import convert
class Slow(dataload.RangeSource):
    def _read(self, indices):
        if 5 in indices:
            print("", flush=True)
            sys.stdin.read()
        return super()._read(indices)
convert(Slow(8), sys.argv[1], shards=8, **eval(sys.argv[2]))
"""


@pytest.fixture
def converting():
    """Start conversions that wait in their sixth record, and return their processes."""
    with started(WAITING) as start:
        yield lambda path, **settings: start(path, repr(settings))


def end(process):
    process.kill()
    process.wait()


def has_label(label, record):
    return bool(record["label"] == label)


def filtered(directory, *, converts=True):
    """Write a data set with two filters and, by default, a conversion that is complete beside it."""
    directory.mkdir(exist_ok=True)
    written(directory / "0.syr", [{"x": np.arange(i + 1), "label": i % 3} for i in range(9)])
    os.utime(directory / "0.syr", (OLD, OLD))
    source = dataload.open(directory / "0.syr")
    for label in range(2):
        source.filter(functools.partial(has_label, label))
    if converts:
        convert(source, directory / "copy.syr", shards=2)


def kinds(*arguments):
    """Return the kinds of files that are listed, with the process that holds one."""
    return sorted((each["kind"], each["holder"].partition(" on ")[0]) for each in facts(*arguments)["kept"])


def test_what_is_beside_data_is_listed_and_pruned(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    data, other, alone = tmp_path / "data", tmp_path / "other", tmp_path / "alone"
    for directory in (data, other, alone):
        filtered(directory, converts=directory != alone)
    names = {".me.convert.json": b"{}", ".you.convert.json": b"not JSON", ".you.convert.log": b"", ".x.lock": b"",
             ".me.convert.log": b"1", ".x.index": b"", ".dataload.json": b""}  # fmt: skip
    for name, content in names.items():
        (data / name).write_bytes(content)
    (data / ".link.dataload-index").symlink_to(data / "0.syr")
    for name in (f".dataload.lengths-{'0' * 32}.npy", f".0.syr.{'0' * 8}-{'0' * 12}.tmp"):
        (data / name / "mine").mkdir(parents=True)
    own = [("filter", ""), ("filter", ""), ("journal", "")]
    assert kinds("cache", "status", data) == [*own, ("lengths", ""), ("unfinished", "")]
    everywhere = facts("cache", "status")
    assert {os.path.dirname(each["path"]) for each in everywhere["kept"]} == {str(data), str(other), str(alone)}
    assert "deleted 2 files" in cache("prune", other).stdout
    assert kinds("cache", "status", other) == [("journal", "")]
    left = {*os.listdir(data)} - {path.name for path in data.glob(".dataload.filter-*")}
    done = cache("prune", "--all").stdout
    assert f"{data}: deleted 2 files" in done
    assert {*os.listdir(data)} == left
    shutil.rmtree(other)  # a place that is gone is not listed
    assert [line for line in cache("status").stdout.splitlines() if line.startswith("/")] == [
        str(tmp_path / "home" / "dataload"), str(data)
    ]  # fmt: skip


def test_lengths_go_only_if_no_manifest_and_no_index_needs_them(tmp_path):
    filtered(tmp_path)
    index_shards(str(tmp_path), measuring=Measuring())
    [named] = tmp_path.glob(".dataload.lengths-*")
    orphan = tmp_path / f".dataload.lengths-{'0' * 32}.npy"
    shutil.copy(named, orphan)
    log = tmp_path / ".dataload.json.index.1-of-2.log"
    log.touch()
    cache("prune", tmp_path)
    assert orphan.exists()
    log.unlink()
    cache("prune", "--all", tmp_path)
    assert [named.exists(), orphan.exists()] == [True, False]
    orphan.touch()
    (tmp_path / "dataload.json").write_bytes(b"damaged" + named.name.encode() + orphan.name.encode())
    cache("prune", "--all", "--yes", tmp_path)
    assert [named.exists(), orphan.exists()] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"part": (1, 1)}])
def test_unfinished_jobs_go_if_no_process_holds_them(tmp_path, converting, settings):
    path = tmp_path / "a.syr"
    process = converting(path, **settings)
    held = {(kind, holder) for kind, holder in kinds("cache", "status", tmp_path)}
    assert {kind for kind, _ in held} == {"conversion", "unfinished"}
    assert {holder for kind, holder in held if kind == "conversion"} == {f"process {process.pid}"}
    log = ".a.syr.convert.1-of-1.log" if settings else ".a.syr.convert.log"
    lock = f"{log if settings else '.a.syr.convert.json'}.lock"
    assert cache("prune", "--all", "--yes", tmp_path).exit_code == 0
    assert {".a.syr.convert.json", log, lock} <= {*os.listdir(tmp_path)}
    assert [*tmp_path.glob(".*.tmp")]
    end(process)
    assert {holder for _, holder in kinds("cache", "status", tmp_path)} == {""}
    assert cache("prune", tmp_path).exit_code == 0
    assert {name for name in os.listdir(tmp_path) if name.endswith((".tmp", ".lock"))} == {lock}
    asked = CliRunner().invoke(app, ["cache", "prune", "--all", str(tmp_path)], input="n\n")
    assert f"{tmp_path / log}: conversion (" in asked.stdout
    assert {".a.syr.convert.json", log} <= {*os.listdir(tmp_path)}
    assert cache("prune", "--all", tmp_path).exit_code == 1  # nobody answers
    assert cache("prune", "--all", "--yes", tmp_path).exit_code == 0
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} == set()
    assert len([*tmp_path.glob("a-*.syr")]) >= 3  # the shards are data


@pytest.mark.slow_suite
def test_jobs_and_shards_of_data_at_urls(object_server, tmp_path, converting, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    bucket, storage = object_server.bucket(), object_server.storage_options()
    options = [f"--option=storage_options.{name}={json.dumps(value)}" for name, value in storage.items()]
    filtered(tmp_path / "data")
    for name in ("0.syr", ".dataload.lengths-" + "0" * 32 + ".npy"):
        object_server.put(bucket, f"d/{name}", (tmp_path / "data" / "0.syr").read_bytes())
    with dataload.open(f"s3://{bucket}/d/0.syr", storage_options=storage, remote={"mode": "shards"}) as source:
        assert len([*source]) == 9
    fill(tmp_path / "home" / "dataload", "s3://b/other")
    url, remote = f"s3://{bucket}/d", {"cache": str(tmp_path / "home" / "dataload")}
    process = converting(f"{url}/a.syr", storage_options=storage, remote=remote, overwrite=True)
    found = kinds("cache", "status", url, *options)
    assert ("conversion", f"process {process.pid}") in found
    assert {kind for kind, _ in found} == {"conversion", "lengths", "shard"}
    assert cache("prune", "--all", "--yes", url, *options).exit_code == 0
    assert ("conversion", f"process {process.pid}") in kinds("cache", "status", url, *options)
    assert shards(tmp_path / "home" / "dataload") == ["other"]
    end(process)
    assert cache("prune", "--all", "--yes", url, *options).exit_code == 0
    assert kinds("cache", "status", url, *options) == []
