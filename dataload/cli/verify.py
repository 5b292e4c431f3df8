"""``dataload verify``: read everything; of a user's own source, run the conformance checks too."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Annotated, Any, Self

import numpy as np
import typer

from dataload._util.failures import BUG, owner_of
from dataload.cli.options import (
    Codec,
    Decode,
    EngineName,
    Fields,
    JsonFlag,
    Options,
    SourceFormat,
    SourceOptions,
    parse_engine,
    parse_part,
)
from dataload.cli.output import ProgressBar, count_of, print_error, print_json, print_line
from dataload.convert.blocks import BlockSize, read_records
from dataload.convert.engine import Engine, run_all
from dataload.convert.plan import select_part
from dataload.errors import ConfigError, SourceError


@dataclass(frozen=True, slots=True)
class Finding:
    """A record or a file that cannot be read."""

    path: str | None  # the file, if known
    index: int | None  # of the record in the data set; None if this file or one before it was not opened
    record: int | None  # index of the record in the file; None if the file cannot be opened
    offset: int | None  # of the damage, in bytes, if known
    error: str  # name of the exception
    cause: str  # its message

    @classmethod
    def of(cls, error: Exception, path: str | None, *, index: int | None = None, record: int | None = None) -> Self:
        """Describe an exception; its own path, if it has one, takes precedence over `path`."""
        path, offset = getattr(error, "path", None) or path, getattr(error, "offset", None)
        return cls(path, index, record, offset, type(error).__name__, str(error))

    def line(self) -> str:
        text = f"{self.error}: {self.cause}"
        if self.path is not None:
            # Messages of our own errors begin with the path, offset and record.
            text = self.cause if self.path in self.cause else f"{self.path}, record {self.record}: {text}"
        return text if self.index is None else f"[{self.index}] {text}"


def verify_command(
    path: Annotated[
        str, typer.Argument(help="A path, pattern, directory, format:path, or module:function.", metavar="PATH")
    ],
    format: SourceFormat = None,  # noqa: A002 - the option's name
    field: Fields = None,
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
    limit: Annotated[int | None, typer.Option(help="Stop after this many bad records.", min=1)] = None,
    part: Annotated[
        str | None, typer.Option(help="Read only part I of N, a contiguous range of the files.", metavar="I/N")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only open every file, and compare it with the manifest.")
    ] = False,
    sample: Annotated[int, typer.Option(help="With module:function: number of records per check.", min=1)] = 64,
    json: JsonFlag = False,
    engine: EngineName = None,
) -> None:
    """Read and decode every record, and report those that cannot be read.

    For module:function, which returns a source of your own, run the
    conformance checks as well; --option is passed to the function.

    The exit code is 1 if any problem was found.
    """
    running = parse_engine(engine)
    if part and running:
        raise ConfigError("--engine reads all parts: leave --part out", key="engine")
    wanted = SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
    if quick and (part or running or wanted.is_function):
        raise ConfigError(
            "--quick opens the files of a data set, in one run: leave --part and --engine out", key="quick"
        )
    if part or running:
        wanted.check_files("--part" if part else "--engine")
    if wanted.is_function:
        _verify_own(path, wanted.call(), sample, limit, json=json)
    elif quick:
        _open_files(path, wanted, json=json)
    else:
        _verify_files(path, wanted, limit, None if part is None else parse_part(part), running, json=json)


def _open_files(name: str, wanted: SourceOptions, *, json: bool) -> None:
    files = max(1, len(wanted.shards().files))
    found, records = list[Finding](), 0
    try:
        with wanted.open(check=True) as source:
            records = len(source)
    except SourceError as error:
        found.append(Finding.of(error, None))
    if json:
        bad = [dataclasses.asdict(finding) for finding in found]
        print_json({"path": name, "files": files, "records": records, "ok": not found, "bad": bad})
    elif found:
        print_error(found[0].line())
    else:
        print_line(f"{count_of(records, 'record')} in {count_of(files, 'file')}: all can be opened")
    if found:
        raise typer.Exit(1)


def _verify_files(
    name: str,
    wanted: SourceOptions,
    limit: int | None,
    part: tuple[int, int] | None,
    engine: Engine | None,
    *,
    json: bool,
) -> None:
    found_shards = wanted.shards()
    entry, paths = found_shards.format, found_shards.files
    verify = {"verify": True} if "verify" in entry.reader_options.names() else {}
    options = {**found_shards.options, **entry.verify_options, **verify, **wanted.options}
    wanted = dataclasses.replace(wanted, options=options)
    if part is not None:
        paths = select_part(paths, *part)
    with ProgressBar("verifying") as bar:
        if engine is None:
            reading = _Reading(bar)
            with closing(reading.findings(wanted, entry.name, paths, part and part[0])) as findings:
                found = _collect(findings, limit, bar, quiet=json)
            records = reading.records
        else:
            task = partial(_verify_part, wanted, entry.name, paths, limit)
            reports = run_all(engine, task, len(paths), progress=lambda done: bar(done, None))
            found = _collect(_merge_findings(reports), limit, bar, quiet=json)
            records = sum(records for records, _ in reports)
    files = max(1, len(paths))
    if json:
        bad = [dataclasses.asdict(finding) for finding in found]
        print_json({"path": name, "files": files, "records": records, "ok": not found, "bad": bad})
    elif found:
        stopped = "; stopped at --limit" if len(found) == limit else ""
        of = f"in {count_of(records, 'record')} read" if records else "and no record was read"
        print_error(f"{len(found)} bad {of}{stopped}")
    else:
        print_line(f"{count_of(records, 'record')} in {count_of(files, 'file')}: all can be read")
    if found:
        raise typer.Exit(1)


def _verify_part(
    wanted: SourceOptions,
    format_name: str,
    paths: Sequence[str],
    limit: int | None,
    *,
    part: tuple[int, int],
    progress: Callable[[int, int], None],
) -> tuple[int, list[Finding]]:
    """Return the number of records in a part, and its findings; the first record of the part has index 0."""

    def report(_done: int, _length: int) -> None:
        progress(reading.records, 0)

    reading = _Reading(report)
    with closing(reading.findings(wanted, format_name, select_part(paths, *part), 1)) as findings:
        found = [*islice(findings, limit)]
    return reading.records, found


def _merge_findings(reports: Sequence[tuple[int, list[Finding]]]) -> Iterator[Finding]:
    """Yield the findings of all parts with their indices in the data set."""
    first: int | None = 0
    for records, findings in reports:
        for finding in findings:
            index = None if first is None or finding.index is None else first + finding.index
            yield dataclasses.replace(finding, index=index)
        if first is not None:
            first = None if any(finding.index is None for finding in findings) else first + records


def _verify_own(name: str, source: Any, sample: int, limit: int | None, *, json: bool) -> None:
    """Run the conformance checks on a user's own source, then read all of it."""
    from dataload.testing.verify import CheckResult, check_source  # imports twenty modules that nothing else needs

    def show(result: CheckResult) -> None:
        print_line(str(result), "red" if result.status == "failed" else "")
        if result.status == "failed":
            print_line(f"        {result.rule}")

    results = check_source(source, sample=sample, report=None if json else show)
    bad: list[Finding] = []
    with ProgressBar("verifying") as bar:
        reading = _Reading(bar)
        if [result.name for result in results] != ["check_length"]:  # otherwise the source cannot be opened
            failures = reading.failures(source)
            findings = (Finding.of(error, None, index=index, record=index) for index, error in failures)
            bad = _collect(findings, limit, bar, quiet=json)
    counts = Counter(result.status for result in results)
    good = not counts["failed"] and not bad
    if json:
        checks, findings = (list(map(dataclasses.asdict, found)) for found in (results, bad))
        print_json({"source": name, "records": reading.records, "ok": good, "checks": checks, "bad": findings})
    else:
        (print_line if good else print_error)(
            f"{count_of(len(results), 'check')}: {counts['failed'] or 'none'} failed, {counts['skipped']} skipped; "
            f"{count_of(reading.records, 'record')}: "
            f"{f'{len(bad)} of them cannot be read' if bad else 'all can be read'}"
        )
    if not good:
        raise typer.Exit(1)


