"""``dataload bench``."""

import json as json_module
import re
import shlex
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, Any, cast, get_args

import typer

from dataload._util.settings import check_directory
from dataload._util.system import user_number
from dataload.bench import runner as table
from dataload.bench.data import AS_IT_IS, BATCH_SIZE, Choices, Data, Written, advice, own_data, plan_loaders, write
from dataload.bench.runner import Results, agreeing, describe_run, measure_all, run_task
from dataload.bench.task import Order
from dataload.cli import options
from dataload.cli.output import ProgressBar, as_typed, print_line, print_table, print_warning
from dataload.errors import ConfigError, DataloadError, MissingDependencyError, closest
from dataload.executors import ExecutorName
from dataload.storage.local.folders import distrust


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
    format: options.SourceFormat = None,  # noqa: A002 - the option's name
    field: options.Fields = None,
    codec: options.Codec = None,
    decode: options.Decode = None,
    option: options.Options = None,
) -> None:
    """Compare formats on your data, side by side in one run.

    The data as they are, and some of their records in other formats: by default in under a minute. Raise --records,
    --repeats and --seconds for figures to rely on.
    """
    if path is None:
        raise ConfigError("give a PATH to your data", key="path")
    # Every argument is checked before the first measurement.
    if json is not None:
        check_directory(json, "json")
    run = describe_run(shlex.join(["dataload", *sys.argv[1:]]))
    choices = Choices(
        orders=cast("Any", choose("orders", orders, get_args(Order))),
        workers=numbers("workers", workers),
        batch_size=batch_size or BATCH_SIZE,
        executor=executor,
        seconds=seconds,
    )
    with ExitStack() as opened:
        directory = Path(cache) if cache is not None else _own_directory()
        wanted = options.SourceOptions.parse(
            path, format=format, fields=field, codec=codec, decode=decode, options=option
        )
        data = _own_data(wanted, opened, records, codec, option, decode)
        if data.unread:
            print_warning(f"{data.unread:,} of the records cannot be read, and are left out: see `dataload verify`")
        if wanted.is_function:  # nothing would tell that it returns other data
            directory.mkdir(parents=True, exist_ok=True)
            directory = Path(opened.enter_context(TemporaryDirectory(dir=directory)))
        found = _side_by_side(data, formats, choices, repeats, directory)
    results = Results(**run, **found)
    if json is not None:
        Path(json).write_text(json_module.dumps(results.to_json(), indent=1), "utf-8")
        print_line(f"written to {json}")


def _own_data(
    wanted: options.SourceOptions,
    opened: ExitStack,
    records: int | None,
    codec: str | None,
    option: Sequence[str] | None,
    decode: Sequence[str] | None,
) -> Data:
    """Return the user's data, with how another process opens them, and as files where they are decoded by default."""
    source = opened.enter_context(wanted.open())
    if not wanted.has_files:
        return own_data(wanted.path, source, records)
    entry = wanted.shards().format
    again = options.parse_options(option) | ({} if codec is None else {"codec": codec})
    again |= {} if decode is None else {"decode": options.parse_decode(decode)}
    raw = None
    if "decode" not in again and options.decodes(entry):
        files = replace(wanted, options={**wanted.options, "decode": None})
        raw = opened.enter_context(files.open())
    with suppress(TypeError):  # of functions, which are not sent to another process
        json_module.dumps(again)
        return own_data(
            wanted.path, source, records, raw=raw, format_name=entry.name, options=again, files=wanted.local_files()
        )
    return own_data(wanted.path, source, records, raw=raw)


def _side_by_side(data: Data, formats: str | None, choices: Choices, repeats: int, cache: Path) -> dict[str, Any]:
    """Write data in several formats, measure and print; return the files and measurements of `Results`."""
    written: dict[str, Written] = {} if formats or data.own is None else {AS_IT_IS: data.own}
    for name in data.usual if formats is None else choose("formats", formats, data.formats):
        try:
            with ProgressBar(f"writing {data.name} as {name}"):
                written[name] = write(data, name, cache)
        except (DataloadError, MissingDependencyError) as error:
            if formats:
                raise
            print_warning(f"not compared as {name}: {as_typed(str(error))}")
    files = [one.facts for one in written.values()]
    tasks = plan_loaders(data, written, choices)
    with ProgressBar(f"measuring {data.name}") as bar:
        found = measure_all(tasks, repeats, run=run_task, progress=lambda done: bar(done, len(tasks) * repeats))
    measured = agreeing(found)
    print_line(data.name, "bold")
    print_table(table.FILE_COLUMNS, table.file_rows(files))
    print_line()
    rows = [*map(table.rate_cells, measured)]
    columns = {name: side for name, side in table.RATE_COLUMNS.items() if any(row.get(name) for row in rows)}
    print_table(columns, [tuple(row.get(name, "") for name in columns) for row in rows])
    for problem in table.problems(measured):
        print_warning(problem)
    print_line()
    if AS_IT_IS in written and (said := advice(measured, files)):
        print_line(said, "bold")
    return {"files": tuple(files), "measurements": measured}


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
