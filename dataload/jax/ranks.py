"""The rank of this process in a JAX program of several processes."""

from itertools import chain
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, Sharding

from dataload._util.settings import setting_error
from dataload.errors import ConfigError
from dataload.loader.order import DistributedPlace


class RowBlocks(NamedTuple):
    """The distribution of a batch's rows over processes and devices."""

    rank: int  # among the processes that hold different rows
    ranks: int
    blocks: int  # equal blocks per rank


def distributed_place(sharding: Sharding | None = None) -> DistributedPlace:
    """Return the rank and the number of ranks of this process, for ``Loader(..., **distributed_place(sharding))``.

    Args:
        sharding: The sharding of the batches, with their rows along axis 0. Processes whose devices hold the same rows,
            as with model parallelism across hosts, have the same rank and read the same data. Ranks ascend with the
            rows. By default, each process is a rank: `jax.process_index` of `jax.process_count`.

    Raises:
        ConfigError: `sharding` is not a `Sharding`, this process has none of its devices, or the rows of its processes
            overlap without being the same.
    """
    if sharding is None:
        return DistributedPlace(rank=jax.process_index(), world_size=jax.process_count())
    rows = row_blocks(sharding)
    return DistributedPlace(rank=rows.rank, world_size=rows.ranks)


def row_blocks(sharding: Any) -> RowBlocks:
    """Return how a sharding distributes rows; raises like `distributed_place`."""
    if not isinstance(sharding, Sharding):
        rule = "must be a jax.sharding.Sharding, such as NamedSharding(mesh, PartitionSpec('data'))"
        raise setting_error("sharding", sharding, rule)
    axes = max(1, len(sharding.spec)) if isinstance(sharding, NamedSharding) else 1
    held: dict[int, set[int]] = {}  # first row of each block, by process
    # Every mesh of n devices divides n rows into equal blocks.
    for device, index in sharding.devices_indices_map((sharding.num_devices,) * axes).items():
        held.setdefault(device.process_index, set()).add(index[0].start or 0)
    process = jax.process_index()
    if process not in held:
        message = f"process {process} has no device of the sharding, so it needs no data: do not build a loader there"
        raise ConfigError(message, key="sharding", value=sharding)
    ranks = sorted({tuple(sorted(blocks)) for blocks in held.values()})
    blocks = [*chain.from_iterable(ranks)]
    if len({*blocks}) < len(blocks) or len({*map(len, ranks)}) > 1:
        found = ", ".join(f"process {process}: {sorted(blocks)}" for process, blocks in sorted(held.items()))
        raise ConfigError(
            "any two processes must hold either the same rows or different rows, and equally many, so that each reads "
            f"one part of a batch; of {sharding.num_devices} rows, the blocks of the sharding begin at {found}: order "
            "the devices of the mesh by process, as jax.make_mesh does",
            key="sharding",
            value=sharding,
        )
    return RowBlocks(ranks.index(tuple(sorted(held[process]))), len(ranks), len(ranks[0]))
