"""``dataload inspect``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, cast

import numpy as np
import typer

from dataload.cli.options import Codec, Decode, Fields, JsonFlag, Options, SourceFormat, SourceOptions
from dataload.cli.output import count_of, human_bytes, print_json, print_line, print_table
from dataload.errors import DataloadError
from dataload.sources.base import Source, spec_of
from dataload.types import BatchReader, ColumnReader, Sharded

__all__ = ["inspect_command"]

_PROTOCOLS = {"BatchReader": BatchReader, "ColumnReader": ColumnReader, "Sharded": Sharded}
_SHOWN_SHARDS = 10
_SHOWN_VALUES = 6
_SHOWN_CHARACTERS = 60


def inspect_command(
    path: Annotated[str, typer.Argument(help="A path, pattern, directory, or format:path.", metavar="PATH")],
    format: SourceFormat = None,  # noqa: A002 - the option's name
    field: Fields = None,
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
    json: JsonFlag = False,
) -> None:
    """Show what a data set holds: fields, dtypes, shapes, counts, shards, size, and one record."""
    wanted = SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
    entry, paths = wanted.shards()
    with wanted.open() as source:
        facts = _facts(source, entry.name, paths)
    if json:
        print_json(facts)
    else:
        _print(facts)


def _facts(source: Source[Any], format_name: str, paths: list[str]) -> dict[str, Any]:
    """All that is known of a source, as JSON."""
    sample, problem = _first_record(source)
    lengths = source.shard_lengths
    names = paths if len(paths) == len(lengths) else [repr(source)] * len(lengths)
    shards: list[dict[str, Any]] = [
        {"path": name, "records": length, "bytes": _size(name)} for name, length in zip(names, lengths, strict=True)
    ]
    specs = source.fields or _specs(sample)
    return {
        "format": format_name,
        "records": len(source),
        "bytes": sum(shard["bytes"] for shard in shards),
        "fields": {name: {"dtype": spec.dtype, "shape": spec.shape} for name, spec in specs.items()},
        "protocols": _protocols(source),
        "notes": _notes(source),
        "fingerprint": source.fingerprint(),
        "shards": shards,
        "sample": sample if problem or not len(source) else _shorten(sample),
    }


def _notes(source: Any) -> list[str]:
    """What a reader of the format decided that is worth knowing."""
    order = getattr(source, "key_order", None)
    return [f"records are in the order of their keys, by {order}"] if order is not None else []


def _protocols(source: Any) -> list[str]:
    return [name for name, protocol in _PROTOCOLS.items() if isinstance(source, protocol)]


def _first_record(source: Source[Any]) -> tuple[Any, bool]:
    """Record 0, or why it cannot be read: everything else about the source is still worth knowing."""
    if not len(source):
        return None, False
    try:
        return source[0], False
    except DataloadError as error:
        return f"cannot be read: {error}", True


def _specs(sample: Any) -> Mapping[str, Any]:
    if not isinstance(sample, Mapping):
        return {}
    return {name: spec_of(value) for name, value in cast("Mapping[str, Any]", sample).items()}


def _size(path: str) -> int:
    if os.path.isdir(path):
        return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    return os.path.getsize(path) if os.path.exists(path) else 0


def _shorten(value: Any) -> Any:
    """A value as a few characters: of an array the first elements and the shape."""
    if isinstance(value, Mapping):
        return {name: _shorten(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, bytes):
        head = repr(value[:_SHOWN_CHARACTERS])
        return head if len(value) <= _SHOWN_CHARACTERS else f"{head}... ({len(value):,} bytes)"
    if isinstance(value, str):
        head = repr(value[:_SHOWN_CHARACTERS])
        return head if len(value) <= _SHOWN_CHARACTERS else f"{head}... ({len(value):,} characters)"
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        items = array.ravel()[:_SHOWN_VALUES].tolist()
        values = ", ".join(f"{item:.5g}" if isinstance(item, float) else str(item) for item in items)
        if not array.ndim:
            return values
        return f"[{values}, ...] {array.shape}" if array.size > _SHOWN_VALUES else f"[{values}] {array.shape}"
    return repr(value)


def _print(facts: dict[str, Any]) -> None:
    shards = facts["shards"]
    print_line(
        f"{facts['format']}: {count_of(facts['records'], 'record')} in {count_of(len(shards), 'shard')}, "
        f"{human_bytes(facts['bytes'])}",
        "bold",
    )
    print_line(f"reads by {', '.join(facts['protocols']) or 'index only'}; fingerprint {facts['fingerprint']}")
    for note in facts["notes"]:
        print_line(f"note: {note}")
    print_line()
    sample = facts["sample"]
    if facts["fields"]:
        shown = cast("dict[str, str]", sample) if isinstance(sample, dict) else {}
        rows = [
            (name, spec["dtype"], _shape(spec["shape"]), shown.get(name, "")) for name, spec in facts["fields"].items()
        ]
        print_table({"field": "left", "dtype": "left", "shape": "left", "record 0": "left"}, rows)
    elif facts["records"]:
        print_line("no fields: records are plain bytes; a codec makes fields of them (--codec)")
    if sample is not None and not isinstance(sample, dict):
        print_line(f"record 0: {sample}")
    if len(shards) > 1:
        print_line()
        rows = [(shard["path"], f"{shard['records']:,}", human_bytes(shard["bytes"])) for shard in shards]
        print_table({"shard": "left", "records": "right", "size": "right"}, rows[:_SHOWN_SHARDS])
        if len(rows) > _SHOWN_SHARDS:
            print_line(f"... and {len(rows) - _SHOWN_SHARDS} more (--json lists all)")


def _shape(shape: tuple[int | None, ...] | None) -> str:
    if shape is None:
        return "?"
    return f"({', '.join('?' if extent is None else str(extent) for extent in shape)})"
