"""Rows of tables, worked out by hand."""

from benchmarks.rates import RATE_COLUMNS, rate_rows
from dataload.bench.runner import FILE_COLUMNS, FileFacts, describe_task, file_rows, problems, rate_cells


def columns(measurements):
    """Heading -> the texts below it."""
    rows = rate_rows(measurements)
    assert all(len(row) == len(RATE_COLUMNS) for row in rows)
    return dict(zip(RATE_COLUMNS, zip(*rows, strict=True), strict=True))


def test_a_row(made):
    measured = made.ours(1000, 2000, 3000, workers=2)
    assert {heading: texts[0] for heading, texts in columns([measured]).items()} == {
        "reader": "dataload",
        "format": "syrah",
        "order": "global",
        "workers": "2",
        "records/s": "2,000",
        "spread": "0.50-1.50",
        "MB/s": "2",  # 1,000 bytes each
        "x limit": "",
        "x peer": "",
        "first touch/s": "1,500",
        "faults/batch": "2.5",  # of 25 faults in 10 batches
        "sys us/batch": "50,000",
        "open ms": "250.0",
        "first ms": "500.0",
        "CPU s/GB": "1,000.00",  # 4 s for the 4 MB of the median
        "peak MB": "30",
        "mapped MB": "10",
    }


def test_a_row_is_compared_with_the_limit_of_its_order(made):
    measured = [
        made.limit(1000),
        made.limit(4000, order="sequential", name="copy, sequential"),
        made.ours(500),
        made.ours(500, order="sequential"),
        made.peer(500, order="pool"),  # no limit of its order: the first one
    ]
    assert columns(measured)["x limit"] == ("1.00", "1.00", "0.50", "0.12", "0.50")


def test_what_has_no_rate_says_so_and_why_below_the_table(made):
    measured = [
        made.limit(1000),
        made.peer(error="not installed", workers=1),  # so ratios to a peer are missing
        made.ours(500, error="killed in round 2", workers=2),
    ]
    found = columns(measured)
    assert found["records/s"] == ("1,000", "none", "500")
    assert found["x limit"] == ("1.00", "", "0.50")
    assert found["x peer"] == ("", "", "")
    assert problems(measured) == [
        "Grain, syrah, global, 1 worker: not installed",
        "dataload, syrah, global, 2 workers: killed in round 2",
    ]


def test_the_cells_without_limits_and_peers(made):
    assert rate_cells(made.ours(1000)) == {
        "reader": "dataload",
        "format": "syrah",
        "order": "global",
        "workers": "0",
        "records/s": "1,000",
        "spread": "",  # of one repeat
        "first touch/s": "1,500",
        "faults/batch": "2.5",
        "sys us/batch": "50,000",
    }
    assert rate_cells(made.ours(error="killed"))["records/s"] == "none"


def test_tasks_and_files(made):
    assert describe_task(made.task(workers=1, order="pool")) == "dataload, syrah, pool, 1 worker"
    assert describe_task(made.task(kind="limit", name="copy, 1 thread", workers=1)) == "copy, 1 thread"
    rows = file_rows([FileFacts("floats", "syrah", 1000, 4_100_000, 2.0), FileFacts("floats", "tar", 0, 0, None)])
    assert rows == [("syrah", "1,000", "4.1", "4,100", "2"), ("tar", "0", "0.0", "0", "")]
    assert {len(row) for row in rows} == {len(FILE_COLUMNS)}
