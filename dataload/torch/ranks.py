"""The ranks of a distributed training job: this process's, checks and checkpoints of all, their work and waits."""

import functools
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.autograd.profiler import record_function
from torch.utils.data import DataLoader as TorchDataLoader  # by its own name: programs replace torch's by ours

from dataload._util.fingerprint import digest
from dataload.errors import ConfigError, DataloadError, StateMismatchError, closest, printable
from dataload.loader.device import AnyLoader, loader_of
from dataload.loader.loader import Loader
from dataload.loader.order import DistributedRank, rank_and_world_size
from dataload.loader.statistics import WAITS, Statistics
from dataload.streams.loader import MultiStreamLoader

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class JsonState:
    """The state of a loader as a single value in a checkpoint of ``torch.distributed.checkpoint``.

    A loader is a `Stateful` itself, but then each key of its state is stored separately, and only the keys of the new
    loader are loaded: checkpoints of an earlier release with fewer keys, and states of streams with their own keys, are
    refused. As JSON text, the state is one value.

    Examples:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(5), batch_size=3)
        >>> state = {"loader": JsonState(loader)}  # for `save` and `load` of torch.distributed.checkpoint
        >>> JsonState(loader).load_state_dict(state["loader"].state_dict())
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader under a single key."""
        return {"json": json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of a `JsonState` into the loader."""
        text = state_dict.get("json")
        try:
            state = json.loads(text) if isinstance(text, str) else None
        except ValueError:
            state = None
        if not isinstance(state, dict):
            found = f"the keys {[*state_dict]}" if text is None else printable(repr(text), 80)
            raise StateMismatchError(
                f"this is not a state of a JsonState: expected a dict as JSON text under 'json', found {found}"
            )
        self._loader.load_state_dict(state)

    def __repr__(self) -> str:
        return f"JsonState({self._loader!r})"


_DATA_DIMS = ("batch", "data", "data_parallel", "ddp", "dp", "dp_replicate", "dp_shard", "fsdp", "replicate", "shard")
_OTHER_DIMS = (
    *("cp", "pp", "sp", "tp"),
    *("context_parallel", "pipeline_parallel", "sequence_parallel", "tensor_parallel"),
)
"""Mesh dimensions of torch, torchtitan, Accelerate and Lightning. Ranks along the latter read the same batches."""


def distributed_place(group: Any = None, *, data_dims: Sequence[str] | None = None) -> DistributedRank:
    """Return the rank and the number of ranks, for ``Loader(..., **distributed_place())``.

    They come from torch.distributed if it is initialised, otherwise from the environment variables RANK and WORLD_SIZE
    that torchrun sets, or variables of Open MPI and Slurm, otherwise they are 0 and 1. `Loader` asks the same when its
    first batch is wanted, but for the dimensions of a mesh.

    Args:
        group: The processes, by default all: a process group whose members read different data, or a `DeviceMesh`.
            Processes of a mesh that differ only in tensor, context or pipeline parallelism read the same batches.
        data_dims: Names of the mesh dimensions along which processes read different data. By default the usual names
            are recognised, such as ``"dp"``, ``"dp_replicate"``, ``"dp_shard"`` or ``"fsdp"``. If one of these includes
            context parallelism, as torchtitan's ``"fsdp"`` may, pass the mesh called ``"batch"``.

    Examples:
        >>> distributed_place()
        {'rank': 0, 'world_size': 1}
    """
    if _is_mesh(group):
        return _rank_in_mesh(group, data_dims)
    if data_dims is not None:
        message = "data_dims are dimensions of a DeviceMesh: pass one as group, or leave data_dims out"
        raise ConfigError(message, key="data_dims", value=data_dims)
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank(group)
        if rank < 0:
            raise _not_inside(group)
        return DistributedRank(rank=rank, world_size=distributed.get_world_size(group))
    if group is not None:
        message = "a process group has ranks only after torch.distributed.init_process_group"
        raise ConfigError(message, key="group", value=group)
    rank, world_size = rank_and_world_size()
    return DistributedRank(rank=rank, world_size=world_size)


def _is_mesh(group: Any) -> bool:
    """Return whether this is a DeviceMesh, without importing the class."""
    return hasattr(group, "mesh_dim_names")


def _not_inside(group: Any) -> ConfigError:
    message = "this process is not in the process group: pass the group that it reads data for"
    return ConfigError(message, key="group", value=group)


def _rank_in_mesh(mesh: "DeviceMesh", data_dims: Sequence[str] | None) -> DistributedRank:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise _not_inside(mesh)
    if mesh.mesh_dim_names is None:
        message = "the dimensions of the mesh have no names: give mesh_dim_names to init_device_mesh"
        raise ConfigError(message, key="group", value=mesh)
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    chosen = _find_data_dims(sizes, data_dims)
    rank, world_size = 0, 1
    for (name, size), at in zip(sizes.items(), coordinate, strict=True):
        if name in chosen:
            rank, world_size = rank * size + at, world_size * size
    return DistributedRank(rank=rank, world_size=world_size)


def _find_data_dims(sizes: Mapping[str, int], data_dims: Sequence[str] | None) -> Sequence[str]:
    if data_dims is not None:
        for name in data_dims:
            if name not in sizes:
                message = f"data_dims has {name!r}, but the mesh has no such dimension: {closest(name, sizes)}"
                raise ConfigError(message, key="data_dims", value=data_dims)
        return data_dims
    for name, size in sizes.items():
        if size > 1 and name not in (*_DATA_DIMS, *_OTHER_DIMS):
            raise ConfigError(
                f"the mesh has the dimensions {', '.join(sizes)}, and {name!r} does not say whether processes along it "
                "read different data: give data_dims, the names of the dimensions along which they do",
                key="data_dims",
                value=data_dims,
            )
    return _DATA_DIMS


def check_ranks(loader: Loader[Any] | MultiStreamLoader, group: Any = None) -> None:
    """Check that the loaders of all processes read the same data in the same order, and continue at the same step.

    All processes of the group must call this function, and all of them raise the error. Without an initialised
    torch.distributed it does nothing. `DeviceLoader` calls it before its first batch if its loader has one rank per
    process.

    Args:
        loader: The loader of this process.
        group: A process group or `DeviceMesh`, including processes that read the same batches; by default all
            processes.

    Raises:
        ConfigError: The loaders differ in data, order, seed, batch size, number of ranks or position; or a rank has no
            process.
        DataloadError: Another process has ended, or does not call this function.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    mine = distributed.get_rank(), _facts(loader)
    try:
        found = gather(mine, group)
    except RuntimeError as error:
        raise DataloadError(
            "the loaders of all processes could not be compared: a process has ended or is not reading; look for its "
            f"error ({error})"
        ) from error
    differences = find_differences(dict(found))
    if differences:
        message = f"the loaders of {len(found)} processes do not match:"
        raise ConfigError("\n  ".join((message, *differences)), key=differences[0].partition(":")[0])


def check_ranks_at_start(loader: Loader[Any] | MultiStreamLoader) -> None:
    """Call `check_ranks` if the loader has one rank per process; otherwise some may have no loader."""
    if distributed.is_available() and distributed.is_initialized():
        processes = distributed.get_world_size()
        if processes > 1 and _facts(loader)["world_size"] == processes:
            check_ranks(loader)


def _facts(loader: Loader[Any] | MultiStreamLoader) -> dict[str, Any]:
    """Return a loader's rank, and the settings that must be the same on all ranks."""
    state = loader.state_dict()
    if isinstance(loader, MultiStreamLoader):  # its ranks may be at different steps
        return {
            name: state[name] for name in ("rank", "world_size", "sequences", "mode", "shuffle", "seed", "batch_size")
        }
    plan = loader.batch_sampler_of(loader.epoch)
    # Each process draws its own seed for a torch DataLoader; if the order uses it, the orders differ, too.
    seed = {} if isinstance(loader, TorchDataLoader) else {"seed": loader.seed}
    changes = (
        f"step {each['position'] // plan.step_size} of epoch {each['epoch']} ({digest(each)[:6]})"
        for each in state.get("changes", ())
    )
    return {
        "rank": plan.rank,
        "world_size": plan.world_size,
        "data": state["source"],
        "order": state["order"],
        **seed,
        "records per epoch": state["length"],
        "rows per step of all ranks": plan.step_size,
        "tail": plan.tail,
        "changes of weights": ", ".join(changes) or "none",
        "epoch": loader.epoch,
        "step": loader.step,
    }


def gather(value: Any, group: Any) -> list[Any]:
    """Return the values of all processes of a group or a mesh, on each of them."""
    values = [value]
    for one in [group.get_group(dim) for dim in range(group.ndim)] if _is_mesh(group) else [group]:
        parts: list[Any] = [None] * distributed.get_world_size(one)
        distributed.all_gather_object(parts, values, group=one)
        values = list(chain.from_iterable(parts))
    return values


def find_differences(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a line for each fact that differs between processes; `facts` is by process."""
    found: dict[str, dict[Any, list[int]]] = {}
    for process, of_process in sorted(facts.items()):
        for name, value in of_process.items():
            found.setdefault(name, {}).setdefault(value, []).append(process)
    ranks, world_size = found.pop("rank"), next(iter(found["world_size"]))
    lines = [f"{name}: {_listed(values)}" for name, values in found.items() if len(values) > 1]
    missing = [rank for rank in range(world_size) if rank not in ranks]
    if missing and not lines:
        lines.append(f"rank: no process has {missing[0]} of {world_size}; {_listed(ranks)}")
    return lines


_MOST_LISTED = 8


def _listed(values: Mapping[Any, Sequence[int]]) -> str:
    texts: list[str] = []
    for value, processes in islice(values.items(), _MOST_LISTED):
        named = ", ".join(map(str, processes[:_MOST_LISTED])) + ", ..." * (len(processes) > _MOST_LISTED)
        texts.append(f"{value!r} in {'process' if len(processes) == 1 else f'{len(processes)} processes:'} {named}")
    return "; ".join(texts)


@dataclass(frozen=True, slots=True, repr=False)
class RankStatistics:
    """The work of the loaders of all ranks; `print` shows a table.

    Attributes:
        ranks: The statistics of each process of the job, by its number.
    """

    ranks: dict[int, Statistics]

    @property
    def slowest(self) -> int | None:
        """The process that waits longest for a batch; None if none waits 5% of its time."""
        waiting = {rank: _wait(found) for rank, found in self.ranks.items() if found.wait_share >= WAITS}
        return max(waiting, key=waiting.__getitem__, default=None)

    @property
    def verdict(self) -> str:
        """One line that names the slowest rank and its reason."""
        slowest = self.slowest
        if slowest is None:
            return "no rank waits for data"
        found = self.ranks[slowest]
        return f"rank {slowest} is the slowest, with {1e3 * _wait(found):,.1f} ms a batch; {found.verdict}"

    def __str__(self) -> str:
        lines = [f"{'rank':>6} {'batches':>9} {'rows/s':>10} {'waits':>6} {'ms/batch':>9} {'ready':>6}  work in"]
        for rank, found in sorted(self.ranks.items()):
            lines.append(
                f"{rank:>6} {found.steps:>9,} {found.rows_per_second:>10,.0f} {found.wait_share:>6.0%} "
                f"{1e3 * _wait(found):>9,.1f} {found.depth:>6.1f}  {found.where}"
            )
        return "\n".join([*lines, self.verdict])

    def __repr__(self) -> str:
        return f"RankStatistics({len(self.ranks)} ranks; {self.verdict})"


def _wait(found: Statistics) -> float:
    """Return the seconds that a consumer waits for a batch other than the first."""
    return (found.wait_seconds - found.first_wait_seconds) / max(1, found.steps)


def statistics(loader: AnyLoader, *, since: Statistics | None = None, group: Any = None) -> RankStatistics | None:
    """Return the statistics of all ranks on rank 0, and None on others. All ranks must call it, at the same point.

    It tells which rank makes the others wait. The timeout of the process group applies.

    Args:
        loader: The loader of this process.
        since: Earlier ``loader.statistics()`` of this process; by default the table covers the time since the loader
            was built.
        group: A process group or `DeviceMesh`, by default all processes. Its first process gets the table.

    Raises:
        DataloadError: Another process has ended, or does not call this function.

    Examples:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(5), batch_size=3)
        >>> [len(batch["index"]) for batch in loader]
        [3, 2]
        >>> statistics(loader).ranks[0].rows
        5
    """
    found = loader_of(loader, "statistics").statistics()
    found = found if since is None else found.since(since)
    if not (distributed.is_available() and distributed.is_initialized()):
        return RankStatistics({0: found})
    rank = distributed.get_rank()
    try:
        ranks = dict(gather((rank, found), group))
    except RuntimeError as error:
        raise DataloadError(
            f"the statistics of all ranks could not be gathered: a process has ended, or does not call this ({error})"
        ) from error
    return RankStatistics(ranks) if rank == min(ranks) else None


@contextmanager
def wait_ranges(loader: AnyLoader, name: str = "dataload.wait") -> Generator[None]:
    """Mark waits for batches in traces of torch's profiler and, with CUDA, of Nsight Systems.

    They are ranges of ``record_function`` and NVTX, in each ``for`` that begins inside the ``with``.

    Args:
        loader: A `Loader`, `MultiStreamLoader`, `DataLoader` or `DeviceLoader`.
        name: Name of the ranges.

    Examples:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(5), batch_size=3)
        >>> with torch.profiler.profile() as profile, wait_ranges(loader):
        ...     for batch in loader:
        ...         pass
        >>> [event.count for event in profile.key_averages() if event.key == "dataload.wait"]
        [2]
    """
    inner = loader_of(loader, "wait_ranges")
    before = inner._around  # pyright: ignore[reportPrivateUsage] # not for users: it runs at each step
    inner._around = functools.partial(_range, name)  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        inner._around = before  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _range(name: str) -> Generator[None]:
    nvtx: Any = torch.cuda.nvtx if torch.cuda.is_available() else None  # without CUDA, it raises
    if nvtx is not None:
        nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx is not None:
            nvtx.range_pop()
