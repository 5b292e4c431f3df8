"""Ctrl-C, and the end of the program, while a store does not answer."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hostile_server import Handler, HostileServer

import dataload

pytestmark = [pytest.mark.slow]
pytest.importorskip("obstore")

CHILD = Path(__file__).parents[1] / "children" / "waits_for_store.py"
EMPTY = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'
WAYS = ("open", "one record", "a large record", "a batch", "a shard", "no workers", "threads", "threads, shards")
WAYS += ("no workers, shards", "processes", "caught", "convert from", "convert to")
SAMPLE = ("a large record", "threads, shards")  # the others are tested by `make test-remote`


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        with dataload.create(path / f"part-{shard}.syr") as writer:
            writer.extend({"x": np.random.default_rng(row).bytes(20_000)} for row in range(shard, 32, 4))
    return path


class Store:
    """Serves files, until it stalls. Writes stall at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stalls = threading.Event()

    def __call__(self, handler: Handler) -> None:
        if self.stalls.is_set() or handler.command == "PUT":
            return handler.stall()
        file = self.root / handler.path.split("?")[0].lstrip("/")
        if "list-type" in handler.path:
            return handler.send(EMPTY)
        if not file.is_file():
            return handler.send(b"", status=404)
        data = file.read_bytes()
        start, stop = handler.span(len(data))
        headers = {
            "ETag": f'"{hashlib.md5(data).hexdigest()}"',
            "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
        }
        return handler.send(data[start:stop], headers, 206 if "Range" in handler.headers else 200)


@pytest.mark.parametrize(
    "what", [way if way in SAMPLE else pytest.param(way, marks=pytest.mark.remote) for way in WAYS]
)
def test_ctrl_c_while_a_store_stalls(shards, tmp_path, what):
    store = Store(shards)
    with HostileServer(store) as server:
        environment = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_REGION": "region",
            "AWS_ENDPOINT": server.endpoint,
            "TEST_SHARDS": str(shards),
        }
        command = [sys.executable, str(CHILD), what, server.endpoint, str(tmp_path / "cache")]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as child:
            try:
                assert child.stdout.readline() == b"ready\n"
                if what != "convert to":  # a store that takes nothing
                    store.stalls.set()
                child.stdin.write(b"\n")
                child.stdin.flush()
                assert server.waiting.wait(30)
                begun = time.monotonic()
                os.kill(child.pid, signal.SIGINT)
                child.wait(timeout=30)
                taken = time.monotonic() - begun
            finally:
                child.kill()
                _, error = child.communicate()
        assert b"KeyboardInterrupt" in error.splitlines()[-2:], error.decode()  # a conversion adds a note on resuming
        assert child.returncode == -signal.SIGINT
        assert b"Fatal" not in error
        assert taken < 8  # 2 s, on a machine that does nothing else; requests would be waited for 10 s and more
