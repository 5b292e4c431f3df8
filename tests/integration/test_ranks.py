"""The processes of a job read what a mesh of devices says, and fail together if they do not fit together."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import run_job  # tests/support
from remote_sets import proxied, write_shards  # tests/support

pytest.importorskip("torch")

pytestmark = [pytest.mark.train, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def eight(object_server, tmp_path_factory):
    """Return the results of eight processes, the data, and the requests that all of them made."""
    from fault_proxy import FaultProxy

    folder = tmp_path_factory.mktemp("eight")
    data = folder / "data"
    data.mkdir()
    write_shards(data, "syr", 4, 16, 1000)
    bucket = object_server.bucket()
    object_server.put_directory(bucket, data)
    with FaultProxy(object_server.endpoint) as proxy:
        script = Path(__file__).with_name("mesh_ranks.py")
        arguments = [folder, f"s3://{bucket}/part-*.syr", json.dumps(proxied(proxy))]
        environment = object_server.environment(proxy.endpoint)
        run_job([sys.executable, script, *arguments], timeout=100, environment=environment)
    found = [json.loads((folder / f"{process}.json").read_text()) for process in range(8)]
    return found, data, proxy.counts


def test_places_in_a_mesh(eight):
    for process, found in enumerate(one["places"] for one in eight[0]):
        first, second, third = process // 4, process // 2 % 2, process % 2
        assert found["2x2x2"] == found["group"] == {"rank": second, "world_size": 2}
        assert found["4 dimensions"] == {"rank": 2 * first + second, "world_size": 4}
        assert found["cp as well"] == {"rank": 2 * second + third, "world_size": 4}
        assert found["slice"] == {"rank": 0, "world_size": 1}
        assert found["unknown"] == (
            "ConfigError: the mesh has the dimensions dp, ep, and 'ep' does not say whether processes along it read "
            "different data: give data_dims, the names of the dimensions along which they do"
        )
        assert found["misspelt"].startswith(
            "ConfigError: data_dims has 'dp_shart', but the mesh has no such dimension:"
        )
        assert found["unnamed"].endswith("the mesh have no names: give mesh_dim_names to init_device_mesh")
        outside = process > 1 and "ConfigError: this process is not in the process group: pass the group that it reads"
        assert (found["outside"] or "").startswith(outside or "")


def test_processes_of_one_data_rank_read_the_same_and_a_node_downloads_it_once(eight):
    found, data, counts = eight
    read = [one["read"] for one in found]
    for process, one in enumerate(read):
        assert one["batches"] == read[process // 2 % 2 * 2]["batches"]
    rows = [np.ravel(read[process]["batches"]) for process in (0, 2)]
    assert sorted(np.concatenate(rows)) == list(range(64))
    assert [len({*(of_rank // 16)}) for of_rank in rows] == [2, 2], "each has shards of its own"
    assert [sum(one["downloaded"] for one in node) for node in (read[:4], read[4:])] == [4, 4]
    for shard in data.iterdir():
        whole = f"bytes=0-{shard.stat().st_size - 1}"
        assert [key.endswith(shard.name) and span == whole for key, span in counts.ranges].count(True) == 2


ERRORS = {
    "all agree": None,
    "samplers of torch": None,
    "seed": r"order: .*\n  seed: 1 in 7 processes: 0, 1, 2, 3, 4, 6, 7; 2 in process 5$",
    "data": r"data: '\w+' in 7 processes: .*; '\w+' in process 5$",
    "order": r"order: '\w+' in 7 processes: .*; '\w+' in process 5$",
    "batch size": r"rows per step of all ranks: 16 in 7 processes: .*; 24 in process 5$",
    "world size": r"world_size: 8 in 7 processes: .*; 6 in process 5\n  rows per step .*$",
    "rank": r"rank: no process has 5 of 8; 0 in process 0; .*; 4 in 2 processes: 4, 5; 6 in process 6; 7 in process 7$",
    "position": r"step: 0 in 7 processes: .*; 1 in process 5$",
    "in a mesh": r"order: .*\n  seed: 1 in 7 processes: .*; 2 in process 5$",
    "lanes": "ConfigError: lanes must be a multiple of world_size, 8, so that each rank has its own; got 4$",
    "checkpoint": r"StateMismatchError: the state was saved with other data or another order: .*\n  source .*$",
    "global batch": "ConfigError: global_batch_size is 12, which 8 ranks cannot share equally: give a multiple of ",
    "dead": "DataloadError: the loaders of all processes could not be compared: a process has ended or is not reading",
}


@pytest.mark.parametrize("name", ERRORS)
def test_all_processes_fail_with_the_same_named_error(eight, name):
    expected = ERRORS[name]
    disagree = r"ConfigError: the loaders of 8 processes do not match:\n  "
    for process, one in enumerate(eight[0]):
        error = one["errors"].get(name)
        if expected is None or (name, process) == ("dead", 5):
            assert error is None
        else:
            assert re.match(expected if "Error: " in expected else disagree + expected, error), error


@pytest.mark.parametrize("processes", [2, 3])
def test_rank_0_gets_the_table_of_all_ranks(processes, tmp_path):
    script = Path(__file__).with_name("statistics_ranks.py")
    options = ["--standalone", f"--nproc-per-node={processes}"]
    run_job([sys.executable, "-m", "torch.distributed.run", *options, script, tmp_path])
    table, recent, pair, steps = json.loads((tmp_path / "0.json").read_text())
    last = processes - 1
    for ranks, slowest, verdict in (table, recent):
        assert ranks == [*range(processes)]
        assert slowest == last
        assert re.match(rf"rank {last} is the slowest, with \d\d\.\d ms a batch; limit: transform slow", verdict)
    assert (pair[0], steps) == ([0, last], 4)
    for rank in range(1, processes):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [None] * 4
    for rank in range(last):
        error = (tmp_path / f"{rank}.txt").read_text()
        assert error.startswith("the statistics of all ranks could not be gathered: a process has ended, or does not")
