"""``dataload bench`` as a user runs it."""

import io
import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import dataload
from dataload.bench.report import curves_figure
from dataload.bench.results import Curve, Results
from dataload.bench.stages import StageReport, StageTime
from dataload.bench.table import RATE_COLUMNS
from dataload.bench.timing import Spread
from dataload.cli import bench
from dataload.cli.app import app
from dataload.cli.bench import _own_directory, _rows
from dataload.errors import ConfigError

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS.parent), str(TESTS / "children")]  # for the package benchmarks, and for what configs name


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module", autouse=True)
def _fonts():
    """matplotlib keeps the files of fonts open once it has drawn text: no leak of the test that draws first."""
    figure = curves_figure([])
    figure.text(0, 0, r"text $x \times \mathdefault{10^{3}}$")
    figure.text(0, 0, "text", fontweight="bold")
    figure.savefig(io.BytesIO())


def test_a_small_run(tmp_path, monkeypatch):
    """With curves of costs, whose measurement takes long."""
    curve = Curve("Orders, a block at a time", "records", "ns/record", {"global": ((1000, 12.5), (2000, 13.0))})
    monkeypatch.setattr(bench, "measure_scale", lambda directory: (curve,) if directory.is_dir() else ())
    targets = {name: tmp_path / f"out.{name}" for name in ("json", "html", "svg")}
    result = run(
        *("--made", "floats-64", "--records", 600, "--formats", "syrah", "--workers", "0", "--batch-size", 100),
        *("--repeats", 1, "--seconds", 0.05, "--cache", tmp_path / "cache", "--scale"),
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
    headings = "reader format order workers records/s x limit first touch/s faults/batch sys us/batch"
    assert headings in [" ".join(line.split()) for line in lines]
    assert max(map(len, lines[:9])) <= 132
    (row,) = (line.split() for line in lines if line.startswith("dataload "))
    assert row[:4] == ["dataload", "syrah", "global", "0"]
    plain = [" ".join(line.split()) for line in lines]
    begin = plain.index("Orders, a block at a time")
    assert plain[begin + 1 : begin + 4] == ["records global, ns/record", "1,000 12.5", "2,000 13"]
    assert results.curves == (curve,)
    page = targets["html"].read_text()
    for shown in ("copy in memory, 2 threads", "How costs grow", "<summary>Orders, a block at a time</summary>"):
        assert shown in page
    assert targets["svg"].read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--made", "float-4k"], "there is no workload 'float-4k'"),
        (["--formats", "syrah,sirah"], "--formats has 'sirah'"),
        (["--formats", ","], "--formats is empty: give some of syrah"),
        (["--made", "tokens", "--formats", "tar"], "--formats has 'tar'"),
        (["--made", "floats-64", "--made", "tokens", "--formats", "syrah"], "--formats has 'syrah'"),
        (["--executor", "fibres"], "'fibres' is not one of 'threads', 'processes'"),
        (["x.syr", "--made", "tokens"], "--made makes data instead of x.syr: give one of the two"),
        (["--orders", "globl"], "--orders has 'globl'"),
        (["--workers", "1,two"], "--workers must be numbers of 0 or more, separated by commas, got '1,two'"),
        (["--workers", "-1"], "--workers must be numbers of 0 or more"),
        (["--json", "/no/such/place/x.json"], "there is no directory /no/such/place"),
        (["--html", "/no/such/place/x.html"], "there is no directory /no/such/place"),
        (["--picture", "/no/such/place/x.png"], "there is no directory /no/such/place"),
        (["--picture", "x.jpeg"], "the suffix of a picture must be one of .pdf, .png, .svg"),
        (["/no/such/data.syr"], "/no/such/data.syr"),
        (["--set", "loader.batch_size=8"], "--set changes a config: give one with --loader"),
        (["--peers", "Grian"], "--peers has 'Grian': did you mean 'Grain'?"),
        (["--peers", "Grain,memmap"], "--peers has 'memmap'"),
        (["--peers", "torch DataLoader, memmap, Grian"], "--peers has 'Grian'"),
        (["--peers", " ,"], "--peers is empty: give some of torch DataLoader"),
        (["--peer-python", "Grain"], "--peer-python must be PATH, or NAME=PATH with the name of a peer, got 'Grain'"),
        (["--peer-python", "Grain="], "--peer-python must be PATH, or NAME=PATH"),
        (["--peer-python", "Grian=/usr/bin/python3"], "did you mean 'Grain'?"),
        (["--made", "streams", "--formats", "syrah"], "--formats has 'syrah'"),
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
    assert "dataload, torchrecord, global, 0 workers: executor threads, num_workers 0, prefetch 2" in lines


# Peers


@pytest.mark.slow_suite
def test_other_loaders_beside_it(tmp_path):
    pytest.importorskip("torch")
    target = tmp_path / "out.json"
    result = run(
        *("--made", "floats-64", "--records", 64, "--formats", "tar", "--workers", "0", "--batch-size", 16),
        *("--repeats", 1, "--seconds", 0.05, "--cache", tmp_path / "cache", "--json", target),
        *(
            "--peers",
            "torch DataLoader, memmap, bagz",
            "--peer-python",
            "bagz=/no/such/python",
            "--peer-python",
            sys.executable,
        ),
    )
    assert result.exit_code == 0, result.output
    results = Results.from_json(json.loads(target.read_text()))
    found = {(m.task.kind, m.task.name): m for m in results.measurements if m.task.kind != "limit"}
    ours, memmap, absent = (
        found[key] for key in (("dataload", "dataload"), ("peer", "torch DataLoader, memmap"), ("peer", "bagz"))
    )
    assert len(found) == 3
    assert ours.answers[0].checksum == memmap.answers[0].checksum is not None
    assert (absent.answers, memmap.task.format) == ((), "npy")
    assert "cannot run /no/such/python" in absent.error
    assert "warning: bagz, bagz, global, 0 workers: cannot run /no/such/python" in result.stderr
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("torch DataLoader, memmap"))
    assert row.split()[-4] == "1.00"  # the best peer


