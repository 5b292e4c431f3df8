"""A loader on Ray where no cluster runs, and the page that shows one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fleet.md"


def test_a_local_cluster_starts_where_there_is_none(tmp_path):
    (program,) = re.findall(r"```python\n(# train.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(program)
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["1000"], done.stderr
    assert done.stderr.count("no Ray cluster runs here, and RAY_ADDRESS names none: started one of") == 1
