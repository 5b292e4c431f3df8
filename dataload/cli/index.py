"""``dataload index``."""

import os
from typing import Annotated

import typer

from dataload.cli.output import ProgressBar, count_of, print_error, print_line
from dataload.errors import ConfigError, DataloadError
from dataload.sources.find import find_shards
from dataload.sources.registry import built_in_formats


def index_command(
    archives: Annotated[list[str], typer.Argument(help="Tar archives, patterns or directories.", metavar="TAR...")],
    directory: Annotated[
        str | None,
        typer.Option("--directory", "-d", help="Where to write the index files. Default: beside the archives."),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Reject archives with split samples, or with two files of one extension in a sample.")
    ] = True,
) -> None:
    """Write DALI-compatible index files for tar archives and validate the archives.

    A bad archive gets no index; the others are still indexed, and the exit
    code is 1.
    """
    entry = next(entry for entry in built_in_formats() if entry.index_writer is not None)
    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory}", key="directory", value=directory)
    found: list[str] = []
    failed, samples = 0, 0
    for pattern in archives:
        try:
            found += find_shards(pattern, entry.name)[1]
        except DataloadError as error:
            failed += 1
            print_error(str(error))
    total = len(found) + failed
    with ProgressBar("indexing") as bar:
        for done, archive in enumerate(found, start=1):
            try:
                index = None
                if directory is not None:
                    index = os.path.join(directory, os.path.splitext(os.path.basename(archive))[0] + ".idx")
                count = entry.write_index(archive, index, overwrite=True, strict=strict)
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
