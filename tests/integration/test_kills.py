"""Writers and conversions that are killed; ``make kills`` does it a thousand times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz" / "kills.py"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8, pytest.param(52, marks=pytest.mark.slow_suite)])
def test_killed_writers_lose_nothing_and_leave_nothing(kills):
    command = [sys.executable, SCRIPT, "--kills", str(kills), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("syrah", "torchrecord", "lmdb", "tar", "array_record"):
        assert f"'{name}': " in done.stdout
    assert "0 lost, 0 half-written, 0 left over, 0 failed" in done.stdout
