"""``dataload bench`` as a user runs it."""

import importlib
import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import fail, run
from written import written

sys.path.append(str(Path(__file__).parents[2]))  # for the package benchmarks
RATE_COLUMNS = importlib.import_module("benchmarks.rates").RATE_COLUMNS
parse_results = importlib.import_module("benchmarks.compare").parse_results

QUICK = ("--workers", "0", "--repeats", 1, "--seconds", 0.05)


def bench(*arguments, json_to=None):
    """Return the lines that a run prints, and what it writes as JSON."""
    result = run("bench", *arguments, *(["--json", json_to] if json_to else []))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout.splitlines(), json.loads(json_to.read_text()) if json_to else None


pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture
def own(tmp_path):
    return written(str(tmp_path / "own.syr"), [{"x": np.full(8, i, np.float32), "y": i} for i in range(300)])


def test_a_small_run(tmp_path, own):
    options = ("--records", 200, "--formats", "torchrecord,tar", *QUICK, "--cache", tmp_path / "cache")
    lines, told = bench(own, *options, json_to=tmp_path / "out.json")
    results = parse_results(told)
    assert results.machine["memory"] > 2**28
    assert [(m.task.kind, m.task.format, m.error) for m in results.measurements] == [
        ("dataload", "torchrecord", None),
        ("dataload", "tar", None),
    ]
    assert len({answer.checksum for m in results.measurements for answer in m.answers}) == 1
    files = [(file.workload, file.format, file.records) for file in results.files]
    assert files == [(own, "torchrecord", 200), (own, "tar", 200)]
    assert lines[0] == own
    plain = [" ".join(line.split()) for line in lines]
    assert any(line.startswith("reader format order workers records/s") for line in plain)
    assert max(map(len, lines[:9])) <= 132
    rows = [line.split()[:4] for line in lines if line.startswith("dataload ")]
    assert rows == [["dataload", name, "global", "0"] for name in ("torchrecord", "tar")]


@pytest.mark.slow_suite  # starts ten processes
def test_photos_of_several_sizes_end_with_advice(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for i in range(6):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(np.full((20 + i, 30, 3), 40 * i, np.uint8)).save(path)
    result = run("bench", tmp_path / "photos", *QUICK, "--cache", tmp_path / "cache", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    results = parse_results(json.loads((tmp_path / "out.json").read_text()))
    rows = [(m.task.name, m.task.format, m.task.order, m.error) for m in results.measurements]
    own = [("as it is", "folder", "global", None), ("as it is", "folder", "pool", None)]
    assert rows == [*own, *(("dataload", name, "global", None) for name in ("syrah", "tar", "torchrecord"))]
    assert "As it is, num_workers=0 is best: " in result.stdout


@pytest.mark.slow_suite  # starts ten processes
def test_a_format_that_cannot_store_the_records_is_left_out(tmp_path):
    (tmp_path / "nested.jsonl").write_text('{"a": {"b": [1, null]}}\n{"a": {"b": []}}\n')
    result = run("bench", tmp_path / "nested.jsonl", *QUICK, "--cache", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    assert "warning: not compared as syrah: " in result.stderr
    assert "As it is, num_workers=0 is best: " in result.stdout


@pytest.mark.slow_suite
def test_data_of_a_function_are_compared_without_themselves(tmp_path):
    _, told = bench("range:20", *QUICK, "--cache", tmp_path / "cache", json_to=tmp_path / "out.json")
    names = {(m.task.name, m.task.format) for m in parse_results(told).measurements}
    assert names == {("dataload", name) for name in ("syrah", "tar", "torchrecord")}


# Options that are deprecated, and what has moved to the repository


def test_old_options_warn(tmp_path, own):
    flags, files = ("--wide", "--cold", "--dark", "--scale"), (tmp_path / "page.html", tmp_path / "out.svg")
    old = (*flags, "--seed", 3, "--html", files[0], f"--picture={files[1]}")
    result = run("bench", own, "--formats", "syrah", *QUICK, "--cache", tmp_path / "cache", *old)
    assert result.exit_code == 0, result.output
    lines = [
        f"warning: {flag} is deprecated and has no effect: use " for flag in (*flags, "--seed", "--html", "--picture")
    ]
    assert [line[: len(start)] for line, start in zip(result.stderr.splitlines(), lines, strict=True)] == lines
    assert not any(file.exists() for file in files)


@pytest.mark.parametrize("moved", [("--made", "floats-64"), ("data", "--peers", "all"), ("d", "--peer-python=p")])
def test_made_data_and_peers_have_moved(moved):
    assert "has moved to `python -m benchmarks`" in fail(2, "bench", *moved).stderr


@pytest.fixture
def benchmarks(monkeypatch, capsys):
    """Run ``python -m benchmarks`` with arguments, and return what it prints and what it writes as JSON."""

    def measure(*arguments, json_to=None):
        from benchmarks.__main__ import main

        given = [*arguments, *(["--json", json_to] if json_to else [])]
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, given)])
        main()
        return capsys.readouterr(), parse_results(json.loads(json_to.read_text())) if json_to else None

    return measure


@pytest.mark.slow_suite
def test_made_data_have_limits(tmp_path, benchmarks):
    options = ("--made", "floats-64", "--records", 600, "--formats", "syrah", "--batch-size", 100)
    printed, results = benchmarks(*options, *QUICK, "--cache", tmp_path / "cache", json_to=tmp_path / "out.json")
    assert [(m.task.kind, m.task.name, m.error) for m in results.measurements] == [
        ("limit", "copy in memory, 1 thread", None),
        ("limit", "copy in memory, 2 threads", None),
        ("dataload", "dataload", None),
    ]
    assert len({answer.checksum for m in results.measurements for answer in m.answers}) == 1
    (head,) = (line for line in printed.out.splitlines() if line.startswith("reader"))
    assert " ".join(head.split()) == " ".join(RATE_COLUMNS)
    assert "dataload, syrah, global, 0 workers: executor threads, num_workers 0, prefetch 2" in printed.out


@pytest.mark.slow_suite
def test_by_default_files_are_kept_where_nobody_else_can_put_some(tmp_path, monkeypatch, own):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"dataload-bench-{os.geteuid()}"

    def refused():
        error = fail(2, "bench", own, "--formats", "syrah").stderr
        return "must be a directory that only you can write to, but is not: remove it, or set --cache" in error

    bench(own, "--records", 16, "--formats", "syrah", *QUICK)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o770)
    assert refused()
    directory.chmod(0o700)
    other = os.geteuid() + 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: other)
        directory.rename(tmp_path / f"dataload-bench-{other}")
        assert refused()
    directory.symlink_to(tmp_path)
    assert refused()
