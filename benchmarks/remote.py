"""Data in object stores, on SeaweedFS's S3 on this machine: CPU of the client, and ratios to a bare client of the run.

Every client has a process of its own (`benchmarks.remote_clients`), so that the CPU of the server, and that of the
proxy that limits, delays and counts, is not counted. The proxy is a Python program in this process; where it is
what limits, a bare client through the same proxy shows it. ``PEER_PYTHON=PATH`` names the Python of an environment with
peers.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

import dataload
from benchmarks.harness import ROOT, VERSION, aim, show, workers_named
from benchmarks.remote_clients import FIELD, PEERS, records
from dataload.bench.runner import child_environment
from dataload.catalog.facts import DataSetFacts, Evidence, ShardFacts
from dataload.catalog.manifest import Manifest
from dataload.samplers import PoolShuffle, ShardSequential
from dataload.storage.remote.settings import parse_bytes
from dataload.types import FieldSpec

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


SIZE, ROUNDS = 512 << 20, 5
_LINE = 15e6  # bytes a second of each connection


def line_rate(lab, rounds):
    """Whole shards from a server that limits each connection."""
    title, data = "remote: line rate", lab.whole
    tasks = {
        "obstore.get": lab.task("get_objects", data),
        "dataload, batches": lab.task("loader", data, loader={"shuffle": "shards"}),
    }
    line, found = _LINE * CONNECTIONS, {}
    with lab.faults(rate=_LINE):
        for _ in range(min(rounds, 3)):
            for name, task in tasks.items():
                figures = lab.run(task, proxied=True)
                found.setdefault(name, []).append(lab.fetched(data) / figures["seconds"] / line)
    print(f"\n{title}: {CONNECTIONS} connections of {_LINE / 1e6:g} MB/s; ratio to the line of {line / 1e6:g} MB/s")
    reached = {name: median(ratios) for name, ratios in found.items()}
    print(f"  obstore.get through the same proxy reaches {reached['obstore.get']:.3f}, one object for each connection")
    ratio = median(mine / its for mine, its in zip(found["dataload, batches"], found["obstore.get"], strict=True))
    return [
        aim(title, "dataload, from open to the last batch, relative to the line", reached["dataload, batches"], 0.9),
        aim(title, "... relative to obstore.get through the same proxy", ratio, 0.9),
    ]


def local_files(data):
    return [os.path.join(data["directory"], os.path.basename(key)) for key in data["keys"]]


def client_cpu(lab, rounds):
    """CPU of the client for whole shards, and the same of peers."""
    title, data = "remote: CPU of the client", lab.whole
    tasks = {
        "obstore.get to files": lab.task("get_objects", data),
        "dataload, download alone": lab.task("loader", data, only="download"),
        "dataload, batches": lab.task("loader", data),
        "dataload, batches of local files": lab.task("loader", data, cache=None, url=local_files(data)),
    }
    python = os.environ.get("PEER_PYTHON")
    jobs = {name: (task, None) for name, task in tasks.items()}
    found, problems = {}, {}
    for name, (_, form) in PEERS.items():
        try:
            jobs[name] = (_peer_task(lab, name, form, python), python)
        except ClientError as error:
            problems[name] = error
    for number in range(rounds):
        for name, (task, interpreter) in jobs.items():
            if name in problems or (name in PEERS and number >= 2):
                continue
            try:
                found.setdefault(name, []).append(lab.run(task, python=interpreter))
            except ClientError as error:
                problems[name] = error
    base = found["obstore.get to files"]
    rows = []
    for name, figures in found.items():
        costs = [one["cpu"] / one["nbytes"] * 1e9 for one in figures]
        ratios = [cost / (its["cpu"] / its["nbytes"] * 1e9) for cost, its in zip(costs, base, strict=False)]
        if not costs:
            continue
        megabytes = median(one["nbytes"] / one["seconds"] / 1e6 for one in figures)
        system = median(one["system"] / one["nbytes"] * 1e9 for one in figures)
        rows.append({"case": name, "CPU s/GB": median(costs), "system": system, "MB/s": megabytes})
        rows[-1]["to obstore"] = median(ratios)
    heading = f"{title}: {SHARDS} objects of {data['nbytes'] / 1e6:.0f} MB, {CONNECTIONS} connections, no limits"
    shown = show(title, heading, rows)
    for name, error in problems.items():
        print(f"  {name}: not measured: {error}")
    ratio = {row["case"]: row["to obstore"] for row in rows}
    return [
        *shown,
        aim(title, "download alone / obstore.get", ratio["dataload, download alone"], most=1.3),
        aim(title, "download and batches / obstore.get", ratio["dataload, batches"], most=1.3),
    ]


def _peer_task(lab, name, form, python):
    data = lab.whole
    if isinstance(form, str):
        data = data if form == "syr" else lab.put(SHARDS, lab.size // SHARDS, RECORD, form)
        return lab.task(name, {**data, "keys": [key for key in data["keys"] if key.endswith(form)]})
    prefix = name.replace(" ", "-").lower()
    directory = lab.scratch / prefix
    written = [str(directory), SHARDS, data["rows"], RECORD]
    path = lab.run({"client": name, "write": written, "cache": None}, python=python)["path"]
    keys = lab.server.put_directory(lab.bucket, Path(path), f"{prefix}/")
    shutil.rmtree(directory)
    return lab.task(name, {**data, "keys": keys, "prefix": prefix})


def processes(lab, _):
    """Eight processes that share a cache."""
    title, data, count = "remote: processes of a node", lab.put(SHARDS, lab.size // SHARDS // 4, RECORD), 8
    total, task = len(data["keys"]) * data["nbytes"], lab.task("loader", data, connections=2)
    print(f"\n{title}: {count} ranks, one cache, {total / 1e6:.0f} MB")
    shutil.rmtree(task["cache"], ignore_errors=True)
    lab.proxy.reset()
    settings = [{"shuffle": "shards", "world_size": count, "rank": rank} for rank in range(count)]
    ranks = [lab.start({**task, "loader": each}, proxied=True) for each in settings]
    read = sum(lab.finish(child)["nbytes"] for child in ranks)
    assert read >= len(data["keys"]) * data["rows"] * RECORD, "the ranks have not read all records"
    return [aim(title, "bytes fetched / bytes of the data", lab.fetched(data) / total, most=1.01)]


def ranges(lab, rounds):
    """Records in global order, by range, from a server 50 ms away."""
    title, record = "remote: ranges", 256 << 10
    data = lab.put(8, lab.size // 32, record)
    bare = lab.task("get_ranges", data, cache=None)
    ours = lab.task(
        "loader", data, cache=None, remote={"mode": "ranges"}, loader={"shuffle": "global", "batch_size": 16}
    )
    rates, useful = {"bare": [], "ours": []}, []
    with lab.faults(latency=0.05):
        for _ in range(min(rounds, 3)):
            for name, task in (("bare", bare), ("ours", ours)):
                figures = lab.run(task, proxied=True)
                seconds = figures.get("read_seconds", figures["seconds"])
                rates[name].append(figures["nbytes"] / seconds / 1e6)
            useful.append(figures["nbytes"] / lab.fetched(data))
    shown = ", ".join(f"{name} {median(found):.1f} MB/s" for name, found in rates.items())
    print(f"\n{title}: 256 KiB, 50 ms, {CONNECTIONS} connections, global shuffle: {shown}")
    ratio = median(mine / its for mine, its in zip(rates["ours"], rates["bare"], strict=True))
    return [
        aim(title, "throughput / that of obstore.get_range in threads", ratio, 0.9),
        aim(title, "bytes used / bytes fetched", median(useful), 0.8),
    ]


def caches(lab, _):
    """Real downloads from a pool in order, beside Belady's optimum for that order."""
    title, shards, record, batch, epochs = "remote: caches smaller than the data", 64, 4096, 32, 3
    data = lab.put(shards, 200 * record, record)
    rows, size = data["rows"], data["nbytes"]
    pool = 2 * rows
    order = PoolShuffle(ShardSequential((rows,) * shards, 1), pool, 1)
    steps = []
    for epoch in range(epochs):
        found = order.indices(np.arange(len(order)), epoch=epoch) // rows
        steps += [sorted(set(found[start : start + batch].tolist())) for start in range(0, len(found), batch)]
    print(f"\n{title}: {shards} shards of {size / 1e6:.2f} MB, a pool of {pool} records, {epochs} epochs")
    found = []
    settings = {"epochs": epochs, "batch_size": batch}
    for percent, workers in ((100, 0), (75, 0), (50, 0), (25, 0), (25, 1), (10, 0)):
        held = shards * percent // 100
        remote = {"budget": held * size, "part_bytes": 1 << 30}
        task = lab.task("loader", data, pool=pool, remote=remote, loader={**settings, "num_workers": workers})
        figures = lab.run(task, proxied=True)
        assert figures["nbytes"] == epochs * shards * rows * record, "records are missing"
        whole = sum(span == f"bytes=0-{size - 1}" for _, span in lab.proxy.counts.ranges)
        by_range = figures["rows_by_range"] / (epochs * shards * rows)
        case = f"{percent}%, {workers_named(workers)}"
        name = f"{case}: {whole} downloads, {by_range:.2%} of rows by range"
        if percent == 10:
            found.append(aim(title, f"{name}, per shard and epoch", whole / shards / epochs, most=1))
        else:
            least = optimum(steps, held)
            found.append(aim(title, f"{name}, to the optimum of {least}", whole / least, most=1.01))
    return found


