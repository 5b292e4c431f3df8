"""``dataload bench``, and ``dataload bench --loader``, which shows where the time of a config goes."""

import json as json_module
import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, Any, cast, get_args

import typer

from dataload._util.settings import check_directory
from dataload.analysis.design import DARK, LIGHT, check_picture
from dataload.bench import table
from dataload.bench.data import Data, Written, made_data, own_data, write
from dataload.bench.plan import Choices, plan_limits, plan_loaders
from dataload.bench.report import rates_figure, report
from dataload.bench.results import Curve, Measurement, Results
from dataload.bench.runner import agreeing, describe_run, measure_all, run_task
from dataload.bench.scale import measure_scale
from dataload.bench.stages import StageReport, measure_stages
from dataload.bench.task import Order, Task
from dataload.bench.timing import Spread
from dataload.bench.workloads import WORKLOADS, get_workload
from dataload.cli.options import Codec, Dark, Decode, Fields, Options, Overrides, Picture, SourceFormat, SourceOptions
from dataload.cli.output import ProgressBar, print_line, print_table, print_warning
from dataload.errors import ConfigError, closest
from dataload.executors.factory import ExecutorName


def bench_command(
    path: Annotated[str | None, typer.Argument(help="Your own data: anything that `dataload inspect` takes.")] = None,
    made: Annotated[list[str] | None, typer.Option(help=f"Or made data: {', '.join(WORKLOADS)}. Repeatable.")] = None,
    formats: Annotated[str | None, typer.Option(help="Formats to compare, separated by commas.")] = None,
    orders: Annotated[str, typer.Option(help="Any of global, pool, sequential.")] = "global",
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "0,1,2",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Records per batch.")] = None,
    records: Annotated[int | None, typer.Option(min=1, help="Number of records.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; tables show medians.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds per measurement, after a warm-up.")] = 2.0,
    executor: Annotated[ExecutorName, typer.Option(help="Kind of workers.")] = "threads",
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop files from the page cache, and measure the first epoch.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the orders.")] = 0,
    cache: Annotated[str | None, typer.Option(help="Directory that keeps the written files.")] = None,
    json: Annotated[str | None, typer.Option(help="Write the figures to this file.")] = None,
    picture: Picture = None,
    dark: Dark = False,
    html: Annotated[str | None, typer.Option(help="Write a report with everything to this file.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Show all columns of the tables.")] = False,
    peers: Annotated[
        str | None,
        typer.Option(help="Also measure other loaders: all, or names. Needs a clone of the repository."),
    ] = None,
    peer_python: Annotated[
        list[str] | None, typer.Option(help="The Python of all peers, or NAME=PATH: that of one peer. Repeatable.")
    ] = None,
    scale: Annotated[bool, typer.Option("--scale", help="Also measure costs against records, shards, ranks.")] = False,
    loader: Annotated[str | None, typer.Option(help="Show where the time of a config goes, and nothing else.")] = None,
    overrides: Overrides = None,
    format: SourceFormat = None,  # noqa: A002 - the option's name
    field: Fields = None,
    codec: Codec = None,
    decode: Decode = None,
    option: Options = None,
) -> None:
    """Compare formats and loaders on your data or on made data, side by side in one run."""
    if loader is not None:
        given = {"PATH": path, "--made": made, "--formats": formats, "--batch-size": batch_size, "--records": records}
        given |= {"--peers": peers, "--scale": scale, "--cold": cold, "--picture": picture, "--html": html}
        _time_stages(loader, overrides or (), seconds, repeats, json, given)
        return
    if overrides:
        raise ConfigError("--set changes a config: give one with --loader", key="set", value=overrides)
    if path is not None and made:
        raise ConfigError(f"--made makes data instead of {path}: give one of the two", key="made", value=made)
    # Every argument is checked before the first measurement.
    _check_targets(json, picture, html)
    run = describe_run(shlex.join(["dataload", *sys.argv[1:]]))
    plan_peers, interpreters = _peers(peers, peer_python or ())
    choices = Choices(
        orders=cast("Any", _choose("orders", orders, get_args(Order))),
        workers=_numbers("workers", workers),
        batch_size=batch_size or 0,  # 0: that of the data
        executor=executor,
        seconds=seconds,
        cold=cold,
        seed=seed,
    )
    with ExitStack() as opened:
        directory = Path(cache) if cache is not None else _own_directory()
        if path is not None:
            wanted = SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
            all_data = [own_data(wanted.path, opened.enter_context(wanted.open()), records)]
            if wanted.is_function:  # nothing would tell that it returns other data
                directory.mkdir(parents=True, exist_ok=True)
                directory = Path(opened.enter_context(TemporaryDirectory(dir=directory)))
        else:
            all_data = [made_data(get_workload(name), records) for name in made or ["floats-4k"]]
        every = [data.formats if formats is None else _choose("formats", formats, data.formats) for data in all_data]
        found: list[tuple[dict[str, Written], tuple[Measurement, ...]]] = []
        for data, names in zip(all_data, every, strict=True):
            own = replace(choices, batch_size=batch_size or data.batch_size)
            written: dict[str, Written] = {}
            for name in names:
                with ProgressBar(f"writing {data.name} as {name}"):
                    written[name] = write(data, name, directory)
            tasks, missing = plan_peers(data, written, own, directory)
            tasks = [*plan_limits(data, written, own), *plan_loaders(data, written, own), *tasks]
            found.append((written, (*_measure(data.name, tasks, repeats, interpreters), *missing)))
            _print(data, *found[-1], wide=wide)
    results = Results(
        **run,
        files=tuple(one.facts for written, _ in found for one in written.values()),
        measurements=tuple(measurement for _, measured in found for measurement in measured),
        curves=_curves() if scale else (),
    )
    _save(results, json, picture, html, dark=dark)


