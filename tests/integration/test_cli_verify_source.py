"""``dataload verify module:factory``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dataload.cli.app import app
from dataload.errors import ConfigError, SourceError

MODULE = '''
import numpy as np
from dataload import MemorySource
from dataload.sources.files import FileSource
from line_source import LineSource


class SortsRequests(LineSource):
    def __getitems__(self, indices):
        return super().__getitems__(np.sort(np.asarray(indices, np.int64)))


def numbers(count=10):
    return MemorySource({"x": np.arange(count)})


class Doubtful(MemorySource):
    """Cannot read some records, whichever way they are asked for."""

    def _read(self, indices):
        for index in indices.tolist():
            if index in (70, 90):
                raise ValueError(f"what is {index}?")
        return super()._read(indices)


def doubtful():
    return Doubtful([{"x": index} for index in range(100)])


def broken():
    raise OSError("no such disk")


def text():
    return 5


ready = numbers()
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "somebodys_source.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somebodys_source", raising=False)


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_good_source():
    result = run("somebodys_source:numbers", "-o", "count=7")
    assert result.exit_code == 0
    *checks, verdict = result.stdout.splitlines()
    assert checks[0] == "passed  check_length"
    assert "passed  check_threads" in checks
    assert verdict == f"{len(checks)} checks: none failed, 0 skipped; 7 records: all can be read"


def test_wrong_source_is_told_the_rule(tmp_path):
    (tmp_path / "x.lines").write_bytes(b"\n".join([*(b"%026x" % i for i in range(20)), b"end"]))
    result = run("somebodys_source:SortsRequests", "-o", f"paths={tmp_path / 'x.lines'}")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("failed  check_request_order: row "))
    assert lines[place + 1].startswith("        Records ")
    assert "failed, " in result.stderr


def test_records_that_cannot_be_read():
    result = run("somebodys_source:doubtful", "--sample", 5)
    assert result.exit_code == 1
    assert "[70] ValueError: what is 70?" in result.stdout
    assert "[90] ValueError: what is 90?" in result.stdout
    assert "100 records: 2 of them cannot be read" in result.stderr
    result = run("somebodys_source:doubtful", "--sample", 5, "--limit", 1)
    assert "[70] " in result.stdout
    assert "[90] " not in result.stdout


def test_json():
    result = run("somebodys_source:doubtful", "--sample", 5, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (report["source"], report["records"], report["ok"]) == ("somebodys_source:doubtful", 100, False)
    assert [bad["index"] for bad in report["bad"]] == [70, 90]
    assert {"name", "status", "rule"} <= report["checks"][0].keys()
    assert json.loads(run("somebodys_source:ready", "--json").stdout)["ok"] is True


def test_source_that_does_not_open(tmp_path):
    result = run("somebodys_source:SortsRequests", "-o", f"paths={tmp_path / 'nothing'}")
    assert result.exit_code == 1
    assert "SourceNotFoundError: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["somebodys_source:nombers"], ConfigError, "did you mean 'numbers'"),
        (["no_such_module:f"], ConfigError, "there is no format or module 'no_such_module': Known: array_record"),
        (["syra:x"], ConfigError, "there is no format or module 'syra': did you mean 'syrah'?"),
        (["broken_module:f"], ConfigError, "importing 'broken_module' raised ZeroDivisionError: division by zero"),
        (["broken_module.inner:f"], ConfigError, "importing 'broken_module.inner' raised ZeroDivisionError"),
        (["somebodys_source:text"], ConfigError, "returns 'int', not a source: a source has __len__ and __getitem__"),
        (["somebodys_source:numbers", "-o", "size=3"], ConfigError, "cannot be called with size=3: got an unexpected"),
        (["somebodys_source:SortsRequests"], ConfigError, "with no options (pass them as -o name=value)"),
        (["somebodys_source:ready", "-o", "size=3"], ConfigError, "is a MemorySource, which does not take --option"),
        (["somebodys_source:broken"], SourceError, "somebodys_source:broken raised OSError: no such disk"),
        (
            ["somebodys_source:numbers", "--field", "x"],
            ConfigError,
            "--field, --codec and --decode are for files; pass options to somebodys_source:numbers with --option",
        ),
        (
            ["somebodys_source:numbers", "--part", "1/2"],
            ConfigError,
            "--part is for files, and somebodys_source:numbers",
        ),
    ],
)
def test_what_is_no_source(arguments, error, message):
    result = run(*arguments)
    assert result.exit_code == (2 if error is ConfigError else 1)
    assert message in result.stderr


@pytest.mark.slow
def test_it_needs_neither_pytest_nor_hypothesis(tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.'); from dataload.cli.app import run\n"
        "code = run(['verify', 'somebodys_source:numbers'])\n"
        "assert not {'pytest', 'hypothesis'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
