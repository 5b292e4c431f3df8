"""The engine `local`: each partition of a task in its own process, so that a killed one cancels no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataload._util.lazy import renamed
from dataload._util.settings import check_count
from dataload.executors import StartMethod, check_processes
from dataload.jobs.attempt import PartTask

_MOST_PARTS = 256  # starting a process takes 0.1 s


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """Runs each partition in its own process, and again up to three times if that is killed.

    Attributes:
        num_workers: Number of processes at a time; by default one for each CPU that this process may use.
        parts: Number of partitions; by default one for each shard, but at most 256.
        start_method: How processes start, as in `multiprocessing`.
    """

    num_workers: int | None = None
    parts: int | None = None
    start_method: StartMethod = "forkserver"

    def __post_init__(self) -> None:
        for name, value in (("num_workers", self.num_workers), ("parts", self.parts)):
            if value is not None:
                check_count(name, value, least=1)

    def default_parts(self, shards: int) -> int:
        return min(shards, _MOST_PARTS)

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        check_processes("engine", "local")
        from dataload.jobs.processes import run_parts  # imports multiprocessing, which most programs do not need

        return run_parts(task, count, advance, self.num_workers, self.start_method)


LocalEngine.__init__ = renamed(workers="num_workers")(LocalEngine.__init__)
