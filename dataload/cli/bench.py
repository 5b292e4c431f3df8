"""``dataload bench``, and ``dataload bench --loader``, which shows where the time of a config goes."""

import json as json_module
import re
import shlex
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, Any, cast, get_args

import typer

from dataload._util.settings import check_directory
from dataload._util.system import user_number
from dataload.analysis.design import check_picture
from dataload.analysis.pictures import rates_figure
from dataload.bench import runner as table
from dataload.bench.data import AS_IT_IS, Choices, Data, Written, advice, own_data, plan_loaders, write
from dataload.bench.runner import FileFacts, Measurement, Results, Spread, agreeing, describe_run, measure_all, run_task
from dataload.bench.stages import StageReport, measure_stages
from dataload.bench.task import Order, Task
from dataload.cli.options import (
    Codec,
    Decode,
    Fields,
    Options,
    Overrides,
    Picture,
    SourceFormat,
    SourceOptions,
    decodes,
    parse_decode,
    parse_options,
)
from dataload.cli.output import ProgressBar, as_typed, print_line, print_table, print_warning
from dataload.errors import ConfigError, DataloadError, MissingDependencyError, closest
from dataload.executors import ExecutorName
from dataload.storage.local.folders import distrust

_MOVED = typer.Option(hidden=True)  # to `python -m benchmarks`, or gone; accepted for a release


def bench_command(
    path: Annotated[str | None, typer.Argument(help="Your data: anything that `dataload inspect` takes.")] = None,
    formats: Annotated[str | None, typer.Option(help="Formats to compare, separated by commas.")] = None,
    orders: Annotated[str, typer.Option(help="Any of global, pool, sequential.")] = "global",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "0,2",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Records per batch.")] = None,
    records: Annotated[int | None, typer.Option(min=1, help="Number of records. By default about 64 MB.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; tables show medians.")] = 2,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds per measurement, after a warm-up.")] = 0.5,
    executor: Annotated[ExecutorName, typer.Option(help="Kind of workers.")] = "threads",
    cache: Annotated[str | None, typer.Option(help="Directory that keeps the written files.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the figures to this file.")] = None,
    picture: Picture = None,
    loader: Annotated[str | None, typer.Option(help="Show where the time of a config goes, and nothing else.")] = None,
    overrides: Overrides = None,
    format: SourceFormat = None,  # noqa: A002 - the option's name
    field: Fields = None,
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
    made: Annotated[list[str] | None, _MOVED] = None,
    peers: Annotated[str | None, _MOVED] = None,
    peer_python: Annotated[list[str] | None, _MOVED] = None,
    scale: Annotated[bool, typer.Option("--scale", hidden=True)] = False,
    cold: Annotated[bool, typer.Option("--cold", hidden=True)] = False,
    seed: Annotated[int, _MOVED] = 0,
    wide: Annotated[bool, typer.Option("--wide", hidden=True)] = False,
    html: Annotated[str | None, _MOVED] = None,
    dark: Annotated[bool, typer.Option("--dark", hidden=True)] = False,
) -> None:
    """Compare formats on your data, side by side in one run.

    The data as they are, and some of their records in other formats: by default in under a minute. Raise --records,
    --repeats and --seconds for figures to rely on.
    """
    if loader is not None:
        given = {"PATH": path, "--formats": formats, "--batch-size": batch_size, "--records": records}
        given |= {"--made": made, "--peers": peers, "--scale": scale, "--cold": cold, "--picture": picture}
        _time_stages(loader, overrides or (), seconds, repeats, json, given)
        return
    if overrides:
        raise ConfigError("--set changes a config: give one with --loader", key="set", value=overrides)
    if path is None or made or peers or peer_python:
        message = (
            "give a PATH to your data: --made, --peers and --peer-python have moved to `python -m benchmarks`, which "
        )
        raise ConfigError(f"{message}a clone of the repository has", key="path")
    old = {"cold": cold, "seed": seed, "scale": scale, "wide": wide, "html": html, "dark": dark}
    for name in (name for name, value in old.items() if value):
        effect = "" if name == "seed" else " and has no effect"
        print_warning(f"--{name} is deprecated{effect}: use --json, --picture, or `python -m benchmarks` in a clone")
    # Every argument is checked before the first measurement.
    _check_targets(json, picture)
    run = describe_run(shlex.join(["dataload", *sys.argv[1:]]))
    choices = Choices(
        orders=cast("Any", choose("orders", orders, get_args(Order))),
        workers=numbers("workers", workers),
        batch_size=batch_size or 0,
        executor=executor,
        seconds=seconds,
        seed=seed,
    )
    with ExitStack() as opened:
        directory = Path(cache) if cache is not None else _own_directory()
        wanted = SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
        data = _own_data(wanted, opened, records, codec, option, decode)
        if wanted.is_function:  # nothing would tell that it returns other data
            directory.mkdir(parents=True, exist_ok=True)
            directory = Path(opened.enter_context(TemporaryDirectory(dir=directory)))
        found = side_by_side([data], formats, choices, repeats, directory)
    results = Results(**run, **found)
    if json is not None:
        _write(json, json_module.dumps(results.to_json(), indent=1))
    if picture is not None:
        rates_figure(table.rates(results.measurements)).savefig(picture)
        print_line(f"drawn to {picture}")


