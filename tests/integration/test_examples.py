"""The examples run unchanged, and print the results that they promise."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# Each imports a framework, which takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def run(name, *packages, options=()):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"examples/{name} needs {package}: pip install 'dataload[examples]'")
    done = subprocess.run([sys.executable, EXAMPLES / name, *options], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_lightning_resumes_in_the_middle_of_an_epoch():
    printed = run("lightning_datamodule.py", "torch", "pytorch_lightning")
    whole = re.search(r"uninterrupted: 30 steps, last loss (\S+)", printed).group(1)
    resumed = re.search(r"resumed after step 17: 13 steps, last loss (\S+)", printed).group(1)
    assert resumed == whole


def test_the_trainer_of_hugging_face_skips_no_batches():
    printed = run("huggingface_trainer.py", "torch", "transformers", "accelerate")
    assert "uninterrupted: 30 batches; resumed after step 17: 13 batches; weights equal: True" in printed


def test_jax_takes_batches_without_copying():
    printed = run("jax_arrays.py", "jax")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    shared, batches = map(int, re.search(r"features were not copied: (\d+) of (\d+)", printed).groups())
    assert batches == 3 * 25
    assert shared > batches / 2, "numpy alone would align one in four"


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
