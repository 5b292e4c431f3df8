"""One rank gets the statistics of all; a rank that has ended is an error and not a hang."""

import json
import re
import sys
from pathlib import Path

import pytest
from jobs import run_job  # tests/support

pytest.importorskip("torch")

pytestmark = [pytest.mark.train]


@pytest.mark.parametrize("processes", [2, 3])
def test_rank_0_gets_the_table_of_all_ranks(processes, tmp_path):
    script = Path(__file__).with_name("statistics_ranks.py")
    options = ["--standalone", f"--nproc-per-node={processes}"]
    run_job([sys.executable, "-m", "torch.distributed.run", *options, script, tmp_path])
    table, recent, pair, steps = json.loads((tmp_path / "0.json").read_text())
    last = processes - 1
    for ranks, slowest, verdict in (table, recent):
        assert ranks == [*range(processes)]
        assert slowest == last
        assert re.match(rf"rank {last} is the slowest, with \d\d\.\d ms a batch; limit: transform slow", verdict)
    assert (pair[0], steps) == ([0, last], 4)
    for rank in range(1, processes):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [None] * 4
    for rank in range(last):
        error = (tmp_path / f"{rank}.txt").read_text()
        assert error.startswith("the statistics of all ranks could not be gathered: a process has ended, or does not")
