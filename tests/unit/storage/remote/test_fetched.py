"""Ranges that are fetched before they are read: which bytes, in how many requests, and where they are copied to."""

import itertools
import threading
import time
from contextlib import ExitStack, closing, nullcontext
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest

from dataload._util.clock import DecodeClock
from dataload.errors import MachineError, StoreError
from dataload.storage import Remote
from dataload.storage.remote.client import ObjectClient
from dataload.storage.remote.clients import client_of
from dataload.storage.remote.files import RemoteFile
from dataload.storage.remote.prefetch import ranges
from dataload.storage.remote.prefetch.ranges import RangePrefetcher
from dataload.storage.remote.requests import GAP
from dataload.storage.remote.settings import ObjectVersion

pytest.importorskip("obstore")
NUMBERS = itertools.count()
CONTENT = np.random.default_rng(0).integers(0, 256, 40 * GAP, np.uint8)
PART = 3 * GAP


@pytest.fixture
def stored():
    """A file in memory: its URL, its version and settings to read it with."""
    url, remote = f"memory://fetched-{next(NUMBERS)}/a.bin", Remote.of(remote={"part_bytes": PART, "connections": 3})
    client, key = client_of(url, writer := Remote())
    client.put(url, key, CONTENT.tobytes(), "overwrite")
    yield url, ObjectVersion(len(CONTENT), "", has_etag=False), remote
    writer.release()
    remote.release()


def step(url, *ranges):
    return [(url, *np.array(ranges, np.int64).reshape(-1, 2).T)]


def read(prefetcher, url, *ranges):
    """Return the numbers of the ranges that were not requested; the others must have their bytes."""
    starts, lengths = np.array(ranges, np.int64).T
    buffer = np.zeros(int(lengths.sum()), np.uint8)
    missing = prefetcher.fill(url, buffer, starts, starts + lengths).tolist()
    ends = np.cumsum(lengths)
    for row, (start, length) in enumerate(ranges):
        if row not in missing:
            assert np.array_equal(buffer[ends[row] - length : ends[row]], CONTENT[start : start + length])
    return missing


def test_loaders_of_one_source_read_what_was_fetched_for_them(stored):
    url, version, remote = stored
    file, starts = RemoteFile(url, version, remote), {9: 1, 1000: 2, 2000: 1}
    with ExitStack() as ahead:
        for start, loader in starts.items():
            with DecodeClock(loader):
                steps = iter([step(url, (start, 7))])
                ahead.enter_context(closing(RangePrefetcher({url: version}, steps, remote)))
        for start, loader in [*starts.items(), *((start, 0) for start in starts)]:  # 0: for an unknown one
            with DecodeClock(loader):
                assert file.read(start, 7) == CONTENT[start : start + 7].tobytes()
        assert remote.traffic.total().requests == 3
        with DecodeClock(3):
            assert len(file.read(9, 7)) == 7
    assert remote.traffic.total().requests == 4
    assert not remote.ranges


def test_a_thread_that_reads_for_no_loader_waits_for_no_plan_and_requests_all_at_once(stored, monkeypatch):
    url, version, remote = stored
    ended, late, real, both = threading.Event(), [], ObjectClient._request, threading.Barrier(2)

    def steps():
        yield step(url, (9, 7))
        late.append(not ended.wait(10))

    def request(client, url, key, version, chunk):
        if chunk.start > 9:
            both.wait(10)
        return real(client, url, key, version, chunk)

    monkeypatch.setattr(ObjectClient, "_request", request)
    offsets, lengths = np.array([30 * GAP, 9, 35 * GAP]), np.array([5, 7, 6])
    with DecodeClock(1):
        prefetcher = RangePrefetcher({url: version}, steps(), remote)
    with closing(prefetcher):
        found = RemoteFile(url, version, remote).copies(offsets, lengths)
        assert not late
        ended.set()
    assert found == [CONTENT[start : start + length].tobytes() for start, length in zip(offsets, lengths, strict=True)]


