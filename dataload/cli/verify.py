"""``dataload verify``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import numpy as np
import typer

from dataload.cli.conformance import names_factory, open_with, print_checks, print_verdict
from dataload.cli.options import Codec, Decode, Fields, JsonFlag, Options, SourceFormat, SourceOptions, parse_options
from dataload.cli.output import ProgressBar, count_of, print_error, print_json, print_line
from dataload.convert.blocks import BlockSize, read_records
from dataload.errors import ConfigError, MissingDependencyError, SourceError, SourceNotFoundError
from dataload.sources.base import Source

__all__ = ["Finding", "verify_command"]


# These say that the command is wrong or the machine lacks something, not that the data are bad.
_NOT_THE_DATA = (ConfigError, MissingDependencyError, SourceNotFoundError)

_READER_OPTIONS = "readahead_buffer_size:0"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that cannot be read.

    Attributes:
        path: The file, as far as known.
        index: Index of the record in the data set; None when a whole file is bad, or one before it is.
        record: Number of the record in the file; None when the whole file is bad.
        offset: Byte offset of what is wrong, where it is known.
        error: Name of the exception.
        cause: Its message.
    """

    path: str | None
    index: int | None
    record: int | None
    offset: int | None
    error: str
    cause: str

    def line(self) -> str:
        """As text. The cause of our own errors names path, offset and record already."""
        place = "" if self.index is None else f"[{self.index}] "
        known = self.path is None or self.path in self.cause
        return (
            f"{place}{self.cause}" if known else f"{place}{self.path}, record {self.record}: {self.error}: {self.cause}"
        )


def verify_command(
    path: Annotated[
        str, typer.Argument(help="A path, pattern, directory, format:path, or module:function.", metavar="PATH")
    ],
    format: SourceFormat = None,  # noqa: A002 - the option's name
    field: Fields = None,
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Stop after so many bad records.", min=1)] = None,
    sample: Annotated[
        int, typer.Option("--sample", help="module:function: records that each check tries.", min=1)
    ] = 64,
    json: JsonFlag = False,
) -> None:
    """Read and decode every record, and report each one that cannot be read.

    For module:function, which gives a source of your own, run the conformance checks too; --option is passed to it.

    The exit code is 1 if there is anything to report.
    """
    if format is None and names_factory(path):
        if field or codec or decode:
            raise ConfigError(f"--field, --codec and --decode are for files; give {path} options by --option")
        _verify_own(path, open_with(path, parse_options(option)), sample, limit, json=json)
        return
    wanted = SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
    check = _Check(wanted)
    found: list[Finding] = []
    with ProgressBar("verifying") as bar, closing(check.findings(bar)) as findings:
        for finding in islice(findings, limit):
            found.append(finding)
            if not json:
                with bar.aside():
                    print_line(finding.line())
    if json:
        bad = [dataclasses.asdict(finding) for finding in found]
        print_json({"path": path, "files": check.files, "records": check.records, "ok": not found, "bad": bad})
    elif found:
        stopped = "; stopped at --limit" if len(found) == limit else ""
        print_error(f"{len(found)} bad in {count_of(check.records, 'record')} read{stopped}")
    else:
        print_line(f"{count_of(check.records, 'record')} in {count_of(check.files, 'file')}: all can be read")
    if found:
        raise typer.Exit(1)


def _verify_own(name: str, source: Any, sample: int, limit: int | None, *, json: bool) -> None:
    results = print_checks(source, sample, quiet=json)
    if [result.name for result in results] == ["check_length"]:  # it does not open
        print_verdict(name, results, 0, [], json=json)
    length, start, size = len(source), 0, BlockSize()
    bad: list[Finding] = []
    with ProgressBar("verifying") as bar:
        while start < length and (limit is None or len(bad) < limit):
            stop = min(start + size.records, length)
            for index, error in islice(
                _failures(source, start, stop, size), None if limit is None else limit - len(bad)
            ):
                place = getattr(error, "path", None), getattr(error, "offset", None)
                bad.append(Finding(place[0], index, index, place[1], type(error).__name__, str(error)))
                if not json:
                    with bar.aside():
                        print_line(f"[{index}] {type(error).__name__}: {error}")
            start = stop
            bar(start, length)
    print_verdict(name, results, start, bad, json=json)


class _Check:
    """One pass over a data set.

    Attributes:
        files: Files that it consists of.
        records: Records read so far, good or bad.
    """

    def __init__(self, wanted: SourceOptions) -> None:
        self._format, self._paths = wanted.shards()
        if self._format.name == "array_record":  # whose package compares hashes, which reading through a map does not
            wanted = dataclasses.replace(wanted, options={"reader_options": _READER_OPTIONS, **wanted.options})
        self._wanted = wanted
        self.files = max(1, len(self._paths))
        self.records = 0

    def findings(self, tell: Callable[[int, int], None]) -> Generator[Finding]:
        """What is bad, in index order."""
        try:
            source = self._wanted.open()
        except _NOT_THE_DATA:
            raise
        except SourceError as error:
            if len(self._paths) < 2:
                yield _unopened(error, self._wanted.path)
            else:
                # One of several files does not open: the others are worth checking, each for itself.
                yield from self._each_file()
            return
        with source:
            yield from self._bad_records(source, self._paths, 0, tell)

    def _each_file(self) -> Iterator[Finding]:
        first: int | None = 0
        for path in self._paths:
            try:
                source = self._wanted.open(path, self._format.name)
            except _NOT_THE_DATA:
                raise
            except SourceError as error:
                yield _unopened(error, path)
                first = None  # nobody knows how many records it should have had
            else:
                with source:
                    yield from self._bad_records(source, [path], first, _ignore)
                    first = None if first is None else first + len(source)

    def _bad_records(
        self, source: Source[Any], paths: Sequence[str], first: int | None, tell: Callable[[int, int], None]
    ) -> Iterator[Finding]:
        size, start, length = BlockSize(), 0, len(source)
        ends = np.cumsum(source.shard_lengths)
        while start < length:
            stop = min(start + size.records, length)
            for index, error in _failures(source, start, stop, size):
                shard = int(np.searchsorted(ends, index, side="right"))
                yield Finding(
                    path=getattr(error, "path", None) or (paths[shard] if len(paths) == len(ends) else None),
                    index=None if first is None else first + index,
                    record=index - (int(ends[shard - 1]) if shard else 0),
                    offset=getattr(error, "offset", None),
                    error=type(error).__name__,
                    cause=str(error),
                )
            self.records += stop - start
            start = stop
            tell(start, length)


def _failures(source: Any, start: int, stop: int, size: BlockSize) -> Iterator[tuple[int, Exception]]:
    """The records of [start, stop) that cannot be read, found by halving what fails."""
    try:
        records = read_records(source, start, stop)
    except _NOT_THE_DATA:
        raise
    except Exception as error:  # a codec of the user's may raise anything, and that is what is asked for
        if stop - start == 1:
            yield start, error
            return
        middle = (start + stop) // 2
        yield from _failures(source, start, middle, size)
        yield from _failures(source, middle, stop, size)
    else:
        size.learn(records)


def _unopened(error: SourceError, path: str) -> Finding:
    return Finding(
        path=error.path or path,
        index=None,
        record=None,
        offset=getattr(error, "offset", None),
        error=type(error).__name__,
        cause=str(error),
    )


def _ignore(done: int, total: int) -> None:
    """Progress over files of which nobody knows how many records they hold."""
