"""Formats by name, suffix and content: the built-in ones and those that installed packages add.

A package adds a format through the entry-point group ``dataload.sources``, which names a `Format` or a source class::

    [project.entry-points."dataload.sources"]
    bagz = "my_package.bagz:BAGZ"

`dataload.open`, configs and the command line then know ``"bagz:path"``. The package is imported when its format is
named, or when a file is not in any built-in format.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from posixpath import splitext
from typing import TYPE_CHECKING, Any

from dataload._util.lazy import entry_points_of
from dataload._util.settings import check_setting
from dataload.errors import ConfigError, MissingDependencyError, SourceError, UnsupportedFormatError, closest
from dataload.sources.array_record import ARRAY_RECORD, TFDS
from dataload.sources.arrow import ARROW, CSV, HUGGING_FACE, PARQUET
from dataload.sources.folder import FOLDER, SPLITS, is_medium, is_metadata
from dataload.sources.format import ADVICE, HEAD_BYTES, Format, describe_head
from dataload.sources.jsonl import JSONL
from dataload.sources.lerobot import LEROBOT
from dataload.sources.lmdb import LMDB, TORCHRECORD
from dataload.sources.mds import MDS
from dataload.sources.options import Options
from dataload.sources.syrah import SYRAH
from dataload.sources.tar import TAR, WIDS
from dataload.sources.text import TEXT, has_only_texts
from dataload.sources.tfrecord import TFRECORD
from dataload.sources.tokens import TOKENS
from dataload.sources.video import VIDEO
from dataload.storage import Remote, base_name, is_url, join, list_folder, local_path, storage_of
from dataload.storage.paths import as_path

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "dataload.sources"


def _parse_count(value: object) -> int:
    try:
        return int(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        message = f"format 'range' takes the number of records (range:1000), got {value!r}"
        raise ConfigError(message, key="paths", value=value) from None


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
    name="range", source="dataload.sources.memory:RangeSource", reader_options=RangeOptions, parse_argument=_parse_count
)

_TABLES = (PARQUET, ARROW, HUGGING_FACE, CSV, JSONL)
_RECORDS = (SYRAH, TORCHRECORD, LMDB, TAR, WIDS, ARRAY_RECORD, TFDS, TFRECORD, MDS)
_OTHERS = (TOKENS, FOLDER, VIDEO, LEROBOT, TEXT, MEMORY, RANGE)
_BUILT_IN = {entry.name: entry for entry in (*_RECORDS, *_TABLES, *_OTHERS)}

_VARIED = {entry.variant_of for entry in _BUILT_IN.values()}
_NUMBER = re.compile(r"-\d+-of-\d+$")  # follows the suffix in TensorFlow's names: x.tfrecord-00000-of-00010


def format_names() -> tuple[str, ...]:
    """Return the sorted names of all formats: built-in ones and those that installed packages add."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points_of(ENTRY_POINT_GROUP))}))


def built_in_formats() -> tuple[Format, ...]:
    """Return dataload's own formats."""
    return tuple(_BUILT_IN.values())


def added_formats() -> Iterator[Format]:
    """Yield the formats that installed packages add, except those that cannot be imported."""
    for name in sorted({point.name for point in entry_points_of(ENTRY_POINT_GROUP)} - _BUILT_IN.keys()):
        with suppress(ConfigError, MissingDependencyError):  # raised again when the format is named
            yield get_format(name)


def all_formats() -> Sequence[Format]:
    """Return the built-in formats and those that installed packages add, whose metadata this reads."""
    return [*built_in_formats(), *added_formats()]


def get_format(name: str) -> Format:
    """Return the format called `name`; a ConfigError if there is none, or two packages add it."""
    check_setting("format", name, str)
    # Built-in formats take precedence, and finding them does not read the metadata of every installed package.
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    points = [point for point in entry_points_of(ENTRY_POINT_GROUP) if point.name == name]
    if not points:
        message = f"there is no format {name!r}: {closest(name, format_names())}"
        raise ConfigError(message, key="format", value=name)
    if len({point.value for point in points}) > 1:
        added = [f"{point.dist.name} ({point.value})" if point.dist else point.value for point in points]
        message = f"format {name!r} is added by two installed packages, {' and '.join(added)}: uninstall one of them"
        raise ConfigError(message, key="format", value=name)
    return _load(points[0])


def _load(point: EntryPoint) -> Format:
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        message = f"the package that adds format {point.name!r} cannot be imported ({point.value}): {error}"
        raise MissingDependencyError(message) from error
    return found if isinstance(found, Format) else Format.from_class(point.name, point.value, found)


