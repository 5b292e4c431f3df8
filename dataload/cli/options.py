"""Options shared by several commands, and the sources they describe."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeAlias

import typer

from dataload._util.settings import check_directory
from dataload.api import open_source
from dataload.cli.output import count_of, print_warning
from dataload.config import parse_assignment, parse_value
from dataload.config.problems import REFERENCE_PATTERN, find_module, resolve_reference
from dataload.errors import ConfigError, DataloadError, SourceError, closest
from dataload.jobs.engine import Engine, LocalEngine
from dataload.loader.loader import Loader
from dataload.sources.base import Source
from dataload.sources.discover import DataSetFiles, find_shards
from dataload.sources.format import Format
from dataload.sources.registry import format_names, get_format, split_format
from dataload.sources.views.adapt import as_source
from dataload.sources.views.split import select
from dataload.storage import Remote, is_url
from dataload.storage.local.files import read_text

SourceFormat: TypeAlias = Annotated[
    str | None, typer.Option(help="Format of the data. Default: detected from the name or content.")
]
Fields: TypeAlias = Annotated[list[str] | None, typer.Option(help="Read only this field. Repeatable.")]
Codec: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Codec of byte records: tensorprotos, example, sequence_example, msgpack, npz, or module:function."
    ),
]
Decode: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="Decoder for files in archives and folders: 'auto', or extension=decoder. Repeatable."),
]
Options: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="Any other option of the format, such as 'shapes.x=[2, 3]'. Repeatable."),
]
Where: TypeAlias = Annotated[
    str | None, typer.Option(help="Only records that fulfil a condition, such as \"label == 3 and name != 'b'\".")
]
Split: TypeAlias = Annotated[
    str | None, typer.Option(help="Shares of parts, and settings: 'train=0.9,test=0.1,seed=1', or 'folds=5,group=id'.")
]
Take: TypeAlias = Annotated[str | None, typer.Option(help="Part of --split to read; of folds test-0, train-0, ...")]
JsonFlag: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile: TypeAlias = Annotated[str, typer.Argument(help="A config file: TOML, YAML or JSON.", metavar="CONFIG")]
Overrides: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, such as loader.batch_size=64. Repeatable.")
]
Rank: TypeAlias = Annotated[int | None, typer.Option(min=0, help="Rank, with --world-size.")]
WorldSize: TypeAlias = Annotated[int | None, typer.Option(min=1, help="Number of ranks. Default: the config's, or 1.")]
State: TypeAlias = Annotated[
    str | None, typer.Option(help="A saved state (JSON): the run went on from there with these settings.")
]
Changes: TypeAlias = Annotated[
    str | None,
    typer.Option(help="Log of changes of weights (loader.changes), for the steps before them."),
]

EngineName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Run all parts, and merge them: 'local:workers=8,parts=64' in processes of this machine, "
        "'ray:cpus=2,memory=4GB' on a Ray cluster (parts=, and address=, by default RAY_ADDRESS).",
        metavar="NAME[:KEY=VALUE,...]",
    ),
]
Part: TypeAlias = Annotated[
    str | None, typer.Option(help="Only part I of N, a contiguous range of the files.", metavar="I/N")
]
Merge: TypeAlias = Annotated[bool, typer.Option("--merge", help="Check that all parts are finished; write the result.")]
Picture: TypeAlias = Annotated[str | None, typer.Option(help="Save a picture: .png, .svg or .pdf.")]


_FUNCTION = Format(name="function", source="", parse_argument=str)
"""Stands for the format of data that a function returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """A data set and how to open it."""

    path: str  # any path that `dataload.open` takes, without a format prefix; or module:function
    format: str | None
    options: dict[str, Any]  # including `fields`; or the arguments of the function
    is_function: bool = False
    where: str | None = None  # a condition for `parse`; other records are left out

    @classmethod
    def parse(
        cls,
        path: str,
        *,
        format: str | None,  # noqa: A002 - the option's name
        fields: Sequence[str] | None = None,
        codec: str | None = None,
        decode: Sequence[str] | None = None,
        options: Sequence[str] | None = None,
        where: str | None = None,
    ) -> SourceOptions:
        """Parse the arguments of a command; an option that is not for a function is a ConfigError."""
        if format is None and _names_function(path):
            if fields or codec is not None or decode:
                message = f"--field, --codec and --decode are for files; pass options to {path} with --option"
                raise ConfigError(message, key="path", value=path)
            return cls(path=path, format=None, options=parse_options(options), is_function=True, where=where)
        entry, path = split_format(path, format)
        parsed = parse_options(options)
        if fields:
            parsed["fields"] = list(fields)
        if codec is not None:
            parsed["codec"] = resolve_codec(codec)
        if decode:
            parsed["decode"] = parse_decode(decode)
        if is_url(path):  # what one use finds out, the next need not ask again
            parsed["remote"] = Remote.of(parsed.pop("storage_options", None), parsed.get("remote"))
        return cls(path=path, format=entry.name if entry is not None else None, options=parsed, where=where)

    def shards(self) -> DataSetFiles:
        """Return the format and the files without opening them; no files if the format does not take paths."""
        entry = self._entry_without_files
        return find_shards(self.path, self.format, remote=self.remote) if entry is None else DataSetFiles(entry, [])

    @property
    def _entry_without_files(self) -> Format | None:
        entry = _FUNCTION if self.is_function else None if self.format is None else get_format(self.format)
        return None if entry is None or entry.takes_paths else entry

    @property
    def has_files(self) -> bool:
        """True if the data set consists of files, which functions and ranges do not."""
        return self._entry_without_files is None

    def local_files(self) -> list[str]:
        """Return the files and directories of the data on this machine."""
        files = self.shards().files or [self.path]
        return [file for file in files if os.path.exists(file)] if self.has_files else []

    def check_files(self, what: str) -> None:
        """Raise if the data set has no files, which `what` needs."""
        if not self.has_files:
            named = self.path if self.is_function else f"{self.format}:{self.path}"
            raise ConfigError(f"{what} is for files, and {named} has none", key="path", value=self.path)

    @property
    def remote(self) -> Remote | None:
        """The settings of data at URLs; None for data on this machine."""
        return self.options.get("remote") if is_url(self.path) else None

    def open_found(self, found: DataSetFiles) -> Source[Any]:
        """Open what `shards` has returned, without finding it again."""
        if not found.files:
            return self.open()
        options = dict(self.options)
        fields = options.pop("fields", None)
        return self._selected(found.open(fields, options))

    def open(self, path: str | None = None, format: str | None = None, *, check: bool = False) -> Source[Any]:  # noqa: A002
        """Open the data set, or one of its files."""
        if self.is_function:
            return self._selected(as_source(self.call()))
        return self._selected(open_source(path or self.path, format=format or self.format, check=check, **self.options))

    def _selected(self, source: Source[Any]) -> Source[Any]:
        return select(source, self.where, {})[0]

    def call(self) -> Any:
        """Return what the function or class makes with the options, or the object itself if it is a source."""
        found = resolve_reference(self.path, "PATH")
        if callable(found):
            try:
                inspect.signature(found).bind(**self.options)
            except TypeError as error:
                given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
                given = given or "no options (pass them as -o name=value)"
                raise ConfigError(f"{self.path} cannot be called with {given}: {error}") from None
            try:
                found = found(**self.options)
            except DataloadError:
                raise
            except Exception as error:
                raise SourceError(f"{self.path} raised {type(error).__name__}: {error}") from error
        elif self.options:
            raise ConfigError(f"{self.path} is a {type(found).__name__}, which does not take --option")
        if isinstance(found, (str, bytes)) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
            kind = type(found).__name__
            raise ConfigError(f"{self.path} returns {kind!r}, not a source: a source has __len__ and __getitem__")
        return found


