"""Engines run all parts of a task, such as a conversion, and collect their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeVar

from dataload._util.indexing import even_split
from dataload._util.settings import check_count
from dataload.errors import ConfigError
from dataload.jobs.attempt import PartTask
from dataload.jobs.local import LocalEngine

Item = TypeVar("Item")


class Engine(Protocol):
    """Runs a task in partitions: `LocalEngine` in processes of this machine, `dataload.ray.RayEngine` on a cluster."""

    @property
    def parts(self) -> int | None:
        """Number of partitions, if the user has chosen it."""
        ...

    def default_parts(self, shards: int) -> int:
        """Return the number of partitions for so many shards, which must depend on nothing else."""
        ...

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        """Run partitions 1 to `count`, and return their values in order. An error ends the run.

        Args:
            task: Called in other processes, once for each partition, and again if its process or machine is lost.
            count: Number of partitions.
            advance: Called now and then with the units that all partitions have done so far.
        """
        ...


def engine_of(engine: Engine | Literal["local"] | None) -> Engine | None:
    if engine == "local":
        return LocalEngine()
    if isinstance(engine, str):
        message = f"engine={engine!r}: pass 'local' or an engine, such as dataload.ray.RayEngine()"
        raise ConfigError(message, key="engine", value=engine)
    return engine


def count_parts(engine: Engine, units: int) -> int:
    count = engine.parts or engine.default_parts(units)
    select_part(range(units), 1, count)  # raises if there are too many
    return count


def select_part(units: Sequence[Item], number: int, count: int) -> tuple[Item, ...]:
    """Return the contiguous units of partition `number`, counted from 1, of `count`."""
    if check_count("the number of parts", count, least=1) > len(units):
        several = f"{len(units)} shard{'' if len(units) == 1 else 's'}"
        message = f"cannot split {several} into {count} parts: ask for fewer parts"
        raise ConfigError(message, key="part", value=count)
    if check_count("the part", number, least=1) > count:
        raise ConfigError(f"there is no part {number} of {count}: parts are counted from 1", key="part", value=number)
    start, stop = even_split(len(units), count)[number - 1]
    return tuple(units[start:stop])
