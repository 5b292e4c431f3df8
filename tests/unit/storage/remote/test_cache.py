"""The node's cache: one download, leases, a budget, full disks, and what killed processes leave."""

import errno
import gc
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
from types import SimpleNamespace

import pytest

from dataload._util.threads import Wait
from dataload.errors import ConfigError, MachineError, SourceError, SourceNotFoundError
from dataload.storage.remote.cache import CacheFullError, ShardCache
from dataload.storage.remote.jobs import Shares
from dataload.storage.remote.requests import check_shard
from dataload.storage.remote.settings import ObjectVersion


def version(tag='"a"'):
    return ObjectVersion(100, tag, True)


def url(name):
    return f"s3://bucket/{name}"


def name_of(name):
    return ShardCache.name(url(name), version())


class Node:
    """A cache, and downloads of 100 bytes with the number of the download."""

    def __init__(self, root, budget=None, **options):
        self.root, self.cache, self.count = root, ShardCache(str(root), budget, **options), 0

    def download(self, descriptor):
        self.count += 1
        os.pwrite(descriptor, bytes([self.count]) * 100, 0)

    def fetch(self, name, *more, tag='"a"', download=None, give_up=lambda: False):
        return self.cache.fetch(url(name), version(tag), download or self.download, give_up, *more)

    def content(self, name, *more, **options):
        with open(self.fetch(name, *more, **options).path, "rb") as file:
            return file.read()

    def fetch_aged(self, names):
        """Fetch shards, of which the first was used longest ago."""
        for age, name in enumerate(names):
            os.utime(self.fetch(name).path, ns=(age, age))

    @property
    def files(self):
        return sorted(name.partition("~")[0] for name in os.listdir(self.root / "shards"))


def raising(error):
    def download(descriptor):
        raise error

    return download


def full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_each_version_of_a_shard_is_downloaded_once(node):
    leases = [node.fetch("x.tar") for _ in range(3)]
    assert node.cache.find(name_of("x.tar")).path == leases[0].path == leases[2].path
    assert (node.count, node.files) == (1, ["x.tar"])
    assert os.stat(leases[0].path).st_mode & 0o777 == 0o600
    empty = node.cache.fetch("s3://bucket/empty", ObjectVersion(0, '"a"', True), lambda _: None, lambda: False)
    assert (empty.size, node.files) == (0, ["empty", "x.tar"])
    node.cache.remove(node.cache.files()[-1])
    other = node.cache.fetch("s3://other/x.tar", version(), node.download, lambda: False)
    assert len({leases[0].path, node.fetch("x.tar", tag='"b"').path, other.path}) == node.count == 3


def test_names_tell_length_and_md5():
    md5 = "0123456789abcdef" * 2
    for address, tag, expected in [
        (url("x"), f'"{md5}"', f"~100~{md5}"),
        ("az://c/x", f'"{md5}"', "~100"),
        (url("x"), f'"{md5}-3"', "~100"),
        (url("x"), f'W/"{md5}"', "~100"),
    ]:
        assert re.fullmatch(f"x~[0-9a-f]{{20}}{expected}", ShardCache.name(address, version(tag)))


def test_the_longest_unused_is_evicted(tmp_path):
    node = Node(tmp_path, 300)
    node.fetch_aged("abc")
    node.cache.find(name_of("a"))  # used again
    gc.collect()
    node.fetch("d")
    assert node.files == ["a", "c", "d"]


def test_what_is_being_read_is_not_evicted_until_it_is_given_up(tmp_path):
    node = Node(tmp_path, 299)
    held = [node.fetch(name) for name in "ab"]
    with pytest.raises(CacheFullError, match=r"no room for s3://bucket/c, which needs 100 bytes, 1 more than.*budget"):
        node.fetch("c")
    assert node.files == ["a", "b"]  # not even the part is left
    node.fetch("c", give_up=lambda: bool(held and held.pop()))
    assert node.files == ["a", "c"]


def test_the_budget_is_a_limit_that_may_be_reached(tmp_path):
    node = Node(tmp_path, 100)
    lease = node.fetch("x")
    assert node.files == ["x"]
    del lease
    with pytest.raises(ConfigError, match=r"s3://bucket/x has 100 bytes, and the budget.* is 99: raise remote.budget"):
        Node(tmp_path, 99).fetch("x", tag='"b"')


def test_a_full_disk_evicts(node):
    node.fetch_aged("ab")
    node.fetch("c", download=lambda descriptor: (full if len(node.files) > 2 else node.download)(descriptor))
    assert node.files == ["b", "c"]


def test_a_disk_that_stays_full_or_fails(tmp_path):
    node = Node(tmp_path, 500)
    match = (
        r"the disk of the cache .* is full: s3://bucket/x needs 100 bytes, the budget is 500, and nothing is left to "
        r"evict; [\d,]+ bytes are free; no shard is in use; no other process is registered: raise remote"
    )
    with pytest.raises(MachineError, match=match):
        node.fetch("x", download=full)
    with pytest.raises(OSError, match="Input/output"):
        node.fetch("x", download=raising(OSError(errno.EIO, "Input/output error")))
    assert node.files == []


