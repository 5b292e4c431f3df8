"""The Ray cluster of fleets, and the actors that live there."""

from __future__ import annotations

import logging
from typing import Any

from dataload._util.lazy import load_optional
from dataload.errors import ConfigError, text_of

NAMESPACE = "dataload"
"""The namespace of actors, which are named ``FLEET/NUMBER``."""

_log = logging.getLogger("dataload")


def connect(address: str | None, *, starts: bool = True) -> Any:
    """Return Ray, connected to a cluster; without one, a cluster on this machine starts, if it `starts`."""
    ray = load_optional("ray", needed_by="a fleet", extra="ray")
    if ray.is_initialized():
        return ray
    try:
        ray.init(address=address or "auto", logging_level="WARNING")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        if address is not None or not starts:
            where = "the Ray cluster of this machine or of RAY_ADDRESS" if address is None else f"Ray at {address!r}"
            raise ConfigError(f"cannot connect to {where}: {text_of(error)}", key="address", value=address) from error
        ray.init(address="local", logging_level="WARNING", include_dashboard=False)
        cpus = ray.cluster_resources().get("CPU", 0)
        _log.warning(
            "no Ray cluster runs here, and RAY_ADDRESS names none: started one of %g CPUs on this machine", cpus
        )
    return ray
