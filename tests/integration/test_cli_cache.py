"""``dataload cache`` on caches that processes read from and download into."""

import hashlib
import json
import os
import subprocess
import sys
import time

import pytest
from command_line import facts, ok, run

import dataload
from dataload.storage.remote.cache import ShardCache
from dataload.storage.remote.settings import ObjectVersion

SIZE = 1000
READER = """
import os, sys
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


@pytest.fixture
def reader(tmp_path):
    """Start processes that hold a lease, or a download."""
    processes = []

    def start(name, downloads=""):
        command = [sys.executable, "-c", READER, str(tmp_path), name, downloads]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for command, expected in [
        (["status"], "0 shards (0 bytes); in use: 0 shards (0 bytes)"),
        (["prune", "--all"], "deleted 0 files (0 bytes) and 0 tables (0 bytes); 0 files (0 bytes) left, 0 in use"),
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
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x.dataload-index").write_bytes(bytes(10))
    found = facts("cache", "status", "--cache", tmp_path)
    assert found["shards"] == {"count": 2, "bytes": 2 * SIZE}
    assert found["in_use"] == found["downloading"] == found["left_over"] == {"count": 1, "bytes": SIZE}
    assert found["tables"] == {"count": 1, "bytes": 10}
    assert 7250 <= found["seconds_unused"]["most"] < 7400
    assert sorted((file["name"].partition("~")[0], file["in_use"]) for file in found["files"]) == [
        (".c", True), (".d", False), ("a", False), ("b", True)
    ]  # fmt: skip
    lines = cache("status", "--cache", tmp_path).stdout.splitlines()
    assert lines[:2] == [str(tmp_path), "2 shards (2.0 kB); in use: 1 shard (1.0 kB)"]
    assert lines[2].endswith("of the longest unused 2 hours ago")
    assert lines[3:] == [
        "1 download (1.0 kB) under way",
        "1 download (1.0 kB) left over, for `dataload cache prune`",
        "1 table (10 bytes)",
    ]


@pytest.mark.slow
def test_pruning_a_cache_in_use(tmp_path, reader):
    for age, name in enumerate(("new", "middle", "old")):
        fill(tmp_path, f"s3://b/{name}", age=100 * age)
    leased, downloading = reader("s3://b/leased"), reader("s3://b/partial", "slowly")
    os.utime(tmp_path / "shards" / ShardCache.name("s3://b/leased", ObjectVersion(SIZE, '"x"', True)), (1, 1))
    done = cache("prune", "--cache", tmp_path, "--budget", "4kB")
    assert "deleted 1 file (1.0 kB); 4 files (4.0 kB) left, 2 in use" in done.stdout
    assert shards(tmp_path) == [".partial", "leased", "middle", "new"]
    cache("prune", "--cache", tmp_path)
    assert shards(tmp_path) == [".partial", "leased"]
    for process in (leased, downloading):
        process.kill()
        process.wait()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x.dataload-index").touch()
    assert cache("prune", "--cache", tmp_path).exit_code == 0
    assert shards(tmp_path) == []
    assert len(os.listdir(tmp_path / "tables")) == 1
    assert "and 1 table" in cache("prune", "--cache", tmp_path, "--all").stdout
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


@pytest.mark.slow
def test_hashes_of_manifests_and_etags(object_server, tmp_path):
    (tmp_path / "data").mkdir()
    for shard in range(3):
        with dataload.create(tmp_path / "data" / f"part-{shard}.syr") as writer:
            writer.extend({"x": shard + row} for row in range(100))
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
