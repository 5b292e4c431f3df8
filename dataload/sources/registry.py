"""Formats by name: what opens and writes them, imported when they are first used.

A package of your own adds a format through the entry-point group ``dataload.sources``::

    [project.entry-points."dataload.sources"]
    bagz = "my_package.bagz:BagzSource"

and `dataload.open("bagz:path")` finds it. It is loaded only when it is named.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataload.errors import ConfigError, MissingDependencyError, closest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["ENTRY_POINT_GROUP", "Format", "by_suffix", "construct", "format_names", "get_format", "load"]

ENTRY_POINT_GROUP = "dataload.sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format, by the places of the classes that serve it.

    Attributes:
        name: As in ``format=`` and ``"name:path"``.
        source: ``"module:Class"``; called with a list of paths, ``fields=`` and the options of the format.
        writer: ``"module:Class"``, called with a path and options; None for what is only read.
        suffixes: Ends of file names that mean this format.
        takes_paths: False for sources made from one argument that is no path (``range:100``).
    """

    name: str
    source: str
    writer: str | None = None
    suffixes: tuple[str, ...] = ()
    takes_paths: bool = True


_BUILT_IN = {
    entry.name: entry
    for entry in (
        Format(
            name="syrah",
            source="dataload.sources.syrah.reader:SyrahSource",
            writer="dataload.sources.syrah.writer:SyrahWriter",
            suffixes=(".syr",),
        ),
        Format(
            name="torchrecord",
            source="dataload.sources.lmdb.torchrecord:TorchRecordSource",
            writer="dataload.sources.lmdb.torchrecord_writer:TorchRecordWriter",
            suffixes=(".torchrecord",),
        ),
        Format(
            name="lmdb",
            source="dataload.sources.lmdb.reader:LMDBSource",
            writer="dataload.sources.lmdb.writer:LMDBWriter",
            suffixes=(".lmdb", ".mdb"),
        ),
        Format(
            name="tar",
            source="dataload.sources.tar.reader:TarSource",
            writer="dataload.sources.tar.writer:TarWriter",
            suffixes=(".tar",),
        ),
        Format(
            name="array_record",
            source="dataload.sources.array_record.reader:ArrayRecordSource",
            writer="dataload.sources.array_record.writer:ArrayRecordWriter",
            suffixes=(".array_record", ".arrayrecord"),
        ),
        # No suffix: .npy and .bin mean many things, and lie beside the shards of other formats.
        Format(name="tokens", source="dataload.sources.tokens.reader:TokenSource"),
        Format(name="memory", source="dataload.sources.memory:MemorySource", takes_paths=False),
        Format(name="range", source="dataload.sources.range:RangeSource", takes_paths=False),
    )
}


def format_names() -> tuple[str, ...]:
    """Names of the built-in formats and of those that installed packages add, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in _entry_points())}))


def get_format(name: str) -> Format:
    """The format called `name`.

    Raises:
        ConfigError: There is none, or two packages add one of that name.
    """
    # A built-in name means the built-in format, and is answered without reading the metadata of every package.
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        message = f"there is no format {name!r}: {closest(name, format_names())}"
        raise ConfigError(message, key="format", value=name)
    if len({point.value for point in points}) > 1:
        raise ConfigError(
            f"format {name!r} is added by two installed packages, {' and '.join(map(_distribution, points))}: "
            "uninstall one of them",
            key="format",
            value=name,
        )
    return Format(name=name, source=points[0].value)


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms, and only names that are not built in need it

    return entry_points(group=ENTRY_POINT_GROUP)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} ({point.value})" if point.dist else point.value


def by_suffix(path: str) -> Format | None:
    """The built-in format that the end of a file name means."""
    lowered = path.rstrip("/").lower()
    for entry in _BUILT_IN.values():
        if lowered.endswith(entry.suffixes) and entry.suffixes:
            return entry
    return None


def load(entry: Format, role: str) -> Any:
    """Import the class for reading (role ``"source"``) or writing (``"writer"``).

    Raises:
        ConfigError: The format cannot be written.
        MissingDependencyError: A plug-in does not import; the message names it.
    """
    place = entry.source if role == "source" else entry.writer
    if place is None:
        raise ConfigError(
            f"format {entry.name!r} is only read; choose one that can be written: "
            f"{', '.join(name for name, f in _BUILT_IN.items() if f.writer)}",
            key="format",
            value=entry.name,
        )
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if entry.name in _BUILT_IN:
            raise
        raise MissingDependencyError(
            f"the package that adds format {entry.name!r} does not load ({place}): {error}"
        ) from error


def construct(entry: Format, role: str, argument: Any, options: Mapping[str, Any]) -> Any:
    """Make a source or a writer, refusing options that its class does not have.

    Args:
        entry: The format.
        role: ``"source"`` or ``"writer"``.
        argument: The paths, or the one path.
        options: Keyword arguments.

    Raises:
        ConfigError: There is no such option, and the message names the closest; or one that is needed is missing.
    """
    cls = load(entry, role)
    parameters = inspect.signature(cls).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in options:
            raise ConfigError(f"format {entry.name!r} needs the option {p.name!r}: give {p.name}=...", key=p.name)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in options:
            if name not in known:
                message = f"format {entry.name!r} has no option {name!r}: {closest(name, known)}"
                raise ConfigError(message, key=name, value=options[name])
    return cls(argument, **options)
