"""JAX support: batches as global arrays over a sharding, and the ranks of processes. No other module needs JAX."""

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from dataload._util.arrays import MASKED, is_masked
from dataload._util.lazy import lazy_names
from dataload._util.settings import check_count, setting_error
from dataload.collate import Ragged
from dataload.errors import ConfigError, MissingDependencyError
from dataload.loader.device import DevicePrefetcher
from dataload.loader.loader import Loader
from dataload.loader.order import DistributedRank
from dataload.samplers import BatchPlanner
from dataload.streams.loader import MultiStreamLoader

try:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, Sharding
except ImportError as _error:
    raise MissingDependencyError("dataload.jax needs JAX: pip install 'dataload[jax]'", name="jax") from _error

__all__ = ["DeviceLoader", "DistributedRank", "distributed_place"]

if not TYPE_CHECKING:  # so that type checkers report names that have changed
    __getattr__, _ = lazy_names(__name__, {}, moved={"DistributedPlace": "dataload.jax:DistributedRank"})


class RowBlocks(NamedTuple):
    """The distribution of a batch's rows over processes and devices."""

    rank: int  # among the processes that hold different rows
    ranks: int
    blocks: int  # equal blocks per rank


def distributed_place(sharding: Sharding | None = None) -> DistributedRank:
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
        return DistributedRank(rank=jax.process_index(), world_size=jax.process_count())
    rows = row_blocks(sharding)
    return DistributedRank(rank=rows.rank, world_size=rows.ranks)


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


class DeviceLoader(DevicePrefetcher[Any]):
    """Gives a loader's batches as global arrays over a sharding, copied to the devices while the model works.

    Each process reads the rows of its rank, and its devices hold them. A global array has the rows of all ranks, in
    the order of ranks. Text, bytes and other objects are left alone. JAX makes 64-bit numbers 32-bit unless
    ``jax_enable_x64`` is set, and on the CPU its arrays may share the memory of the loader's arrays.

    Take `state_dict` from this object and not from `loader`, whose position is ahead by the batches being copied.

    Args:
        loader: A `dataload.Loader` or `dataload.streams.MultiStreamLoader`, with the rank that `distributed_place`
            returns for the sharding.
        sharding: The layout of each array over the devices of all processes, rows along axis 0. An array with fewer
            axes than a `PartitionSpec` has entries is laid out by the first of them.
        depth: Number of batches on the devices ahead of the one that the consumer has.

    Attributes:
        loader: The loader.
        sharding: The sharding.

    Raises:
        ConfigError: The loader has another rank, `tail="partial"`, or a batch size that the sharding cannot split;
            `depth` is less than 1; or `distributed_place` refuses the sharding. From the iterator: the sharding cannot
            split the rows of a batch; a batch differs in shape from the first one, on several ranks; or JAX does not
            support a dtype.
    """

    def __init__(self, loader: Loader[Any] | MultiStreamLoader, sharding: Sharding, *, depth: int = 2) -> None:
        super().__init__(loader, check_count("depth", depth, least=1))
        self.sharding = sharding
        self._rows = row_blocks(sharding)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the first batch
        planner: BatchPlanner | None = getattr(loader, "batch_sampler", None)
        if planner is not None:
            self._check(planner)

    def _check(self, planner: BatchPlanner) -> None:
        rank, ranks, blocks = self._rows
        if (planner.rank, planner.world_size) != (rank, ranks):
            raise ConfigError(
                f"the loader has rank {planner.rank} of {planner.world_size}, but the sharding gives this process the "
                f"rows of rank {rank} of {ranks}: build it with Loader(..., **distributed_place(sharding))",
                key="rank",
                value=planner.rank,
            )
        if ranks * blocks > 1 and planner.tail == "partial":
            raise ConfigError(
                "tail='partial' ends an epoch with a shorter batch, which the sharding cannot split: build the loader "
                "with tail='pad' or tail='drop'",
                key="tail",
                value=planner.tail,
            )
        batch_size = getattr(planner, "batch_size", None)
        if batch_size is not None and batch_size % blocks:
            raise self._indivisible("batch_size", batch_size)

    def _indivisible(self, name: str, rows: int) -> ConfigError:
        blocks = self._rows.blocks
        message = (
            f"{name} must be a multiple of {blocks}, the blocks that the sharding splits a rank's rows into; got {rows}"
        )
        return ConfigError(message, key="batch_size", value=rows)

    def _send(self, batch: Any, name: str = "batch") -> Any:
        def place(path: Any, leaf: Any) -> Any:
            at = f"{name}{jax.tree_util.keystr(path)}"
            if type(leaf) is dict:
                columns = cast("dict[Any, Any]", leaf)
                return {key: self._send(column, f"{at}[{key!r}]") for key, column in columns.items()}
            return self._place(at, leaf)

        return jax.tree_util.tree_map_with_path(place, batch, is_leaf=_is_leaf)

    def _place(self, name: str, value: Any) -> Any:
        _, ranks, blocks = self._rows
        if isinstance(value, Ragged) and ranks * blocks > 1:
            raise ConfigError(f"{name} is ragged, so its rows cannot be split: collate it with 'pad'", key="collate")
        if isinstance(value, Ragged):
            return Ragged(self._place(name, value.values), self._place(name, value.offsets))
        if not isinstance(value, np.ndarray) or not value.ndim:
            return value
        array = cast("np.ndarray[Any, Any]", value)
        if is_masked(array):
            raise ConfigError(f"{name}: {MASKED}")
        if len(array) % blocks:
            raise self._indivisible(f"the rows of {name}", len(array))
        if ranks > 1 and self._shapes.setdefault(name, array.shape) != array.shape:
            raise ConfigError(
                f"{name} has the shape {array.shape}, after {self._shapes[name]} in the first batch: several ranks "
                "need batches of one shape, so pad to a fixed length, and replace bad records instead of skipping them",
                key="collate",
                value=array.shape,
            )
        shape = (len(array) * ranks, *array.shape[1:])
        try:
            return jax.make_array_from_process_local_data(self._sharding_of(array.ndim), array, shape)
        except TypeError as error:
            raise ConfigError(f"{name}: JAX has no dtype for {array.dtype}; cast it in a transform") from error

    def _sharding_of(self, axes: int) -> Sharding:
        sharding = self.sharding
        if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= axes:
            return sharding
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]), memory_kind=sharding.memory_kind)

    def __repr__(self) -> str:
        return f"DeviceLoader({self.loader!r}, {self.sharding})"


def _is_leaf(value: Any) -> bool:
    """Return whether JAX must not take a value apart: it would sort keys of dicts, and visit each of many texts."""
    texts = type(value) is list and all(isinstance(item, (str, bytes)) for item in cast("list[Any]", value))
    return texts or type(value) is dict or isinstance(value, Ragged)
