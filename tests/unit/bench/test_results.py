"""Results: spreads, ratios, their way through JSON, and their table."""

import json

import pytest

from benchmarks.compare import parse_results
from benchmarks.rates import RATE_COLUMNS, rate_rows, ratios_of
from dataload.bench.runner import FILE_COLUMNS, FileFacts, Spread, describe_task, file_rows, problems, rate_cells


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        ([5.0], 5, 5, 5),
        ([3.0, 1.0], 2, 1, 3),
        ([9.0, 1.0, 2.0], 2, 1, 9),
        ([1.0, 2.0, 3.0, 4.0, 100.0], 3, 2, 4),  # the quartiles: one outlier does not show
    ],
)
def test_a_spread(values, median, low, high):
    assert Spread.of(values) == Spread(median, low, high)


def test_ratios_are_taken_within_rounds(made):
    """A machine that is ten times as slow in the second round changes the rates, and no ratio."""
    limit, ours = made.limit(1000, 100), made.ours(500, 50)
    assert ratios_of(ours.rates, limit.rates) == [0.5, 0.5]
    assert ours.records_per_second == Spread(275, 50, 500)


def test_json_and_back(made):
    results = made.results(
        made.limit(1000, 900),
        made.ours(500, options={"open": {"fields": ["x"]}, "executor": "threads"}),
        made.peer(error="not installed"),
        files=[FileFacts("floats", "syrah", 10, 1234, 0.5), FileFacts("floats", "lmdb", 10, 99, None)],
        rows=({"title": "Opening", "case": "tar", "seconds": 0.1},),
    )
    values = json.loads(json.dumps(results.to_json()))
    assert parse_results(values) == results
    assert parse_results({**values, "curves": []}) == results, "0.2 wrote curves"


@pytest.mark.parametrize("version", [None, 0, 1, 3, "2"])
def test_another_version_is_refused(made, version):
    values = {**made.results().to_json(), "version": version}
    with pytest.raises(ValueError, match=f"expected results of dataload bench, version 2, got version {version!r}"):
        parse_results(values)


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
