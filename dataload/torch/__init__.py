"""PyTorch: batches as tensors that share their memory, batches on a device, and sources as map-style data sets.

The only package that imports torch.
"""

import importlib

from dataload.errors import MissingDependencyError

try:
    importlib.import_module("torch")  # the modules below take it for granted
except ImportError as error:
    raise MissingDependencyError("dataload.torch needs torch: pip install 'dataload[torch]'", name="torch") from error

from dataload.torch.dataset import SourceDataset
from dataload.torch.device import DeviceLoader
from dataload.torch.place import DistributedPlace, distributed_place
from dataload.torch.tensors import to_pinned, to_tensors

__all__ = ["DeviceLoader", "DistributedPlace", "SourceDataset", "distributed_place", "to_pinned", "to_tensors"]