def by_suffix(path: str, known: Iterable[Format] | None = None) -> Format | None:
    """Return the first of the `known` formats, by default all, that has the suffix of `path`, or None."""
    lowered = _NUMBER.sub("", path.rstrip("/").lower())
    among = chain(built_in_formats(), added_formats()) if known is None else known
    return next((entry for entry in among if entry.suffixes and lowered.endswith(entry.suffixes)), None)


def by_suffixes(paths: Collection[str], known: Iterable[Format]) -> list[Format | None]:
    """Return what `by_suffix` does for many paths; those with the same name from its first dot on have one answer."""
    entries = [entry for entry in known if entry.suffixes]
    if not all(suffix.startswith(".") for entry in entries for suffix in entry.suffixes):
        return [by_suffix(path, entries) for path in paths]
    names = (path.rstrip("/").rpartition("/")[2] for path in paths)
    ends = [name[max(0, name.find(".")) :] for name in names]
    found = {end: by_suffix(end, entries) for end in {*ends}}
    return [found[end] for end in ends]


def by_content(path: str, remote: Remote | None = None) -> Format | None:
    """Return the format of a directory that is a single data set because it has no shards, or None; at a URL, text."""
    if not storage_of(path, remote).is_directory(path):
        return None
    if is_url(path):
        return get_format("text") if has_only_texts(path, remote) else None
    ways = ((entry, entry.is_data_set_without_shards) for entry in built_in_formats())
    return next((entry for entry, tells in ways if tells is not None and entry.load(tells)(path)), None)


def split_format(paths: Any, name: str | None = None) -> tuple[Format | None, Any]:
    """Split ``"format:path"`` into the format, None if it is not named, and the rest; `name` gives the format apart."""
    if name is not None:
        return get_format(name), paths
    if not isinstance(paths, str):
        return None, paths
    prefix, rest = split_prefix(paths)
    # A path that exists may have a colon too.
    return (None, paths) if prefix is None or storage_of(paths).exists(paths) else (get_format(prefix), rest)


def split_prefix(path: str) -> tuple[str | None, str]:
    """Split ``"format:path"``; a path without a format, a URL and a path with a drive letter stay whole."""
    prefix, colon, rest = path.partition(":")
    is_name = colon and len(prefix) > 1 and prefix.isidentifier() and not rest.startswith("//")
    return (prefix, rest) if is_name else (None, path)


def find_destination(path: Any, name: str | None = None) -> tuple[Format, str]:
    """Return the format in which to write, `name` or by prefix or suffix, and the path without its name."""
    entry, rest = split_format(path, name)
    rest = local_path(as_path(rest))
    if "*" in base_name(rest):
        shards = f"name one file, or list the shards ({base_name(rest).replace('*', '{00..07}', 1)!r})"
        raise ConfigError(f"{rest!r} is a pattern, which cannot be written to: {shards}", key="destination", value=rest)
    entry = entry or by_suffix(rest)
    if entry is not None and entry.writer is not None:
        makes_folders = entry.directory_file is not None or entry.is_data_set_without_shards is not None
        if rest.endswith("/") and not makes_folders and not rest.rstrip("/").lower().endswith(entry.suffixes):
            message = f"{rest!r} is a directory: name the file in it, such as {rest + 'data' + entry.suffixes[0]!r}"
            raise ConfigError(message, key="destination", value=rest)
        return entry, rest
    writable = ", ".join(known.name for known in all_formats() if known.writer is not None)
    if entry is None:
        message = f"the suffix of {rest!r} does not name a format: pass format=, one of {writable}"
        raise ConfigError(message, key="format", value=rest)
    message = f"format {entry.name!r} is read-only; choose one that can be written: {writable}"
    raise ConfigError(message, key="format", value=entry.name)


def family_of(entry: Format) -> str:
    """Return the name of the general format, which shares suffixes and magic with its variants."""
    return entry.variant_of or entry.name


def _decides(entry: Format) -> bool:
    """Return whether the suffix of a format decides, because no variant shares it."""
    return entry.variant_of is None and entry.name not in _VARIED


def format_of_directory(directory: str, remote: Remote | None, known: Sequence[Format]) -> Format | None:
    """Return the format of a directory that is a single data set, or None."""
    return next((entry for entry in known if entry.is_data_set(directory, remote)), None)


_SHOWN = 3


