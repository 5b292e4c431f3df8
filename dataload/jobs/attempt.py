"""One attempt at one partition of a task: what an engine calls in another process, and how errors come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dataload.errors import ConfigError, DataloadError, message_of
from dataload.executors.serialization import check_work, sendable


class PartTask(Protocol):
    """A task in partitions, such as ``partial(convert, source, destination)``: it pickles, and may run again."""

    def __call__(self, *, part: tuple[int, int], progress: Callable[[int, int], None]) -> Any:
        """Run partition (i, n), counted from 1; `progress` is called with (units done, units of the partition)."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attempt."""

    value: Any  # what the task returned
    done: int  # units that it has done
    error: Exception | None = None


def attempt(task: PartTask, part: tuple[int, int], report: Callable[[int], None]) -> Outcome:
    """Run a partition in this process, and return its value or error; `report` is called with the units done."""
    done = 0

    def progress(units: int, _: int) -> None:
        nonlocal done
        done = units
        report(units)

    try:
        return Outcome(task(part=part, progress=progress), done)
    except Exception as error:  # a user's source or transform may raise anything
        return Outcome(None, done, sendable(error, f"the process of part {_name(part)}"))


def value_of(outcome: Outcome, part: tuple[int, int], where: str = "") -> Any:
    """Return the value of a partition, or raise its error, which names the partition and `where` it ran."""
    error = outcome.error
    if error is None:
        return outcome.value
    if isinstance(error, DataloadError):
        error.args = (f"part {_name(part)}{where}: {error}",)
    else:
        error.add_note(f"It was raised in part {_name(part)}{where}.")
    raise error


def check_sendable(task: PartTask, engine: str) -> set[str]:
    """Check that a task pickles, and return the modules that other processes need for it."""
    try:
        return check_work(task)
    except DataloadError:
        raise
    except Exception as error:
        raise unsendable(engine, error) from error


def unsendable(engine: str, error: Exception) -> ConfigError:
    message = (
        f"engine {engine!r} sends the source and all options to other processes, and they do not pickle "
        f"({message_of(error)}): pass no open files or locks; functions that are not in a module need cloudpickle"
    )
    return ConfigError(message, key="engine", value=engine)


def _name(part: tuple[int, int]) -> str:
    return f"{part[0]}/{part[1]}"
