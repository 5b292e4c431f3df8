"""The examples run unchanged, and print the results that they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import require  # tests/support

EXAMPLES = Path(__file__).parents[2] / "examples"

# Each imports a framework, which takes seconds.
pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]


def run(name, *packages, options=(), python=sys.executable, environment=None):
    require(*packages)
    command = [python, EXAMPLES / name, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NEED_A_FOLDER = {
    "accelerate_state": "accelerate",
    "dcp": "torch",
    "huggingface_trainer": "transformers",
    "lightning_datamodule": "pytorch_lightning",
    "orbax_checkpoints": "orbax",
}


@pytest.mark.parametrize("name", NEED_A_FOLDER)
def test_an_example_without_its_argument_says_what_it_needs(name):
    require(NEED_A_FOLDER[name])
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert f"examples/{name}.py checkpoints\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_jax_resumes_on_several_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    printed = run("jax_arrays.py", "jax")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    assert "4 devices in 1 processes; resumed after step 37, equal: True" in printed


def test_dali_is_fed_and_resumes():
    python = os.environ.get("DALI_PYTHON", str(EXAMPLES.parent / ".venv-dali/bin/python"))
    if not Path(python).exists():
        pytest.skip(
            "examples/dali_external_source.py needs DALI in an environment of its own: make .venv-dali/.installed"
        )
    path = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    printed = run("dali_external_source.py", python=python, environment=path)
    assert "each image once an epoch: True" in printed
    assert "resumed after step 5: 9 steps, the same batches: True" in printed


def test_state_carried_across_batches_helps_a_language_model(tmp_path):
    picture = tmp_path / "rows.png"
    small = {"steps": 150, "seeds": 1, "rows": 32, "hidden": 32, "rate": 0.01, "pattern": "[a-e]*/*.py"}
    options = [str(word) for name, value in small.items() for word in (f"--{name}", value)]
    options += ["--data", str(tmp_path), "--picture", str(picture)]
    printed = run("char_lm.py", "torch", "matplotlib", options=options)
    assert "continues with the same batch: True" in " ".join(printed.split())
    rows = re.findall(r"│ (carried|zero at each chunk) +│ +150 │ ([\d.]+) \(.*?│ ([\d.]+) \(", printed)
    bits = {mode: [float(value) for value in values] for mode, *values in rows}
    carried, _ = bits["carried"]
    assert carried < min(bits["zero at each chunk"]) < 7, "of 128 characters, each of which would cost 7 bits"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_slurm_runs_the_parts_and_merges_them(tmp_path, monkeypatch):
    """Without Slurm: `sbatch` and `dataload` are scripts that print how they are called."""
    import dataload
    from dataload.cli import app as main
    from dataload.convert import convert

    for name, prints in (("sbatch", 'echo "$@" >> calls; echo 42'), ("dataload", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{prints}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script = str(EXAMPLES / "slurm_convert.sh")

    def slurm(*arguments, **environment):
        return subprocess.run(
            [script, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )

    command = ["a.syr", "d/b.tar", "--shards", "3"]
    done = slurm("--mem=8G", "--", *command, PARTS="2")
    assert done.stdout == "submitted parts 1 to 2 as array 42, and the merge as job 42\n", done.stderr
    called = f"{script} a.syr d/b.tar --shards 3"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"--parsable --mem=8G --array=1-2 --export=ALL,PARTS=2 {called}",
        f"--parsable --mem=8G --dependency=afterok:42 --kill-on-invalid-dep=yes --export=ALL,MERGE=1 {called}",
    ]
    assert slurm(*command).stderr.startswith("usage: PARTS=N ")

    source = dataload.MemorySource([{"x": i} for i in range(7)])
    with dataload.create("a.syr") as writer:
        writer.extend(source)
    for directory in ("d", "one"):
        (tmp_path / directory).mkdir()
    jobs = [{"SLURM_ARRAY_TASK_ID": "2", "PARTS": "2"}, {"SLURM_ARRAY_TASK_ID": "1", "PARTS": "2"}, {"MERGE": "1"}]
    for environment in jobs:
        assert main.run(slurm(*command, **environment).stdout.split()) == 0
    with dataload.open("a.syr") as opened:
        convert(opened, "one/b.tar", shards=3)
    hashes = [{path.name: path.read_bytes() for path in Path(name).glob("[!.]*")} for name in ("d", "one")]
    assert hashes[0] == hashes[1]
