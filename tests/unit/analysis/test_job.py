"""Jobs on paper, beside slow walks over every position."""

import json

import numpy as np
import pytest
from command_line import run
from hypothesis import given
from hypothesis import strategies as st

import dataload
from dataload.analysis.job_plan import Cluster, plan_job, touches
from dataload.convert import convert
from dataload.errors import ConfigError
from dataload.samplers import BatchSampler, BucketBatchSampler, PoolShuffle
from dataload.samplers.basic import GlobalShuffle, Lanes, Repeat, Sequential, ShardSequential, Subset

MEGABYTE = 10**6


pytestmark = pytest.mark.usefixtures("fonts")


def job_of(sampler, shards, records, *, ranks, per_node, batch_size=4, tail="drop"):
    planner = BatchSampler(sampler=sampler, batch_size=batch_size, world_size=ranks, tail=tail)
    ends = np.arange(1, shards + 1) * records
    return Cluster(planner=planner, ends=ends, sizes=np.full(shards, MEGABYTE), ranks_per_node=per_node)


def walked(job, epoch):
    """What each node reads of each shard: first and last step, and rows."""
    found = {}
    for rank in range(job.planner.world_size):
        planner = job.planner.with_ranks(rank=rank)
        for step in range(planner.steps(epoch)):
            for index in planner.plans(range(step, step + 1), epoch=epoch)[0].indices.tolist():
                key = rank // job.ranks_per_node, next(i for i, end in enumerate(job.ends) if index < end)
                first, last, rows = found.get(key, (step, step, 0))
                found[key] = min(first, step), max(last, step), rows + 1
    return found


@given(data=st.data())
def test_touches_are_those_of_a_walk_over_every_position(data):
    shards, records = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    parent = ShardSequential((records,) * shards, data.draw(st.integers(0, 9)))
    orders = [GlobalShuffle(len(parent), 1), PoolShuffle(parent, 5, 1), Lanes(parent, 4, 3, 1), parent]
    job = job_of(
        data.draw(st.sampled_from(orders)),
        shards,
        records,
        ranks=4,
        per_node=data.draw(st.sampled_from([1, 2, 4])),
        batch_size=data.draw(st.integers(1, 4)),
        tail=data.draw(st.sampled_from(["drop", "pad", "partial"])),
    )
    epoch = data.draw(st.integers(0, 2))
    if not job.planner.steps(epoch):
        return
    found = touches(job, range(job.nodes), epoch)
    rows = zip(*(each.tolist() for each in (found.node, found.shard, found.first, found.last, found.rows)), strict=True)
    assert {(node, shard): (*steps,) for node, shard, *steps in rows} == walked(job, epoch)


def test_each_of_1024_ranks_reads_its_lane_and_a_node_downloads_each_byte_once():
    """One shard per lane, on 128 nodes: together they download each shard once."""
    job = job_of(Lanes(ShardSequential((8,) * 1024, 3), 1024, 4), 1024, 8, ranks=1024, per_node=8)
    found = touches(job, range(128), 0)
    assert np.bincount(found.shard).tolist() == [1] * 1024
    assert np.bincount(found.node).tolist() == [8] * 128
    plan = plan_job(job, bandwidth=MEGABYTE, budget=None, mode="shards")
    assert plan.node_bytes == (8 * MEGABYTE, 8 * MEGABYTE)
    assert (plan.first_bytes, plan.first_seconds) == (8 * MEGABYTE, 8)


@pytest.mark.parametrize("kind", ["lanes", "pool", "global", "repeat"])
def test_a_thinned_job_is_like_the_whole(kind):
    shards, records = 256, 512
    parent = ShardSequential((records,) * shards, 3)
    order = {
        "lanes": Lanes(parent, 64, 64, 1),
        "pool": PoolShuffle(parent, 2048, 3),
        "global": GlobalShuffle(len(parent), 3),
        "repeat": Repeat(parent, 2),
    }[kind]
    job = job_of(order, shards, records, ranks=64, per_node=8, batch_size=8)
    thin = job.thinned(1, 4096)
    assert thin.planner.items(0) < len(order)
    counts = [len({*touches(each, [0], 0).shard.tolist()}) for each in (job, thin)]
    assert counts[1] == pytest.approx(counts[0], rel=0.1)


def test_orders_that_cannot_be_thinned():
    order = Subset(Sequential(100), [*range(100)])
    message = r"an epoch of 100 items is too long to walk \(up to 10\), and Subset cannot be thinned: plan a part of"
    with pytest.raises(ConfigError, match=message):
        job_of(order, 10, 10, ranks=2, per_node=1).thinned(2, 10)
    planner = BucketBatchSampler(lengths=np.ones(100, np.int64), batch_size=2)
    job = Cluster(planner=planner, ends=np.array([100]), sizes=np.array([1]), ranks_per_node=1)
    assert touches(job, [0], 0).rows.tolist() == [100]
    with pytest.raises(ConfigError, match="and BucketBatchSampler cannot be thinned"):
        job.thinned(1, 10)