def test_all_peers_are_all_that_are_known(monkeypatch):
    from benchmarks.peers import PEERS, plan

    asked = []
    monkeypatch.setattr(plan, "plan_peers", lambda names, *_, **__: asked.append(tuple(names)) or ([], []))
    monkeypatch.setattr(bench, "_measure", lambda *_: ())
    assert run("--made", "streams", "--records", 16, "--peers", "all").exit_code == 0
    assert asked == [tuple(PEERS)]


def test_peers_without_a_clone(monkeypatch, tmp_path):
    """As from an installed wheel, whose directory holds no benchmarks."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "benchmarks").is_dir()])
    result = run("--made", "floats-64", "--peers", "all", "--cache", tmp_path / "cache")
    assert result.exit_code not in (0, None)
    assert "--peers needs benchmarks/peers, which the repository has" in result.stderr
    assert "put the clone on PYTHONPATH" in result.stderr
    # In a clone it is found, also where the command itself is an installed script.
    monkeypatch.chdir(TESTS.parent)
    assert "--peers has 'Grian'" in run("--peers", "Grian").stderr


def test_streams(tmp_path):
    target = tmp_path / "out.json"
    result = run(
        *("--made", "streams", "--workers", "0,2", "--records", 64, "--batch-size", 4),
        *("--repeats", 1, "--seconds", 0.05, "--cold", "--json", target),
    )
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    results = Results.from_json(json.loads(target.read_text()))
    assert [(m.task.name, m.task.workers, m.error) for m in results.measurements] == [
        ("bare generators, 1 process", 0, None),
        *(("dataload", workers, None) for workers in (0, 2)),
    ]
    assert len({answer.checksum for m in results.measurements for answer in m.answers}) == 1
    assert [m.answers[0].settings["num_workers"] for m in results.measurements[1:]] == [0, 2]


# Stages of a config


@pytest.fixture
def config(tmp_path):
    with dataload.create(tmp_path / "x.syr") as writer:
        writer.extend({"x": np.full(4, i, np.float32)} for i in range(32))
    path = tmp_path / "config.toml"
    path.write_text(
        '[source]\npath = "x.syr"\n[loader]\nbatch_size = 4\ntransform = "bench_steps:double"\n', encoding="utf-8"
    )
    return path


def test_where_the_time_of_a_config_goes(tmp_path, config):
    target = tmp_path / "out.json"
    result = run(
        "--loader", config, "--seconds", 0.05, "--repeats", 1, "--json", target, "--set", "loader.batch_size=8"
    )
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    told = json.loads(target.read_text())
    names = ["source", "+ transform", "+ collate", "the config as it is", "the same batches from memory"]
    assert [stage["name"] for stage in told["stages"]] == names
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["stage", "records/s", "us/batch", "added"]
    assert all(line.startswith(name) for line, name in zip(lines[1:], names, strict=False))
    for line, stage, before in zip(lines[1:], told["stages"], [None, *told["stages"]], strict=False):
        line = line.removeprefix(stage["name"]).replace("about 0", "")
        figures = [float(word.replace(",", "")) for word in line.split()]
        took = stage["batch_seconds"]["median"] * 1e6
        more = [took - before["batch_seconds"]["median"] * 1e6] if stage["name"].startswith("+") else []
        more = [added for added in more if added > 0]
        assert figures == pytest.approx([stage["rows_per_second"], took, *more], abs=0.51)
        assert stage["rows_per_second"] == pytest.approx(8e6 / took)  # one round
    assert "note: copying to a device is not part of a config" in result.stdout
    assert told["verdict"] in lines
    assert told["verdict"]
    assert lines[-1] == f"written to {target}"


def test_what_a_stage_adds_is_about_nothing_within_the_spread_of_the_repeats():
    def stage(name, *times):
        return StageTime(name, Spread(*times), 1.0)

    stages = (
        stage("source", 5e-3, 4e-3, 6e-3),
        stage("+ decode", 3e-3, 2e-3, 3.5e-3),  # noise
        stage("+ transform", 4e-3, 3e-3, 5e-3),
        stage("+ collate", 9e-3, 8e-3, 9e-3),
    )
    added = [row[-1] for row in _rows(StageReport(stages, "", ()))]
    assert added == ["", "about 0", "about 0", "+5,000.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--made", "tokens"], "--loader measures a config and nothing else: remove --made"),
        (["x.syr"], "remove PATH"),
        (["--formats", "tar"], "remove --formats"),
        (["--batch-size", 4], "remove --batch-size"),
        (["--records", 4], "remove --records"),
        (["--peers", "Grain"], "remove --peers"),
        (["--scale"], "remove --scale"),
        (["--cold"], "remove --cold"),
        (["--picture", "x.svg"], "remove --picture"),
        (["--html", "x.html"], "remove --html"),
        (["--json", "/no/such/place/x.json"], "there is no directory /no/such/place"),
        (["--set", "loader.batch_size=0"], "loader.batch_size"),
    ],
)
def test_what_does_not_go_together_with_a_config(config, arguments, message):
    result = run("--loader", config, *arguments)
    assert result.exit_code not in (0, None)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_by_default_files_are_kept_where_nobody_else_can_put_some(tmp_path, monkeypatch):
    monkeypatch.setattr("dataload.cli.bench.gettempdir", lambda: str(tmp_path))
    directory = tmp_path / f"dataload-bench-{os.geteuid()}"
    for _ in range(2):
        assert _own_directory() == directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    message = rf"{directory} must be a directory that only you can write to, but is not: remove it, or set --cache"
    directory.chmod(0o770)
    with pytest.raises(ConfigError, match=message):
        _own_directory()
    directory.chmod(0o700)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    directory.rename(tmp_path / f"dataload-bench-{other}")
    with pytest.raises(ConfigError, match="must be a directory that only you can write to"):
        _own_directory()
    monkeypatch.undo()
    monkeypatch.setattr("dataload.cli.bench.gettempdir", lambda: str(tmp_path))
    directory.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=message):
        _own_directory()
