"""``dataload verify``: read everything; of a user's own source, run the conformance checks too."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Annotated, Any

import typer

from dataload.cli import options
from dataload.cli.output import ProgressBar, count_of, print_error, print_json, print_line
from dataload.convert.blocks import Finding, Reading, merge_findings, verify_part
from dataload.errors import ConfigError, SourceError
from dataload.jobs.engine import Engine, count_parts, select_part


def verify_command(
    path: Annotated[
        str, typer.Argument(help="A path, pattern, directory, format:path, or module:function.", metavar="PATH")
    ],
    format: options.SourceFormat = None,  # noqa: A002 - the option's name
    field: options.Fields = None,
    codec: options.Codec = None,
    decode: options.Decode = None,
    option: options.Options = None,
    limit: Annotated[int | None, typer.Option(help="Stop after this many bad records.", min=1)] = None,
    part: options.Part = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only open every file, and compare it with the manifest.")
    ] = False,
    sample: Annotated[int, typer.Option(help="With module:function: number of records per check.", min=1)] = 64,
    json: options.JsonFlag = False,
    engine: options.EngineName = None,
) -> None:
    """Read and decode every record, and report those that cannot be read.

    For module:function, which returns a source of your own, run the
    conformance checks as well; --option is passed to the function.

    The exit code is 1 if any problem was found.
    """
    running = options.parse_engine(engine)
    if part and running:
        raise ConfigError("--engine reads all parts: leave --part out", key="engine")
    wanted = options.SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
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
        _verify_files(path, wanted, limit, options.parse_part(part), running, json=json)


def _open_files(name: str, wanted: options.SourceOptions, *, json: bool) -> None:
    files = max(1, len(wanted.shards().files))
    found, records = list[Finding](), 0
    try:
        with wanted.open(check=True) as source:
            records = len(source)
    except SourceError as error:
        found.append(Finding.of(error, None))
    _report(name, files, records, found, found[0].line() if found else "", "opened", json=json)


def _verify_files(
    name: str,
    wanted: options.SourceOptions,
    limit: int | None,
    part: tuple[int, int] | None,
    engine: Engine | None,
    *,
    json: bool,
) -> None:
    found_shards = wanted.shards()
    entry, paths = found_shards.format, found_shards.files
    verify = {"verify": True} if "verify" in entry.reader_options.names() else {}
    settings = {**found_shards.options, **entry.verify_options, **verify, **wanted.options}
    wanted = dataclasses.replace(wanted, options=settings)
    if part is not None:
        paths = select_part(paths, *part)
    opening = partial(_open, wanted, entry.name)
    with ProgressBar("verifying") as bar:
        if engine is None:
            reading = Reading(bar)
            with closing(reading.findings(opening, paths, part and part[0])) as findings:
                found = _collect(findings, limit, bar, quiet=json)
            records = reading.records
        else:
            task = partial(verify_part, opening, paths, limit)
            reports = engine.run(task, count_parts(engine, len(paths)), lambda done: bar(done, None))
            found = _collect(merge_findings(reports), limit, bar, quiet=json)
            records = sum(records for records, _ in reports)
    stopped = "; stopped at --limit" if len(found) == limit else ""
    of = f"in {count_of(records, 'record')} read" if records else "and no record was read"
    _report(name, max(1, len(paths)), records, found, f"{len(found)} bad {of}{stopped}", "read", json=json)


def _report(
    name: str, files: int, records: int, found: Sequence[Finding], problem: str, what: str, *, json: bool
) -> None:
    if json:
        bad = [dataclasses.asdict(finding) for finding in found]
        print_json({"path": name, "files": files, "records": records, "ok": not found, "bad": bad})
    elif found:
        print_error(problem)
    else:
        print_line(f"{count_of(records, 'record')} in {count_of(files, 'file')}: all can be {what}")
    if found:
        raise typer.Exit(1)


def _open(wanted: options.SourceOptions, format_name: str, path: str | None) -> Any:
    return wanted.open(path, path and format_name)


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
        reading = Reading(bar)
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
