"""The core: the functions through which all bytes leave a mapped file, compiled if possible."""

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any

from dataload._util.settings import check_choice
from dataload.storage import _core_numpy as _core
from dataload.storage._core_numpy import PLACE_BITS, file_number

__all__ = [
    "MOST_SHARDS",
    "PLACE_BITS",
    "can_map",
    "compiled_core",
    "core",
    "core_name",
    "file_number",
    "is_compiled",
]

MOST_SHARDS = 1 << 19


@functools.cache
def core():  # noqa: ANN201 - the type of a module has no name
    """Return the core: the compiled extension or `_core_numpy`. ``DATALOAD_CORE=numpy`` or ``compiled`` chooses."""
    wanted = os.environ.get("DATALOAD_CORE")
    if wanted:
        check_choice("DATALOAD_CORE", wanted, ("compiled", "numpy"))
    if not TYPE_CHECKING and wanted != "numpy":
        try:
            return compiled_core()
        except ImportError:
            if wanted == "compiled":
                raise
    return _core


def compiled_core() -> Any:
    """Return the compiled extension, if `is_compiled`.

    It alone has `Maps` of files and `Tables` of many shards, see `_shards.h`. Without it, each shard is read by itself.
    """
    return importlib.import_module("dataload.storage._core_c")


def is_compiled() -> bool:
    return core() is not _core


def core_name() -> str:
    return "compiled" if is_compiled() else "numpy"


def can_map() -> bool:
    """Return whether files are mapped: only if the core handles SIGBUS, so that a file that shrinks does no harm."""
    return is_compiled() and os.environ.get("DATALOAD_SIGBUS_GUARD") != "0"
