"""Formats by name: the built-in ones, and those that installed packages add.

A package of your own adds a format through the entry-point group ``dataload.sources``, with a `Format`, or with a plain
source class::

    [project.entry-points."dataload.sources"]
    bagz = "my_package.bagz:BAGZ"

Then `dataload.open("bagz:path")` finds it, and so do configs and the command line. A package is loaded when its format
is named, or when a file is in no built-in format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from dataload.errors import ConfigError, MissingDependencyError, closest
from dataload.sources.array_record.format import ARRAY_RECORD
from dataload.sources.format import Format
from dataload.sources.lmdb.format import LMDB, TORCHRECORD
from dataload.sources.options import Options
from dataload.sources.syrah.format import SYRAH
from dataload.sources.tar.format import TAR
from dataload.sources.tokens.format import TOKENS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINT_GROUP",
    "added_formats",
    "built_in_formats",
    "by_suffix",
    "format_names",
    "get_format",
    "writable_names",
]

ENTRY_POINT_GROUP = "dataload.sources"


def _parse_count(value: object) -> int:
    try:
        return int(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise ConfigError(
            f"format 'range' takes the number of records (range:1000), got {value!r}", key="paths", value=value
        ) from None


def _parse_data(value: object) -> object:
    if isinstance(value, str):
        raise ConfigError("format 'memory' takes data, not a path: pass records or columns", key="paths", value=value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions(Options):
    """Options of a range of integers, as for Python's `range`.

    Attributes:
        start: First integer.
        step: Difference between consecutive integers; not 0.
    """

    start: int = 0
    step: int = 1


MEMORY = Format(
    name="memory", source="dataload.sources.memory:MemorySource", takes_paths=False, parse_argument=_parse_data
)
RANGE = Format(
    name="range",
    source="dataload.sources.range:RangeSource",
    reader_options=RangeOptions,
    takes_paths=False,
    parse_argument=_parse_count,
)

_BUILT_IN = {entry.name: entry for entry in (SYRAH, TORCHRECORD, LMDB, TAR, ARRAY_RECORD, TOKENS, MEMORY, RANGE)}


def format_names() -> tuple[str, ...]:
    """Return the names of the built-in formats and of those that installed packages add, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in _entry_points())}))


def built_in_formats() -> tuple[Format, ...]:
    """Return the formats of dataload itself."""
    return tuple(_BUILT_IN.values())


def added_formats() -> Iterator[Format]:
    """Yield the formats of installed packages, leaving out those that do not load."""
    for name in sorted({point.name for point in _entry_points()} - _BUILT_IN.keys()):
        with suppress(ConfigError, MissingDependencyError):  # raised when the format is named
            yield get_format(name)


def writable_names() -> tuple[str, ...]:
    """Return the names of the built-in formats that can be written."""
    return tuple(entry.name for entry in _BUILT_IN.values() if entry.can_write)


def get_format(name: str) -> Format:
    """Return the format called `name`.

    Raises:
        ConfigError: There is none, or two packages add one of that name.
        MissingDependencyError: The package that adds it does not load.
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
    return _load(points[0])


def _load(point: EntryPoint) -> Format:
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"the package that adds format {point.name!r} does not load ({point.value}): {error}"
        ) from error
    return found if isinstance(found, Format) else Format.from_class(point.name, point.value, found)


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # 20 ms, and only names that are not built in need it

    return entry_points(group=ENTRY_POINT_GROUP)


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} ({point.value})" if point.dist else point.value


def by_suffix(path: str, known: Iterable[Format] | None = None) -> Format | None:
    """Return the format that the end of a file name means, or None.

    Args:
        path: Path or name of a file.
        known: The formats to choose from, the first that fits; by default all, built-in ones first.
    """
    lowered = path.rstrip("/").lower()
    among = chain(built_in_formats(), added_formats()) if known is None else known
    return next((entry for entry in among if entry.suffixes and lowered.endswith(entry.suffixes)), None)
