"""The settings of workers on a Ray cluster. `dataload.ray` has what runs them, and alone imports Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from dataload._util.settings import Above, Checked, Least, setting_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet(Checked):
    """Workers on the machines of a Ray cluster: ``Loader(..., executor=Fleet(), num_workers=64)``.

    Each worker is a Ray actor that opens the source itself, by paths that its node sees or by URLs, and makes whole
    batches. A batch whose actor or node is lost is made again elsewhere. Ray that this process has initialised is used;
    otherwise it connects to a running cluster, or starts one on this machine and says so.

    Attributes:
        num_cpus: CPUs that Ray reserves for a worker.
        memory: Bytes of memory that Ray reserves for a worker; None reserves none.
        scheduling: ``"spread"`` over the nodes, or Ray's ``"default"``, which fills one node after another.
        name: Loaders with the same name, for example on several ranks, share the workers and take turns. By
            default, each loader starts its own.
        detached: Whether the workers of a named fleet stay when its last loader ends, until ``dataload fleet stop``.
        address: The cluster, as in ``ray.init``: by default the one in RAY_ADDRESS, or one that runs on this machine.
        writable: Whether batches are copied into memory of the loader's own, so that they can be written to. If not,
            their arrays are Ray's memory, which is read-only and stays in use until they are gone.
    """

    num_cpus: Annotated[float, Above(0)] = 1
    memory: Annotated[int, Least(1)] | None = None
    scheduling: Literal["spread", "default"] = "spread"
    name: str | None = None
    detached: bool = False
    address: str | None = None
    writable: bool = True

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.name is not None and (not self.name or "/" in self.name):
            raise setting_error("name", self.name, "must be text without a slash")
        if self.detached and self.name is None:
            raise setting_error("detached", self.detached, "needs a name, by which other processes find the workers")