def is_media_folder(
    directory: str, holder: Format | None, options: Collection[str], known: Sequence[Format], remote: Remote | None
) -> bool:
    """Return whether a local directory has images or audio, at any depth, and no shards; or options that say so.

    `holder` is the format of the directory itself; if an index makes it one, this describes all files in it.
    """
    if holder is not None and by_suffix(str(holder.directory_file), known) is None:
        return False
    names: list[str] = []
    if is_url(directory):
        names = storage_of(directory, remote).list(directory)
    else:
        with suppress(SourceError):  # raised again by whatever reads there
            list_folder(directory, names.append)
    names.sort()
    media = [*filter(is_medium, names)]
    others = sorted({*names}.difference(media))
    shards = [name for name, of in zip(others, by_suffixes(others, known), strict=True) if of and not is_metadata(name)]
    if not media or not shards or {"labels", "pattern", "split"} & {*options}:  # options of folders
        return bool(media) and not is_url(directory)
    table = next((name for name in shards if name.endswith(".csv")), None)
    join_it = "" if table is None else f"labels={join(directory, table)!r} to join its rows to them, "
    pattern = join(directory, re.sub(r"[^/.]+(\.[^/]*)$", r"*\1", shards[0]))
    raise ConfigError(
        f"{directory} has both images or audio ({_some(media)}) and files of other formats ({_some(shards)}): say what "
        f"you mean: format='folder' for the images alone, {join_it}or a pattern such as {pattern!r} for the files",
        key="paths",
        value=directory,
    )


def warn_of_splits(directory: str, files: Iterable[str]) -> None:
    """Warn if all files of a directory, which are read as one data set, are called after splits of one."""
    found = sorted({re.split(r"[-_.]", base_name(file))[0] for file in files})
    if len(found) > 1 and all(name.lower() in SPLITS for name in found):
        message = f"{directory} has files of the splits {', '.join(found)}, which are read together"
        one = next((name for name in found if name.lower().startswith("train")), found[0])
        several = f"or name all by {join(directory, '*')!r}"
        warnings.warn(f"{message}: open one of them, {join(directory, f'{one}*')!r}, {several}", stacklevel=2)


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names):,}: {', '.join(names[:_SHOWN])}{more}"


def format_of_files(files: Sequence[str], remote: Remote | None) -> Format:
    """Return the format that all files of a data set have, by suffix and content.

    Raises:
        ConfigError: They have different formats.
        UnsupportedFormatError: One has no known format.
    """
    # Looking for added formats takes long, so it is done once, and only if a built-in suffix does not decide.
    by_name = by_suffixes(files, built_in_formats())
    if len({*map(id, by_name)}) == 1 and by_name[0] is not None and _decides(by_name[0]):
        return by_name[0]
    known = built_in_formats() if all(by_name) else all_formats()
    splits = [(entry, entry.load(entry.split_selection)) for entry in known if entry.split_selection is not None]
    found: dict[str, Format] = {}
    with nullcontext() if remote is None else remote.learning(files):
        for file in files:
            selected = next((one for one, split in splits if split(file) != file), None)
            found[file] = _format_of(file, selected, known, remote)
    names = sorted({entry.name for entry in found.values()})
    if len(names) > 1:
        examples = ", ".join(f"{next(f for f, e in found.items() if e.name == name)} ({name})" for name in names)
        message = f"the files of a data set have one format, got {examples}"
        raise ConfigError(f"{message}: open them separately and join them with ConcatSource", key="paths")
    return found[files[0]]


def _format_of(path: str, selected: Format | None, known: Sequence[Format], remote: Remote | None) -> Format:
    """Return the format of a file in which `selected` finds a selection of records."""
    if selected is not None and not selected.suffixes:
        return selected
    path = path if selected is None else selected.file(path)
    by_name = by_suffix(path, known)
    if by_name is not None and _decides(by_name):
        return by_name
    storage = storage_of(path, remote)
    holder = format_of_directory(path, remote, all_formats()) if storage.is_directory(path) else None
    if holder is None and (found := by_content(path, remote)) is not None:
        return found
    data = path if holder is None or holder.directory_file is None else join(path, holder.directory_file)
    with storage.open(data) as file:
        head = file.read(0, HEAD_BYTES)
    plain = path.lower().removesuffix(".gz").removesuffix(".zst")
    found, advice = detect(head, known), ADVICE.get(splitext(plain)[1])
    if found is not None and not (advice and found.name == "folder"):  # .npz and .pt files are ZIP archives, too
        variants = ((each, each.is_variant) for each in built_in_formats() if each.variant_of == found.name)
        return next((each for each, tells in variants if tells and each.load(tells)(data, remote)), found)
    if by_name is not None:
        return by_name  # its reader explains the error best
    if advice is None:
        detected = ", ".join(sorted(entry.name for entry in known if entry.magic is not None))
        advice = f"{detected} are detected by their content; for others pass format=, for raw tokens format='tokens'"
    raise UnsupportedFormatError(f"{path} is not in a known format: {describe_head(head)}; {advice}", path=path)


def detect(head: bytes, known: Iterable[Format] | None = None) -> Format | None:
    """Return the first of the `known` formats, by default all, of a file that begins with `head`, or None."""
    return next((entry for entry in (all_formats() if known is None else known) if entry.matches(head)), None)
