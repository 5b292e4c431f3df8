"""The Ray cluster of fleets, and the actors that live there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from dataload._util.lazy import load_optional
from dataload.errors import ConfigError, text_of

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
