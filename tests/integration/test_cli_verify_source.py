"""``dataload verify module:factory``."""

import json
import os
import subprocess
import sys

import pytest
from command_line import run

MODULE = '''
import numpy as np
from dataload import MemorySource
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


ready = numbers()
'''


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "somebodys_source.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "somebodys_source", raising=False)


def verify(*arguments):
    return run("verify", *arguments)


def test_good_source():
    result = verify("somebodys_source:numbers", "-o", "count=7")
    assert result.exit_code == 0
    *checks, verdict = result.stdout.splitlines()
    assert checks[0] == "passed  check_length"
    assert "passed  check_threads" in checks
    assert verdict == f"{len(checks)} checks: none failed, 0 skipped; 7 records: all can be read"


def test_wrong_source_is_told_the_rule(tmp_path):
    (tmp_path / "x.lines").write_bytes(b"\n".join([*(b"%026x" % i for i in range(20)), b"end"]))
    result = verify("somebodys_source:SortsRequests", "-o", f"paths={tmp_path / 'x.lines'}")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("failed  check_request_order: row "))
    assert lines[place + 1].startswith("        Records ")
    assert "failed, " in result.stderr


def test_records_that_cannot_be_read():
    result = verify("somebodys_source:doubtful", "--sample", 5)
    assert result.exit_code == 1
    assert "[70] ValueError: what is 70?" in result.stdout
    assert "[90] ValueError: what is 90?" in result.stdout
    assert "100 records: 2 of them cannot be read" in result.stderr
    result = verify("somebodys_source:doubtful", "--sample", 5, "--limit", 1)
    assert ("[70] " in result.stdout, "[90] " in result.stdout) == (True, False)
    result = verify("somebodys_source:doubtful", "--sample", 5, "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (report["source"], report["records"], report["ok"]) == ("somebodys_source:doubtful", 100, False)
    assert [bad["index"] for bad in report["bad"]] == [70, 90]
    assert {"name", "status", "rule"} <= report["checks"][0].keys()
    assert json.loads(verify("somebodys_source:ready", "--json").stdout)["ok"] is True


def test_source_that_does_not_open(tmp_path):
    result = verify("somebodys_source:SortsRequests", "-o", f"paths={tmp_path / 'nothing'}")
    assert result.exit_code == 1
    assert "SourceNotFoundError: " in result.stdout


@pytest.mark.slow_suite
def test_it_needs_neither_pytest_nor_hypothesis(tmp_path):
    program = (
        "import sys; sys.path.insert(0, '.'); from dataload.cli.app import run\n"
        "code = run(['verify', 'somebodys_source:numbers'])\n"
        "sys.exit(code or bool({'pytest', 'hypothesis'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=50).returncode == 0
