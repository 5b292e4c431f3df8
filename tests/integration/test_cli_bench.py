"""``dataload bench`` as a user runs it."""

import io
import json

import numpy as np
import pytest
from typer.testing import CliRunner

import dataload
from dataload.bench.picture import curves_figure
from dataload.bench.results import Results
from dataload.bench.table import RATE_COLUMNS
from dataload.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module", autouse=True)
def _fonts():
    """matplotlib keeps the files of fonts open once it has drawn text: no leak of the test that draws first."""
    figure = curves_figure([])
    figure.text(0, 0, "text")
    figure.text(0, 0, "text", fontweight="bold")
    figure.savefig(io.BytesIO())


def test_a_small_run(tmp_path):
    targets = {name: tmp_path / f"out.{name}" for name in ("json", "html", "svg")}
    result = run(
        *("--made", "floats-64", "--records", 600, "--formats", "syrah", "--workers", "0", "--batch-size", 100),
        *("--repeats", 1, "--seconds", 0.05, "--cache", tmp_path / "cache"),
        *("--json", targets["json"], "--html", targets["html"], "--picture", targets["svg"]),
    )
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    results = Results.from_json(json.loads(targets["json"].read_text()))
    assert [(m.task.kind, m.task.name, m.error) for m in results.measurements] == [
        ("limit", "copy in memory, 1 thread", None),
        ("limit", "copy in memory, 2 threads", None),
        ("dataload", "dataload", None),
    ]
    assert len({answer.checksum for m in results.measurements for answer in m.answers}) == 1
    assert [(file.workload, file.format, file.records) for file in results.files] == [("floats-64", "syrah", 600)]
    lines = result.stdout.splitlines()
    assert lines[0] == "floats-64"
    assert "reader format order workers records/s spread x limit" in [" ".join(line.split()) for line in lines]
    assert max(map(len, lines[:9])) <= 100
    (row,) = (line.split() for line in lines if line.startswith("dataload "))
    assert row[:4] == ["dataload", "syrah", "global", "0"]
    assert "copy in memory, 2 threads" in targets["html"].read_text()
    assert targets["svg"].read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--made", "float-4k"], "there is no workload 'float-4k'"),
        (["--formats", "syrah,sirah"], "--formats has 'sirah'"),
        (["--formats", ","], "--formats names none: give some of syrah"),
        (["--made", "tokens", "--formats", "tar"], "--formats has 'tar'"),
        (["--made", "floats-64", "--made", "tokens", "--formats", "syrah"], "--formats has 'syrah'"),
        (["--executor", "fibres"], "--executor has 'fibres'"),
        (["x.syr", "--made", "tokens"], "--made makes data instead of x.syr: give one of the two"),
        (["--orders", "globl"], "--orders has 'globl'"),
        (["--workers", "1,two"], "--workers must be numbers of 0 or more with commas between, got '1,two'"),
        (["--workers", "-1"], "--workers must be numbers of 0 or more"),
        (["--json", "/no/such/place/x.json"], "there is no directory /no/such/place"),
        (["--html", "/no/such/place/x.html"], "there is no directory /no/such/place"),
        (["--picture", "/no/such/place/x.png"], "there is no directory /no/such/place"),
        (["--picture", "x.jpeg"], "a picture ends in .pdf, .png, .svg"),
        (["/no/such/data.syr"], "/no/such/data.syr"),
    ],
)
def test_wrong_arguments_cost_no_work(tmp_path, arguments, message):
    result = run(*arguments, "--cache", tmp_path)
    assert result.exit_code not in (0, None)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_all_columns_for_data_of_the_users_own(tmp_path):
    path = str(tmp_path / "own.syr")
    with dataload.create(path) as writer:
        writer.extend({"x": np.full(8, i, np.float32), "y": i} for i in range(300))
    result = run(
        *(path, "--wide", "--records", 200, "--formats", "torchrecord", "--workers", "0", "--repeats", 1),
        *("--seconds", 0.05, "--cache", tmp_path / "cache"),
    )
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert lines[0] == path
    (head,) = (line for line in lines if line.startswith("reader"))
    assert " ".join(head.split()) == " ".join(RATE_COLUMNS)
    assert [line.split()[:2] for line in lines if line.startswith("torchrecord")] == [["torchrecord", "200"]]
    (row,) = (line.split() for line in lines if line.startswith("dataload "))
    assert row[:4] == ["dataload", "torchrecord", "global", "0"]
