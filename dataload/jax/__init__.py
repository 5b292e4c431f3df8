"""JAX support: batches as global arrays over a sharding, and the ranks of processes.

This is the only package that needs JAX.
"""

import importlib

from dataload.errors import MissingDependencyError

try:
    importlib.import_module("jax")  # the modules below need it
except ImportError as _error:
    raise MissingDependencyError("dataload.jax needs JAX: pip install 'dataload[jax]'", name="jax") from _error

from dataload.jax.device import DeviceLoader, distributed_place
from dataload.loader.order import DistributedPlace

__all__ = ["DeviceLoader", "DistributedPlace", "distributed_place"]
