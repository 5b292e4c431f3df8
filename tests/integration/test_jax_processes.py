"""Two processes of one JAX program read the same data as one would, whatever the sharding."""

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataload.samplers import GlobalShuffle

if importlib.util.find_spec("jax") is None:
    pytest.skip("needs jax", allow_module_level=True)

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]
SCRIPT = Path(__file__).parent / "jax_ranks.py"


def run(folder, processes):
    """Return the results of each process of a job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, SCRIPT, folder, str(port)]
    jobs = [
        subprocess.Popen(
            [*command, str(process), str(processes)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for process in range(processes)
    ]
    try:
        ended = [job.communicate(timeout=90)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, printed in zip(jobs, ended, strict=True):
        assert job.returncode == 0, printed
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(processes)]


def test_two_processes_read_what_one_would(tmp_path):
    first, second = found = run(tmp_path, 2)
    order = GlobalShuffle(100, 5).indices(np.arange(100), epoch=0)[:80].reshape(5, 16).tolist()
    sums = [float(4 * 4 * sum(batch) + 16 * 6) for batch in order]
    for process, one in enumerate(found):
        assert one["alone"].startswith("Loader(100 records, 8 rows per step,")
        for when in ("before backends", "after"):
            assert one[when].startswith("this JAX program has 2 processes, and each of them would read all of the data")
        assert one["asked for"].startswith("Loader(100 records")
        assert one["data"]["place"] == {"rank": process, "world_size": 2}
        assert one["data"]["held"] == [batch[process::2] for batch in order[:3]]
        assert one["model"]["place"] == {"rank": 0, "world_size": 1}
        assert one["model"]["held"] == order[:3], "both processes hold all rows, of half of the columns"
        assert one["rest"]["held"] == [batch[process::2] for batch in order[3:]], "goes on with another sharding"
        assert one["data"]["sums"] == one["model"]["sums"] == sums[:3]
        assert one["rest"]["sums"] == sums[3:]
        assert one["data"]["shape"] == one["model"]["shape"] == [16, 4]
    assert first["data"]["state"] == first["model"]["state"] == second["data"]["state"]