def command_group(text: str) -> Any:
    """Return a command with subcommands; `text` is its help."""
    return typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=text)


def _names_function(path: str) -> bool:
    """Return whether `path` is ``module:function``, and neither a file nor ``format:path``."""
    module = path.partition(":")[0]
    if re.fullmatch(REFERENCE_PATTERN, path) is None or module in format_names() or os.path.exists(path):
        return False
    if not find_module(module):
        raise ConfigError(f"there is no format or module {module!r}: {closest(module, format_names())}", key="path")
    return True


def parse_options(options: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``["a=1", "b.c=2"]`` into ``{"a": 1, "b": {"c": 2}}``."""
    parsed: dict[str, Any] = {}
    for option in options or ():
        if "=" not in option:
            raise ConfigError(f"--option {option!r}: pass name=value", key="option", value=option)
        keys, value = parse_assignment(option)
        table = parsed
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{option!r}: {key!r} already has a value", key=key)
        table[keys[-1]] = value
    return parsed


def parse_range(text: str, option: str) -> range:
    """Parse ``"10"`` as one number, ``"0:5"`` as the first five."""
    start, colon, stop = text.partition(":")
    if not start.isdecimal() or (colon and not stop.isdecimal()):
        raise ConfigError(f"{option} must be a number or start:stop, such as 10 or 0:5, got {text!r}")
    found = range(int(start), int(stop) if colon else int(start) + 1)
    if not found:
        raise ConfigError(f"{option} {text} is empty: stop must be greater than start")
    return found


def check_steps(steps: range, total: int, epoch: int, option: str, text: str | None = None) -> None:
    """Raise if an epoch of `total` steps does not have all of these, which `text` asks for."""
    if not steps or steps.stop > total:
        asked = text or f"{steps.start}:{steps.stop}"
        raise ConfigError(f"{option} {asked} is out of range: epoch {epoch} has {count_of(total, 'step')}")


def ranks_of(rank: int | None, world_size: int | None) -> list[str]:
    """Return the overrides for one rank of some number of ranks."""
    if rank is not None and world_size is None:
        raise ConfigError("--rank needs --world-size")
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigError(f"--rank must be less than --world-size, {world_size}, got {rank}")
    return [] if world_size is None else [f"loader.world_size={world_size}", f"loader.rank={rank or 0}"]


def read_file(path: str, option: str) -> str:
    """Return the text of a file that an option names."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option}: {path} cannot be read: {reason}") from error


