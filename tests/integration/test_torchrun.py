"""Several processes started by torchrun read the same data, and train the same model, as a single process."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataload.samplers import GlobalShuffle

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH = 24
RECORDS = 250

# torchrun and each of its processes import torch, on a machine that may be busy with other tests.
pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]


def torchrun(processes, script, *arguments):
    """Run a job and return its output. No process of the job is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    job = subprocess.Popen(
        [*command, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        printed, _ = job.communicate(timeout=80)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        printed, _ = job.communicate()
        pytest.fail(f"the job hangs:\n{printed}")
    assert job.returncode == 0, printed
    return printed


def global_batches(epoch):
    order = GlobalShuffle(RECORDS, 5).indices(np.arange(RECORDS), epoch=epoch).tolist()
    return [order[i : i + GLOBAL_BATCH] for i in range(0, RECORDS, GLOBAL_BATCH)]


def check_ranks(found, expected):
    """Check that row i of each global batch goes to rank i modulo the number of ranks."""
    for rank, one in enumerate(found):
        assert one["steps"] == len(global_batches(0))
        assert one["batches"] == [batch[rank :: len(found)] for batch in expected]
    assert len({json.dumps(one["state"]) for one in found}) == 1, "ranks have different states"


def test_four_processes_stop_and_two_go_on_with_the_same_global_batches(tmp_path):
    def run(processes, *arguments):
        script = ROOT / "tests" / "integration" / "torchrun_ranks.py"
        torchrun(processes, script, tmp_path, GLOBAL_BATCH // processes, *arguments)
        return [json.loads((tmp_path / f"{processes}-{rank}.json").read_text()) for rank in range(processes)]

    four = run(4, 4, 0)
    check_ranks(four, global_batches(0)[:4])
    assert [one["in_pair"] for one in four[:2]] == [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}]
    assert all(one["in_pair"].startswith("this process is not in the process group") for one in four[2:])
    (tmp_path / "state.json").write_text(json.dumps(four[0]["state"]))
    check_ranks(run(2, -1, 1, tmp_path / "state.json"), global_batches(0)[4:] + global_batches(1))


def test_two_processes_train_as_one_does_and_one_goes_on(tmp_path):
    script = ROOT / "examples" / "ddp.py"
    spec = importlib.util.spec_from_file_location("ddp_example", script)
    ddp = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ddp)

    checkpoint = tmp_path / "run.pt"
    printed = torchrun(2, script, "--checkpoint", checkpoint, "--stop-after", 30)
    processes, loss = re.search(r"processes: (\d), loss: (\S+)", printed).groups()
    assert processes == "2"
    stopped, whole = ddp.train(stop_after=30), ddp.train()
    assert float(loss) == pytest.approx(stopped, rel=1e-4)
    assert whole < 0.9 * stopped, "16 more steps make no difference: resuming would not be seen"
    assert ddp.train(checkpoint) == pytest.approx(whole, rel=1e-4)
