"""Other loaders, set up as their own documentation recommends, and measured in processes of their own.

`PEERS` lists what each one reads, and imports nothing of it. A peer may live in an environment of its own, which needs
numpy and has this repository on ``PYTHONPATH``: the modules here import nothing else. ``pip install 'dataload[bench]'``
installs the peers that get along with one another.

A task for a peer has the options of `field.Field.to_options`, and in ``path`` a file of a format that the peer reads,
or what `prepare` has written for it. In LMDB and ArrayRecord files a record is the bytes of the field, unless
``options["open"]["codec"]`` says otherwise; in tar archives it is the component ``x.npy`` for arrays, and ``bin`` or
``jpg``, with DALI's index beside the archive.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.peers.field import Field, FieldKind
from dataload.bench.machine import versions
from dataload.bench.task import Order, Reading, Task
from dataload.errors import ConfigError, closest


@dataclass(frozen=True, slots=True)
class Peer:
    """Another loader.

    Attributes:
        name: Name in tables.
        imports: Modules that must be installed, that of the peer first.
        packages: Packages whose versions are shown; the first is what pip installs.
        readings: Format -> ``"module:function"`` in this package; the function opens the peer, given task and field.
        orders: The orders that it has.
        own_format: The one of `readings` that only it reads.
        write: ``"module:function"`` that writes it, given a source, the field and a directory; returns its path.
        kinds: What fields may hold.
        workers: Whether it takes a number of workers. If not, it decides about threads itself, and is measured once.
    """

    name: str
    imports: tuple[str, ...]
    packages: tuple[str, ...]
    readings: Mapping[str, str]
    orders: tuple[Order, ...] = ("global", "sequential")
    own_format: str | None = None
    write: str | None = None
    kinds: tuple[FieldKind, ...] = ("array", "bytes", "image")
    workers: bool = True


_OF_RECORDS = ("lmdb", "tar", "array_record")
_GLOBAL: tuple[Order, ...] = ("global", "sequential")
_POOL: tuple[Order, ...] = ("pool", "sequential")
_ALL_ORDERS: tuple[Order, ...] = ("global", "pool", "sequential")


def _own(name: str, module: str, form: str, imports: str, packages: str, orders: tuple[Order, ...]) -> Peer:
    """Return a peer with a format of its own, which the functions FORM and write_FORM of a module read and write."""
    function = form.replace(" ", "_")
    return Peer(
        name=name,
        imports=tuple(imports.split()),
        packages=tuple(packages.split()),
        readings={form: f"{module}:{function}"},
        orders=orders,
        own_format=form,
        write=f"{module}:write_{function}",
    )


def _torch(name: str, **more: Any) -> Peer:
    return Peer(name=f"torch DataLoader{name}", imports=("torch",), packages=("torch",), **more)


def _memmap(name: str, function: str) -> Peer:
    more = {"own_format": "npy", "write": "torch_loader:write_npy", "kinds": ("array",)}
    return _torch(name, readings={"npy": f"torch_loader:{function}"}, **more)


_ALL = (
    _torch("", readings={form: f"torch_loader:{form}" for form in _OF_RECORDS}),
    _memmap(", memmap", "memmap"),
    _memmap(", memmap in bulk", "memmap_bulk"),
    _torch(" per group of rows", readings={"generator": "torch_loader:groups"}, orders=("sequential",)),
    Peer("Grain", ("grain",), ("grain", "array-record"), {"array_record": "readers:grain"}),
    _own("WebDataset", "readers", "tar shards", "webdataset torch", "webdataset torch", _POOL),
    _own("MosaicML Streaming", "own_formats", "mds", "streaming torch", "mosaicml-streaming torch", _ALL_ORDERS),
    _own("LitData", "own_formats", "litdata", "litdata torch", "litdata torch", _POOL),
    Peer(
        "DALI on CPU",
        ("nvidia.dali",),
        ("nvidia-dali-cuda120", "nvidia-dali-cuda130"),
        {"tar": "readers:dali"},
        orders=_POOL,
    ),
    Peer("SPDL", ("spdl.pipeline",), ("spdl-core",), {form: f"readers:spdl_{form}" for form in _OF_RECORDS}),
    replace(_own("bagz", "own_formats", "bagz", "bagz", "bagz", _GLOBAL), workers=False),
    _own("Hugging Face datasets", "own_formats", "arrow", "datasets", "datasets torch", _ALL_ORDERS),
    replace(_own("Lance", "own_formats", "lance", "lance pyarrow", "pylance pyarrow", _GLOBAL), workers=False),
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
