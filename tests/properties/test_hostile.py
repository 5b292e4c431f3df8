"""Parsers on files that were changed: an error of dataload or the right records, and nothing else.

The targets are those of the fuzzer, `tests/fuzz`; what it found once is replayed here.
"""

from functools import cache
from pathlib import Path

import pytest
import tables  # noqa: F401 - starts what pyarrow keeps
from mutants import make_mutant
from run import watch_mutants
from targets import TARGETS

FOUND = Path(__file__).parents[1] / "golden" / "fuzz"
MUTANTS = 30  # `make fuzz MUTANTS=10000` tries more, with limits of memory and time


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@cache
def seeds(name):
    return TARGETS[name][1]()


@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.parametrize("name", TARGETS)
def test_mutants(name):
    known = [data for data in seeds(name) if len(data) <= 200_000]
    for number in range(MUTANTS):
        TARGETS[name][0](make_mutant(name, number, known))


@pytest.mark.slow_suite
@pytest.mark.slow
def test_the_fuzzer_tries_mutants_in_a_process():
    assert watch_mutants("npy", 0, 100) == 0


@pytest.mark.filterwarnings("ignore:.*group_size")
@pytest.mark.parametrize("name", TARGETS)
def test_good_files(name):
    assert seeds(name)
    for data in seeds(name)[:12]:
        TARGETS[name][0](data)


@pytest.mark.parametrize("path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_the_fuzzer_found(path):
    TARGETS[path.parent.name][0](path.read_bytes())
