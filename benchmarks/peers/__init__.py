"""Other loaders, set up as their own documentation recommends, and measured in processes of their own.

`PEERS` lists what each one reads, and imports nothing of it. A peer may live in an environment of its own, which needs
numpy and has this repository on ``PYTHONPATH``: the modules here import nothing else. ``pip install 'dataload[bench]'``
installs the peers that get along with one another.

A task for a peer has the options of `field.Field.to_options`, and in ``path`` a file of a format that the peer reads,
or what `plan` has written for it. In LMDB and ArrayRecord files a record is the bytes of the field; in tar archives it
is the component ``x.npy``, with DALI's index beside the archive.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import own_formats as own
from benchmarks.peers import readers, torch_loader
from benchmarks.peers.field import Field
from dataload.bench.runner import versions
from dataload.bench.task import Order, Reading, Task


@dataclass(frozen=True, slots=True)
class Peer:
    """Another loader; `imports` are modules that must be installed, and `packages` what pip installs, first its own.

    `grid` are settings to try at the best number of workers, and `one_file` formats that have no shards.

    `write` writes the one format of `readings` that only this peer reads, given a source, the field and a directory,
    and returns its path. A peer without `workers` decides about threads itself, and is measured once.
    """

    name: str
    imports: tuple[str, ...]
    packages: tuple[str, ...]
    readings: Mapping[str, Callable[..., Reading]]
    orders: tuple[Order, ...] = ("global", "sequential")
    write: Callable[..., str] | None = None
    workers: bool = True
    grid: tuple[Mapping[str, Any], ...] = ()
    one_file: tuple[str, ...] = ("lmdb", "npy", "bagz")

    @property
    def own_format(self) -> str | None:
        """The format that only this peer reads."""
        return None if self.write is None else next(iter(self.readings))


_TORCH_GRID = ({"prefetch_factor": 8},)
_GRAIN_GRID = tuple({"num_threads": threads, "prefetch_buffer_size": ahead} for threads, ahead in ((1, 2), (16, 500)))


def _torch(name: str, readings: Mapping[str, Callable[..., Reading]], **more: Any) -> Peer:
    return Peer(f"torch DataLoader{name}", ("torch",), ("torch",), readings, **more, grid=_TORCH_GRID)


def _own(name: str, imports: str, packages: str, read: Callable[..., Reading], *settings: Any, **more: Any) -> Peer:
    """Return a peer whose format is called like the function that reads it."""
    readings = {read.__name__.replace("_", " "): read}
    return Peer(name, tuple(imports.split()), tuple(packages.split()), readings, *settings, **more)


_GLOBAL: tuple[Order, ...] = ("global", "sequential")
_POOL: tuple[Order, ...] = ("pool", "sequential")
_ALL_ORDERS: tuple[Order, ...] = ("global", "pool", "sequential")
_MEMMAP: Mapping[str, Any] = {"write": torch_loader.write_npy}
_DALI = "nvidia-dali-cuda120", "nvidia-dali-cuda130"
_ALL = (
    _torch("", torch_loader.RECORDS),
    _torch(", memmap", {"npy": torch_loader.memmap}, **_MEMMAP),
    _torch(", memmap in bulk", {"npy": torch_loader.memmap_bulk}, **_MEMMAP),
    Peer("Grain", ("grain",), ("grain", "array-record"), {"array_record": readers.grain}, grid=_GRAIN_GRID),
    _own(
        "WebDataset",
        "webdataset torch",
        "webdataset torch",
        readers.tar_shards,
        _POOL,
        readers.write_tar_shards,
        grid=_TORCH_GRID,
    ),
    _own(
        "MosaicML Streaming",
        "streaming torch",
        "mosaicml-streaming torch",
        own.mds,
        _ALL_ORDERS,
        own.write_mds,
        grid=_TORCH_GRID,
    ),
    _own("LitData", "litdata torch", "litdata torch", own.litdata, _POOL, own.write_litdata, grid=_TORCH_GRID),
    Peer("DALI on CPU", ("nvidia.dali",), _DALI, {"tar": readers.dali}, _POOL, grid=({"prefetch_queue_depth": 4},)),
    Peer("tf.data", ("tensorflow",), ("tensorflow-cpu",), {"tfrecord": readers.tf_data}, _POOL, workers=False),
    Peer("SPDL", ("spdl.pipeline",), ("spdl-core",), readers.SPDL, grid=({"buffer_size": 8},)),
    _own("bagz", "bagz", "bagz", own.bagz, _GLOBAL, own.write_bagz, workers=False),
    _own("Hugging Face datasets", "datasets", "datasets torch", own.arrow, _ALL_ORDERS, own.write_arrow),
    _own("Lance", "lance pyarrow", "pylance pyarrow", own.lance, _GLOBAL, own.write_lance, workers=False),
)

_ADVICE = {
    "torch DataLoader": "https://docs.pytorch.org/docs/stable/data.html",
    "Grain": "https://google-grain.readthedocs.io/en/latest/tutorials/dataset_advanced_tutorial.html",
    "WebDataset": "https://github.com/tmbdev/wds-distributed",
    "MosaicML Streaming": "https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html",
    "LitData": "https://github.com/Lightning-AI/litData",
    "DALI on CPU": "https://docs.nvidia.com/deeplearning/dali/user-guide/docs/examples/general/data_loading/"
    "dataloading_webdataset.html",
    "tf.data": "https://www.tensorflow.org/guide/data_performance",
    "SPDL": "https://facebookresearch.github.io/spdl/latest/getting_started/pytorch.html",
    "bagz": "https://github.com/google-deepmind/bagz",
    "Hugging Face datasets": "https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable",
    "Lance": "https://lancedb.github.io/lance-python-doc/random-access.html",
}
"""The page of its documentation that each peer is set up by, shown with its settings."""


PEERS: Mapping[str, Peer] = {peer.name: peer for peer in _ALL}
"""By name, in the order of the tables."""


def open_peer(task: Task) -> Reading:
    """Open the peer that a task names, over its data: the ``Task.reading`` of all peers."""
    peer = PEERS[task.name]
    reading = peer.readings[task.format](task, Field.from_options(task.options))
    advice = _ADVICE.get(task.name) or _ADVICE[task.name.partition(",")[0]]
    reading.settings = {**versions(*peer.packages), **reading.settings, "set up by": advice}
    return reading


def why_missing(peer: Peer, python: str | None = None) -> str | None:
    """Return why a peer cannot be measured by an interpreter, or None if it can. Imports nothing of the peer."""
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
