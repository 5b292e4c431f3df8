"""Jobs that share a cache with too little room; ``make jobs`` runs 200 rounds of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz" / "cache_jobs.py"


@pytest.mark.remote
@pytest.mark.timeout(170)
def test_jobs_that_share_a_cache_receive_their_batches_without_a_hang():
    pytest.importorskip("obstore")
    command = [sys.executable, SCRIPT, "--rounds", "6", "--first", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 rounds" in done.stdout
