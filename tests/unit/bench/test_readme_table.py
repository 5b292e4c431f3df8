"""benchmarks/readme_table.py; and that README.md and docs/performance.md have the tables that it makes."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import readme_table
from benchmarks.compare import parse_results
from dataload.bench.runner import FileFacts

ROOT = Path(__file__).parents[3]


def rows(text):
    return [[cell.strip() for cell in line.split(" | ")] for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)]


def test_the_best_of_each_format_and_peer(made):
    results = made.results(
        made.limit(1000, 2000),
        made.limit(1200, 1200, name="get", reading="module:get"),
        made.ours(400, 800, workers=1),
        made.ours(500, 1000, workers=2),
        made.ours(5000, 5000, order="sequential"),  # reads no shuffled records
        made.ours(100, 200, format="tar"),
        made.peer(10, 10),
        made.peer(250, 500, format="lmdb", workers=2),
        made.peer(300, 300, name="WebDataset", order="pool", format="tar"),
        made.peer(error="not installed", name="DALI"),
        files=[FileFacts("floats", "syrah", 5000, 1, None)],
    )
    text = "\n".join(readme_table.markdown(results))
    head, *found = rows(text)
    assert head[:5] == ["reader", "format", "order", "workers", "records/s"]
    assert head[5:] == ["spread", "first touch", "faults/batch", "of limit", "of best peer"]
    assert [[*row[:5], *row[8:]] for row in found] == [
        ["limit: copy", "", "", "0", "1,500", "1.00", "4.00"],
        ["bare loop: get", "", "", "0", "1,200", "0.90", "3.60"],
        ["**dataload**", "syrah", "global", "2", "750", "0.50", "2.00"],
        ["Grain", "lmdb", "global", "2", "375", "0.25", "1.00"],
        ["WebDataset", "tar", "pool", "0", "300", "0.22", "0.90"],
        ["**dataload**", "tar", "global", "0", "150", "0.10", "0.40"],
    ]
    assert found[0][5:8] == ["0.67-1.33", "1,500", "2.5"]
    assert "In each of 2 rounds" in text
    assert "- Grain, lmdb, global, 2 workers: threads 1" in text
    assert "- DALI, syrah, global, 0 workers: not installed" in text
    assert text.startswith("**floats**, 5,000 records:\n\n| reader")
    for what in ("2026-01-02", "A processor, 2 CPUs, 25 GB", "numpy 2.0.0", "```\ndataload bench --made floats\n```"):
        assert what in text
    text = "\n".join(readme_table.short(results))
    assert rows(text) == [
        ["reader", "format", "order", "records/s", "of limit"],
        ["limit: copy", "", "", "1,500", "1.00"],
        ["**dataload**", "syrah", "global", "750", "0.50"],
        ["Grain", "lmdb", "global", "375", "0.25"],
        ["WebDataset", "tar", "pool", "300", "0.22"],
        ["**dataload**", "tar", "global", "150", "0.10"],
    ]
    assert "medians of 2 rounds of" in text
    assert "on 2 CPUs (A processor), 2026-01-02." in text


@pytest.mark.parametrize("page", readme_table.PAGES)
def test_the_tables_are_made_from_the_recorded_results(page):
    text = (ROOT / page).read_text("utf-8")
    results = parse_results(json.loads((ROOT / "benchmarks" / "results" / "readme.json").read_text("utf-8")))
    assert readme_table.replace(text, "\n".join(readme_table.PAGES[page](results))) == text, (
        "run python -m benchmarks.readme_table benchmarks/results/readme.json"
    )
