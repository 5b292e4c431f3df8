"""JAX and Orbax: the position in the data is an item of each checkpoint, as JSON.

    python examples/orbax_checkpoints.py checkpoints

Kill it at any time and run it again: it continues in the middle of the epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from orbax import checkpoint

import dataload

EPOCHS = 3
Parameters = dict[str, jax.Array]


def make_source() -> dataload.MemorySource:
    features = np.random.default_rng(0).standard_normal((640, 8), dtype=np.float32)
    return dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 3)})


def loss_of(parameters: Parameters, batch: dict[str, np.ndarray]) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ parameters["in"])
    return jnp.mean((hidden @ parameters["out"] - batch["y"]) ** 2)


@jax.jit
def train(parameters: Parameters, batch: dict[str, np.ndarray]) -> tuple[Parameters, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    return {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}, loss


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    options = checkpoint.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=2)
    parameters = {"in": jax.random.normal(jax.random.key(0), (8, 32)) / 3, "out": jnp.zeros((32, 1))}
    with (
        checkpoint.CheckpointManager(Path(sys.argv[1]).absolute(), options=options) as manager,
        dataload.Loader(
            make_source(), batch_size=64, shuffle=True, tail="drop", num_workers=2, epochs=EPOCHS
        ) as loader,
    ):
        step = manager.latest_step() or 0
        if step:
            items = checkpoint.args.Composite(
                parameters=checkpoint.args.StandardRestore(parameters), loader=checkpoint.args.JsonRestore()
            )
            restored = manager.restore(step, args=items)
            parameters = restored.parameters
            loader.load_state_dict(restored.loader)
        loss = jnp.array(jnp.nan)
        while loader.epoch < EPOCHS:
            for batch in loader:
                parameters, loss = train(parameters, batch)
                step += 1
                items = checkpoint.args.Composite(
                    parameters=checkpoint.args.StandardSave(parameters),
                    loader=checkpoint.args.JsonSave(loader.state_dict()),  # the same on every host
                )
                manager.save(step, args=items)  # every fourth step
    print(f"last loss: {loss:.6f}")


if __name__ == "__main__":
    main()