def test_ranges_of_steps_are_merged_cut_and_fetched_once(stored):
    url, version, remote = stored
    far = 20 * GAP
    steps = [
        step(url, (5, 10), (far, 7)),
        # These are merged: what lies less than a gap apart, and what overlaps, also of two steps.
        step(url, (100, 50), (150 + GAP, 50)),
        step(url, (120, 100), (-3, 9), (version.size - 4, 9), (90, 0)),
        step(url, (far, 4 * PART)),
    ]
    with closing(RangePrefetcher({url: version}, iter(steps), remote)) as prefetcher:
        assert read(prefetcher, url, (5, 10), (far, 7)) == []
        assert read(prefetcher, url, (100, 50), (150 + GAP, 50)) == []
        prefetcher.received()
        assert read(prefetcher, url, (far, 4 * PART), (120, 100), (90, 130), (90, 0)) == []
        assert read(prefetcher, url, (3, 5), (200 + GAP, 1), (far + 4 * PART, 1), (100, 1)) == [0, 1, 2]
        for _ in range(3):
            prefetcher.received()
    downloads = remote.traffic.total()
    assert downloads.requests == 2 + 1 + 4
    assert downloads.nbytes == 10 + 7 + (110 + GAP) + 4 * PART
    assert downloads.wasted_bytes == 110 + GAP - (50 + 50 + 100)
    assert "ahead" not in remote.ranges


def test_a_machine_that_starts_no_more_threads_leaves_no_reader_waiting(stored, monkeypatch):
    url, version, remote = stored
    start = Mock(side_effect=[DEFAULT, DEFAULT, RuntimeError], wraps=threading.Thread.start)
    with DecodeClock(1):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread: start(thread))
            with pytest.raises(MachineError, match="starts no more threads for downloads: lower remote"):
                RangePrefetcher({url: version}, iter([step(url, (5, 10))]), remote)
        assert RemoteFile(url, version, remote).read(5, 10) == CONTENT[5:15].tobytes()


def test_what_was_not_requested_is_fetched_by_the_reader(stored):
    url, version, remote = stored
    with closing(RangePrefetcher({url: version}, iter([step(url, (5, 10))]), remote)):
        found = RemoteFile(url, version, remote).copies(np.array([20 * GAP, 5, 7 * GAP]), np.array([3, 10, 2]))
    assert found == [CONTENT[at : at + n].tobytes() for at, n in ((20 * GAP, 3), (5, 10), (7 * GAP, 2))]
    assert remote.traffic.total().nbytes == 15


def test_a_few_steps_are_fetched_ahead_of_those_received(stored, monkeypatch):
    """Of steps of equal bytes, four, and the one that makes them more."""
    monkeypatch.setattr(ranges, "_GROUP_STEPS", 1)
    url, version, remote = stored
    taken = []
    steps = (taken.append(number) or step(url, (2 * GAP * number, 10)) for number in range(9))
    with closing(RangePrefetcher({url: version}, steps, remote)) as prefetcher:
        for ahead in (5, 6, 7):
            deadline = time.monotonic() + 60
            while remote.traffic.total().nbytes < 10 * ahead and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.02)
            assert (len(taken), remote.traffic.total().nbytes) == (ahead, 10 * ahead)
            prefetcher.received()
        assert read(prefetcher, url, (0, 10), (8 * GAP, 10), (16 * GAP, 10)) == [0], "kept until it was received"
        assert len(taken) == 9, "a reader that lacks a range has all planned"


@pytest.mark.parametrize("error", [OSError("reset"), StoreError("it is gone")])
def test_requests_that_fail_are_left_to_the_reader(stored, monkeypatch, error):
    """Unless their last attempt fails while the reader waits."""
    begun, waits = threading.Semaphore(0), threading.Event()
    url, version, remote = stored
    others = threading.enumerate()

    def fail(*_):
        begun.release()
        assert waits.wait(60)
        raise error

    def steps():
        yield step(url, (5, 10))
        yield step(url, (2 * GAP, 31))  # more than four times the bytes of the first
        waits.set()  # a reader that waits looks farther ahead

    monkeypatch.setattr(ObjectClient, "stream", fail)
    monkeypatch.setattr(ranges, "_GROUP_STEPS", 1)
    monkeypatch.setattr(ranges, "_CLOSE_SECONDS", 60)
    with closing(RangePrefetcher({url: version}, steps(), remote)) as prefetcher:
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60)
        with pytest.raises(StoreError) if isinstance(error, StoreError) else nullcontext():
            assert read(prefetcher, url, (5, 10)) == [0]
        assert read(prefetcher, url, (5, 10)) == [0]
    assert set(threading.enumerate()) <= set(others)
