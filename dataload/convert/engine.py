"""Engines run all parts of a task, such as a conversion, and collect what they return."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dataload.convert.attempt import PartTask
from dataload.convert.journal import Journal, JournalFile
from dataload.convert.local import LocalEngine
from dataload.convert.plan import Shard, part_path, select_part
from dataload.errors import ConfigError
from dataload.storage import Remote, storage_of

if TYPE_CHECKING:
    from dataload.convert import ConvertReport


class Engine(Protocol):
    """Runs the parts of a task: `LocalEngine` in processes of this machine, `dataload.ray.RayEngine` on a cluster."""

    @property
    def parts(self) -> int | None:
        """The number of parts that the user wants."""
        ...

    def default_parts(self, shards: int) -> int:
        """Return the number of parts for so many shards. It depends on nothing else, so that a run can be repeated."""
        ...

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        """Run parts 1 to `count`, and return what they return, in order.

        A part whose process or machine is lost is tried again. An error that a part raises ends the run.

        Args:
            task: Called once for each part, or more often, in other processes.
            count: Number of parts.
            advance: Called now and then with the units that all parts have done so far.
        """
        ...


def engine_of(engine: Engine | Literal["local"]) -> Engine:
    """Return the engine of a name, or the engine itself."""
    if engine == "local":
        return LocalEngine()
    if isinstance(engine, str):
        message = f"engine={engine!r}: pass 'local' or an engine, such as dataload.ray.RayEngine()"
        raise ConfigError(message, key="engine", value=engine)
    return engine


def check_whole(part: tuple[int, int] | None, merge: bool) -> None:
    """Raise if an engine is told to run one part, or to merge only."""
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
    """Run all parts of a task, at most one per shard, and return what they return, in order.

    `progress` is called now and then with the units done. `parts` is by default what the engine says. `again` says how
    to continue after Ctrl-C.
    """
    count = parts or count_parts(engine, shards)
    try:
        return engine.run(task, count, progress)
    except KeyboardInterrupt as interrupt:
        if again:
            interrupt.add_note(again)
        raise


def count_parts(engine: Engine, shards: int) -> int:
    """Return the number of parts of a task with so many shards."""
    count = engine.parts or engine.default_parts(shards)
    select_part(range(shards), 1, count)  # raises if there are too many
    return count


def conversion_parts(engine: Engine, file: JournalFile, plan: Sequence[Shard], *, resume: bool) -> int:
    """Return the number of parts of a conversion: that of the run to resume unless the user wants another."""
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
    file: JournalFile,
    begun: Journal,
    plan: Sequence[Shard],
    remote: Remote | None,
    *,
    overwrite: bool,
    progress: Callable[[int, int], None] | None,
) -> list[ConvertReport]:
    """Run all parts of a conversion, `begun.parts` in number, and return their reports.

    `file` is the journal of the whole, whose lock the caller holds, and `begun` its content. `overwrite` forgets what
    parts of an earlier run have finished. `progress` is called with (records done, records).
    """
    file.save(begun)  # the parts find their plan there
    if overwrite:
        for number in range(1, begun.parts + 1):
            receipt = part_path(file.path, number, begun.parts)
            storage_of(receipt, remote).remove(receipt)
    again = "finished shards are kept: pass resume=True to continue"
    advance = of_total(progress, begun.records)
    try:
        return run_all(engine, task, len(plan), parts=begun.parts, progress=advance, again=again)
    except BaseException:
        receipts = part_path(glob.escape(file.path), "*", begun.parts)
        if not storage_of(file.path, remote).glob(receipts):  # there is nothing to resume
            file.remove()
        raise


def of_total(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Return a function of the units done that reports them with the total."""
    return lambda done: None if progress is None else progress(done, total)
