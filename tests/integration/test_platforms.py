"""The basic uses on a system without the names and files that only Linux has, or that Windows lacks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_server import HostileServer

CHILD = Path(__file__).parents[1] / "children" / "lesser_system.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "core"), [pytest.param("macos", "compiled", marks=pytest.mark.slow_suite), ("windows", "numpy")]
)
def test_local_and_remote_data_are_written_converted_and_loaded(system, core, tmp_path):
    def answer(handler):
        data = (tmp_path / handler.path.strip("/")).read_bytes()
        start, stop = handler.span(len(data))
        headers = {"ETag": '"1"', "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}", "Accept-Ranges": "bytes"}
        if handler.command == "HEAD":
            handler.begin(200, {"ETag": '"1"', "Content-Length": len(data), "Accept-Ranges": "bytes"})
        else:
            handler.send(data[start:stop], headers, 206 if "Range" in handler.headers else 200)

    with HostileServer(answer) as server:
        done = subprocess.run(
            [sys.executable, CHILD, system, tmp_path, server.endpoint],
            env={**os.environ, "DATALOAD_CORE": core},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
