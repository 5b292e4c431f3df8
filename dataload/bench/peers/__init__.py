"""Other loaders, set up as their own documentation recommends, and measured in processes of their own.

`PEERS` says of each what it reads; nothing of it is imported here. A peer may live in an environment of its own, which
needs numpy beside it and this package on ``PYTHONPATH``: its modules import nothing else.

A task for a peer has the options of `reading.Field.to_options`, and in ``path`` a file of one of the formats that the
peer reads, or what ``python -m dataload.bench.peers.prepare`` has written for it. In LMDB and ArrayRecord files a
record is the bytes of the field, unless ``options["open"]["codec"]`` says otherwise; in tar archives it is the
component ``x.npy`` for arrays, and ``bin`` or ``jpg``, with DALI's index beside the archive.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from dataload.bench.peers.reading import FieldKind
from dataload.bench.task import Order
from dataload.errors import ConfigError, closest

__all__ = ["PEERS", "Peer", "get_peer", "why_missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another loader.

    Attributes:
        name: As tables show it.
        module: What is imported of it, for example ``"litdata"``.
        package: What pip installs.
        readings: Format -> ``"module:function"`` of the reading for ``Task.reading``.
        orders: Those that it has.
        own_format: That of `readings` which it alone reads, and `prepare` writes.
        prepare: ``"module:function"`` that writes it, see `dataload.bench.peers.prepare`.
        kinds: What fields may hold.
        workers: Whether it takes a number of workers. Without, its threads are its own affair, and it is measured once.
        needs: Further modules that have to be there.
    """

    name: str
    module: str
    package: str
    readings: Mapping[str, str]
    orders: tuple[Order, ...]
    own_format: str | None = None
    prepare: str | None = None
    kinds: tuple[FieldKind, ...] = ("array", "bytes", "image")
    workers: bool = True
    needs: tuple[str, ...] = ()


_HERE = "dataload.bench.peers"

_ALL = (
    Peer(
        name="torch DataLoader",
        module="torch",
        package="torch",
        readings={
            "lmdb": f"{_HERE}.torch_loader:lmdb",
            "tar": f"{_HERE}.torch_loader:tar",
            "array_record": f"{_HERE}.torch_loader:array_record",
        },
        orders=("global", "sequential"),
    ),
    Peer(
        name="torch DataLoader, memmap",
        module="torch",
        package="torch",
        readings={"npy": f"{_HERE}.torch_loader:memmap"},
        orders=("global", "sequential"),
        own_format="npy",
        prepare=f"{_HERE}.torch_loader:write_npy",
        kinds=("array",),
    ),
    Peer(
        name="torch DataLoader, memmap in bulk",
        module="torch",
        package="torch",
        readings={"npy": f"{_HERE}.torch_loader:memmap_bulk"},
        orders=("global", "sequential"),
        own_format="npy",
        prepare=f"{_HERE}.torch_loader:write_npy",
        kinds=("array",),
    ),
    Peer(
        name="torch DataLoader per group of rows",
        module="torch",
        package="torch",
        readings={"generator": "dataload.bench.stream_readings:torch_groups"},
        orders=("sequential",),
    ),
    Peer(
        name="Grain",
        module="grain",
        package="grain",
        readings={"array_record": f"{_HERE}.grain:loader"},
        orders=("global", "sequential"),
    ),
    Peer(
        name="WebDataset",
        module="webdataset",
        package="webdataset",
        readings={"tar shards": f"{_HERE}.webdataset:loader"},
        orders=("pool", "sequential"),
        own_format="tar shards",
        prepare=f"{_HERE}.webdataset:write_shards",
        needs=("torch",),
    ),
    Peer(
        name="MosaicML Streaming",
        module="streaming",
        package="mosaicml-streaming",
        readings={"mds": f"{_HERE}.mosaicml:loader"},
        orders=("global", "pool", "sequential"),
        own_format="mds",
        prepare=f"{_HERE}.mosaicml:write",
    ),
    Peer(
        name="LitData",
        module="litdata",
        package="litdata",
        readings={"litdata": f"{_HERE}.litdata:loader"},
        orders=("pool", "sequential"),
        own_format="litdata",
        prepare=f"{_HERE}.litdata:write",
    ),
    Peer(
        name="DALI on CPU",
        module="nvidia.dali",
        package="nvidia-dali-cuda120",
        readings={"tar": f"{_HERE}.dali:loader"},
        orders=("pool", "sequential"),
    ),
    Peer(
        name="SPDL",
        module="spdl.pipeline",
        package="spdl-core",
        readings={
            "lmdb": f"{_HERE}.spdl:lmdb",
            "tar": f"{_HERE}.spdl:tar",
            "array_record": f"{_HERE}.spdl:array_record",
        },
        orders=("global", "sequential"),
    ),
    Peer(
        name="bagz",
        module="bagz",
        package="bagz",
        readings={"bagz": f"{_HERE}.bagz:loader"},
        orders=("global", "sequential"),
        own_format="bagz",
        prepare=f"{_HERE}.bagz:write",
        workers=False,
    ),
    Peer(
        name="Hugging Face datasets",
        module="datasets",
        package="datasets",
        readings={"arrow": f"{_HERE}.huggingface:loader"},
        orders=("global", "pool", "sequential"),
        own_format="arrow",
        prepare=f"{_HERE}.huggingface:write",
    ),
    Peer(
        name="Lance",
        module="lance",
        package="pylance",
        readings={"lance": f"{_HERE}.lance:loader"},
        orders=("global", "sequential"),
        own_format="lance",
        prepare=f"{_HERE}.lance:write",
        workers=False,
    ),
)

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _ALL}
"""By name, in the order of the tables."""


def get_peer(name: str) -> Peer:
    """The peer of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in PEERS:
        raise ConfigError(f"there is no peer {name!r}: {closest(name, PEERS)}", key="peers", value=name)
    return PEERS[name]


def why_missing(peer: Peer, python: str | None = None) -> str | None:
    """Why a peer cannot be measured, as its row says it; None if it can. Imports nothing of the peer.

    Args:
        peer: The peer.
        python: The interpreter that is to run it; None for this one.
    """
    modules = (peer.module, *peer.needs)
    if python is None:
        absent = [module for module in modules if not _is_there(module)]
    else:
        try:
            found = subprocess.run(
                [python, "-c", _ASK, *modules], capture_output=True, text=True, check=True, timeout=60
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot run {python}: {error}"
        absent = found.split()
    if not absent:
        return None
    where = f" in the environment of {python}" if python else ""
    return f"not installed{where} (no module {absent[0]}): pip install {peer.package}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


_ASK = """
import importlib.util, sys
for module in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        print(module)
"""
