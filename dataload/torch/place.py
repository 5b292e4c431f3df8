"""The rank of this process in a distributed training job."""

from typing import Any

from torch import distributed

from dataload.errors import ConfigError
from dataload.loader.order import DistributedPlace, rank_and_world_size


def distributed_place(group: Any = None) -> DistributedPlace:
    """Return the rank and the number of processes, for ``Loader(..., **distributed_place())``.

    They come from torch.distributed if it is initialised, else from the environment variables RANK and WORLD_SIZE that
    torchrun sets, else they are 0 and 1. `Loader` itself only looks at the environment, and some launchers do not set
    RANK.

    Args:
        group: The process group whose members read different data; by default all processes. With tensor or pipeline
            parallelism, pass the data-parallel group.

    Raises:
        ConfigError: This process is not in `group`; `group` is given but torch.distributed is not initialised; or one
            of the variables is missing or is not an integer.
    """
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank(group)
        if rank < 0:
            message = "this process is not in the process group: pass the group that it reads data for"
            raise ConfigError(message, key="group", value=group)
        return DistributedPlace(rank=rank, world_size=distributed.get_world_size(group))
    if group is not None:
        message = "a process group has ranks only after torch.distributed.init_process_group"
        raise ConfigError(message, key="group", value=group)
    rank, world_size = rank_and_world_size()
    return DistributedPlace(rank=rank, world_size=world_size)
