"""The cases of ``python -m benchmarks``: names and keys of their rows, which `benchmarks.compare` reads."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import formats, harness
from benchmarks.harness import Case, against, content, more_workers, run_cases
from dataload.bench import task as measuring

SHORT = {"rounds": 2, "seconds": 0.002}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(harness, "_WARM_UP", 0.0)
    monkeypatch.setattr(harness, "sleep", lambda seconds: None)


def batches(value, rows=4, steps=3):
    return lambda: (np.full((rows, 2), value) for _ in range(steps))


def row(case, *rates):
    return {"title": "Title", "case": case, "rates": list(rates)}


@pytest.mark.slow_suite
def test_rows_and_table(capsys):
    cases = [Case("limit", batches(1)), Case("ours", batches(1), 0.0, 1e12)]
    limit, ours = run_cases("Title", cases, **SHORT)
    assert (limit["title"], limit["case"], limit["ratios"], limit["met"]) == ("Title", "limit", [1.0, 1.0], None)
    assert (len(ours["rates"]), len(ours["ratios"])) == (2, 2)
    assert ours["ratio"] == pytest.approx(sum(ours["ratios"]) / 2)
    assert ours["met"] is False
    assert {"faults_per_batch", "system_us_per_batch"} <= {*ours}
    assert capsys.readouterr().out.splitlines()[-1].endswith(">= 0.0, >= 1,000,000,000,000/s  NOT MET")


def test_rates_count_rows(monkeypatch):
    """A clock that ticks once for each reading: after a batch, a tick has passed."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(measuring, "perf_counter", lambda: next(ticks) * 1e-3)
    (measured,) = run_cases("Title", [Case("limit", batches(1, rows=10))], rounds=1, seconds=0.1)
    assert measured["records_per_second"] == pytest.approx(10 / 1e-3, rel=0.05)


def test_a_reader_of_something_else_is_refused():
    cases = [Case("limit", batches(1)), Case("ours", batches(2))]
    with pytest.raises(AssertionError, match="Title: ours read something else than limit"):
        run_cases("Title", cases, **SHORT)
    run_cases("Title", [cases[0], replace(cases[1], compared=False)], **SHORT)


def test_content_is_that_of_all_bytes_in_any_layout():
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert content({"x": values}) == content([row.tobytes() for row in values]) == content(values.copy())
    assert content(values) != content(values[::-1])


def test_comparisons_take_ratios_within_rounds(capsys):
    fewer, more, most = row("0 workers", 100, 10), row("1 worker", 200, 20), row("2 workers", 190, 19)
    assert against(more, fewer, 1.5)["ratio"] == 2
    found = more_workers([fewer, more, most])
    assert (found["ratio"], found["met"]) == (0.95, False)
    assert found["case"].endswith("2 workers / 1 worker")
    assert found["pairs"] == {"1 worker / 0 workers": 2, "2 workers / 1 worker": 0.95}
    assert "NOT MET" in capsys.readouterr().out


@pytest.mark.slow_suite
@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_format_on_little_data(tmp_path, monkeypatch, name):
    """Every case of a format reads what its limits read, and has the loader with 0 to 4 workers."""
    pytest.importorskip("lmdb")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(formats, "run_cases", lambda title, cases: run_cases(title, cases, rounds=1, seconds=0.001))
    rows = formats.FORMATS[name](replace(formats.SIZES["4k"], nbytes=256, count=64, batch_size=16))
    formats.forget()
    names = [row["case"] for row in rows]
    assert [name for name in names if name.startswith("Loader") and "/" not in name] == [
        "Loader, no worker",
        "Loader, 1 worker",
        *(f"Loader, {n} workers" for n in (2, 3, 4)),
    ]
    assert sum(name.startswith("more workers are not slower") for name in names) == 1
