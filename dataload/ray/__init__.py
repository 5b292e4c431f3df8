"""Conversions and loaders on a Ray cluster.

`Fleet` lets the workers of a loader run there. A partition of a conversion is a task, which Ray repeats if its machine
is lost:

```python
import dataload
import dataload.ray

source = dataload.open("/shared/train.tar", decode="auto")
dataload.ray.convert(source, "/shared/train.array_record", shards=512, address="auto")
```

All machines need the same paths or URLs, and the same packages. This is the only package that needs Ray.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

from dataload._util.lazy import load_optional
from dataload._util.settings import Above, Least, check_settings
from dataload.convert import ConvertReport
from dataload.convert import convert as _convert
from dataload.errors import ConfigError, SourceError, SourceNotFoundError, text_of
from dataload.executors.base import Fleet
from dataload.jobs.engine import Outcome, PartTask, attempt, sendable_as, value_of
from dataload.storage.remote.settings import parse_bytes
from dataload.types import RandomAccessSource

load_optional("ray", needed_by="dataload.ray", extra="ray")

__all__ = ["Fleet", "RayEngine", "convert"]

NAMESPACE = "dataload"
"""Ray's namespace of the actors. Names are ``FLEET/NUMBER``, or ``FLEET/NUMBER.START`` if one loader owns the actor."""

_SECONDS = 5.0  # for all actors to answer

_log = logging.getLogger("dataload")


def dump(value: Any) -> bytes:
    """Return a pickle that has functions of the main module by value."""
    return load_optional("ray.cloudpickle", needed_by="dataload.ray", extra="ray").dumps(value)


def connect(address: str | None, *, starts: bool = True, **options: Any) -> Any:
    """Return Ray, connected to a cluster; without one, a cluster on this machine starts, if it `starts`."""
    ray = load_optional("ray", needed_by="a fleet", extra="ray")
    if ray.is_initialized():
        return ray
    options["logging_level"] = "WARNING"
    try:
        ray.init(address=address or "auto", **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        if address is not None or not starts:
            where = "of this machine or of RAY_ADDRESS" if address is None else f"at {address!r}"
            message = f"cannot connect to the Ray cluster {where}: {text_of(error)}"
            raise ConfigError(message, key="address", value=address) from error
        ray.init(address="local", include_dashboard=False, **options)
        cpus = ray.cluster_resources().get("CPU", 0)
        _log.warning(
            "no Ray cluster runs here, and RAY_ADDRESS names none: started one of %g CPUs on this machine", cpus
        )
    return ray


@dataclass(frozen=True, slots=True)
class ActorReport:
    """The state of an actor. `node` is empty while the actor starts, and if it does not answer."""

    fleet: str
    number: int
    node: str = ""
    process: int = 0
    loaders: int = 0  # that use it
    queue: int = 0  # batches, or groups of them, that they have asked for and not received
    made: int = 0
    bytes: int = 0  # of what it has made


def list_actors(address: str | None = None) -> list[ActorReport]:
    """Return the actors of all fleets of a running cluster, by the names of their fleets."""
    ray = connect(address, starts=False)
    asked = [(name, handle.report.options(concurrency_group="report").remote()) for name, handle in _actors(ray)]
    ready, _ = ray.wait([found for _, found in asked], num_returns=len(asked), timeout=_SECONDS) if asked else ([], [])
    reports: list[ActorReport] = []
    for name, found in asked:
        report: dict[str, Any] = {}
        with suppress(ray.exceptions.RayError):
            report = ray.get(found) if found in ready else {}
        fleet, _, number = name.rpartition("/")
        shown = {each.name: report[each.name] for each in fields(ActorReport) if each.name in report}
        reports.append(ActorReport(fleet, int(number.partition(".")[0]), **shown))
    return sorted(reports, key=lambda each: (each.fleet, each.number))


def stop_fleet(name: str, address: str | None = None) -> int:
    """End all actors of a fleet, whoever uses them, and return their number; loaders in use start others."""
    ray = connect(address, starts=False)
    ended = [handle for actor, handle in _actors(ray) if actor.rpartition("/")[0] == name]
    for handle in ended:
        ray.kill(handle)
    return len(ended)


def _actors(ray: Any) -> Iterator[tuple[str, Any]]:
    util = load_optional("ray.util", needed_by="a fleet", extra="ray")
    for actor in util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE:
            with suppress(ValueError):  # it has just ended
                yield actor["name"], ray.get_actor(actor["name"], namespace=NAMESPACE)


def convert(source: RandomAccessSource[Any], destination: str | os.PathLike[str], **options: Any) -> ConvertReport:
    """Convert a data set on a Ray cluster: `dataload.convert.convert` with a `RayEngine`.

    Args:
        source: A source from `dataload.open`, or any other that pickles.
        destination: A path that all machines share, or a URL.
        options: Settings of `RayEngine`, and other arguments of `dataload.convert.convert`.
    """
    settings = {each.name: options.pop(each.name) for each in fields(RayEngine) if each.name in options}
    return _convert(source, destination, engine=RayEngine(**settings), **options)


_MOST_PARTS = 1000
_RETRIES = 3
_POLL_SECONDS = 1.0
_END_SECONDS = 10.0  # to delete unfinished files
_PAUSES = (1.0, 4.0, 16.0)
_SAME_PATHS = "all machines of the cluster need the same paths: use a shared file system or URLs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEngine:
    """Runs each partition as a Ray task, and again up to three times if its worker or machine is lost.

    It uses the Ray that this process has initialised and leaves it running; otherwise it connects, and disconnects at
    the end.

    Attributes:
        parts: Number of partitions; by default one for each shard, but at most 1000.
        cpus: CPUs that Ray reserves for a partition.
        memory: Bytes of memory that Ray reserves for a partition, such as ``"4GB"``.
        address: The cluster, as in ``ray.init``: by default the one in RAY_ADDRESS, or one that runs on this machine,
            or a new one on this machine alone. "auto" never starts one.
    """

    parts: Annotated[int, Least(1)] | None = None
    cpus: Annotated[float, Above(0)] = 1
    memory: int | str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes("memory", self.memory))

    def default_parts(self, shards: int) -> int:
        return min(shards, _MOST_PARTS)

    def run(self, task: PartTask, count: int, advance: Callable[[int], None]) -> list[Any]:
        ray = load_optional("ray", needed_by="engine 'ray'", extra="ray")
        content = sendable_as(dump, task, "ray")
        joined = ray.is_initialized()
        if joined and self.address is not None:
            message = f"Ray is initialised already: leave address={self.address!r} out, or call ray.shutdown() before"
            raise ConfigError(message, key="address", value=self.address)
        connect(self.address, log_to_driver=False)
        try:
            self._check_resources(ray)
            resources = {"num_cpus": self.cpus, **({} if self.memory is None else {"memory": self.memory})}
            remote = ray.remote(max_retries=_RETRIES, scheduling_strategy="SPREAD", **resources)(run_part)
            sent = ray.put(content)
            pending = {remote.remote(sent, number, count, os.getcwd()): number for number in range(1, count + 1)}
            try:
                return _collect(ray, pending, count, advance)
            finally:
                _cancel(ray, list(pending))
        finally:
            if not joined:
                ray.shutdown()

    def _check_resources(self, ray: Any) -> None:
        wanted = {"CPU": self.cpus, "memory": self.memory or 0}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            most = ", ".join(f"{max(node.get(name, 0) for node in nodes):,.0f} {name}" for name in wanted)
            message = f"a partition needs {self.cpus:g} CPU, {wanted['memory']:,} memory, and no machine has that"
            warnings.warn(f"{message} (at most {most}): waiting for one to join", RuntimeWarning, stacklevel=2)


