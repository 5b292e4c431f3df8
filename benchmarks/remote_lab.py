"""A server of objects with data, a proxy in front of it, and clients in processes of their own."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

import dataload
from benchmarks.harness import ROOT, VERSION
from benchmarks.remote_clients import records
from dataload.bench.runner import child_environment

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

SHARDS, RECORD = 16, 64 << 10
CONNECTIONS = 8
_SECONDS = 600  # of a client


class ClientError(Exception):
    """A client could not be measured."""


class Lab:
    """A server with data, and a proxy in front of it."""

    def __init__(self, held, size):
        from fault_proxy import FaultProxy
        from object_server import ObjectServer

        self.server = held.enter_context(ObjectServer())
        self.proxy = held.enter_context(FaultProxy(self.server.endpoint))
        self.bucket = self.server.bucket()
        self.scratch = Path(held.enter_context(tempfile.TemporaryDirectory(dir=ROOT, prefix="remote-")))
        self.size = size

    def put(self, shards, nbytes, record, suffix="syr"):
        """Store shards of about `nbytes` bytes; returns what a task says about them."""
        rows = max(1, nbytes // record)
        directory = ROOT / f"v{VERSION}-remote-{suffix}-{shards}-{rows}-{record}"
        if not directory.exists():
            part = Path(tempfile.mkdtemp(dir=ROOT))
            for shard in range(shards):
                with dataload.create(part / f"part-{shard:05}.{suffix}") as writer:
                    writer.extend(records(shard, rows, record))
            for index in part.glob("*.idx"):
                index.unlink()
            part.rename(directory)
        keys = self.server.put_directory(self.bucket, directory, f"{directory.name}/")
        nbytes = (directory / os.path.basename(keys[0])).stat().st_size
        return {"keys": keys, "nbytes": nbytes, "directory": str(directory), "rows": rows, "record": record}

    @cached_property
    def whole(self):
        return self.put(SHARDS, self.size // SHARDS, RECORD)

    def task(self, client, data, *, cache=True, connections=CONNECTIONS, **more):
        cache = str(self.scratch / "cache") if cache is True else cache
        settings = {"client": client, "bucket": self.bucket, "cache": cache, "connections": connections}
        return {**settings, **data, **more}

    def start(self, task, *, proxied, python=None):
        endpoint = self.proxy.endpoint if proxied else self.server.endpoint
        store = {
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
        }
        child = subprocess.Popen(
            [python or sys.executable, "-m", "benchmarks.remote_clients"],
            env={**child_environment(), **store},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        child.stdin.write(json.dumps(task))
        child.stdin.close()
        child.stdin = None
        return child

    def run(self, task, *, proxied=False, python=None):
        """The figures of one client, which begins with an empty cache."""
        if task["cache"]:
            shutil.rmtree(task["cache"], ignore_errors=True)
        self.proxy.reset()
        return self.finish(self.start(task, proxied=proxied, python=python))

    @staticmethod
    def finish(child):
        try:
            out, errors = child.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise ClientError(f"no answer within {_SECONDS} s") from None
        if child.returncode:
            lines = [line for line in errors.splitlines() if line.strip()]
            raise ClientError(_reason(lines) if lines else f"ended with {child.returncode}")
        return json.loads(out.splitlines()[-1])

    @contextlib.contextmanager
    def faults(self, **faults):
        from fault_proxy import Faults

        self.proxy.faults = Faults(**faults)
        try:
            yield
        finally:
            self.proxy.faults = Faults()

    def fetched(self, data):
        """Bytes of the objects that went through the proxy."""
        return sum(self.proxy.counts.bytes[f"{self.bucket}/{key}"] for key in data["keys"])


def _reason(lines):
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines)[-1].strip()[:200]
