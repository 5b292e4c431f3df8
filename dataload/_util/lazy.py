"""Package names imported on first use, and moved names."""

import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, moved: Mapping[str, str] | None = None, submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package or module.

    `homes` maps names to ``"module"`` or ``"module:other_name"``; `moved` maps deprecated names to their new public
    module; `submodules` are imported when used as attributes.
    """

    def get(name: str) -> Any:
        if name in homes:
            module, _, there = homes[name].partition(":")
            value = getattr(import_module(module), there or name)
            setattr(sys.modules[package], name, value)  # later uses do not come here
            return value
        if moved is not None and name in moved:
            message = f"{package}.{name} is deprecated: use {moved[name]}.{name}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(import_module(moved[name]), name)
        if name in submodules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *submodules})

    return get, names
