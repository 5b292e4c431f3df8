"""Other loaders, set up as their own documentation recommends, and measured in processes of their own.

`PEERS` lists what each one reads, and imports nothing of it. A peer may live in an environment of its own, which needs
numpy and has this repository on ``PYTHONPATH``: its module imports nothing else. ``pip install 'dataload[bench]'``
installs the peers that get along with one another.

Each module has functions ``(task, field) -> Reading`` that open the peer, and those with a format of their own a
function ``write(records, field, directory, count) -> path``. The task has the options of `field.Field.to_options`, and
in ``path`` a file of a format that the peer reads, or what `prepare` has written for it. In LMDB and ArrayRecord files
a record is the bytes of the field, unless ``options["open"]["codec"]`` says otherwise; in tar archives it is the
component ``x.npy`` for arrays, and ``bin`` or ``jpg``, with DALI's index beside the archive.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.field import Field, FieldKind
from dataload.bench.machine import versions
from dataload.bench.task import Order, Reading, Task
from dataload.errors import ConfigError, closest

__all__ = ["PEERS", "Peer", "get_peer", "open_peer", "resolve", "why_missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another loader.

    Attributes:
        name: Name in tables.
        imports: Modules that must be installed, that of the peer first: ``("litdata",)``.
        packages: Their packages as pip names them.
        readings: Format -> ``"module:function"`` in this package.
        orders: The orders that it has.
        own_format: The one of `readings` that only it reads, and its module's ``write`` writes.
        kinds: What fields may hold.
        workers: Whether it takes a number of workers. If not, it decides about threads itself, and is measured once.
    """

    name: str
    imports: tuple[str, ...]
    packages: tuple[str, ...]
    readings: Mapping[str, str]
    orders: tuple[Order, ...] = ("global", "sequential")
    own_format: str | None = None
    kinds: tuple[FieldKind, ...] = ("array", "bytes", "image")
    workers: bool = True

    def write(self) -> Any:
        """Return the function that writes the peer's own format."""
        assert self.own_format is not None
        return resolve(self.readings[self.own_format].partition(":")[0] + ":write")


def _torch(name: str, own_format: str | None = None, **readings: str) -> Peer:
    kinds: tuple[FieldKind, ...] = ("array",) if own_format else ("array", "bytes", "image")
    return Peer(
        name=f"torch DataLoader{name}",
        imports=("torch",),
        packages=("torch",),
        readings=readings,
        own_format=own_format,
        kinds=kinds,
    )


def _own(name: str, imports: str, package: str, module: str, form: str, *orders: Order, workers: bool = True) -> Peer:
    """Return a peer with a format of its own."""
    return Peer(
        name=name,
        imports=tuple(imports.split()),
        packages=(package, *imports.split()[1:]),
        readings={form: f"{module}:loader"},
        orders=orders,
        own_format=form,
        workers=workers,
    )


_ALL = (
    _torch("", lmdb="torch_loader:lmdb", tar="torch_loader:tar", array_record="torch_loader:array_record"),
    _torch(", memmap", "npy", npy="torch_loader:memmap"),
    _torch(", memmap in bulk", "npy", npy="torch_loader:memmap_bulk"),
    Peer(
        name="torch DataLoader per group of rows",
        imports=("torch",),
        packages=("torch",),
        readings={"generator": "torch_groups:loader"},
        orders=("sequential",),
    ),
    Peer(
        name="Grain",
        imports=("grain",),
        packages=("grain", "array-record"),
        readings={"array_record": "grain:loader"},
    ),
    _own("WebDataset", "webdataset torch", "webdataset", "webdataset", "tar shards", "pool", "sequential"),
    _own(
        "MosaicML Streaming", "streaming torch", "mosaicml-streaming", "mosaicml", "mds", "global", "pool", "sequential"
    ),
    _own("LitData", "litdata torch", "litdata", "litdata", "litdata", "pool", "sequential"),
    Peer(
        name="DALI on CPU",
        imports=("nvidia.dali",),
        packages=("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
        readings={"tar": "dali:loader"},
        orders=("pool", "sequential"),
    ),
    Peer(
        name="SPDL",
        imports=("spdl.pipeline",),
        packages=("spdl-core",),
        readings={"lmdb": "spdl:lmdb", "tar": "spdl:tar", "array_record": "spdl:array_record"},
    ),
    _own("bagz", "bagz", "bagz", "bagz", "bagz", "global", "sequential", workers=False),
    _own("Hugging Face datasets", "datasets", "datasets", "huggingface", "arrow", "global", "pool", "sequential"),
    _own("Lance", "lance pyarrow", "pylance", "lance", "lance", "global", "sequential", workers=False),
)

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _ALL}
"""By name, in the order of the tables."""


def get_peer(name: str) -> Peer:
    """Return the peer called `name`.

    Raises:
        ConfigError: There is none.
    """
    if name not in PEERS:
        raise ConfigError(f"there is no peer {name!r}: {closest(name, PEERS)}", key="peers", value=name)
    return PEERS[name]


def open_peer(task: Task) -> Reading:
    """Open the peer that a task names, over its data: the ``Task.reading`` of all peers.

    Raises:
        ConfigError: The peer does not have the order, or the task lacks the options of a peer.
        MissingDependencyError: The peer is not installed.
    """
    peer = get_peer(task.name)
    if task.order not in peer.orders:
        raise ConfigError(
            f"{task.name} has the orders {', '.join(peer.orders)}, not {task.order!r}", key="order", value=task.order
        )
    field = None if task.format == "generator" else Field.from_options(task.options)
    reading: Reading = resolve(peer.readings[task.format])(task, field)
    reading.settings = {**versions(*peer.packages), **reading.settings}
    return reading


def resolve(reference: str) -> Any:
    """Import ``"module:function"`` of this package."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def why_missing(peer: Peer, python: str | None = None) -> str | None:
    """Return why a peer cannot be measured, or None if it can. Imports nothing of the peer.

    Args:
        peer: The peer.
        python: The interpreter that will run it; None for this one.
    """
    try:
        command = [python or sys.executable, "-c", _FIND, *peer.imports]
        absent = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        return f"cannot run {python}: {error}"
    if not absent:
        return None
    where = f" in the environment of {python}" if python else ""
    return f"not installed{where} (no module {absent[0]}): pip install {peer.packages[0]}"


_FIND = """
import importlib.util, sys
for module in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        print(module)
"""
