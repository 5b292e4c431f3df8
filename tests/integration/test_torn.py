"""Shards that are overwritten in place while a loader reads them; ``make torn`` does it 440 times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz" / "torn.py"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_no_batch_is_torn():
    command = [sys.executable, SCRIPT, "--rounds", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 wrong; from the last piece to the error " in done.stdout
