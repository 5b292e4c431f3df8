"""The node's cache: one download, leases, a budget, full disks, and what killed processes leave."""

from __future__ import annotations

import errno
import gc
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time

import pytest

from dataload._util.waits import Wait
from dataload.errors import ConfigError, MachineError, SourceError, SourceNotFoundError
from dataload.storage.remote.cache import CacheFullError, ShardCache
from dataload.storage.remote.checked import check_shard
from dataload.storage.remote.files import open_shards
from dataload.storage.remote.jobs import Shares
from dataload.storage.remote.settings import ObjectVersion


def version(size=100, tag='"a"'):
    return ObjectVersion(size, tag, True)


def url(name):
    return f"s3://bucket/{name}"


def never():
    return False


class Downloads:
    """Writes shards whose bytes are the number of the download."""

    def __init__(self, size=100):
        self.count = 0
        self.size = size

    def __call__(self, descriptor):
        self.count += 1
        os.pwrite(descriptor, bytes([self.count]) * self.size, 0)


def content(lease):
    with open(lease.path, "rb") as file:
        return file.read()


def files(root):
    return sorted(name.partition("~")[0] for name in os.listdir(root / "shards"))


def test_a_shard_is_downloaded_once(tmp_path):
    cache, download = ShardCache(str(tmp_path), 1000), Downloads()
    leases = [cache.fetch(url("x.tar"), version(), download, never) for _ in range(3)]
    assert [content(lease) for lease in leases] == [b"\1" * 100] * 3
    assert cache.find(ShardCache.name(url("x.tar"), version())).path == leases[0].path
    assert download.count == 1
    assert files(tmp_path) == ["x.tar"]


def test_another_version_is_another_file(tmp_path):
    cache, download = ShardCache(str(tmp_path), 1000), Downloads()
    names = {
        cache.fetch(url("x"), version(), download, never).path,
        cache.fetch(url("x"), version(tag='"b"'), download, never).path,
        cache.fetch("s3://other/x", version(), download, never).path,
    }
    assert len(names) == download.count == 3


@pytest.mark.parametrize("name", ["x" * 300, "...", "a b/ü&c.tar", "~"])
def test_names_of_files(tmp_path, name):
    found = ShardCache.name(url(name), version())
    assert len(found) < 150
    assert not found.startswith(".")
    assert "/" not in found
    assert content(ShardCache(str(tmp_path), None).fetch(url(name), version(), Downloads(), never))


def test_the_longest_unused_is_evicted(tmp_path):
    cache, download = ShardCache(str(tmp_path), 300), Downloads()
    for age, name in enumerate("abc"):
        path = cache.fetch(url(name), version(), download, never).path
        os.utime(path, ns=(age, age))
    cache.find(ShardCache.name(url("a"), version()))  # used again
    gc.collect()
    cache.fetch(url("d"), version(), download, never)
    assert files(tmp_path) == ["a", "c", "d"]


def test_what_is_being_read_is_not_evicted(tmp_path):
    cache, download = ShardCache(str(tmp_path), 250), Downloads()
    held = [cache.fetch(url(name), version(), download, never) for name in "ab"]
    with pytest.raises(CacheFullError, match=r"no room for s3://bucket/c, which needs 100 bytes, 50 more than.*budget"):
        cache.fetch(url("c"), version(), download, never)
    assert files(tmp_path) == ["a", "b"]  # not even the part is left
    held.pop(0)
    cache.fetch(url("c"), version(), download, never)
    assert files(tmp_path) == ["b", "c"]


def test_leases_that_are_not_in_use_are_given_up(tmp_path):
    cache, download = ShardCache(str(tmp_path), 250), Downloads()
    held = [cache.fetch(url(name), version(), download, never) for name in "ab"]
    cache.fetch(url("c"), version(), download, lambda: bool(held and held.pop()))
    assert files(tmp_path) == ["a", "c"]


def test_a_shard_larger_than_the_budget(tmp_path):
    cache = ShardCache(str(tmp_path), 99)
    with pytest.raises(ConfigError, match=r"s3://bucket/x has 100 bytes, and the budget.* is 99: raise remote.budget"):
        cache.fetch(url("x"), version(), Downloads(), never)


