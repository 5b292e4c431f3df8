"""benchmarks/compare.py: verdicts on made-up runs, and its rank sum against scipy's and printed tables."""

import json

import numpy as np
import pytest

from benchmarks import compare

STEADY = [100.0, 100.3, 99.8, 100.1, 99.9, 100.2]


def scaled(factor, values=STEADY):
    return [value * factor for value in values]


def ranked(lower, higher, wins):
    """`lower` values and `higher` values, where in `wins` pairs the former is above the latter."""
    found = []
    for place in range(lower):
        above = min(wins, higher)
        wins -= above
        found.append(100.0 * above + 50 - place)
    return found, [100.0 * number for number in range(1, higher + 1)]


@pytest.mark.parametrize(("count", "critical"), [(5, 1), (6, 3), (7, 6), (8, 9), (9, 14), (10, 19), (12, 31)])
def test_chances_agree_with_the_printed_table(count, critical):
    """Critical values of Mann and Whitney's U for one side and 0.01."""
    assert compare.chance_of_lower(*ranked(count, count, critical)) <= 0.01
    assert compare.chance_of_lower(*ranked(count, count, critical + 1)) > 0.01


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (STEADY, STEADY, "no difference"),
        (STEADY, scaled(0.98), "no difference"),
        (STEADY, scaled(0.9), "slower"),
        (STEADY, scaled(1.1), "faster"),
        (STEADY, scaled(0.95), "not clear"),  # at the threshold
        ([100, 80, 120, 95, 110, 90], [99, 81, 119, 94, 112, 88], "not clear"),  # noise above the threshold
        ([100, 80, 120, 95, 110, 90], [40, 60, 35, 47, 55, 50], "slower"),
        (STEADY[:3], scaled(0.1)[:3], "too few repeats to say"),
        (STEADY[:4], scaled(0.1)[:4], "too few repeats to say"),
        (STEADY[:5], scaled(0.1)[:5], "slower"),
        ([*STEADY[:5], 5.0], scaled(0.9), "not clear"),  # one hiccup of six: no verdict, not a wrong one
        (scaled(0.9), [*STEADY, 5.0, *STEADY], "faster"),
    ],
)
def test_verdicts(old, new, verdict):
    assert compare.verdict_of(old, new, 0.05) == verdict


@pytest.fixture
def run(tmp_path, capsys):
    """Compare two runs as the script does: exit status and lines."""

    def run(old, new, *options):
        for name, values in (("old", old), ("new", new)):
            content = values if isinstance(values, dict) else values.to_json()
            (tmp_path / name).write_text(json.dumps(content))
        status = compare.main([str(tmp_path / "old"), str(tmp_path / "new"), *options])
        return status, capsys.readouterr().out.splitlines()

    return run


def row_of(lines, name):
    (line,) = (line for line in lines if line.startswith(f"{name} "))
    return " ".join(line.split()).removeprefix(name).split()


OURS, PEER = "dataload, syrah, global, 0 workers", "Grain, syrah, global, 0 workers"


def test_what_became_slower(made, run):
    old = made.results(made.limit(*scaled(10)), made.ours(*scaled(8)), made.ours(*scaled(4), workers=1))
    new = made.results(made.limit(*scaled(10)), made.ours(*scaled(4)), made.ours(*scaled(5), workers=1))
    status, lines = run(old, new)
    assert status == 1
    assert lines[0] == "floats: copy 1,000 -> 1,000 records/s, x1.00"
    assert row_of(lines, OURS) == ["0.800", "0.400", "0.500", "slower"]
    assert row_of(lines, "dataload, syrah, global, 1 worker") == ["0.400", "0.500", "1.250", "faster"]
    assert lines[-1] == f"slower, or failing: {OURS}"
    assert run(old, new, "--threshold", "0.6")[0] == 0


DRIFT = [1000, 500, 2000, 250, 4000]


@pytest.mark.parametrize(
    ("old", "new", "status", "name", "expected"),
    [
        ((scaled(10), scaled(8)), (scaled(1), scaled(0.8)), 0, OURS, "0.800 0.800 1.000 no difference"),  # the machine
        ((DRIFT, scaled(0.5, DRIFT)), (DRIFT[::-1], scaled(0.25, DRIFT[::-1])), *(1, OURS, "0.500 0.250 0.500 slower")),
        ((STEADY, None, STEADY), (STEADY, None, scaled(0.5)), 0, PEER, "1.000 0.500 0.500 slower"),
        ((None, scaled(10)), (None, scaled(1)), 1, OURS, "1,000 100 0.100 slower"),
    ],
)
def test_rates_are_compared_relative_to_the_limit_of_their_round(made, run, old, new, status, name, expected):
    def results(limit, ours, peer=None):
        kinds = ((made.limit, limit), (made.ours, ours), (made.peer, peer))
        return made.results(*(make(*rates) for make, rates in kinds if rates))

    found, lines = run(results(*old), results(*new))
    assert (found, row_of(lines, name)) == (status, expected.split())
    if old[0] == scaled(10):
        assert lines[0] == "floats: copy 1,000 -> 100 records/s, x0.10"


def test_what_fails_now_counts_as_slower(made, run):
    good, bad = made.ours(*STEADY), made.ours(error="the file\x1b is gone")
    old, new = (made.results(made.limit(*STEADY), found) for found in (good, bad))
    status, lines = run(old, new)
    assert status == 1
    assert " ".join(row_of(lines, OURS)) == r"1.000 fails: the file\x1b is gone"
    status, lines = run(new, old)
    assert (status, row_of(lines, OURS)[1]) == (0, "failed:")
    assert run(new, new)[0] == 0


def case(name, figure, **more):
    return {"title": "tar", "case": name, "records_per_second": 100 * figure, "ratio": figure, **more}


def repeated(name, values, aim=None):
    return case(name, float(np.median(values)), ratios=values, aim=aim)


def test_cases_are_compared_by_their_ratio_to_the_first(made, run):
    rows = (case("slices", 1.0), repeated("Loader", STEADY, aim=0.8), repeated("torch", STEADY), case("open", 0.5))
    later = (
        case("slices", 1.0) | {"records_per_second": 200.0},
        repeated("Loader", scaled(0.5), aim=0.8),
        repeated("torch", scaled(0.5)),
    )
    status, lines = run(made.results(rows=rows), made.results(rows=later))
    assert status == 1
    assert lines[0] == "tar: slices 100 -> 200 records/s, x2.00"
    assert " ".join(row_of(lines, "slices")) == "1.000 1.000 1.000 too few repeats to say"
    assert row_of(lines, "Loader")[2:] == ["0.500", "slower"]
    assert "only in the old run" in lines[5]
    assert lines[-1] == "slower, or failing: Loader"
