"""Names that are imported on first use, names that have changed, and optional packages."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module

TYPE_CHECKING = False  # typing would take most of the time of `import dataload`
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from typing import Any, TypeVar

    InitT = TypeVar("InitT", bound=Callable[..., None])


def lazy_names(
    package: str, homes: Mapping[str, str], *, moved: Mapping[str, str] | None = None, submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package or module.

    `homes` maps names to ``"module"`` or ``"module:other_name"``, and so does `moved` for deprecated names, to public
    modules; `submodules` are imported when used as attributes.
    """

    def get(name: str) -> Any:
        if name in homes:
            module, _, there = homes[name].partition(":")
            value = getattr(import_module(module), there or name)
            setattr(sys.modules[package], name, value)  # later uses do not come here
            return value
        if moved is not None and name in moved:
            module, _, there = moved[name].partition(":")
            message = f"{package}.{name} is deprecated: use {module}.{there or name}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(import_module(module), there or name)
        if name in submodules:
            return import_module(f"{package}.{name}")
        advice = import_module("dataload._util.interactive").instead("module", name) if package == "dataload" else ""
        raise AttributeError(f"module {package!r} has no attribute {name!r}{advice}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *submodules})

    return get, names


def load_optional(module: str, *, needed_by: str, extra: str | None, package: str | None = None) -> Any:
    """Import a module that `needed_by` needs, as its error says, and return it; `extra` installs its package."""
    try:
        return import_module(module)
    except ImportError as error:
        from dataload.errors import MissingDependencyError  # `import dataload` loads this module

        name = package or module.partition(".")[0]
        # Another package can provide a module of the same name (there is a `bson` besides pymongo's) that lacks what
        # is needed. Report the actual failure then, instead of claiming that nothing is installed.
        found = "" if isinstance(error, ModuleNotFoundError) else f" (importing it failed: {error})"
        install = name if extra is None else f"'dataload[{extra}]' (or only {name})"
        raise MissingDependencyError(f"{needed_by} needs {name}{found}: pip install {install}", name=name) from error


def renamed(**names: str) -> Callable[[InitT], InitT]:
    """Decorate a constructor so that old names of arguments, given as ``old="new"``, still work, with a warning."""
    # The old argument ``start_method`` said how the processes of ``executor="processes"`` start, and nothing otherwise.

    def decorate(init: InitT) -> InitT:
        @functools.wraps(init)
        def translated(self: Any, /, *args: Any, **settings: Any) -> None:
            owner = type(self).__name__
            for old, new in names.items():
                if old not in settings:
                    continue
                message = f"{old} of {owner} is deprecated: pass it as {new}="
                warnings.warn(message, DeprecationWarning, stacklevel=2)
                value, replaced = settings.pop(old), settings.get(new)
                if value is None or (old == "start_method" and replaced != "processes"):
                    continue
                if replaced is not None and old != "start_method":
                    from dataload.errors import ConfigError  # `import dataload` loads this module

                    raise ConfigError(f"{old} is the old name of {new}: give only {new}", key=old, value=value)
                settings[new] = value
            init(self, *args, **settings)

        return translated  # pyright: ignore[reportReturnType] # the signature is that of `init`

    return decorate


def entry_points_of(group: str) -> Sequence[EntryPoint]:
    """Return what installed packages add to a group."""
    return _entry_points_in(group, tuple((path, _changed(path or ".")) for path in sys.path))


def _changed(folder: str) -> int:
    with suppress(OSError):
        return os.stat(folder).st_mtime_ns
    return 0


@functools.lru_cache(maxsize=1)
def _entry_points_in(group: str, folders: tuple[tuple[str, int], ...]) -> Sequence[EntryPoint]:
    """Read the metadata of all packages, in 10 ms, again only if a folder of packages has changed since."""
    from importlib.metadata import entry_points  # takes 20 ms; only needed for other names

    del folders
    return tuple(entry_points(group=group))
