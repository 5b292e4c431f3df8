"""Measurements of peers: which can be made, which cannot and why, and that their files are written once."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dataload
from benchmarks.peers import plan as peers_plan
from benchmarks.peers.field import expand_files
from benchmarks.peers.plan import plan_peers
from benchmarks.workloads import made_data, write_made
from dataload.bench.data import Choices

TORCH, MEMMAP = "torch DataLoader", "torch DataLoader, memmap"


@pytest.fixture
def data():
    return made_data("floats-64", 20)


@pytest.fixture
def plan(tmp_path, data, monkeypatch):
    """A function: peers and formats -> tasks, and those that cannot be; all peers are there."""
    monkeypatch.setattr(peers_plan, "why_missing", lambda peer, python: None)

    usual = Choices(orders=("global", "sequential"), workers=(0, 2), batch_size=8, seconds=0.5)

    def plan(*names, formats=("lmdb", "tar", "array_record"), data=data, choices=usual, interpreters=None, shards=1):
        written = {name: write_made(data, name, tmp_path, shards) for name in formats}
        return plan_peers(names, data, written, choices, tmp_path, interpreters=interpreters or {}, shards=shards)

    return plan


@pytest.fixture
def prepares(monkeypatch):
    """The commands that were run, instead of them: each says what `answers` has for it, by default a path."""
    ran, answers = [], {}

    def run(command, **settings):
        ran.append((command, settings))
        status, output, errors = answers.get(command[3], (0, f"noise\n\n{command[5]}/x.npy\n", ""))
        return subprocess.CompletedProcess(command, status, output, errors)

    monkeypatch.setattr(peers_plan.subprocess, "run", run)
    run.ran, run.answers = ran, answers
    return run


def test_several_files(plan, data, tmp_path):
    """All formats that can have several are read, by us and by peers, and hold the same records as one file."""
    several = replace(data, name="floats-64 in 3 shards", content=f"{data.content}-3")
    tasks, missing = plan(TORCH, data=several, shards=3)
    assert missing == []
    assert {task.format for task in tasks} == {"tar", "array_record"}
    for task in tasks:
        assert len(expand_files(task.path)) == 3
        assert task.options["field"]["shards"] == 3
    with dataload.open(write_made(several, "tar", tmp_path, 3).path, decode="auto") as source:
        np.testing.assert_array_equal(source.read_batch(range(20))["x"], [record["x"] for record in data.records])


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (MEMMAP, "its own format is written from a tar archive: add tar to --formats"),
        ("DALI on CPU", "reads tar, not lmdb: add one that it reads to --formats"),
    ],
)
def test_what_a_peer_cannot_read(plan, peer, why):
    tasks, missing = plan(peer, formats=("lmdb",))
    found = [(measurement.task.name, measurement.error, measurement.answers) for measurement in missing]
    assert (tasks, found) == ([], [(peer, why, ())])


def test_a_format_of_its_own_is_prepared_once_by_the_peers_interpreter(plan, prepares):
    tasks, missing = plan(MEMMAP, interpreters={MEMMAP: "/other/python"})
    assert missing == []
    ((command, settings),) = prepares.ran
    assert command[:4] == ["/other/python", "-m", "benchmarks.peers.plan", MEMMAP]
    assert command[4].endswith("data.tar")
    assert json.loads(command[6]) == {"field": {"name": "x", "dtype": "float32", "shape": [16], "shards": 1}}
    assert str(Path(dataload.__file__).parents[1]) in settings["env"]["PYTHONPATH"].split(":")
    assert {(task.format, task.path) for task in tasks} == {("npy", f"{command[5]}/x.npy")}
    assert plan(MEMMAP)[0] == tasks
    assert len(prepares.ran) == 1
