"""Engines run all partitions of a task, such as a conversion, and collect their values."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dataload.convert.attempt import PartTask
from dataload.convert.journal import Journal, JournalFile, Ledger
from dataload.convert.local import LocalEngine
from dataload.convert.plan import Shard, log_path, receipt_path, select_part
from dataload.errors import ConfigError
from dataload.storage import Remote, storage_of

if TYPE_CHECKING:
    from dataload.convert.job import ConvertReport


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


def engine_of(engine: Engine | Literal["local"]) -> Engine:
    if engine == "local":
        return LocalEngine()
    if isinstance(engine, str):
        message = f"engine={engine!r}: pass 'local' or an engine, such as dataload.ray.RayEngine()"
        raise ConfigError(message, key="engine", value=engine)
    return engine


def check_whole(part: tuple[int, int] | None, merge: bool) -> None:
    if part is not None or merge:
        raise ConfigError("an engine runs all parts and merges them: pass it without part and merge", key="engine")


def run_all(
    engine: Engine,
    task: PartTask,
    shards: int,
    *,
    progress: Callable[[int], None],
    parts: int | None = None,
    again: str = "",
) -> list[Any]:
    """Run all partitions of a task (`parts`, by default the engine's number) and return their values in order."""
    count = parts or count_parts(engine, shards)
    try:
        return engine.run(task, count, progress)
    except KeyboardInterrupt as interrupt:
        if again:
            interrupt.add_note(again)
        raise


def count_parts(engine: Engine, shards: int) -> int:
    count = engine.parts or engine.default_parts(shards)
    select_part(range(shards), 1, count)  # raises if there are too many
    return count


def conversion_parts(engine: Engine, file: JournalFile, plan: Sequence[Shard], *, resume: bool) -> int:
    """Return the number of partitions of a conversion, by default as in the run to resume."""
    begun = file.load() if resume else None
    if begun is None or begun.complete:
        return count_parts(engine, len(plan))
    if not begun.parts:
        message = f"the conversion of {file.path} was begun without an engine: continue without one, or pass"
        raise ConfigError(f"{message} overwrite=True to start over", key="engine")
    return engine.parts or begun.parts


def run_conversion(
    engine: Engine,
    task: PartTask,
    ledger: Ledger,
    begun: Journal,
    plan: Sequence[Shard],
    remote: Remote | None,
    *,
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
) -> list[ConvertReport]:
    """Run all partitions of a conversion, whose locked journal is `begun`; return their reports."""
    file = ledger.head
    if ledger.anew:
        file.save(begun)  # partitions find their plan there
    if overwrite:
        for number in range(1, begun.parts + 1):
            receipt = receipt_path(file.path, number, begun.parts)
            storage_of(receipt, remote).remove(receipt)
    again = "finished shards are kept: pass resume=True to continue"
    advance = of_total(progress, begun.records)
    if remote is not None:
        remote.listings.clear()  # other processes will write there
    try:
        return run_all(engine, task, len(plan), parts=begun.parts, progress=advance, again=again)
    except BaseException:
        logs = log_path(glob.escape(file.path), "*", begun.parts)
        if not storage_of(file.path, remote).glob(logs):  # nothing to resume
            file.remove()
        raise


def of_total(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    return lambda done: None if progress is None else progress(done, total)