def check_new(path: str, option: str) -> None:
    """Check that an option names a new file in an existing directory, before any work is done that could be lost."""
    check_directory(path, option)
    if os.path.lexists(path):
        raise ConfigError(f"{option}: {path} exists: choose another name", key=option, value=path)


def write_file(path: str, text: str, option: str, mode: str = "x") -> None:
    """Write a file that an option names, by default one that does not exist yet."""
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}") from error


def load_state(loader: Loader[Any], path: str | None, changes: str | None = None) -> None:
    """Load a state, the JSON of `Loader.state_dict`, and a log of changes, if they are given."""
    if path is not None:
        text = read_file(path, "--state")
        try:
            state = json.loads(text)
        except ValueError as error:
            message = f"--state: {path} is not JSON ({error}): save json.dumps(loader.state_dict()) in a file"
            raise ConfigError(message) from error
        loader.load_state_dict(state, on_growth="finish")
    if changes is not None:
        read_file(changes, "--changes")
        loader.load_changes(changes)


def parse_part(text: str | None) -> tuple[int, int] | None:
    """Parse ``"2/8"``, the second of eight parts."""
    if text is None:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise ConfigError(f"--part {text!r}: pass two numbers, such as 2/8 for the second of eight", key="part")
    return int(number), int(count)


_ENGINES = {
    "local": {"workers": "num_workers", "parts": "parts"},
    "ray": {"cpus": "cpus", "memory": "memory", "address": "address", "parts": "parts"},
}
"""Settings of engines, and the arguments that they are."""


def parse_engine(text: str | None) -> Engine | None:
    """Return the engine that ``"local:workers=8"`` or ``"ray:cpus=2,memory=4GB"`` describes; None for None."""
    if text is None:
        return None
    name, _, rest = text.partition(":")
    if name not in _ENGINES:
        raise ConfigError(f"--engine {name!r}: pass local or ray", key="engine", value=text)
    settings: dict[str, Any] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = item.partition("=")
        if not equals or key not in _ENGINES[name]:
            reason = closest(key, _ENGINES[name]) if equals else f"settings are written as in {name}:parts=64"
            message = f"--engine {text}: {item!r} is not a setting of {name}: {reason}"
            raise ConfigError(message, key="engine", value=text)
        settings[_ENGINES[name][key]] = parse_value(value)
    try:
        if name == "ray":
            from dataload.ray import RayEngine  # imports Ray

            return RayEngine(**settings)
        return LocalEngine(**settings)
    except ConfigError as error:
        raise ConfigError(f"--engine {text}: {error}", key="engine", value=text) from error


def join_engine(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments with the flags that set an engine before 0.3 as part of ``--engine``."""
    kept, settings, rest = list[str](), dict[str, str](), iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in ("--parts", "--workers", "--cpus", "--memory", "--address"):
            settings[flag] = f"{flag[2:]}={value if equals else next(rest, '')}"
        else:
            kept += [flag, value] if flag == "--engine" and equals else [argument]
    if settings:
        first = next(iter(settings))
        if "--engine" not in kept[:-1]:
            engines = " or ".join(name for name, known in _ENGINES.items() if first[2:] in known)
            raise ConfigError(f"{first} is for --engine {engines}", key=first[2:], value=settings[first])
        at = kept.index("--engine") + 1
        kept[at] += (",", ":")[":" not in kept[at]] + ",".join(settings.values())
        print_warning(f"{', '.join(settings)} of engines are deprecated: write --engine {kept[at]}")
    return kept


def resolve_codec(name: str, key: str = "--codec") -> Any:
    """Return the function that ``"module:function"`` refers to; any other name is returned unchanged."""
    return resolve_reference(name, key) if ":" in name else name


def parse_decode(decode: Sequence[str]) -> str | dict[str, Any]:
    if len(decode) == 1 and "=" not in decode[0]:
        return decode[0]
    table: dict[str, Any] = {}
    for item in decode:
        extension, equals, decoder = item.partition("=")
        if not equals:
            raise ConfigError(f"--decode {item!r}: pass one decoder for all, or extension=decoder each", key="decode")
        table[extension] = resolve_codec(decoder, "--decode")
    return table


def decodes(entry: Format) -> bool:
    """Return whether a format decodes files by default."""
    return any(each.name == "decode" and each.default == "auto" for each in fields(entry.reader_options))
