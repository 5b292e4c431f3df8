"""The core, compiled if it can be: the functions through which all bytes leave a mapped file."""

import functools
import importlib
import os
from typing import TYPE_CHECKING

from dataload._util.settings import check_choice
from dataload.storage import _core_numpy as _core


@functools.cache
def core():  # noqa: ANN201 - the type of a module has no name
    """Return the module of the core: the extension made of `_core.c`, or `_core.py`.

    The environment variable ``DATALOAD_CORE`` chooses: ``numpy`` for `_core.py`, ``compiled`` for the extension.
    """
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
    """Return which core is in use: "compiled" or "numpy"."""
    return "numpy" if core() is _core else "compiled"


def can_map() -> bool:
    """Return whether files are mapped: only if a file that shrinks meanwhile cannot kill the process.

    That needs the compiled core. ``DATALOAD_SIGBUS_GUARD=0`` keeps it from handling SIGBUS; files are then not mapped.
    """
    return core() is not _core and os.environ.get("DATALOAD_SIGBUS_GUARD") != "0"