@pytest.mark.slow_suite
def test_ten_to_the_ten_records_in_a_hundred_thousand_shards():
    """A plan looks at a few million records of them at most."""
    order = Lanes(ShardSequential((100_000,) * 100_000, 3), 1024)
    planner = BatchSampler(sampler=order, batch_size=256, world_size=1024)
    sizes = np.full(100_000, 10**9)
    job = Cluster(planner=planner, ends=np.cumsum(order.parent.shard_lengths), sizes=sizes, ranks_per_node=8)
    plan = plan_job(job, bandwidth=10**10, budget=10**12, mode="auto")
    assert plan.node_bytes[0] == pytest.approx(10**14 / 128, rel=0.02)
    assert plan.first_bytes == pytest.approx(8 * 10**9, rel=0.15)
    assert plan.walked < 0.001
    assert plan.readers[1] <= 3


CONFIG = """[source]
path = "{path}"
[sampler]
kind = "lanes"
lanes = 8
[sampler.parent]
kind = "shard_sequential"
[loader]
batch_size = 4
"""


def plan(tmp_path, *arguments, path="s3://nowhere/part-{0..7}.tar"):
    config = tmp_path / "train.toml"
    config.write_text(CONFIG.format(path=path))
    return run("plan", config, *arguments)


COUNTS = ("--records", 800, "--shards", 16, "--record-bytes", "10kB")


def test_the_command_without_data(tmp_path):
    arguments = (*COUNTS, "--nodes", 2, "--gpus", 4, "--bandwidth", "1MB/s")
    result = plan(tmp_path, *arguments, "--cache", "10MB")
    assert result.exit_code == 0, result.output
    lines = dict(line.rsplit("  ", 1) for line in result.stdout.splitlines() if "  " in line)
    found = {name.strip(): value for name, value in lines.items()}
    assert result.stdout.startswith("2 nodes of 4 ranks (8); 16 shards of 8.0 MB; 25 steps per epoch\nmode shards: ")
    assert found["bytes that a node reads in an epoch"] == "4.0 MB (most: 4.0 MB)"
    assert found["time to the first batch"] == "at least 2.0 s"
    facts = json.loads(plan(tmp_path, *arguments, "--json").stdout)
    assert (facts["nodes"], facts["mode"], facts["node_bytes"], facts["first_seconds"]) == (2, "shards", [4e6, 4e6], 2)
    again = plan(tmp_path, *COUNTS, "--nodes", 2, "--gpus", 4, "--set", "remote.mode=ranges")
    assert "mode ranges: remote.mode says so" in again.stdout, again.output


def test_options_of_the_simulation_have_no_effect(tmp_path):
    arguments = (*COUNTS, "--nodes", 2, "--gpus", 4, "--json")
    old = ("--step-time", "1ms", "--epochs=3", "--picture", tmp_path / "plan.svg")
    plain, deprecated = plan(tmp_path, *arguments), plan(tmp_path, *arguments, *old)
    assert (plain.stderr, deprecated.stdout) == ("", plain.stdout)
    warned = [f"warning: {flag} is deprecated and has no effect" for flag in ("--step-time", "--epochs", "--picture")]
    assert deprecated.stderr.splitlines() == warned
    assert json.loads(plain.stdout)["wait_seconds"] is None


def test_the_command_with_data_that_have_a_manifest(tmp_path):
    records = [{"x": np.full(500, row), "i": row} for row in range(64)]
    convert(dataload.MemorySource(records), tmp_path / "part-{shard}.syr", shards=8)
    result = plan(tmp_path, "--nodes", 4, "--gpus", 2, path=tmp_path)
    assert result.exit_code == 0, result.output
    total = sum(path.stat().st_size for path in tmp_path.glob("*.syr"))
    assert f"8 shards of {total / 1000:.1f} kB" in result.stdout
    selected = '{condition="i >= 40 and i < 56"}'
    some = "--gpus", 1, "--set", "sampler=null", "--set", "remote.mode=ranges", "--json"
    whole, part = (
        json.loads(plan(tmp_path, *some, *more, path=tmp_path).stdout)
        for more in ((), ("--set", f"source.select={selected}"))
    )
    assert (part["shards"], 4 * part["data_bytes"]) == (2, total)
    assert 4 * part["node_bytes"][0] == whole["node_bytes"][0]


ITERATORS = 'sampler={kind="iterators", make_stream="os:listdir", sequences=["a", "b"]}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*COUNTS, "--bandwidth", "fast"), "--bandwidth must be a number of bytes such as 500GB or 64MiB, got 'fast'"),
        ((*COUNTS, "--cache", "much"), "--cache must be a number of bytes such as 500GB or 64MiB, got 'much'"),
        ((*COUNTS, "--cache", "1kB"), "a cache of 1.0 kB has no room for the largest shard, 500.0 kB: raise --cache"),
        ((*COUNTS, "--nodes", 3), "3 nodes of 8 are 24 ranks: "),
        ((*COUNTS, "--nodes", 3), "set lanes to 24, or to a multiple"),
        (COUNTS[:4], "--records, --shards and --record-bytes stand for data: give all three"),
        (("--records", 3, *COUNTS[2:]), "--shards must be at most --records, 3, got 16"),
        (
            (*COUNTS, "--set", 'source=[{path="a.tar"}, {path="b"}]'),
            "stands for one data set: the config must have one [source]",
        ),
        (("--gpus", 1, "--set", "source=null", "--set", ITERATORS), "is 'iterators': streams have no order to plan by"),
        (("--gpus", 1, "--set", "source.path=range:0", "--set", "sampler=null"), "no steps to plan"),
    ],
)
def test_errors_say_what_to_do(tmp_path, arguments, message):
    result = plan(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
