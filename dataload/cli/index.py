"""``dataload index``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from dataload.api import find_shards
from dataload.cli.output import ProgressBar, count_of, print_error, print_line
from dataload.errors import ConfigError, DataloadError

__all__ = ["index_command"]


def index_command(
    archives: Annotated[list[str], typer.Argument(help="Archives: paths, patterns, directories.", metavar="TAR...")],
    directory: Annotated[
        str | None, typer.Option("--directory", "-d", help="Where the index files go; by default beside the archives.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(help="Refuse archives in which samples are torn apart or have two files of one extension."),
    ] = True,
) -> None:
    """Write index files as DALI reads them, and check the archives on the way.

    A bad archive gets no index and does not keep the others from theirs; the exit code is then 1.
    """
    from dataload.sources.tar.writer import write_index

    if directory is not None and not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory}", key="directory", value=directory)
    found, missing = _find(archives)
    for error in missing:
        print_error(str(error))
    failed, samples = len(missing), 0
    with ProgressBar("indexing") as bar:
        for done, archive in enumerate(found, start=1):
            try:
                count = write_index(archive, _index_path(archive, directory), overwrite=True, strict=strict)
            except (DataloadError, OSError) as error:
                failed += 1
                with bar.aside():
                    print_error(str(error))
            else:
                samples += count
                with bar.aside():
                    print_line(f"{archive}: {count_of(count, 'sample')}")
            bar(done, len(found))
    total = len(found) + len(missing)
    if total > 1:
        print_line(f"{count_of(samples, 'sample')} in {total - failed} of {count_of(total, 'archive')}")
    if failed:
        raise typer.Exit(1)


def _find(patterns: Sequence[str]) -> tuple[list[str], list[DataloadError]]:
    """The archives that exist, and an error for each pattern that matches none."""
    found: list[str] = []
    missing: list[DataloadError] = []
    for pattern in patterns:
        try:
            found += find_shards(pattern, format="tar")[1]
        except DataloadError as error:
            missing.append(error)
    return found, missing


def _index_path(archive: str, directory: str | None) -> str | None:
    if directory is None:
        return None
    return os.path.join(directory, os.path.splitext(os.path.basename(archive))[0] + ".idx")
