"""Options that several commands share, and the sources that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, TypeAlias

import typer

from dataload.api import find_shards, open_source
from dataload.config.overrides import parse_assignment
from dataload.config.references import resolve_reference
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.sources.registry import Format, format_names, get_format, load

__all__ = [
    "Codec",
    "ConfigFile",
    "Decode",
    "Fields",
    "JsonFlag",
    "Options",
    "Overrides",
    "Picture",
    "SourceFormat",
    "SourceOptions",
    "named",
    "parse_options",
    "split_prefix",
    "takes",
]

SourceFormat: TypeAlias = Annotated[
    str | None, typer.Option("--format", help="Format of the data; by default the name decides, then the content.")
]
Fields: TypeAlias = Annotated[
    list[str] | None, typer.Option("--field", help="Read only this field; may be given several times.")
]
Codec: TypeAlias = Annotated[
    str | None,
    typer.Option("--codec", help="What turns bytes into fields: tensorprotos, example, msgpack, npz, module:function."),
]
Decode: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--decode", help="tar: 'auto', or extension=decoder; may be given several times."),
]
Options: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="Another option of the format, as key=value: -o 'shapes.x=[2, 3]'."),
]
JsonFlag: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigFile: TypeAlias = Annotated[str, typer.Argument(help="A config in TOML, YAML or JSON.", metavar="CONFIG")]
Overrides: TypeAlias = Annotated[
    list[str] | None, typer.Option("--set", help="Replace a setting: loader.batch_size=64; may be given again.")
]
Picture: TypeAlias = Annotated[str | None, typer.Option("--picture", help="Draw it: a .png, .svg or .pdf.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How a data set shall be opened.

    Attributes:
        path: As `dataload.open` takes it.
        format: Name of the format, or None.
        options: Options of the format, fields included.
    """

    path: str
    format: str | None
    options: dict[str, Any]

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
    ) -> SourceOptions:
        """From what stands on the command line.

        Raises:
            ConfigError: An option is no ``key=value``, or names a function that does not exist.
        """
        if format is None:
            prefix, path = split_prefix(path)
        else:
            prefix = format
        parsed = parse_options(options)
        if fields:
            parsed["fields"] = list(fields)
        if codec is not None:
            parsed["codec"] = named(codec, "--codec")
        if decode:
            parsed["decode"] = _parse_decode(decode)
        return cls(path=path, format=prefix, options=parsed)

    def shards(self) -> tuple[Format, list[str]]:
        """Format and files, unopened; no files for a format that is made from something else."""
        if self.format is not None and not get_format(self.format).takes_paths:
            return get_format(self.format), []
        return find_shards(self.path, format=self.format)

    def open(self, path: str | None = None, format: str | None = None) -> Source[Any]:  # noqa: A002
        """The data set, or one file of it."""
        return open_source(path or self.path, format=format or self.format, **self.options)


def split_prefix(path: str) -> tuple[str | None, str]:
    """``"tar:x"`` as ``("tar", "x")``, if that is a format; anything else stays whole."""
    prefix, colon, rest = path.partition(":")
    return (prefix, rest) if colon and prefix in format_names() else (None, path)


def parse_options(options: Sequence[str] | None) -> dict[str, Any]:
    """``["a=1", "b.c=2"]`` as ``{"a": 1, "b": {"c": 2}}``."""
    parsed: dict[str, Any] = {}
    for option in options or ():
        keys, value = parse_assignment(option)
        table = parsed
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{option!r}: {key!r} has a value already", key=key)
        table[keys[-1]] = value
    return parsed


def named(name: str, key: str) -> Any:
    """A name as it is, or the function that ``"module:function"`` names."""
    return resolve_reference(name, key) if ":" in name else name


def _parse_decode(decode: Sequence[str]) -> str | dict[str, Any]:
    if len(decode) == 1 and "=" not in decode[0]:
        return decode[0]
    table: dict[str, Any] = {}
    for item in decode:
        extension, equals, decoder = item.partition("=")
        if not equals:
            raise ConfigError(f"--decode {item!r}: give one name for all, or extension=decoder each", key="decode")
        table[extension] = named(decoder, "--decode")
    return table


def takes(entry: Format, role: str, option: str) -> bool:
    """Whether the source or writer of a format has an option."""
    return option in signature(load(entry, role)).parameters