@pytest.mark.parametrize("folder", ["", "shards"])
@pytest.mark.parametrize(("mode", "who"), [(0o777, "everybody"), (0o770, r"its group \d+")])
def test_a_directory_that_others_may_write_to(tmp_path, folder, mode, who):
    (tmp_path / "cache" / "shards").mkdir(parents=True)
    path = tmp_path / "cache" / folder
    path.chmod(mode)
    match = rf"{path} cannot be used as a cache, because {who} may write to it: run `chmod go-w {path}` if nobody else"
    with pytest.raises(ConfigError, match=match):
        ShardCache(str(tmp_path / "cache"), None)
    path.chmod(0o755)
    ShardCache(str(tmp_path / "cache"), None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_cache_of_another_user_is_not_believed(tmp_path):
    cache, download = ShardCache(str(tmp_path), None), Downloads()
    path = cache.fetch(url("a"), version(), download, never).path
    for change in (lambda: os.chown(path, 4321, 4321), lambda: os.chmod(path, 0o660), lambda: os.chmod(path, 0o602)):
        change()
        assert content(cache.fetch(url("a"), version(), download, never)) == bytes([download.count]) * 100
    assert download.count == 4
    part = tmp_path / "shards" / f".{ShardCache.name(url('b'), version())}.part"
    part.touch()
    part.chmod(0o666)  # whoever made it could write to the shard afterwards
    assert os.stat(cache.fetch(url("b"), version(), download, never).path).st_mode & 0o777 == 0o600
    for folder in (tmp_path / "shards", tmp_path):
        os.chown(folder, 4321, -1)
        with pytest.raises(ConfigError, match=rf"{folder} cannot be used as a cache, because it belongs to user 4321"):
            ShardCache(str(tmp_path), None)


def test_links_in_a_cache_are_not_followed_and_the_cache_may_be_one(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    ShardCache(str(tmp_path / "link"), None)
    (tmp_path / "cache" / "shards").rename(tmp_path / "shards")
    (tmp_path / "cache" / "shards").symlink_to("../shards")
    with pytest.raises(ConfigError, match=r"shards cannot be used as a cache, because it is a symbolic link"):
        ShardCache(str(tmp_path / "cache"), None)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match=r"the cache .*file cannot be created: File exists"):
        ShardCache(str(tmp_path / "file"), None)


def test_a_failed_download_leaves_nothing(tmp_path):
    def fail(descriptor):
        raise SourceError("gone")

    cache = ShardCache(str(tmp_path), None)
    with pytest.raises(SourceError, match="gone"):
        cache.fetch(url("x"), version(), fail, never)
    assert files(tmp_path) == []
    assert content(cache.fetch(url("x"), version(), Downloads(), never)) == b"\1" * 100


def test_a_full_disk_evicts(tmp_path):
    class Full(Downloads):
        def __call__(self, descriptor):
            if self.count and len(os.listdir(tmp_path / "shards")) > 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().__call__(descriptor)

    cache, download = ShardCache(str(tmp_path), None), Full()
    for age, name in enumerate("ab"):
        os.utime(cache.fetch(url(name), version(), download, never).path, ns=(age, age))
    cache.fetch(url("c"), version(), download, never)
    assert files(tmp_path) == ["b", "c"]


def test_a_full_disk_without_anything_to_evict(tmp_path):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    match = (
        r"the disk of the cache .* is full: s3://bucket/x needs 100 bytes, the budget is 500, and nothing is left to "
        r"be evicted; free are [\d,]+ bytes; no shard is in use; no other process is registered: raise remote"
    )
    with pytest.raises(MachineError, match=match):
        ShardCache(str(tmp_path), 500).fetch(url("x"), version(), full, never)
    assert files(tmp_path) == []


def test_another_error_of_the_disk(tmp_path):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        ShardCache(str(tmp_path), 500).fetch(url("x"), version(), fail, never)


class Opened:
    def __init__(self):
        self.is_open = True

    def release(self):
        self.is_open = False


def test_an_open_shard_at_the_address_of_one_that_is_gone_is_given_up():
    shards = open_shards()
    for _ in range(100):  # other threads may take the address first
        while shards.give_up():
            pass
        first = Opened()
        address = id(first)
        shards.touch(first)
        del first
        second = Opened()
        if id(second) == address:
            break
    assert id(second) == address
    shards.touch(second)
    assert shards.give_up()
    assert not second.is_open


def test_without_a_budget_the_disk_is_the_limit(tmp_path, monkeypatch):
    cache, download = ShardCache(str(tmp_path), None), Downloads()
    cache.fetch(url("a"), version(), download, never)
    real = os.statvfs(tmp_path)

    def small(path):  # 1,000 bytes, of which 220 are for the cache, and 50 are spared
        used = sum(file.stat().st_size for file in (tmp_path / "shards").iterdir())
        return os.statvfs_result((1, 1, 1000, 220 - used, 220 - used, *real[5:]))

    monkeypatch.setattr(os, "statvfs", small)
    cache.fetch(url("b"), version(), download, never)
    assert files(tmp_path) == ["b"]


def test_others_wait_for_a_download(tmp_path):
    cache, download = ShardCache(str(tmp_path), None), Downloads()
    begun, go_on = threading.Event(), threading.Event()

    def slowly(descriptor):
        begun.set()
        go_on.wait()
        download(descriptor)

    found = []
    first = threading.Thread(target=lambda: found.append(cache.fetch(url("x"), version(), slowly, never)))
    others = [
        threading.Thread(target=lambda: found.append(cache.fetch(url("x"), version(), download, never)))
        for _ in range(4)
    ]
    first.start()
    begun.wait()
    for other in others:
        other.start()
    assert not found
    go_on.set()
    for thread in (first, *others):
        thread.join()
    assert [content(lease) for lease in found] == [b"\1" * 100] * 5
    assert download.count == 1


def _download_until_killed(root, ready):
    def fill(descriptor):
        os.pwrite(descriptor, b"x" * 50, 0)
        ready.set()
        signal.pause()

    ShardCache(root, 150).fetch(url("x"), version(), fill, never)


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_what_a_killed_process_leaves_is_taken_over(tmp_path, same):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_download_until_killed, args=(str(tmp_path), ready))
    process.start()
    ready.wait()
    cache = ShardCache(str(tmp_path), 150)
    if not same:  # while it is alive, its part counts and stays
        with pytest.raises(CacheFullError):
            cache.fetch(url("y"), version(), Downloads(), never)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    process.close()
    assert files(tmp_path) == [".x"]
    name = "x" if same else "y"
    assert content(cache.fetch(url(name), version(), Downloads(), never)) == b"\1" * 100
    assert files(tmp_path) == [name]