def _own_data(
    wanted: SourceOptions,
    opened: ExitStack,
    records: int | None,
    codec: str | None,
    options: Sequence[str] | None,
    decode: Sequence[str] | None,
) -> Data:
    """Return the user's data, with how another process opens them, and as files where they are decoded by default."""
    source = opened.enter_context(wanted.open())
    if not wanted.has_files:
        return own_data(wanted.path, source, records)
    entry = wanted.shards().format
    again = parse_options(options) | ({} if codec is None else {"codec": codec})
    again |= {} if decode is None else {"decode": parse_decode(decode)}
    raw = None
    if "decode" not in again and decodes(entry):
        files = replace(wanted, options={**wanted.options, "decode": None})
        raw = opened.enter_context(files.open())
    with suppress(TypeError):  # of functions, which are not sent to another process
        json_module.dumps(again)
        return own_data(
            wanted.path, source, records, raw=raw, format_name=entry.name, options=again, files=wanted.local_files()
        )
    return own_data(wanted.path, source, records, raw=raw)


def side_by_side(
    all_data: Sequence[Data],
    formats: str | None,
    choices: Choices,
    repeats: int,
    cache: Path,
    *,
    plan: Callable[..., tuple[Sequence[Task], Sequence[Measurement]]] = lambda *given: (plan_loaders(*given[:3]), ()),
    write: Callable[[Data, str, Path], Written] = write,
    interpreters: Mapping[str, str] | None = None,
    wide: bool = False,
) -> dict[str, Any]:
    """Write data in several formats, measure and print; return the files and measurements of `Results`."""
    files: list[FileFacts] = []
    measurements: list[Measurement] = []
    every = [
        (data.usual or data.formats) if formats is None else choose("formats", formats, data.formats)
        for data in all_data
    ]
    for data, names in zip(all_data, every, strict=True):
        own = replace(choices, batch_size=choices.batch_size or data.batch_size)
        written: dict[str, Written] = {} if formats or data.own is None else {AS_IT_IS: data.own}
        for name in names:
            try:
                with ProgressBar(f"writing {data.name} as {name}"):
                    written[name] = write(data, name, cache)
            except (DataloadError, MissingDependencyError) as error:
                if formats or not data.usual:
                    raise
                print_warning(f"not compared as {name}: {as_typed(str(error))}")
        planned = plan(data, written, own, cache)
        facts = [one.facts for one in written.values()]
        measured = measure_tasks(data.name, *planned, repeats, interpreters, files=facts, wide=wide)
        if AS_IT_IS in written and (said := advice(measured, facts)):
            print_line(said, "bold")
        measurements += measured
        files += facts
    return {"files": tuple(files), "measurements": tuple(measurements)}


