"""Parsers on files that were changed: an error of dataload or the right records, and nothing else.

The targets are those of the fuzzer, `tests/fuzz`; what it found once is replayed here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from run import watch_mutants
from targets import TARGETS

FOUND = Path(__file__).parents[1] / "golden" / "fuzz"
MUTANTS = 1_000  # `make fuzz MUTANTS=10000` tries more
OF_TABLES = dict.fromkeys(("parquet", "arrow", "csv", "jsonl", "jsonl_gz"), 200)
"""Targets that open files, of which pyarrow or the fuzzers of others know the most."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@cache
def seeds(name):
    return TARGETS[name][1]()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TARGETS)
def test_mutants(name):
    """In a process of its own, with little memory and time; it prints what fails."""
    assert watch_mutants(name, 0, OF_TABLES.get(name, MUTANTS)) == 0


@pytest.mark.parametrize("name", TARGETS)
def test_good_files(name):
    assert seeds(name)
    for data in seeds(name)[:12]:
        TARGETS[name][0](data)


@pytest.mark.parametrize("path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_the_fuzzer_found(path):
    TARGETS[path.parent.name][0](path.read_bytes())