def optimum(steps, budget):
    """Downloads of Belady's algorithm, which evicts what is wanted last, but no shard of the step that is read."""
    uses = [(at, shard) for at, step in enumerate(steps) for shard in step]
    following, last = [0.0] * len(uses), {}
    for number in reversed(range(len(uses))):
        at, shard = uses[number]
        following[number] = last.get(shard, float("inf"))
        last[shard] = at
    held, downloads = {}, 0
    for (at, shard), later in zip(uses, following, strict=True):
        if shard not in held:
            downloads += 1
            if len(held) == budget:
                del held[max((other for other in held if other not in steps[at]), key=held.__getitem__)]
        held[shard] = later
    return downloads


def opening(lab, rounds):
    """Opening 10,000 shards by their manifest, and the first batch over a limited line."""
    title, count = "remote: opening", 10_000
    small = lab.put(1, RECORD, RECORD)
    body = Path(local_files(small)[0]).read_bytes()
    tag = lab.server.put(lab.bucket, "many/part-00000.syr", body)  # the others are listed, and not opened here
    names = [f"part-{number:05}.syr" for number in range(count)]
    shards = [ShardFacts(name, len(body), small["rows"], evidence=Evidence(0, tag)) for name in names]
    entry = DataSetFacts.of("part-{00000..09999}.syr", "syrah", shards, fields={FIELD: FieldSpec("uint8", (RECORD,))})
    manifest = Manifest((entry,)).to_bytes()
    lab.server.put(lab.bucket, "many/dataload.json", manifest)
    task = lab.task("loader", {"keys": [], "nbytes": 0}, url=f"s3://{lab.bucket}/many", cache=None)
    task |= {"only": "first", "loader": {"batch_size": 1, "num_workers": 0}}
    seconds = []
    for _ in range(rounds):
        found = lab.run(task, proxied=True)
        seconds.append(found["open_seconds"])
    counts = lab.proxy.counts
    requests = counts.gets("dataload.json"), counts.requests.total() - counts.gets(".syr"), counts.lists.total()
    print(f"\n{title}: {count:,} shards, a manifest of {len(manifest) / 1e6:.2f} MB; best of {rounds}")
    rows = [
        aim(title, "requests to open, LISTs included", requests[1] + requests[2], most=1),
        aim(title, "seconds to open, with the transfer", min(seconds), most=0.1 + len(manifest) / 100e6),
    ]
    data, line = lab.whole, _LINE * CONNECTIONS
    pool = 2 * data["rows"]
    order = PoolShuffle(ShardSequential((data["rows"],) * SHARDS, 1), pool, 1)
    wanted = {index // data["rows"] for index in order.indices(np.arange(64), epoch=0).tolist()}
    least = len(wanted) * data["nbytes"] / line
    task = lab.task("loader", data, pool=pool, only="first")
    with lab.faults(rate=_LINE):
        first = [lab.run(task, proxied=True)["first_seconds"] for _ in range(min(rounds, 3))]
    name = f"seconds to the first batch, whose {len(wanted)} shards take {least:.2f} s"
    return [*rows, aim(title, name, median(first), most=least + 1)]


CASES = {
    "line": line_rate,
    "cpu": client_cpu,
    "processes": processes,
    "ranges": ranges,
    "caches": caches,
    "opening": opening,
}


def remote(names=(), *, size=SIZE, rounds=ROUNDS):
    from object_server import why_not

    reason = why_not()
    if reason is not None:
        print(f"\nremote: not measured: {reason}")
        return []
    ROOT.mkdir(exist_ok=True)
    rows = []
    with contextlib.ExitStack() as held:
        lab = Lab(held, parse_bytes("size", size))
        for name in names or CASES:
            begun = time.perf_counter()
            rows += CASES[name](lab, rounds)
            print(f"  [remote {name}: {time.perf_counter() - begun:.0f} s]", flush=True)
    return rows
