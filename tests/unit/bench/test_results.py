"""Results: spreads, ratios, and their way through JSON."""

import json

import pytest

from benchmarks.compare import parse_results
from benchmarks.rates import ratios_of
from dataload.bench.runner import FileFacts, Spread


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
