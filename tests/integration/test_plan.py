"""What `dataload plan` says, beside what eight ranks download."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import facts
from fault_proxy import FaultProxy
from remote_sets import proxied, write_shards

from dataload.convert.indexing import index_shards

pytestmark = [pytest.mark.slow, pytest.mark.remote]

RANK = Path(__file__).parents[1] / "children" / "planned_rank.py"
RANKS, SHARDS, RECORDS, BYTES = 8, 32, 48, 20_000
SAMPLERS = {
    "lanes": {"kind": "lanes", "lanes": RANKS, "pool_size": 20, "parent": {"kind": "shard_sequential"}},
    "pool": {"kind": "pool_shuffle", "pool_size": 2 * RECORDS, "parent": {"kind": "shard_sequential"}},
}


@contextlib.contextmanager
def ranks_of(config, server, proxies, cache):
    """Start the ranks, which share proxies and caches by node."""
    per_node = RANKS // len(proxies)
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(RANKS):
            proxy = proxies[rank // per_node]
            own = {
                **config,
                "source": {**config["source"], "storage": proxied(proxy)},
                "loader": {**config["loader"], "rank": rank, "world_size": RANKS},
                "remote": {**config["remote"], "cache": str(cache / str(rank // per_node))},
            }
            environment = {**os.environ, **server.environment(proxy.endpoint), "LOCAL_WORLD_SIZE": str(per_node)}
            child = subprocess.Popen(
                [sys.executable, str(RANK), json.dumps(own)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            stack.enter_context(child)  # closes its pipes, which ends it, and waits for it
            started.append(child)
        for child in started:
            assert child.stdout.readline() == "ready\n"
        yield started


def measured(config, server, nodes, cache, steps):
    """Return the bytes that each node has downloaded after the first step, and after all."""
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(server.endpoint)) for _ in range(nodes)]
        sent = []
        with ranks_of(config, server, proxies, cache) as ranks:
            for proxy in proxies:
                proxy.reset()
            for _ in range(steps):
                for rank in ranks:
                    rank.stdin.write("\n")
                    rank.stdin.flush()
                for rank in ranks:
                    assert rank.stdout.readline() == "done\n"
                sent.append([proxy.counts.bytes.total() for proxy in proxies])
        return sent[0], sent[-1]


@pytest.mark.parametrize(("kind", "nodes"), [("lanes", 2), ("pool", 1)])
def test_the_plan_is_about_what_is_measured(object_server, tmp_path, monkeypatch, kind, nodes):
    data = tmp_path / "data"
    data.mkdir()
    write_shards(data, "syr", SHARDS, RECORDS, BYTES)
    index_shards(str(data))
    bucket = object_server.bucket()
    object_server.put_directory(bucket, data, "set/")
    for name, value in object_server.environment().items():
        monkeypatch.setenv(name, value)
    config = {
        "source": {"path": f"s3://{bucket}/set"},
        "sampler": SAMPLERS[kind],
        "loader": {"batch_size": 4, "epochs": 1, "tail": "drop"},
        "remote": {"budget": "1GB", "mode": "shards"},
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**config, "remote": {**config["remote"], "cache": str(tmp_path / "none")}}))
    plan = facts("plan", path, "--nodes", nodes, "--gpus", RANKS // nodes)
    first, total = measured(config, object_server, nodes, tmp_path, plan["steps"])
    assert plan["node_bytes"][0] == pytest.approx(sum(total) / nodes, rel=0.01)
    assert plan["first_bytes"] <= max(first)
