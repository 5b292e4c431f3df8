"""Our sources in Grain's own loaders, with two worker processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from every_format import small_sets
from written import written

from dataload.sources.registry import built_in_formats

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parents[1] / "children" / "grain_loader.py"


def test_every_format_is_read_by_grains_workers(tmp_path):
    pytest.importorskip("grain", reason="grain is not installed")
    path, sets = written(tmp_path / "x.array_record", [b"%03d" % i for i in range(100)]), small_sets(tmp_path)
    assert sets.keys() | {"memory"} == {entry.name for entry in built_in_formats()}
    # In a process of its own: Grain starts threads and processes that it does not end before its process does.
    command = [sys.executable, SCRIPT, path, sets["tfds"][0], json.dumps(sets)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all read\n")