def test_a_disk_with_little_room_left_says_what_it_spares(node, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10_000, free=520))
    spares = (
        "which needs 100 bytes, 80 more than the disk leaves .*; without remote.budget, a twentieth of the disk stays"
    )
    with pytest.raises(CacheFullError, match=spares):
        node.fetch("a")


def test_who_waits_for_room_in_vain_learns_who_has_it(tmp_path):
    node = Node(tmp_path, 450)
    held = [node.fetch(name) for name in "abcd"]
    shares = Shares(str(tmp_path), node.cache.limit, "train-00.tar and 3 more", 1.0, 200)
    match = (
        r"no room for s3://bucket/e, which needs 100 bytes, 50 more than the budget leaves beside the shards that "
        rf"are being read; shards in use: a, b, c and 1 more \(400 bytes\); process {os.getpid()} reads train-00.tar "
        r"and 3 more and needs 200 bytes: raise remote.budget, free space on the disk, or end one of these jobs"
    )
    with pytest.raises(CacheFullError, match=match):
        node.fetch("e", Wait(0.01))
    held.pop()
    node.cache.prune()
    with pytest.raises(CacheFullError, match=r"; shards in use: a, b, c \(300 bytes\); process"):
        Node(tmp_path, 350).fetch("e")
    held.append(node.fetch("d"))
    del shares
    assert node.files == ["a", "b", "c", "d"]


def test_pruning_spares_what_is_used(node):
    node.fetch_aged("abc")
    (node.root / "shards" / ".d~0.part").write_bytes(b"left over")
    gc.collect()
    held = node.cache.find(name_of("a"))
    os.utime(held.path, ns=(0, 0))
    assert [file.is_used() for file in node.cache.files()] == [True, False, False, False]
    assert [file.name.partition("~")[0] for file in node.cache.prune(200)] == [".d", "b"]
    assert node.files == ["a", "c"]
    assert [file.name.partition("~")[0] for file in node.cache.prune()] == ["c"]
    del held
    assert len(node.cache.prune()) == 1
    assert node.files == []


def test_a_failed_download_leaves_nothing(node):
    with pytest.raises(SourceError, match="gone"):
        node.fetch("x", download=raising(SourceError("gone")))
    assert node.files == []
    assert node.content("x") == b"\1" * 100


def test_others_wait_for_a_download(node):
    begun, go_on = threading.Event(), threading.Event()

    def slowly(descriptor):
        begun.set()
        go_on.wait()
        node.download(descriptor)

    found = []
    first = threading.Thread(target=lambda: found.append(node.fetch("x", download=slowly)))
    first.start()
    begun.wait()
    others = [threading.Thread(target=lambda: found.append(node.fetch("x"))) for _ in range(4)]
    for other in others:
        other.start()
    assert not found
    go_on.set()
    for thread in (first, *others):
        thread.join()
    assert (len(found), node.count, node.content("x")) == (5, 1, b"\1" * 100)


def test_a_download_that_does_not_get_on_is_not_waited_for(tmp_path):
    """Of a process that was stopped, say. One that writes is waited for as long as it takes."""
    node = Node(tmp_path, timeout=0.1)
    begun, go_on = threading.Event(), threading.Event()

    def hangs(descriptor):
        begun.set()
        go_on.wait()

    first = threading.Thread(target=lambda: node.fetch("x", download=hangs))
    first.start()
    begun.wait()
    match = r"another process has not written to .*\.x~.*\.part for 0.1 s; shards in use: x \(100 bytes\); no other"
    try:
        with pytest.raises(CacheFullError, match=match):
            node.fetch("x")
        before = node.cache.progress(name_of("x"))
        os.utime(tmp_path / "shards" / f".{name_of('x')}.part", ns=(1, 1))
        assert None not in (before, node.cache.progress(name_of("x")))
        assert before != node.cache.progress(name_of("x"))
    finally:
        go_on.set()
        first.join()
    (tmp_path / "shards" / f".{name_of('y')}.part").touch()
    assert node.cache.progress(name_of("y")) is None, "a part without room is no progress"


def _download_until_killed(root, ready):
    def fill(descriptor):
        os.pwrite(descriptor, b"x" * 50, 0)
        ready.set()
        signal.pause()

    Node(root, 150).fetch("x", download=fill)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x", "y"])
def test_what_a_killed_process_leaves_is_taken_over(tmp_path, name):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_download_until_killed, args=(tmp_path, ready))
    process.start()
    ready.wait()
    node = Node(tmp_path, 150)
    if name == "y":  # while it is alive, its part counts and stays
        with pytest.raises(CacheFullError):
            node.fetch("y")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    process.close()
    assert node.files == [".x"]
    assert node.content(name) == b"\1" * 100
    assert node.files == [name]


