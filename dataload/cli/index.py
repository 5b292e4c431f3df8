"""``dataload index``."""

import os
from typing import Annotated

import typer
from rich.filesize import decimal

from dataload.cli.options import (
    Codec,
    Decode,
    EngineName,
    Options,
    SourceFormat,
    SourceOptions,
    parse_engine,
    parse_options,
    parse_part,
)
from dataload.cli.output import ProgressBar, count_of, print_error, print_line
from dataload.convert.indexing import index_shards
from dataload.errors import ConfigError, DataloadError
from dataload.sources.discover import find_shards
from dataload.sources.registry import built_in_formats
from dataload.storage import Remote, base_name


def index_command(
    paths: Annotated[
        list[str], typer.Argument(help="Tar archives, patterns or directories; with --manifest, any shards.")
    ],
    directory: Annotated[
        str | None,
        typer.Option("--directory", "-d", help="Where to write the index files. Default: beside the archives."),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Reject archives with split samples, or with two files of one extension in a sample.")
    ] = True,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Write or renew dataload.json in the directory of the shards instead.")
    ] = False,
    part: Annotated[
        str | None, typer.Option(help="With --manifest: describe only part I of N of the shards.", metavar="I/N")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="With --manifest: merge the manifests of all finished parts.")
    ] = False,
    format: SourceFormat = None,  # noqa: A002 - the option's name
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
    engine: EngineName = None,
) -> None:
    """Write index files for tar archives, or the manifest of a directory.

    Index files are DALI-compatible; the archives are validated. A bad archive
    gets no index; the others are still indexed, and the exit code is 1.

    With --manifest, the manifest lists the shards of each PATH with records,
    sizes and SHA-256, and gives their format, --codec and --decode to those
    who open the directory. An interrupted run resumes.
    """
    running = parse_engine(engine)
    if manifest:
        if directory is not None:
            raise ConfigError("a manifest is written beside its shards: leave --directory out", key="directory")
        for path in paths:
            wanted = SourceOptions.parse(path, format=format, codec=codec, decode=decode, options=option)
            wanted.check_files("--manifest")
            with ProgressBar("hashing shards") as bar:
                report = index_shards(
                    wanted.path,
                    format=wanted.format,
                    options=wanted.options,
                    part=None if part is None else parse_part(part),
                    merge=merge,
                    engine=running,
                    progress=bar,
                )
            for entry in report.data_sets:
                shards, records = count_of(len(entry.names), "shard"), count_of(sum(entry.records), "record")
                print_line(f"{report.path}: {entry.pattern}: {records} in {shards} ({decimal(sum(entry.bytes))})")
            if report.resumed:
                print_line(f"{count_of(report.resumed, 'shard')} from an earlier run")
    elif format or codec or decode or part or merge or running:
        message = "--format, --codec, --decode, --part, --merge and --engine are for --manifest"
        raise ConfigError(message, key="manifest")
    else:
        given = parse_options(option)
        remote = Remote.of(given.pop("storage_options", None), given.pop("remote", None))
        if given:
            message = f"without --manifest, --option takes storage_options and remote only, got {min(given)!r}"
            raise ConfigError(message, key="option")
        _index_archives(paths, directory, remote, strict=strict)


def _index_archives(archives: list[str], directory: str | None, remote: Remote, *, strict: bool) -> None:
    entry = next(entry for entry in built_in_formats() if entry.index_writer is not None)
    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory}", key="directory", value=directory)
    found: list[str] = []
    failed, samples = 0, 0
    for pattern in archives:
        try:
            found += find_shards(pattern, entry.name, manifests=False, remote=remote).files
        except DataloadError as error:
            failed += 1
            print_error(str(error))
    total = len(found) + failed
    with ProgressBar("indexing") as bar:
        for done, archive in enumerate(found, start=1):
            try:
                index = None
                if directory is not None:
                    index = os.path.join(directory, os.path.splitext(base_name(archive))[0] + ".idx")
                count = entry.write_index(archive, index, overwrite=True, strict=strict, remote=remote)
            except (DataloadError, OSError) as error:
                failed += 1
                with bar.hidden():
                    print_error(str(error))
            else:
                samples += count
                with bar.hidden():
                    print_line(f"{archive}: {count_of(count, 'sample')}")
            bar(done, len(found))
    if total > 1:
        print_line(f"{count_of(samples, 'sample')} in {total - failed} of {count_of(total, 'archive')}")
    if failed:
        raise typer.Exit(1)
