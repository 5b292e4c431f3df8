"""Waits in torch's profiler, and the table of all ranks; tests/integration has those of several processes."""

import gc
import weakref
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

import dataload  # noqa: E402 - skipped where torch is missing
from dataload import Loader, RangeSource, WorkerError  # noqa: E402
from dataload.loader.statistics import StageStatistics, Statistics  # noqa: E402
from dataload.torch import RankStatistics, statistics, wait_ranges  # noqa: E402
from dataload.torch.device import DeviceLoader  # noqa: E402

profiler = torch.autograd.profiler.profile  # torch.profiler imports the compiler first, for seconds


def read(loader):
    for _ in loader:
        torch.zeros(4).add_(1)


def test_ranges_do_not_overlap_with_the_work_of_the_model():
    with Loader(RangeSource(8), batch_size=2) as loader, wait_ranges(loader), profiler() as profile:
        read(loader)
    spans = [(e.time_range.start, e.name) for e in profile.function_events if e.name in ("dataload.wait", "aten::add_")]
    assert [name for _, name in sorted(spans)] == ["dataload.wait", "aten::add_"] * 4


def test_a_wait_that_fails_ends_its_range():
    def fails(record):
        raise ValueError

    def act():
        with pytest.raises(WorkerError):
            next(iter(loader))
        torch.zeros(4).add_(1)

    with Loader(RangeSource(8), batch_size=2, transform=fails) as loader, wait_ranges(loader):
        with profiler() as profile:
            act()
        (range_,) = (event for event in profile.function_events if event.name == "dataload.wait")
        (work,) = (event for event in profile.function_events if event.name == "aten::add_")
        assert range_.time_range.end <= work.time_range.start


def test_cuda_has_the_ranges_of_nvtx(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with Loader(RangeSource(4), batch_size=2) as loader, wait_ranges(loader):
        read(loader)
    assert seen == ["dataload.wait", "pop"] * 2


def test_a_loader_with_ranges_is_dropped_at_once():
    loader = Loader(RangeSource(4), batch_size=2)
    with wait_ranges(loader):
        read(loader)
    gc.disable()
    try:
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None
    finally:
        gc.enable()


def of(wait, consumer, **changed):
    """Statistics of 10 batches."""
    fields = {"steps": 10, "rows": 100, "nbytes": 0, "wait_seconds": wait, "consumer_seconds": consumer, "workers": 2}
    fields |= {"executor": "threads", "cpus": 2, "stages": {"decode": StageStatistics(10, 1.9 * (wait + consumer))}}
    return Statistics(**fields | changed)


def test_the_table_names_the_slowest_rank_and_its_reason():
    # Rank 3 has waited longer, but for its first batch.
    table = RankStatistics({0: of(0.1, 3.9), 2: of(2.0, 2.0), 3: of(5.0, 3.9, first_wait_seconds=4.9), 1: of(1.0, 3.0)})
    assert table.slowest == 2
    assert table.verdict == f"rank 2 is the slowest, with 200.0 ms a batch; {table.ranks[2].verdict}"
    assert "limit: decode (100% of worker time)" in table.verdict
    assert str(table).splitlines() == [
        "  rank   batches     rows/s  waits  ms/batch  ready  work in",
        "     0        10         25     2%      10.0    0.0  2 threads",
        "     1        10         25    25%     100.0    0.0  2 threads",
        "     2        10         25    50%     200.0    0.0  2 threads",
        "     3        10         11     2%      10.0    0.0  2 threads",
        table.verdict,
    ]
    assert repr(table) == f"RankStatistics(4 ranks; {table.verdict})"


def test_no_rank_waits():
    table = RankStatistics({0: of(0.1, 3.9), 1: of(0.0, 4.0)})
    assert (table.slowest, table.verdict) == (None, "no rank waits for data")
    assert RankStatistics({3: of(0.2, 3.8)}).slowest == 3
    for steps in (0, 1):
        verdict = RankStatistics({0: of(2.0, 2.0, steps=steps)}).verdict
        assert verdict.startswith("rank 0 is the slowest, with 2,000.0 ms a batch; limit: unknown")


def test_a_single_process_gets_its_own(monkeypatch):
    with DeviceLoader(dataload.Loader(RangeSource(8), batch_size=2), "cpu") as loader:
        batches = iter(loader)
        next(batches)
        before = loader.loader.statistics()
        next(batches)
        assert statistics(loader).ranks[0].steps == 2
        assert statistics(loader, since=before).ranks[0].steps == 1
        distributed = torch.distributed
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            assert statistics(loader).ranks[0].steps == 2
            monkeypatch.setattr(distributed, "all_gather_object", Mock(side_effect=RuntimeError("closed")))
            with pytest.raises(
                dataload.DataloadError, match=r"could not be gathered: a process has ended, .*\(closed\)"
            ):
                statistics(loader)
        finally:
            distributed.destroy_process_group()
    with pytest.raises(TypeError, match=r"^statistics takes a Loader, .*; found list$"):
        statistics([])
