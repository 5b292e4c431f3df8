"""The core, compiled if it can be: the functions through which all bytes leave a mapped file.

The environment variable ``DATALOAD_CORE`` chooses: ``numpy`` for the functions of `_core.py`, ``compiled`` for those of
`_core.c` or an ImportError. `NAME` tells which are in use.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from dataload.storage import _core

__all__ = ["NAME", "MapFault", "can_map", "copies", "gather", "gather_ranges"]


def _load() -> Any:
    wanted = os.environ.get("DATALOAD_CORE")
    if wanted != "numpy":
        try:
            return importlib.import_module("dataload.storage._core_c")
        except ImportError:
            if wanted == "compiled":
                raise
    return _core


if TYPE_CHECKING:
    chosen = _core
else:
    chosen = _load()

NAME = "numpy" if chosen is _core else "compiled"
MapFault = chosen.MapFault
copies = chosen.copies
gather = chosen.gather
gather_ranges = chosen.gather_ranges


def can_map() -> bool:
    """Return whether files are mapped: only if a file that shrinks meanwhile cannot kill the process.

    That needs the compiled core. ``DATALOAD_SIGBUS_GUARD=0`` keeps it from handling SIGBUS; files are then not mapped.
    """
    return NAME == "compiled" and os.environ.get("DATALOAD_SIGBUS_GUARD") != "0"