def test_a_link_is_not_followed(tmp_path):
    cache = ShardCache(str(tmp_path / "cache"), None)
    (tmp_path / "secret").write_bytes(b"secret")
    os.symlink(tmp_path / "secret", tmp_path / "cache" / "shards" / ShardCache.name(url("x"), version()))
    with pytest.raises(OSError):
        cache.find(ShardCache.name(url("x"), version()))
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_names_tell_length_and_md5():
    md5 = "0123456789abcdef" * 2
    for address, tag, expected in [
        (url("x"), f'"{md5}"', f"~100~{md5}"),
        ("az://c/x", f'"{md5}"', "~100"),
        (url("x"), f'"{md5}-3"', "~100"),
        (url("x"), f'W/"{md5}"', "~100"),
    ]:
        assert re.fullmatch(f"x~[0-9a-f]{{20}}{expected}", ShardCache.name(address, version(tag=tag)))


def test_pruning_spares_what_is_used(tmp_path):
    cache, download = ShardCache(str(tmp_path), None), Downloads()
    for age, name in enumerate("abc"):
        os.utime(cache.fetch(url(name), version(), download, never).path, ns=(age, age))
    (tmp_path / "shards" / ".d~0.part").write_bytes(b"left over")
    gc.collect()
    held = cache.find(ShardCache.name(url("a"), version()))
    os.utime(held.path, ns=(0, 0))
    assert [file.is_used() for file in cache.files()] == [True, False, False, False]
    assert [file.name.partition("~")[0] for file in cache.prune(200)] == [".d", "b"]
    assert files(tmp_path) == ["a", "c"]
    assert [file.name.partition("~")[0] for file in cache.prune()] == ["c"]
    del held
    assert len(cache.prune()) == 1
    assert files(tmp_path) == []


