"""What one process of a JAX program reads, on four devices; run by test_jax_processes.py.

Arguments: folder, port of the coordinator, number of this process, number of processes.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dataload
from dataload.jax import DeviceLoader, distributed_place

SOURCE = dataload.MemorySource({"index": np.arange(100), "x": np.arange(400, dtype=np.float32).reshape(100, 4)})


def refusal():
    try:
        return repr(dataload.Loader(SOURCE, batch_size=8))
    except dataload.ConfigError as error:
        return str(error)


def read(sharding, batch_size, steps, state=None):
    """The rows that this process reads, those of its devices, sums over all devices, and the state."""
    place = distributed_place(sharding)
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
    settings = {"batch_size": batch_size, "shuffle": True, "seed": 5, "tail": "pad", "num_workers": 1}
    loader = dataload.Loader(SOURCE, **settings, **place)
    with DeviceLoader(loader, sharding) as batches:
        if state is not None:
            batches.load_state_dict(state)
        held, sums = [], []
        for step, batch in enumerate(batches, 1):
            shards = batch["index"].addressable_shards
            parts = {shard.index[0].start or 0: shard.data.tolist() for shard in shards}
            held.append([index for first in sorted(parts) for index in parts[first]])
            for rows, cells in zip(shards, batch["x"].addressable_shards, strict=True):
                columns = np.arange(4)[cells.index[1]] if len(cells.index) > 1 else np.arange(4)
                assert np.array_equal(cells.data, 4 * np.asarray(rows.data)[:, None] + columns)
            sums.append(float(total(batch["x"])))
            if step == steps:
                break
        shape = batch["x"].shape
        return {"place": place, "held": held, "sums": sums, "state": batches.state_dict(), "shape": shape}


def main(folder, port, process, processes):
    found = {"alone": refusal()}
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    found["before backends"] = refusal()
    devices = np.array(jax.devices())
    found["after"] = refusal()
    found["asked for"] = repr(dataload.Loader(SOURCE, batch_size=8, rank=0, world_size=1))
    # One row block for each device; and a model over both processes, each of which has all rows.
    data = NamedSharding(Mesh(devices, "data"), PartitionSpec("data"))
    model = NamedSharding(Mesh(devices.reshape(processes, 4).T, ("data", "model")), PartitionSpec("data", "model"))
    found["data"] = read(data, 8, 3)
    found["model"] = read(model, 16, 3)
    found["rest"] = read(data, 8, 2, found["model"]["state"])
    Path(folder, f"{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
