"""Hints cover what will be touched, and are given when a probe finds the data cold."""

import errno
import mmap
import os

import numpy as np
import pytest

from dataload.storage.local import record_files as mapped
from dataload.storage.local import record_files as readahead
from dataload.storage.local.record_files import MappedFile, is_cold, will_need

PAGE = mmap.PAGESIZE


class Recorded:
    """A map of 100 pages that notes which ranges are asked for."""

    def __init__(self):
        self.ranges = []

    def __len__(self):
        return 100 * PAGE

    def madvise(self, option, start, size):
        assert option == mmap.MADV_WILLNEED
        self.ranges.append((start, size))


@pytest.mark.parametrize(
    ("offsets", "lengths", "expected"),
    [
        ([9 * PAGE + 5, 10, 5 * PAGE], np.array([2 * PAGE, 7, 0]), [(0, 17), (9 * PAGE, 2 * PAGE + 5)]),
        ([5 * PAGE, 6 * PAGE, 200 * PAGE, -7], PAGE, [(5 * PAGE, 2 * PAGE)]),  # neighbours, and what is outside
        ([100, 0, 64, 4 * PAGE], 64, [(0, 164), (4 * PAGE, 64)]),  # of one page once
    ],
)
def test_ranges_begin_at_pages_and_cover_what_is_touched(offsets, lengths, expected):
    recorded = Recorded()
    will_need(recorded, np.array(offsets), lengths)
    assert recorded.ranges == expected


@pytest.mark.parametrize(("error", "cold"), [(0, False), (errno.EAGAIN, True), (errno.EOPNOTSUPP, False)])
def test_what_the_system_answers(monkeypatch, error, cold):
    def preadv(*_):
        if error:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(readahead.os, "preadv", preadv)
    assert is_cold(0, 0) is cold


@pytest.mark.parametrize("cold", [False, True])
def test_reads_are_the_same_and_hinted_only_when_cold(tmp_path, monkeypatch, cold):
    hinted = []
    monkeypatch.setattr(mapped, "is_cold", lambda *_: cold)
    monkeypatch.setattr(mapped, "will_need", lambda m, *ranges: hinted.append(ranges) or will_need(m, *ranges))
    content = np.random.default_rng(0).integers(0, 256, 50 * PAGE, dtype=np.uint8)
    content.tofile(tmp_path / "data")
    monkeypatch.setattr(mapped, "STEPS_BETWEEN_PROBES", 0)
    file = MappedFile(str(tmp_path / "data"))
    offsets = np.random.default_rng(1).integers(0, 49 * PAGE, 200)
    columns = content[np.array([9, 0, 25 * PAGE])[:, None, None] + (offsets // 2)[:, None] + np.arange(8)]
    assert np.array_equal(file.gather(offsets, 300), content[offsets[:, None] + np.arange(300)])
    assert file.copies(offsets, np.full(200, 5)) == [content[o : o + 5].tobytes() for o in offsets]
    assert np.array_equal(
        file.gather_every(7, 64, 64, offsets // 64), content[offsets[:, None] // 64 * 64 + 7 + np.arange(64)]
    )
    assert np.array_equal(file.gather_columns(offsets // 2, np.array([9, 0, 25 * PAGE]), 8), columns)
    assert len(hinted) == (4 if cold else 0)
    if cold:
        assert all(np.array_equal(where, offsets) for where, _ in hinted[:2])
        assert np.array_equal(hinted[2][0], offsets // 64 * 64 + 7)
        assert hinted[3][1] == 8