def test_a_shard_that_somebody_has_cut_is_downloaded_again(node):
    os.truncate(node.fetch("a").path, 60)
    assert node.cache.find(name_of("a")) is None
    assert node.content("a") == b"\2" * 100


def test_a_cache_that_is_deleted_while_it_is_used(tmp_path):
    node = Node(tmp_path / "cache")
    node.fetch("a")
    shutil.rmtree(node.root)
    cache, name = node.cache, name_of("a")
    assert (cache.names(), cache.files(), cache.holds(name), cache.find(name)) == (set(), [], False, None)
    assert node.content("a") == b"\2" * 100
    assert (cache.names(), cache.holds(name)) == ({name}, True)
    with pytest.raises(SourceError, match="shards is repeatedly deleted while it is in use: set"):
        node.fetch("b", download=lambda _: shutil.rmtree(node.root))
    with pytest.raises(SourceNotFoundError):
        node.fetch("c", download=raising(SourceNotFoundError("there is no s3://bucket/c")))
    shutil.rmtree(node.root)
    assert cache.limit() > 0


def test_checks(node):
    content = bytes([1]) * 100
    md5, sha256 = hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()
    for name, tag in [("plain", '"a"'), ("tagged", f'"{md5}"')]:
        node.count = 0
        node.fetch(name, tag=tag)
    (node.root / "shards" / "unknown").touch()
    found = {file.name.partition("~")[0]: file for file in node.cache.files()}
    for name, given, by in [
        ("plain", {}, "length"),
        ("plain", {"sha256": sha256}, "sha256"),
        ("tagged", {}, "md5"),
        ("tagged", {"md5": False}, "length"),
        ("unknown", {}, None),
    ]:
        checked = check_shard(found[name], **given)
        assert (checked.by, checked.problem) == (by, None)
    for file in found.values():
        with open(file.path, "r+b") as stream:
            stream.write(b"\2")
    wrong = hashlib.md5(b"\2" + content[1:]).hexdigest()
    assert check_shard(found["tagged"]).problem == f"its MD5 is {wrong}, and the object's is {md5}"
    assert "its SHA256 is" in check_shard(found["plain"], sha256).problem
    os.truncate(found["plain"].path, 60)
    assert check_shard(found["plain"]).problem == "it has 60 bytes, and the object has 100"
    for file in found.values():
        node.cache.remove(file)
        node.cache.remove(file)
        assert check_shard(file) is None
    assert node.files == []


# Whose files are believed; folders are in tests/unit/storage/local/test_trusted.py


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_cache_of_another_user_is_not_believed(node):
    path = node.fetch("a").path
    for change in (lambda: os.chown(path, 4321, 4321), lambda: os.chmod(path, 0o660), lambda: os.chmod(path, 0o602)):
        change()
        assert node.content("a") == bytes([node.count]) * 100
    assert node.count == 4
    part = node.root / "shards" / f".{name_of('b')}.part"
    part.touch()
    part.chmod(0o666)  # whoever made it could write to the shard afterwards
    assert os.stat(node.fetch("b").path).st_mode & 0o777 == 0o600


def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")  # the cache itself may be one
    node = Node(tmp_path / "link")
    (tmp_path / "secret").write_bytes(bytes(5000))
    for number, make in enumerate((lambda path: os.symlink(tmp_path / "secret", path), os.mkfifo), 1):
        make(node.root / "shards" / name_of("x"))
        assert [file.size < 5000 for file in node.cache.files()] == [True], "a link has the size of its text"
        assert node.cache.find(name_of("x")) is None
        assert node.content("x") == bytes([number]) * 100
        node.cache.evict(name_of("x"))
    assert (tmp_path / "secret").read_bytes() == bytes(5000)


@pytest.mark.parametrize("budget", [None, 300_000])
def test_a_download_looks_at_the_other_shards_once(tmp_path, monkeypatch, budget):
    node, real, looks = Node(tmp_path, budget), os.scandir, []
    node.fetch("a.tar")
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or real(path))
    node.fetch("b.tar")
    assert len(looks) == 1


def test_a_disk_smaller_than_the_budget_limits_the_shards(tmp_path, monkeypatch):
    cache, real = ShardCache(str(tmp_path), 300_000), os.statvfs(tmp_path)
    (tmp_path / "shards" / "a~1").write_bytes(bytes(50_000))
    free = [400_000]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 500_000, free[0], free[0], *real[5:])))
    assert cache.limit() == 300_000
    free[0] = 300_000
    assert cache.limit() == 300_000 + 50_000 - (1 << 16)
    free[0] = 100_000
    assert cache.limit() == 100_000 + 50_000 - (1 << 16)  # some is for the files of jobs
    free[0] = 0
    assert cache.limit() == 0
    assert cache.most() == 300_000
