"""Names in files that lead elsewhere; ``make names`` tries all of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "fuzz" / "names.py"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_nothing_that_a_file_names_leaves_its_directory_or_host():
    cases = ["wids", "manifest of wids", "hugging face, splits", "wids at a URL"]
    command = [sys.executable, SCRIPT, "--every", "9", *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout.splitlines()[-1]
