"""Train in JAX on all devices of all processes, and resume in the middle of an epoch.

python examples/jax_arrays.py

Each step trains on the same records for any number of devices and processes:

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_arrays.py
python examples/jax_arrays.py --coordinator localhost:9999 --processes 2 --process 0 &
python examples/jax_arrays.py --coordinator localhost:9999 --processes 2 --process 1
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dataload
from dataload.jax import DeviceLoader, distributed_place

GLOBAL_BATCH = 256
EPOCHS = 3

Parameters = dict[str, jax.Array]


def loss_of(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ parameters["in"])
    return jnp.mean((hidden @ parameters["out"] - batch["y"]) ** 2)


@jax.jit
def step(parameters: Parameters, batch: dict[str, jax.Array]) -> tuple[Parameters, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    return {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}, loss


def make_source() -> dataload.MemorySource:
    features = np.random.default_rng(0).standard_normal((6400, 64), dtype=np.float32)
    return dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 8)})


def train(sharding: NamedSharding, saved: tuple[Any, Any] | None = None, stop_after: int | None = None) -> Any:
    """Train for `EPOCHS`, or for `stop_after` steps, and return the parameters and the loader's state."""
    place = distributed_place(sharding)
    # tail="drop", because JAX would compile again for a batch of another shape, which devices might not share equally.
    loader = dataload.Loader(
        make_source(),
        batch_size=GLOBAL_BATCH // place["world_size"],
        shuffle=True,
        tail="drop",
        num_workers=1,
        epochs=EPOCHS,
        **place,
    )
    rng = np.random.default_rng(1)
    parameters: Any = {"in": rng.standard_normal((64, 32), dtype=np.float32) / 8, "out": np.zeros((32, 1), np.float32)}
    with DeviceLoader(loader, sharding) as batches:
        if saved is not None:
            parameters, state = saved
            batches.load_state_dict(state)
        parameters = jax.device_put(parameters, NamedSharding(sharding.mesh, PartitionSpec()))
        steps = 0
        while (epoch := batches.state_dict()["epoch"]) < EPOCHS:
            losses = []
            for batch in batches:
                parameters, loss = step(parameters, batch)
                losses.append(loss)
                steps += 1
                if steps == stop_after:
                    return jax.device_get(parameters), batches.state_dict()
            if saved is None and stop_after is None and jax.process_index() == 0:
                print(f"epoch {epoch}: loss {np.mean(losses):.6f}")
    return jax.device_get(parameters), batches.state_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", help="host and port of process 0")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    options = parser.parse_args()
    if options.processes > 1:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
    # Each device holds the same number of rows; the model is on all of them.
    sharding = NamedSharding(Mesh(np.array(jax.devices()), "data"), PartitionSpec("data"))
    whole, _ = train(sharding)
    resumed, _ = train(sharding, saved=train(sharding, stop_after=37))
    equal = all(np.array_equal(whole[name], resumed[name]) for name in whole)
    print(f"{jax.device_count()} devices in {jax.process_count()} processes; resumed after step 37, equal: {equal}")


if __name__ == "__main__":
    main()
