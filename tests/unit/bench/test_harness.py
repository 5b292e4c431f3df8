"""The cases of ``python -m benchmarks``: names and keys of their rows, which `benchmarks.compare` reads."""

import pytest

from benchmarks import cases, harness
from benchmarks.harness import Case, run_cases


def test_rows_and_table(capsys):
    ran = []
    made = [
        Case("limit", lambda: ran.append("limit") or 1.5),
        Case("ours", lambda: ran.append("ours") or 1.5, 0.0, 1e12),
    ]
    limit, ours = run_cases("Title", made, items=1000, steps=10, rounds=2)
    assert ran == ["limit", "ours"] * 3  # the first run of each warms up
    assert (limit["title"], limit["case"], limit["ratios"], limit["met"]) == ("Title", "limit", [1.0, 1.0], None)
    assert ours["ratio"] == pytest.approx(sum(ours["ratios"]) / 2)
    assert ours["met"] is False
    assert capsys.readouterr().out.splitlines()[-1].endswith(">= 0.0, >= 1,000,000,000,000/s  NOT MET")


def test_a_reader_of_something_else_is_refused():
    with pytest.raises(AssertionError, match="Title: ours read something else than limit"):
        run_cases("Title", [Case("limit", lambda: 1), Case("ours", lambda: 2)], items=1, steps=1)


def test_a_format_on_little_data(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    names = [row["case"] for row in cases.syrah(16, 64, 16, 0.25)]
    assert names[0] == "np.take of the mapped file (the limit)"
    assert names[2:] == ["source.read_batch", "Loader, no worker", "Loader, 1 worker", "Loader, 2 workers"]
