"""Executors run tasks in the consumer's thread, in threads, or in processes and on Ray clusters (imported on use)."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Literal, TypeAlias, TypeVar

from dataload._util.settings import check_setting
from dataload._util.system import IS_POSIX
from dataload.errors import ConfigError
from dataload.executors.base import Executor, Fleet, SerialExecutor, TimeoutPolicy, WorkerStatus
from dataload.executors.serialization import check_work
from dataload.executors.threads import ThreadExecutor

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

ExecutorName: TypeAlias = Literal["threads", "processes", "fork", "spawn", "forkserver", "ray"]
"""The kind of workers, if `num_workers` is not 0: threads, processes by how they start, or a `Fleet` (see `Loader`)."""

_ADVICE = (
    "functions and classes that are not at the top level of a module, or are of a notebook, need cloudpickle (pip "
    "install cloudpickle); other things, executor='threads' or, in a loader, executor='fork'"
)
_SLOTS_BEYOND_WINDOW = 3  # the consumer's batch, the previous one, and one on its way


def make_executor(
    work: Callable[[TaskT, WorkerStatus], ResultT],
    name: ExecutorName | Fleet,
    workers: int,
    *,
    window: int,
    timeouts: TimeoutPolicy,
    settings: Iterable[tuple[str, str, Any]],
    first: int = 0,
    assign: Callable[[TaskT], int | None] | None = None,
) -> Executor[TaskT, ResultT]:
    """Return the executor for `work`, for `window` tasks ahead; `settings` are for errors of `check_pickles`.

    `name` comes from `check_executor`. Processes run each task in the worker whose number ``assign(task)`` returns.
    """
    if not workers:
        return SerialExecutor(work)
    options: dict[str, Any] = {"timeouts": timeouts, "first": first}
    if name == "threads":
        return ThreadExecutor(work, workers, **options)
    if isinstance(name, Fleet):  # Ray may be missing
        fleet: Any = import_module("dataload.ray.fleet")
        return fleet.FleetExecutor(work, workers, fleet=name, settings=settings, **options)
    check_processes("executor", name)
    from dataload.executors.processes import ProcessExecutor  # `multiprocessing` takes long to import

    modules = () if name == "fork" else check_pickles(*settings)
    options |= {"start_method": None if name == "processes" else name, "modules": modules, "assign": assign}
    return ProcessExecutor(work, workers, slots=window + _SLOTS_BEYOND_WINDOW, **options)


def check_executor(value: Any) -> Any:
    """Return the setting `executor`, checked to be a name or a `Fleet`; for ``"ray"``, the default `Fleet`."""
    if not isinstance(value, Fleet):
        check_setting("executor", value, ExecutorName)
    return Fleet() if value == "ray" else value


def check_processes(key: str, value: object) -> None:
    """Refuse worker processes on Windows."""
    if not IS_POSIX:
        raise ConfigError("worker processes need Linux or macOS: use threads on Windows", key=key, value=value)


def check_pickles(*settings: tuple[str, str, Any], check: Callable[[Any], set[str]] = check_work) -> set[str]:
    """Check that settings (key, name in messages, value) pickle, and return the modules that they need."""
    modules: set[str] = set()
    for key, name, value in settings:
        try:
            modules |= check(value)
        except ConfigError:  # has its own remedy
            raise
        except Exception as error:
            raise ConfigError(
                f"worker processes need a copy of {name}, and {value!r} cannot be pickled "
                f"({type(error).__name__}: {error}); {_ADVICE}",
                key=key,
                value=value,
            ) from error
    return modules
