"""Formats by name: the built-in ones and those that installed packages add.

A package adds a format through the entry-point group ``dataload.sources``, which names a `Format` or a source class::

    [project.entry-points."dataload.sources"]
    bagz = "my_package.bagz:BAGZ"

`dataload.open`, configs and the command line then know ``"bagz:path"``. The package is imported when its format is
named, or when a file is not in any built-in format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from dataload._util.settings import check_setting
from dataload.errors import ConfigError, MissingDependencyError, closest
from dataload.sources.array_record.format import ARRAY_RECORD, TFDS
from dataload.sources.arrow.format import ARROW, CSV, HUGGING_FACE, PARQUET
from dataload.sources.folder.format import FOLDER
from dataload.sources.format import Format
from dataload.sources.jsonl.format import JSONL
from dataload.sources.lerobot.format import LEROBOT
from dataload.sources.lmdb.format import LMDB, TORCHRECORD
from dataload.sources.mds.format import MDS
from dataload.sources.options import Options
from dataload.sources.syrah.format import SYRAH
from dataload.sources.tar.format import TAR, WIDS
from dataload.sources.text.format import TEXT
from dataload.sources.tfrecord.format import TFRECORD
from dataload.sources.tokens.format import TOKENS
from dataload.sources.video.format import VIDEO
from dataload.storage import is_url, storage_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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


MEMORY = Format(name="memory", source="dataload.sources.memory:MemorySource", parse_argument=_parse_data)
RANGE = Format(
    name="range",
    source="dataload.sources.memory:RangeSource",
    reader_options=RangeOptions,
    parse_argument=_parse_count,
)

_TABLES = (PARQUET, ARROW, HUGGING_FACE, CSV, JSONL)
_OF_FILES = (
    SYRAH,
    TORCHRECORD,
    LMDB,
    TAR,
    WIDS,
    ARRAY_RECORD,
    TFDS,
    TFRECORD,
    MDS,
    *_TABLES,
    TOKENS,
    FOLDER,
    VIDEO,
    LEROBOT,
    TEXT,
)
_BUILT_IN = {entry.name: entry for entry in (*_OF_FILES, MEMORY, RANGE)}

_NUMBER = re.compile(r"-\d+-of-\d+$")  # follows the suffix in TensorFlow's names: x.tfrecord-00000-of-00010


def format_names() -> tuple[str, ...]:
    """Return the sorted names of all formats: built-in ones and those that installed packages add."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in _entry_points())}))


def built_in_formats() -> tuple[Format, ...]:
    """Return dataload's own formats."""
    return tuple(_BUILT_IN.values())


def added_formats() -> Iterator[Format]:
    """Yield the formats that installed packages add, except those that cannot be imported."""
    for name in sorted({point.name for point in _entry_points()} - _BUILT_IN.keys()):
        with suppress(ConfigError, MissingDependencyError):  # raised again when the format is named
            yield get_format(name)


def get_format(name: str) -> Format:
    """Return the format called `name`; a ConfigError if there is none, or two packages add it."""
    check_setting("format", name, str)
    # Built-in formats take precedence, and finding them does not read the metadata of every installed package.
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        message = f"there is no format {name!r}: {closest(name, format_names())}"
        raise ConfigError(message, key="format", value=name)
    if len({point.value for point in points}) > 1:
        added = [f"{point.dist.name} ({point.value})" if point.dist else point.value for point in points]
        raise ConfigError(
            f"format {name!r} is added by two installed packages, {' and '.join(added)}: uninstall one of them",
            key="format",
            value=name,
        )
    return _load(points[0])


def _load(point: EntryPoint) -> Format:
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"the package that adds format {point.name!r} cannot be imported ({point.value}): {error}"
        ) from error
    return found if isinstance(found, Format) else Format.from_class(point.name, point.value, found)


def _entry_points() -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # takes 20 ms; only needed for other names

    return entry_points(group=ENTRY_POINT_GROUP)


def by_suffix(path: str, known: Iterable[Format] | None = None) -> Format | None:
    """Return the first of the `known` formats, by default all, that has the suffix of `path`, or None."""
    lowered = _NUMBER.sub("", path.rstrip("/").lower())
    among = chain(built_in_formats(), added_formats()) if known is None else known
    return next((entry for entry in among if entry.suffixes and lowered.endswith(entry.suffixes)), None)


def by_content(path: str) -> Format | None:
    """Return the format of a local directory that is a single data set because it has no shards, or None."""
    if is_url(path) or not storage_of(path).is_directory(path):
        return None
    ways = ((entry, entry.is_data_set_without_shards) for entry in built_in_formats())
    return next((entry for entry, tells in ways if tells is not None and entry.load(tells)(path)), None)


def family_of(entry: Format) -> str:
    """Return the name of the general format, which shares suffixes and magic with its variants."""
    return entry.variant_of or entry.name


def variants_of(entry: Format) -> list[Format]:
    """Return the built-in formats that are variants of this one."""
    return [other for other in built_in_formats() if other.variant_of == entry.name]
