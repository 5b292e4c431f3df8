"""Our sources in Grain's own DataLoader, with two worker processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dataload

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[1] / "golden" / "tfds" / "demo" / "1.0.0"
SCRIPT = Path(__file__).parents[1] / "children" / "grain_loader.py"


@pytest.mark.timeout(180)
def test_ours_run_in_grains_loader(tmp_path):
    pytest.importorskip("grain", reason="grain is not installed")
    path = tmp_path / "x.array_record"
    with dataload.create(path) as writer:
        for i in range(100):
            writer.write(b"%03d" % i)
    # In a process of its own: Grain starts threads and processes that it does not end before its process does.
    done = subprocess.run(
        [sys.executable, SCRIPT, path, DEMO], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all read\n")
