"""PyTorch support: torch's DataLoader with our loader underneath, tensors, devices, ranks, sources as datasets.

This is the only package that needs torch.
"""

import importlib
from typing import TYPE_CHECKING

from dataload._util.lazy import lazy_names
from dataload.errors import MissingDependencyError

try:
    importlib.import_module("torch")  # the modules below need it
except ImportError as _error:
    raise MissingDependencyError(
        "dataload.torch needs torch: pip install 'dataload[torch]' (or only torch)", name="torch"
    ) from _error

from dataload.torch.dataloader import DataLoader
from dataload.torch.datasets import SourceDataset
from dataload.torch.device import DeviceLoader, to_pinned, to_tensors
from dataload.torch.ranks import (
    DistributedRank,
    JsonState,
    RankStatistics,
    check_ranks,
    distributed_place,
    statistics,
    wait_ranges,
)

__all__ = [
    "DataLoader",
    "DeviceLoader",
    "DistributedRank",
    "JsonState",
    "RankStatistics",
    "SourceDataset",
    "check_ranks",
    "distributed_place",
    "statistics",
    "to_pinned",
    "to_tensors",
    "wait_ranges",
]

if not TYPE_CHECKING:  # so that type checkers report names that have changed
    __getattr__, _ = lazy_names(__name__, {}, moved={"DistributedPlace": "dataload.torch:DistributedRank"})
