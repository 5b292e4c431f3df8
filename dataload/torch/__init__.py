"""PyTorch support: batches as tensors without copying, batches on a device, sources as map-style datasets.

This is the only package that needs torch.
"""

import importlib

from dataload.errors import MissingDependencyError

try:
    importlib.import_module("torch")  # the modules below need it
except ImportError as _error:
    raise MissingDependencyError(
        "dataload.torch needs torch: pip install 'dataload[torch]' (or only torch)", name="torch"
    ) from _error

from dataload.torch.dataset import SourceDataset
from dataload.torch.device import DeviceLoader
from dataload.torch.place import DistributedPlace, distributed_place
from dataload.torch.tensors import to_pinned, to_tensors

__all__ = ["DeviceLoader", "DistributedPlace", "SourceDataset", "distributed_place", "to_pinned", "to_tensors"]
