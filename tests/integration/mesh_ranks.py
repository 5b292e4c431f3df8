"""What eight processes of a job read and raise; run by test_ranks.py.

Arguments: folder, and the storage options of the data, a bucket with shards.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dataload
from dataload.samplers import Lanes, ShardSequential
from dataload.torch import DeviceLoader, check_ranks, distributed_place

PROCESSES = 8
RECORDS = 64


def read_by_mesh(mesh, folder, url, storage):
    """Read one epoch through the cache of a node: the first four processes are on one, the others on another."""
    cache = {"cache": folder / f"node-{distributed.get_rank() // 4}", "mode": "shards"}
    with dataload.open(url, storage_options=storage, remote=cache) as source:
        order = Lanes(ShardSequential(source.shard_lengths, seed=3), lanes=2)
        with dataload.Loader(source, batch_size=4, sampler=order, **distributed_place(mesh), epochs=1) as loader:
            check_ranks(loader, mesh)
            batches = [batch["n"].tolist() for batch in loader]
            return {"batches": batches, "downloaded": loader.statistics().downloads.shards_downloaded}


def places(mesh):
    """Return places in meshes of four dimensions, and the ranks of the groups that torch makes."""
    wide = init_device_mesh("cpu", (2, 2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    return {
        "2x2x2": distributed_place(mesh),
        "group": distributed_place(mesh.get_group("dp")),
        "4 dimensions": distributed_place(wide),
        "cp as well": distributed_place(wide, data_dims=("dp_shard", "cp")),
        "slice": distributed_place(wide["tp"]),
        "unknown": error_of(lambda: distributed_place(init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "ep")))),
        "misspelt": error_of(lambda: distributed_place(wide, data_dims=("dp_shart",))),
        "unnamed": error_of(lambda: distributed_place(init_device_mesh("cpu", (8,)))),
        "outside": error_of(
            lambda: distributed_place(DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",), _init_backend=False))
        ),
    }


def error_of(act):
    try:
        act()
    except dataload.DataloadError as error:
        return f"{type(error).__name__}: {error}"
    return None


def disagreements(mesh):
    """Return the error of each of several jobs in which process 5 differs."""
    here = distributed.get_rank()

    def loader(source=None, state=None, **settings):
        made = dataload.Loader(
            source or dataload.RangeSource(RECORDS),
            **{"batch_size": 2, "shuffle": True, "seed": 1, **distributed_place(), **settings},
        )
        if state is not None:
            made.load_state_dict(state)
        return DeviceLoader(made, "cpu")

    with loader() as running:
        next(iter(running))
        state = running.state_dict()
    other = here == 5
    jobs = {
        "all agree": lambda: next(iter(loader())),
        "seed": lambda: next(iter(loader(seed=1 + other))),
        "data": lambda: next(iter(loader(dataload.RangeSource(RECORDS + other, start=int(other))))),
        "order": lambda: next(iter(loader(shuffle="shards" if other else "global"))),
        "batch size": lambda: next(iter(loader(batch_size=2 + other))),
        "world size": lambda: check_ranks(loader(**({"rank": 5, "world_size": 6} if other else {})).loader),
        "rank": lambda: next(iter(loader(rank=4 if other else here, world_size=PROCESSES))),
        "position": lambda: next(iter(loader(state=state if other else None))),
        "in a mesh": lambda: check_ranks(loader(seed=1 + other, **distributed_place(mesh)).loader, mesh),
        "lanes": lambda: loader(sampler=Lanes(ShardSequential((RECORDS,), 1), 4), shuffle=False),
        "checkpoint": lambda: loader(dataload.RangeSource(RECORDS + 1, start=1), state=state),
        "global batch": lambda: loader(batch_size=None, global_batch_size=12),
        # The last, because a process ends before it reads.
        "dead": lambda: os._exit(0) if other else next(iter(loader())),
    }
    for name, job in jobs.items():
        yield name, error_of(job)


def run(rank, folder, url, storage):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    found = {"places": places(mesh), "read": read_by_mesh(mesh, folder, url, storage), "errors": {}}
    for name, error in disagreements(mesh):
        found["errors"][name] = error
        (folder / f"{rank}.json").write_text(json.dumps(found))


def main(folder, url, storage):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run, args=(rank, Path(folder), url, storage)) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(*sys.argv[1:3], json.loads(sys.argv[3]))
