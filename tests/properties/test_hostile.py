"""Parsers on files that were changed: an error of dataload or the right records, and nothing else.

The targets are those of the fuzzer, `tests/fuzz`; what it found once is replayed here.
"""

from __future__ import annotations

import importlib.util
import resource
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1]
FOUND = TESTS / "golden" / "fuzz"
MOST_BYTES = 4 << 30

spec = importlib.util.spec_from_file_location("fuzz_targets", TESTS / "fuzz" / "targets.py")
fuzz_targets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz_targets)
TARGETS = fuzz_targets.TARGETS

INTERESTING = [b"\0", b"\xff", b"\x80", b"\x7f", b"\0" * 8, b"\xff" * 8, b"\xff" * 4 + b"\x7f", b"9" * 20, b"\n", b" "]


@pytest.fixture(autouse=True)
def little_memory(monkeypatch, tmp_path):
    """What a header claims must not be allocated."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use() + MOST_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def in_use():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@cache
def seeds(name):
    return [data for data in TARGETS[name][1]() if len(data) < 150_000][:12]


@st.composite
def mutated(draw, name):
    """One of the good inputs, with a few changes."""
    data = bytearray(draw(st.sampled_from(seeds(name))))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, min(len(data), 2048) - 1)) | st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["set", "insert", "delete", "cut", "repeat"]))
        piece = draw(st.sampled_from(INTERESTING) | st.binary(min_size=1, max_size=8))
        length = draw(st.integers(1, 600))
        if kind == "set":
            data[place : place + len(piece)] = piece
        elif kind == "insert":
            data[place:place] = piece
        elif kind == "delete":
            del data[place : place + length]
        elif kind == "cut":
            del data[place:]
        else:
            data[place:place] = data[place : place + length]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files(name):
    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(data=mutated(name) | st.binary(max_size=200))
    def holds(data):
        TARGETS[name][0](data)

    holds()


@pytest.mark.parametrize("name", TARGETS)
def test_good_files(name):
    assert seeds(name)
    for data in seeds(name):
        TARGETS[name][0](data)


@pytest.mark.parametrize("path", sorted(FOUND.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_the_fuzzer_found(path):
    TARGETS[path.parent.name][0](path.read_bytes())
