"""Costs over tiny sizes: every size has a row."""

from itertools import groupby

from benchmarks.scale import scale


def test_every_size_has_a_row():
    sizes = {"ordered": (1000, 10**9), "loaded": (1000, 2000), "shards": (1, 2), "ranks": (1, 3)}
    rows = scale(**sizes, records_of_ranks=200_000)
    found = [list(group) for _, group in groupby(rows, key=lambda row: row["title"])]
    orders = {"sequential", "global", "shards, pool of 1,024"}
    for table, names, cases in zip(
        found,
        (orders, orders, {"in order", "shuffled"}, {"open"}, {"read_batch"}, orders),
        (
            "1,000 1,000,000,000 records",
            "1,000 1,000,000,000 records",
            "1,000 2,000 records",
            *["1 2 shards"] * 2,
            "1 3 ranks",
        ),
        strict=True,
    ):
        *counts, size = cases.split()
        assert [row["case"] for row in table] == [f"{count} {size}" for count in counts]
        assert all(set(row) == {"title", "case", *names} and all(row[name] > 0 for name in names) for row in table)
    # A permutation of 10^9 records would take 8 GB, and a block of it 128 KiB.
    assert all(found[1][1][name] < 8e6 for name in orders)