def test_checks(tmp_path):
    content = bytes([1]) * 100
    md5, sha256 = hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest()
    cache = ShardCache(str(tmp_path), None)
    for name, tag in [("plain", '"a"'), ("tagged", f'"{md5}"')]:
        cache.fetch(url(name), version(tag=tag), Downloads(), never)
    (tmp_path / "shards" / "unknown").touch()
    found = {file.name.partition("~")[0]: file for file in cache.files()}
    assert check_shard(found["plain"]).by == "length"
    assert check_shard(found["plain"], sha256).by == "sha256"
    assert check_shard(found["tagged"]).by == "md5"
    assert check_shard(found["tagged"], md5=False).by == "length"
    assert check_shard(found["unknown"]).by is None
    assert not any(check_shard(file, sha256).problem for file in found.values())
    for file in found.values():
        with open(file.path, "r+b") as stream:
            stream.write(b"\2")
    wrong = hashlib.md5(b"\2" + content[1:]).hexdigest()
    assert check_shard(found["tagged"]).problem == f"its MD5 is {wrong}, and that of the object is {md5}"
    assert "its SHA256 is" in check_shard(found["plain"], sha256).problem
    os.truncate(found["plain"].path, 60)
    assert check_shard(found["plain"]).problem == "it has 60 bytes, and the object has 100"
    for file in found.values():
        cache.remove(file)
        cache.remove(file)
        assert check_shard(file) is None
    assert files(tmp_path) == []


def test_without_a_budget_the_users_cache_directory_takes_a_share_of_what_is_free(tmp_path, monkeypatch):
    cache, real = ShardCache(str(tmp_path), None, share=0.1), os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 1000, 700, 700, *real[5:])))
    assert cache.limit() == 70
    (tmp_path / "shards" / "a~1").write_bytes(bytes(50))
    assert cache.limit() == 75
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 1000, 10, 10, *real[5:])))
    assert cache.limit() == 6
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 5000, 10, 10, *real[5:])))
    assert cache.limit() == 0  # a twentieth of the disk stays free in any case


def test_a_failed_download_is_not_waited_for_while_threads_still_write_to_it(tmp_path):
    cache, kept = ShardCache(str(tmp_path), None), []
    waiting = threading.Thread(target=cache.fetch, args=(url("a"), version(), Downloads(), never), daemon=True)

    def fails(descriptor):
        kept.append(os.dup(descriptor))
        waiting.start()
        time.sleep(0.2)  # it opens the part, and waits for its lock
        raise SourceError("no answer")

    with pytest.raises(SourceError, match="no answer"):
        cache.fetch(url("a"), version(), fails, never)
    waiting.join(10)
    assert not waiting.is_alive()
    os.close(kept.pop())
    assert files(tmp_path) == ["a"]


def test_a_shard_that_somebody_has_cut_is_downloaded_again(tmp_path):
    cache, download = ShardCache(str(tmp_path), None), Downloads()
    path = cache.fetch(url("a"), version(), download, never).path
    os.truncate(path, 60)
    assert cache.find(ShardCache.name(url("a"), version())) is None
    lease = cache.fetch(url("a"), version(), download, never)
    with open(lease.path, "rb") as file:
        assert file.read() == bytes([2]) * 100  # the second download


def test_who_waits_for_room_gets_it_when_a_lease_ends(tmp_path):
    cache, download = ShardCache(str(tmp_path), 150), Downloads()
    held = [cache.fetch(url("a"), version(), download, never)]
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            held.clear()

    lease = cache.fetch(url("b"), version(), download, never, Wait(60, pause=pause))
    assert (content(lease), len(pauses), files(tmp_path)) == (b"\2" * 100, 3, ["b"])


