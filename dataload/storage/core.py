"""The core: the functions through which all bytes leave a mapped file, compiled if possible."""

import functools
import importlib
import os
from typing import TYPE_CHECKING

from dataload._util.settings import check_choice
from dataload.storage import _core_numpy as _core
from dataload.storage._shards_numpy import MOST_SHARDS, PLACE_BITS, file_number

__all__ = ["MOST_SHARDS", "PLACE_BITS", "can_map", "core", "core_name", "file_number"]


@functools.cache
def core():  # noqa: ANN201 - the type of a module has no name
    """Return the core: the compiled extension or `_core_numpy`. ``DATALOAD_CORE=numpy`` or ``compiled`` chooses."""
    wanted = os.environ.get("DATALOAD_CORE")
    if wanted:
        check_choice("DATALOAD_CORE", wanted, ("compiled", "numpy"))
    if not TYPE_CHECKING and wanted != "numpy":
        try:
            return importlib.import_module("dataload.storage._core_c")
        except ImportError:
            if wanted == "compiled":
                raise
    return _core


def core_name() -> str:
    return "numpy" if core() is _core else "compiled"


def can_map() -> bool:
    """Return whether files are mapped: only if the core handles SIGBUS, so that a file that shrinks does no harm."""
    return core() is not _core and os.environ.get("DATALOAD_SIGBUS_GUARD") != "0"
