"""Train in JAX. Batches become jax.Arrays through DLPack; on the CPU, aligned memory is not copied.

python examples/jax_arrays.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dataload

Parameters = dict[str, jax.Array]


def to_jax(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Convert the arrays of a batch to JAX arrays. JAX assumes that they are constant: do not write to the batch."""
    return {name: jnp.from_dlpack(array) for name, array in batch.items()}


def loss_of(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ parameters["in"])
    return jnp.mean((hidden @ parameters["out"] - batch["y"]) ** 2)


@jax.jit
def step(parameters: Parameters, batch: dict[str, jax.Array]) -> tuple[Parameters, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    return jax.tree.map(lambda parameter, gradient: parameter - 0.1 * gradient, parameters, gradients), loss


def shares_memory(array: jax.Array, original: np.ndarray) -> bool:
    return array.unsafe_buffer_pointer() == original.ctypes.data


def main() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((6400, 64), dtype=np.float32)
    source = dataload.MemorySource({"x": features, "y": np.tanh(features.sum(1, keepdims=True) / 8)})
    parameters: Any = {
        "in": jnp.asarray(rng.standard_normal((64, 32), dtype=np.float32) / 8),
        "out": jnp.zeros((32, 1)),
    }
    # tail="drop", because JAX would compile again for a batch of another shape.
    with dataload.Loader(
        source, batch_size=256, shuffle=True, tail="drop", num_workers=1, executor="processes"
    ) as loader:
        shared = batches = 0
        for epoch in range(3):
            losses = []
            for batch in loader:
                arrays = to_jax(batch)
                parameters, loss = step(parameters, arrays)
                losses.append(loss)
                shared += shares_memory(arrays["x"], batch["x"])
                batches += 1
            print(f"epoch {epoch}: loss {np.mean(losses):.6f}")
    print(f"batches whose features were not copied: {shared} of {batches}")


if __name__ == "__main__":
    main()
