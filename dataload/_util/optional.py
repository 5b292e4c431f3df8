"""Optional packages, loaded on first use."""

from __future__ import annotations

import importlib
from typing import Any

from dataload.errors import MissingDependencyError

__all__ = ["load_optional"]


def load_optional(module: str, *, needed_by: str, extra: str, package: str | None = None) -> Any:
    """Import `module`, or say which command installs it.

    Args:
        module: Module to import, for example ``"bson"``.
        needed_by: What needs it, as the message shall say it: ``"format 'syrah'"``.
        extra: The extra of dataload that brings it.
        package: Name of the package where it differs from the module's.

    Raises:
        MissingDependencyError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = package or module.partition(".")[0]
        # Another package with the same module name (there is a `bson` besides pymongo's) imports, but lacks
        # what is needed; say so instead of claiming that nothing is there.
        found = "" if isinstance(error, ModuleNotFoundError) else f" (importing it failed: {error})"
        raise MissingDependencyError(
            f"{needed_by} needs {name}{found}: pip install 'dataload[{extra}]'", name=name
        ) from error