def run_part(content: bytes, number: int, count: int, directory: str) -> tuple[Outcome, str]:
    """Run a partition in a worker of the cluster; return its outcome and the node."""
    if os.path.isdir(directory):
        os.chdir(directory)  # for relative paths
    run = partial(attempt, partial(_unpickled, content), (number, count), lambda _: None)
    outcome = run()
    for pause in _PAUSES:
        if type(outcome.error) is not SourceError:
            break
        time.sleep(pause)  # a worker of a lost machine may still hold the partition's lock
        outcome = run()
    ray = load_optional("ray", needed_by="engine 'ray'", extra="ray")
    return outcome, ray.util.get_node_ip_address()


def _unpickled(content: bytes, *, part: tuple[int, int], progress: Callable[[int, int], None]) -> Any:
    return pickle.loads(content)(part=part, progress=progress)  # noqa: S301 - from the process that runs the engine


def _collect(ray: Any, pending: dict[Any, int], count: int, advance: Callable[[int], None]) -> list[Any]:
    """Return the values of the partitions, in order; `pending` keeps the unfinished tasks."""
    values: dict[int, Any] = {}
    done = 0
    while pending:
        advance(done)
        finished, _ = ray.wait([*pending], timeout=_POLL_SECONDS)
        for task in finished:
            number = pending.pop(task)
            try:
                outcome, node = ray.get(task)
            except ray.exceptions.RayError as error:
                raise SourceError(f"Ray cannot run part {number}/{count}: {text_of(error)}") from error
            if isinstance(outcome.error, SourceNotFoundError):
                outcome.error.args = (f"{outcome.error} ({_SAME_PATHS})",)
            values[number] = value_of(outcome, (number, count), f" on node {node}")
            done += outcome.done
    advance(done)
    return [values[number] for number in range(1, count + 1)]


def _cancel(ray: Any, tasks: list[Any]) -> None:
    """Have tasks delete unfinished files and end; kill those that take too long."""
    for task in tasks:
        ray.cancel(task)
    _, late = ray.wait(tasks, num_returns=len(tasks), timeout=_END_SECONDS) if tasks else ([], [])
    for task in late:
        ray.cancel(task, force=True)
