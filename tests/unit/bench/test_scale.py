"""Curves of tiny sizes: every point is there."""

from dataload.bench.scale import measure_scale


def test_every_size_has_a_point(tmp_path):
    sizes = {"ordered": (1000, 10**9), "loaded": (1000, 2000), "shards": (1, 2), "ranks": (1, 3)}
    times, memory, loader, opening, reading, ranks = measure_scale(tmp_path, **sizes, records_of_ranks=200_000)
    orders = {"sequential", "global", "shards, pool of 1,024"}
    for curve, names, xs in (
        (times, orders, [1000, 10**9]),
        (memory, orders, [1000, 10**9]),
        (loader, {"in order", "shuffled"}, [1000, 2000]),
        (opening, {"open"}, [1, 2]),
        (reading, {"read_batch"}, [1, 2]),
        (ranks, orders, [1, 3]),
    ):
        assert set(curve.lines) == names, curve.title
        for points in curve.lines.values():
            assert [x for x, _ in points] == xs
            assert all(y > 0 for _, y in points)
    # A permutation of 10^9 records would take 8 GB, and a block of it 128 KiB.
    assert all(line[-1][1] < 8e6 for line in memory.lines.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0.syr", "2-0.syr", "2-1.syr"]
