"""Writers and conversions that are killed; ``make kills`` does it a thousand times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz" / "kills.py"


@pytest.mark.slow
def test_killed_writers_lose_nothing_and_leave_nothing():
    command = [sys.executable, SCRIPT, "--kills", "52", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost, 0 half-written, 0 left over, 0 failed" in done.stdout
