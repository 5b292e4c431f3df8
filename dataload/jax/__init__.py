"""JAX support: batches as global arrays over a sharding, and the ranks of processes.

This is the only package that needs JAX.
"""

import importlib
from typing import TYPE_CHECKING

from dataload._util.lazy import lazy_names
from dataload.errors import MissingDependencyError

try:
    importlib.import_module("jax")  # the modules below need it
except ImportError as _error:
    raise MissingDependencyError("dataload.jax needs JAX: pip install 'dataload[jax]'", name="jax") from _error

from dataload.jax.device import DeviceLoader, distributed_place
from dataload.loader.order import DistributedRank

__all__ = ["DeviceLoader", "DistributedRank", "distributed_place"]

if not TYPE_CHECKING:  # so that type checkers report names that have changed
    __getattr__, _ = lazy_names(__name__, {}, moved={"DistributedPlace": "dataload.jax:DistributedRank"})