def _collect(findings: Iterator[Finding], limit: int | None, bar: ProgressBar, *, quiet: bool) -> list[Finding]:
    """Return up to `limit` findings, and print each as it comes unless `quiet`."""
    found: list[Finding] = []
    for finding in islice(findings, limit):
        found.append(finding)
        if not quiet:
            with bar.hidden():
                print_line(finding.line())
    return found


class _Reading:
    """Reads sources from front to back, and counts the `records` read so far, good or bad."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self.records = 0

    def failures(self, source: Any) -> Iterator[tuple[int, Exception]]:
        """Yield the index and the error of each record that cannot be read."""
        size, start, length = BlockSize(), 0, len(source)
        while start < length:
            stop = min(start + size.records, length)
            self.records += stop - start
            yield from _failures(source, start, stop, size)
            start = stop
            self._progress(start, length)

    def findings(
        self, wanted: SourceOptions, format_name: str, paths: Sequence[str], part: int | None
    ) -> Generator[Finding]:
        """Yield the findings of a data set, or of the files of a part, in index order."""
        first: int | None = 0 if part in (None, 1) else None  # the number of records in earlier parts is unknown
        pending: list[str | None] = [None] if part is None else [*paths]  # None stands for the whole data set
        while pending:
            path = pending.pop(0)
            try:
                source = wanted.open(path, path and format_name)
            except SourceError as error:
                if owner_of(error) != "record":
                    raise
                if path is None and len(paths) > 1:
                    pending += paths  # one of the files does not open: check each by itself
                else:
                    yield Finding.of(error, path or wanted.path)
                    first = None  # the number of records that it should have is unknown
                continue
            with source:
                ends = np.cumsum(source.shard_lengths)
                files = paths if path is None else [path]
                for index, error in self.failures(source):
                    shard = int(np.searchsorted(ends, index, side="right"))
                    file = files[shard] if len(files) == len(ends) else None
                    record = index - (int(ends[shard - 1]) if shard else 0)
                    yield Finding.of(error, file, index=None if first is None else first + index, record=record)
                first = None if first is None else first + len(source)


def _failures(source: Any, start: int, stop: int, size: BlockSize) -> Iterator[tuple[int, Exception]]:
    """Yield the records of [start, stop) that cannot be read, found by bisection."""
    try:
        records = read_records(source, start, stop)
    except Exception as error:  # a user's codec may raise anything
        if owner_of(error) != "record":
            if owner_of(error) == "dataload":
                error.add_note(BUG)
            raise
        if stop - start == 1:
            yield start, error
            return
        middle = (start + stop) // 2
        yield from _failures(source, start, middle, size)
        yield from _failures(source, middle, stop, size)
    else:
        size.learn(records)
