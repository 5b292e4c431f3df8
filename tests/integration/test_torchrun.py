"""Several processes started by torchrun read the same data, and train the same model, as a single process."""

import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import run_job  # tests/support

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
    return run_job([*command, script, *arguments])


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


def load_example(script):
    spec = importlib.util.spec_from_file_location("ddp_example", script)
    ddp = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ddp)
    return ddp


def test_the_example_stops_and_goes_on(tmp_path):
    ddp, checkpoint = load_example(ROOT / "examples" / "ddp.py"), tmp_path / "run.pt"
    stopped, whole = ddp.train(checkpoint, stop_after=30), ddp.train()
    assert whole < 0.9 * stopped, "20 more steps make no difference: resuming would not be seen"
    (tmp_path / "other.pt").write_bytes(checkpoint.read_bytes())
    assert ddp.train(checkpoint) == pytest.approx(whole, rel=1e-4)
    assert whole != pytest.approx(ddp.train(tmp_path / "other.pt", rows_per_process=40), rel=1e-4)


class Agents:
    """The agents of an elastic job, one for each "node", and what they and their processes print."""

    def __init__(self, folder):
        self._read, self._write = os.pipe()
        self._output = os.fdopen(self._read)
        self._folder = folder
        self._port = free_port()
        self._agents = []
        self.printed = []

    def start(self, processes):
        """Add a node with so many processes."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic"]
        is_first = not self._agents
        settings = f"is_host={int(is_first)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3", *rendezvous]
        command += ["--rdzv-conf", settings]
        command += ["--nproc-per-node", str(processes), "--max-restarts", "9", "--monitor-interval", "0.2"]
        script = [ROOT / "tests" / "integration" / "elastic_ranks.py", self._folder / "notes"]
        options = ["--checkpoint", self._folder / "run.pt", "--checkpoint-every", "3"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment |= {"WAITS": "1"} if is_first else {}
        agent = subprocess.Popen(
            [*command, *script, *options], stdout=self._write, stderr=subprocess.STDOUT, env=environment
        )
        self._agents.append(agent)
        return agent

    def held(self, processes):
        """Wait until so many processes hold, and return their numbers by agent."""
        found = {}
        for line in self._output:
            self.printed.append(line)
            for process, agent in re.findall(rf"held: {processes} processes, (\d+) of (\d+)\.", line):
                found.setdefault(int(agent), []).append(int(process))
            if sum(map(len, found.values())) == processes:
                return found
        return None

    def end(self):
        """Wait for the end of the job, and return what was printed."""
        os.close(self._write)
        self._write = None
        self.printed += self._output
        for agent in self._agents:
            agent.wait()
        return "".join(self.printed)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for agent in self._agents:
            if agent.poll() is None:
                for process in children(agent.pid):
                    os.kill(process, signal.SIGKILL)
                agent.kill()
                agent.wait()
        if self._write is not None:
            os.close(self._write)
        self._output.close()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def children(process):
    listings = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for listing in listings for child in listing.read_text().split()]


def test_a_job_goes_on_with_other_numbers_of_processes_when_nodes_are_killed_and_added(tmp_path):
    """4 processes, 2 and 3: over what the checkpoints say, each record of an epoch is trained on once."""
    (tmp_path / "notes").mkdir()
    with Agents(tmp_path) as agents:
        first, second = agents.start(2), agents.start(2)
        of_second = agents.held(4)[second.pid]
        for process in (second.pid, *of_second):
            os.kill(process, signal.SIGKILL)
        agents.held(2)
        third = agents.start(1)
        printed = agents.end()
        assert (first.returncode, third.returncode) == (0, 0), printed
    ddp = load_example(ROOT / "examples" / "ddp.py")
    assert float(re.search(r"processes: 3, loss: (\S+)", printed)[1]) == pytest.approx(ddp.train(), rel=1e-4)

    # One run for each start and epoch, in the order of time.
    by_start = {}
    for path in sorted((tmp_path / "notes").iterdir()):
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        by_start.setdefault(path.stem.partition("-")[0], []).append(notes)
    runs = []
    for ranks in by_start.values():
        steps = list(zip(*ranks, strict=False))  # a rank may be killed before it notes a step of the others
        assert all(len(ranks) == note["world_size"] for step in steps for note in step)
        runs.append([(step[0]["after"], sorted(i for note in step for i in note["indices"])) for step in steps])
    sizes = [ranks[0][0]["world_size"] for ranks in by_start.values()]
    assert [size for size, _ in itertools.groupby(sizes)][-3:] == [4, 2, 3]

    order = [GlobalShuffle(1500, 0).indices(np.arange(1500), epoch=epoch).tolist() for epoch in range(2)]
    expected = [sorted(one[i : i + ddp.GLOBAL_BATCH]) for one in order for i in range(0, 1500, ddp.GLOBAL_BATCH)]
    number = {json.dumps([step // 25 + (step % 25 == 24), (step + 1) % 25 * 60]): step for step in range(50)}
    reached = 0
    for run in runs:
        numbers = [number[json.dumps(after)] for after, _ in run]
        assert numbers[0] <= reached, "steps are lost"
        assert reached - numbers[0] < 3, "a checkpoint was ignored"
        reached = numbers[-1] + 1
        assert [batch for _, batch in run] == expected[numbers[0] : reached]
    assert reached == 50