def _own_directory() -> Path:
    """Return the directory that keeps written files by default; only this user can have put something there."""
    directory = Path(gettempdir()) / f"dataload-bench-{os.geteuid()}"
    with suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
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
    _check_targets(json, None, None)
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


def _check_targets(json: str | None, picture: str | None, html: str | None) -> None:
    """Check that everything can be written."""
    for key, target in (("json", json), ("html", html)):
        if target is not None:
            check_directory(target, key)
    for drawn in (picture, f"{html}.svg" if html is not None else None):  # the report holds such pictures
        if drawn is not None:
            check_picture(drawn)


def _save(results: Results, json: str | None, picture: str | None, html: str | None, *, dark: bool) -> None:
    if json is not None:
        _write(json, json_module.dumps(results.to_json(), indent=1))
    if picture is not None:
        rates_figure(results, theme=DARK if dark else LIGHT).savefig(picture)
        print_line(f"drawn to {picture}")
    if html is not None:
        _write(html, report(results))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, "utf-8")
    print_line(f"written to {path}")


def _measure(
    name: str, tasks: Sequence[Task], repeats: int, interpreters: Mapping[str, str]
) -> tuple[Measurement, ...]:
    run = partial(run_task, interpreters=interpreters)
    with ProgressBar(f"measuring {name}") as bar:
        return agreeing(measure_all(tasks, repeats, run=run, progress=lambda done: bar(done, len(tasks) * repeats)))


def _curves() -> tuple[Curve, ...]:
    with ProgressBar("measuring how costs grow"), TemporaryDirectory() as directory:
        curves = measure_scale(Path(directory))
    for curve in curves:
        print_line(curve.title, "bold")
        print_table(*table.curve_table(curve))
        print_line()
    return curves


def _peers(
    names: str | None, pythons: Sequence[str]
) -> tuple[Callable[..., tuple[Sequence[Task], Sequence[Measurement]]], dict[str, str]]:
    """Return a function that plans the measurements of the peers, and the Python of those that have their own."""
    if names is None and not pythons:
        return lambda *_: ((), ()), {}
    package = _import_peers()
    known = tuple(package.PEERS)
    interpreters: dict[str, str] = {}
    for setting in sorted(pythons, key=lambda setting: "=" in setting):  # one peer's overrides that of all
        if "=" not in setting and os.sep in setting:
            interpreters |= dict.fromkeys(known, setting)
            continue
        name, _, interpreters[name] = setting.partition("=")
        if not interpreters[name] or name not in known:
            message = f"--peer-python must be PATH, or NAME=PATH with the name of a peer, got {setting!r}"
            raise ConfigError(f"{message}: {closest(name, known)}", key="peer_python", value=setting)
    chosen = known if names == "all" else () if names is None else _choose("peers", names, known)
    return partial(package.plan.plan_peers, chosen, interpreters=interpreters), interpreters


def _import_peers() -> Any:
    if os.path.isfile("benchmarks/peers/__init__.py") and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # run in a clone, but from an installed script
    try:
        import_module("benchmarks.peers.plan")
        return import_module("benchmarks.peers")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks"):
            raise
        raise ConfigError(
            "--peers needs benchmarks/peers, which the repository has and the installed package does not: run the "
            "command in a clone of the repository, or put the clone on PYTHONPATH",
            key="peers",
        ) from error


def _print(data: Data, written: dict[str, Written], measured: Sequence[Measurement], *, wide: bool) -> None:
    print_line(data.name, "bold")
    print_table(table.FILE_COLUMNS, table.file_rows([one.facts for one in written.values()]))
    print_line()
    rows = table.rate_rows(measured)
    print_table(*((table.RATE_COLUMNS, rows) if wide else table.shortened(table.RATE_COLUMNS, rows)))
    for problem in table.problems(measured):
        print_warning(problem)
    for line in table.settings(measured) if wide else ():
        print_line(line)
    print_line()


def _choose(key: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    # Some names contain a comma.
    whole = "|".join(sorted(map(re.escape, allowed), key=len, reverse=True))
    chosen = tuple(re.findall(rf"\s*({whole}|[^,\s][^,]*?)\s*(?:,|$)", text))
    for name in chosen:
        if name not in allowed:
            raise ConfigError(f"--{key} has {name!r}: {closest(name, allowed)}", key=key, value=name)
    if not chosen:
        raise ConfigError(f"--{key} is empty: give some of {', '.join(allowed)}", key=key, value=text)
    return chosen


def _numbers(key: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        message = f"--{key} must be numbers of 0 or more, separated by commas, got {text!r}"
        raise ConfigError(message, key=key, value=text)
    return tuple(map(int, text.split(",")))
