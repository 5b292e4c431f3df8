"""Which process of a training job this is."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import distributed

from dataload.errors import ConfigError
from dataload.loader.order import rank_and_world_size

__all__ = ["DistributedPlace", "distributed_place"]


class DistributedPlace(TypedDict):
    """Which process of a training job this is.

    Attributes:
        rank: Its number, in [0, world_size).
        world_size: Number of processes.
    """

    rank: int
    world_size: int


def distributed_place(group: Any = None) -> DistributedPlace:
    """Rank and number of processes, for ``Loader(..., **distributed_place())``.

    From torch.distributed where that is initialised; else from the environment variables RANK and WORLD_SIZE, as
    torchrun sets them; else 0 of 1. `Loader` by itself knows the environment only, and some launchers leave RANK out.

    Args:
        group: The process group whose members read different data; by default all processes. With tensor or pipeline
            parallelism it is the data-parallel group.

    Raises:
        ConfigError: This process is not in `group`; there is a group and torch.distributed is not initialised; or one
            of the variables is missing or no number.
    """
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank(group)
        if rank < 0:
            raise ConfigError(
                "this process is not in the process group: pass the group that it reads data for",
                key="group",
                value=group,
            )
        return DistributedPlace(rank=rank, world_size=distributed.get_world_size(group))
    if group is not None:
        raise ConfigError(
            "a process group has ranks once torch.distributed.init_process_group was called", key="group", value=group
        )
    rank, world_size = rank_and_world_size()
    return DistributedPlace(rank=rank, world_size=world_size)