def measure_tasks(
    title: str,
    tasks: Sequence[Task],
    missing: Sequence[Measurement],
    repeats: int,
    interpreters: Mapping[str, str] | None = None,
    *,
    files: Sequence[FileFacts] = (),
    wide: bool = False,
) -> list[Measurement]:
    """Measure tasks and print them as one table, which ends with `missing`; return all."""
    run = partial(run_task, interpreters=interpreters)
    with ProgressBar(f"measuring {title}") as bar:
        measured = measure_all(tasks, repeats, run=run, progress=lambda done: bar(done, len(tasks) * repeats))
    found = [*agreeing(measured), *missing]
    print_line(title, "bold")
    if files:
        print_table(table.FILE_COLUMNS, table.file_rows(files))
        print_line()
    rows = table.rate_rows(found)
    print_table(*((table.RATE_COLUMNS, rows) if wide else table.shortened(table.RATE_COLUMNS, rows)))
    for problem in table.problems(found):
        print_warning(problem)
    for line in table.settings(found) if wide else ():
        print_line(line)
    print_line()
    return found


def _own_directory() -> Path:
    """Return the directory that keeps written files by default; only this user can have put something there."""
    directory = Path(gettempdir()) / f"dataload-bench-{user_number()}"
    with suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user_number() or distrust(found):
        raise ConfigError(
            f"{directory} must be a directory that only you can write to, but is not: remove it, or set --cache to "
            "another directory",
            key="cache",
            value=str(directory),
        )
    return directory


def _time_stages(
    config: str, overrides: Sequence[str], seconds: float, repeats: int, json: str | None, given: Mapping[str, Any]
) -> None:
    """Measure the stages of a config and print them; none of the other options, `given`, may be set."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--loader measures a config and nothing else: remove {name}", key="loader")
    _check_targets(json, None)
    with ProgressBar(f"measuring {config}"):
        report = measure_stages(config, overrides=overrides, seconds=seconds, repeats=repeats)
    print_table({"stage": "left", "records/s": "right", "us/batch": "right", "added": "right"}, _rows(report))
    for note in (*report.notes, "about 0: less than the repeats differ, or nothing"):
        print_line(f"note: {note}")
    print_line(report.verdict, "bold")
    if json is not None:
        _write(json, json_module.dumps(asdict(report), indent=1))


def _rows(report: StageReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    before: Spread | None = None
    for stage in report.stages:
        took, added = stage.batch_seconds, ""
        if before is not None and stage.name.startswith("+"):
            more, noise = took.median - before.median, max(took.high - took.low, before.high - before.low)
            added = f"{more * 1e6:+,.1f}" if more > noise else "about 0"
        rows.append((stage.name, f"{stage.rows_per_second:,.0f}", f"{took.median * 1e6:,.1f}", added))
        before = took
    return rows


def _check_targets(json: str | None, picture: str | None) -> None:
    """Check that everything can be written."""
    if json is not None:
        check_directory(json, "json")
    if picture is not None:
        check_picture(picture)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, "utf-8")
    print_line(f"written to {path}")


def choose(key: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Return the names in an option; a name that is not allowed is a ConfigError."""
    # Some names contain a comma.
    whole = "|".join(sorted(map(re.escape, allowed), key=len, reverse=True))
    chosen = tuple(re.findall(rf"\s*({whole}|[^,\s][^,]*?)\s*(?:,|$)", text))
    for name in chosen:
        if name not in allowed:
            raise ConfigError(f"--{key} has {name!r}: {closest(name, allowed)}", key=key, value=name)
    if not chosen:
        raise ConfigError(f"--{key} is empty: give some of {', '.join(allowed)}", key=key, value=text)
    return chosen


def numbers(key: str, text: str) -> tuple[int, ...]:
    """Return the numbers in an option."""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        message = f"--{key} must be numbers of 0 or more, separated by commas, got {text!r}"
        raise ConfigError(message, key=key, value=text)
    return tuple(map(int, text.split(",")))