def test_who_waits_for_room_in_vain_learns_who_has_it(tmp_path):
    cache, download = ShardCache(str(tmp_path), 450), Downloads()
    held = [cache.fetch(url(name), version(), download, never) for name in "abcd"]
    shares = Shares(str(tmp_path), cache.limit, "train-00.tar and 3 more", 1.0, 200)
    match = (
        r"no room for s3://bucket/e, which needs 100 bytes, 50 more than the budget leaves beside the shards that "
        rf"are being read; in use are a, b, c and 1 more \(400 bytes\); process {os.getpid()} reads train-00.tar and 3 "
        r"more and needs 200 bytes: raise remote.budget, free space on the disk, or end one of these jobs"
    )
    with pytest.raises(CacheFullError, match=match):
        cache.fetch(url("e"), version(), download, never, Wait(0.01))
    del shares
    assert len(held) == 4
    assert files(tmp_path) == ["a", "b", "c", "d"]


def test_a_download_that_does_not_get_on_is_not_waited_for(tmp_path):
    """Of a process that was stopped, say. One that writes is waited for as long as it takes."""
    cache = ShardCache(str(tmp_path), None, timeout=0.1)
    begun, go_on = threading.Event(), threading.Event()

    def hangs(descriptor):
        begun.set()
        go_on.wait()

    first = threading.Thread(target=cache.fetch, args=(url("x"), version(), hangs, never))
    first.start()
    begun.wait()
    try:
        match = (
            r"another process has not written to .*\.x~.*\.part for 0.1 s; in use are x \(100 bytes\); no other process"
        )
        with pytest.raises(CacheFullError, match=match):
            cache.fetch(url("x"), version(), Downloads(), never)
        name = ShardCache.name(url("x"), version())
        before = cache.progress(name)
        os.utime(tmp_path / "shards" / f".{name}.part", ns=(1, 1))
        assert None not in (before, cache.progress(name))
        assert before != cache.progress(name)
    finally:
        go_on.set()
        first.join()


def test_a_part_without_room_is_no_progress(tmp_path):
    cache, name = ShardCache(str(tmp_path), None), ShardCache.name(url("x"), version())
    (tmp_path / "shards" / f".{name}.part").touch()
    assert cache.progress(name) is None


def test_a_cache_that_is_deleted_while_it_is_used(tmp_path):
    cache, download = ShardCache(str(tmp_path / "cache"), None), Downloads()
    cache.fetch(url("a"), version(), download, never)
    shutil.rmtree(tmp_path / "cache")
    name = ShardCache.name(url("a"), version())
    assert (cache.names(), cache.files(), cache.holds(name), cache.find(name)) == (set(), [], False, None)
    assert content(cache.fetch(url("a"), version(), download, never)) == b"\2" * 100

    def deletes(descriptor):
        shutil.rmtree(tmp_path / "cache")

    with pytest.raises(
        SourceError, match=r"shards is deleted again and again while it is in use: set remote.cache to an"
    ):
        cache.fetch(url("b"), version(), deletes, never)

    def missing(descriptor):
        raise SourceNotFoundError("there is no s3://bucket/c")

    with pytest.raises(SourceNotFoundError, match="there is no s3://bucket/c"):
        cache.fetch(url("c"), version(), missing, never)
    shutil.rmtree(tmp_path / "cache")
    assert cache.limit() > 0


def test_a_disk_smaller_than_the_budget_limits_the_shards(tmp_path, monkeypatch):
    cache, real = ShardCache(str(tmp_path), 300_000), os.statvfs(tmp_path)
    (tmp_path / "shards" / "a~1").write_bytes(bytes(50_000))
    free = [400_000]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 500_000, free[0], free[0], *real[5:])))
    assert cache.limit() == 300_000
    free[0] = 100_000
    assert cache.limit() == 100_000 + 50_000 - (1 << 16)  # some is for the files of jobs
    free[0] = 0
    assert cache.limit() == 0
    assert cache.most() == 300_000


def test_a_disk_without_room_for_another_file_evicts(tmp_path, monkeypatch):
    cache, download, real, fails = ShardCache(str(tmp_path), 500), Downloads(), os.open, []
    cache.fetch(url("a"), version(), download, never)

    def full(path, flags, *mode, **more):
        if flags & os.O_CREAT and not fails:
            fails.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return real(path, flags, *mode, **more)

    monkeypatch.setattr(os, "open", full)
    assert content(cache.fetch(url("b"), version(), download, never)) == b"\2" * 100
    assert (len(fails), files(tmp_path)) == (1, ["b"])
