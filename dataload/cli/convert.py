"""``dataload convert``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dataload.cli.options import (
    Codec,
    Decode,
    Fields,
    Options,
    SourceOptions,
    named,
    parse_options,
    split_prefix,
    takes,
)
from dataload.cli.output import ProgressBar, as_typed, count_of, human_bytes, print_line
from dataload.convert import convert
from dataload.convert.plan import destination_format
from dataload.sources.registry import Format

__all__ = ["convert_command"]


def convert_command(
    source: Annotated[str, typer.Argument(help="A path, pattern, directory, or format:path.", metavar="SRC")],
    destination: Annotated[
        str,
        typer.Argument(help="A path, or format:path; for shards with {shard:05d} in it, if you like.", metavar="DST"),
    ],
    format: Annotated[  # noqa: A002 - the option's name
        str | None, typer.Option("--format", help="Format to write; by default the name of DST decides.")
    ] = None,
    from_format: Annotated[
        str | None, typer.Option("--from", help="Format of SRC; by default its name decides, then the content.")
    ] = None,
    shards: Annotated[int | None, typer.Option("--shards", help="Write so many files.")] = None,
    records_per_shard: Annotated[
        int | None, typer.Option("--records-per-shard", help="Write files of at most so many records.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier run was interrupted.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    keep_key: Annotated[bool, typer.Option("--keep-key", help="Keep the __key__ of tar samples as a field.")] = False,
    field: Fields = None,
    codec: Codec = None,
    to_codec: Annotated[
        str | None, typer.Option("--to-codec", help="Codec for writing, where it is not the one for reading.")
    ] = None,
    decode: Decode = None,
    option: Options = None,
    to_option: Annotated[
        list[str] | None, typer.Option("--to-option", help="An option of the writer, as key=value.")
    ] = None,
) -> None:
    """Turn a data set into another format, in shards, in the order of its records.

    --codec counts for whichever of the two formats stores plain bytes, and for both if both do.
    """
    prefix, path = split_prefix(destination) if format is None else (format, destination)
    entry = destination_format(path, prefix)
    wanted = SourceOptions.parse(source, format=from_format, fields=field, decode=decode, options=option)
    if codec is not None and takes(wanted.shards()[0], "source", "codec"):
        wanted.options["codec"] = named(codec, "--codec")
    with wanted.open() as opened, ProgressBar(f"converting to {entry.name}") as bar:
        report = convert(
            opened,
            path,
            format=entry.name,
            writer_options=_writer_options(entry, to_codec or codec, to_option),
            shards=shards,
            records_per_shard=records_per_shard,
            keep_key=keep_key,
            resume=resume,
            overwrite=overwrite,
            progress=bar,
        )
    for note in report.notes:
        print_line(f"note: {as_typed(note)}")
    resumed = f", {count_of(report.resumed, 'record')} of them earlier" if report.resumed else ""
    print_line(f"{count_of(report.records, 'record')} in {report.pattern} ({human_bytes(report.bytes)}{resumed})")


def _writer_options(entry: Format, codec: str | None, options: list[str] | None) -> dict[str, Any]:
    parsed = parse_options(options)
    if codec is not None and takes(entry, "writer", "codec"):
        parsed["codec"] = named(codec, "--codec")
    return parsed
