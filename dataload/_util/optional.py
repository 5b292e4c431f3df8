"""Optional packages, loaded on first use."""

import importlib
from typing import Any

from dataload.errors import MissingDependencyError


def load_optional(module: str, *, needed_by: str, extra: str | None, package: str | None = None) -> Any:
    """Import a module of an optional package and return it, or say how to install the package.

    `needed_by` is what needs the module, worded for the error message: ``"format 'syrah'"``. `extra` is the extra of
    dataload that installs the package, if there is one.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        # Another package can provide a module of the same name (there is a `bson` besides pymongo's) that lacks what
        # is needed. Report the actual failure then, instead of claiming that nothing is installed.
        found = "" if isinstance(error, ModuleNotFoundError) else f" (importing it failed: {error})"
        install = name if extra is None else f"'dataload[{extra}]' (or only {name})"
        raise MissingDependencyError(f"{needed_by} needs {name}{found}: pip install {install}", name=name) from error
