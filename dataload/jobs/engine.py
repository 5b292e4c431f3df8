"""Engines run all parts of a task, such as a conversion, in processes of this machine or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

from dataload._util.indexing import even_split
from dataload._util.lazy import renamed
from dataload._util.settings import Checked, Least, check_count
from dataload.errors import ConfigError
from dataload.executors import StartMethod, check_processes
from dataload.jobs.attempt import PartTask

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


_MOST_PARTS = 256  # starting a process takes 0.1 s


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine(Checked):
    """Runs each partition in its own process, and again up to three times if that is killed.

    Attributes:
        num_workers: Number of processes at a time; by default one for each CPU that this process may use.
        parts: Number of partitions; by default one for each shard, but at most 256.
        start_method: How processes start, as in `multiprocessing`.
    """

    num_workers: Annotated[int, Least(1)] | None = None
    parts: Annotated[int, Least(1)] | None = None
    start_method: StartMethod = "forkserver"

    def default_parts(self, shards: int) -> int:
        return min(shards, _MOST_PARTS)

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        check_processes("engine", "local")
        from dataload.jobs.processes import run_parts  # imports multiprocessing, which most programs do not need

        return run_parts(task, count, advance, self.num_workers, self.start_method)


LocalEngine.__init__ = renamed(workers="num_workers")(LocalEngine.__init__)
