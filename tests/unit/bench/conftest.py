"""Made-up results, whose figures can be worked out by hand."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataload.bench.runner import Measurement, Results
from dataload.bench.task import Answer, Task

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS.parent), str(TESTS / "children")]  # for the package benchmarks, and for what tasks name


def make_task(**changes):
    values = {
        "workload": "floats",
        "kind": "dataload",
        "name": "dataload",
        "reading": "module:function",
        "path": "/data/x.syr",
        "format": "syrah",
        "order": "global",
        "workers": 0,
        "batch_size": 256,
    }
    return Task(**{**values, **changes})


def make_answer(rate, **changes):
    values = {
        "open_seconds": 0.25,
        "first_batch_seconds": 0.5,
        "seconds": 2.0,
        "records": round(2 * rate),
        "nbytes": round(2 * rate) * 1000,
        "cpu_seconds": 4.0,
        "peak_rss": 30_000_000,
        "cached_rss": 10_000_000,
        "checksum": 7,
        "settings": {"threads": 1},
        "batches": 10,
        "system_seconds": 0.5,
        "minor_faults": 25,
        "first_touch_rate": 1500.0,
    }
    return Answer(**{**values, **changes})


def make_measurement(*rates, error=None, **task):
    return Measurement(make_task(**task), tuple(map(make_answer, rates)), error)


def make_results(*measurements, files=(), **changes):
    values = {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"system": "Linux 6", "processor": "A processor", "cpus": 2, "memory": 25_000_000_000},
        "versions": {"python": "3.11.7", "numpy": "2.0.0"},
        "command": "dataload bench --made floats",
        "files": tuple(files),
        "measurements": tuple(measurements),
    }
    return Results(**{**values, **changes})


@pytest.fixture(scope="session")
def made():
    """Functions that make tasks, answers, measurements and results."""
    return SimpleNamespace(
        task=make_task,
        answer=make_answer,
        ours=make_measurement,
        limit=partial(make_measurement, kind="limit", name="copy", reading="module:copy"),
        peer=partial(make_measurement, kind="peer", name="Grain"),
        results=make_results,
    )
