"""``dataload bench``."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Annotated, Any, cast, get_args

import typer

from dataload._util.checks import check_directory
from dataload.analysis.pictures import check_picture
from dataload.bench.data import Data, Written, made_data, own_data, write
from dataload.bench.html import report
from dataload.bench.machine import describe_machine, describe_versions
from dataload.bench.peers import PEERS
from dataload.bench.picture import rates_figure
from dataload.bench.plan import Choices, plan_limits, plan_loaders
from dataload.bench.results import Curve, FileFacts, Measurement, Results
from dataload.bench.rivals import plan_peers
from dataload.bench.runner import agreeing, measure_all, run_task
from dataload.bench.scale import measure_scale
from dataload.bench.table import (
    FILE_COLUMNS,
    RATE_COLUMNS,
    curve_table,
    file_rows,
    problems,
    rate_rows,
    settings,
    shortened,
)
from dataload.bench.task import Order, Task
from dataload.bench.workloads import WORKLOADS, get_workload
from dataload.cli.bench_stages import time_stages
from dataload.cli.options import (
    Codec,
    Decode,
    Fields,
    Options,
    Overrides,
    Picture,
    SourceFormat,
    SourceOptions,
)
from dataload.cli.output import ProgressBar, print_line, print_table, print_warning
from dataload.errors import ConfigError, closest

__all__ = ["bench_command"]


def bench_command(
    path: Annotated[str | None, typer.Argument(help="Data of your own, as `dataload inspect` takes it.")] = None,
    made: Annotated[
        list[str] | None, typer.Option("--made", help=f"Made data instead: {', '.join(WORKLOADS)}; may be given again.")
    ] = None,
    formats: Annotated[str | None, typer.Option("--formats", help="Formats to compare, with commas between.")] = None,
    orders: Annotated[str, typer.Option("--orders", help="global, pool, sequential.")] = "global",
    workers: Annotated[str, typer.Option("--workers", help="Numbers of workers.")] = "0,1,2",
    batch_size: Annotated[int | None, typer.Option("--batch-size", min=1, help="Records per batch.")] = None,
    records: Annotated[int | None, typer.Option("--records", min=1, help="So many records.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds, of which the median counts.")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", min=0.05, help="Of each measurement, about.")] = 2.0,
    executor: Annotated[str, typer.Option("--executor", help="threads or processes.")] = "threads",
    cold: Annotated[bool, typer.Option("--cold", help="Drop the files from the page cache before each.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the orders.")] = 0,
    cache: Annotated[str | None, typer.Option("--cache", help="Directory that keeps the written files.")] = None,
    json: Annotated[str | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    picture: Picture = None,
    html: Annotated[str | None, typer.Option("--html", help="Write a report with everything to this file.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="All columns of the tables.")] = False,
    peers: Annotated[
        str | None, typer.Option("--peers", help="Other loaders beside it: all, or names with commas between.")
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option("--peer-python", help="NAME=PATH: the Python of the environment of a peer; may be given again."),
    ] = None,
    scale: Annotated[bool, typer.Option("--scale", help="Costs against records, shards and ranks, too.")] = False,
    loader: Annotated[
        str | None, typer.Option("--loader", help="Where the time of this config goes, and nothing else.")
    ] = None,
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
        time_stages(loader, overrides or (), seconds, repeats, json, given)
        return
    if overrides:
        raise ConfigError("--set changes a config: give one with --loader", key="set", value=overrides)
    _check_targets(json, picture, html)
    if path is not None and made:
        raise ConfigError(f"--made makes data instead of {path}: give one of the two", key="made", value=made)
    _parsed("executor", executor, ("threads", "processes"))
    begun = datetime.now(UTC).isoformat(timespec="seconds")
    where = Path(cache) if cache is not None else Path(gettempdir()) / "dataload-bench"
    with ExitStack() as opened:
        if path is not None:
            given = SourceOptions.parse(path, format=format, fields=field, codec=codec, decode=decode, options=option)
            options = {**given.options, **({} if given.format is None else {"format": given.format})}
            own, source = own_data(given.path, records, options)
            opened.enter_context(source)
            all_data = [own]
        else:
            all_data = [made_data(get_workload(name), records) for name in made or ["floats-4k"]]
        # All that can be wrong is looked at before the first measurement.
        base = Choices(
            orders=cast("Any", _parsed("orders", orders, get_args(Order))),
            workers=tuple(_numbers("workers", workers)),
            batch_size=0,  # that of the data
            executor=executor,
            seconds=seconds,
            cold=cold,
            seed=seed,
        )
        all_names = [
            data.formats if formats is None else _parsed("formats", formats, data.formats) for data in all_data
        ]
        rivals = [] if peers is None else _peers(peers)
        interpreters = _interpreters(peer_python or ())
        measured: list[Measurement] = []
        files: list[FileFacts] = []
        for data, names in zip(all_data, all_names, strict=True):
            choices = replace(base, batch_size=batch_size or data.batch_size)
            written = {name: _write(data, name, where) for name in names}
            tasks, missing = plan_peers(rivals, data, written, choices, where, interpreters=interpreters)
            tasks = [*plan_limits(data, written, choices), *plan_loaders(data, written, choices), *tasks]
            found = (*_measure(data.name, tasks, repeats, interpreters), *missing)
            _print(data, written, found, wide=wide)
            measured += found
            files += [one.facts for one in written.values()]
    results = Results(
        date=begun,
        machine=describe_machine(),
        versions=describe_versions(),
        command=shlex.join(["dataload", *sys.argv[1:]]),
        files=tuple(files),
        measurements=tuple(measured),
        curves=_curves() if scale else (),
    )
    for curve in results.curves:
        print_line(curve.title, "bold")
        print_table(*curve_table(curve))
        print_line()
    _save(results, json, picture, html)


def _check_targets(json: str | None, picture: str | None, html: str | None) -> None:
    """See that everything can be written, before there is work to lose."""
    for key, target in (("json", json), ("html", html)):
        if target is not None:
            check_directory(target, key)
    if picture is not None:
        check_picture(picture)
    if html is not None:
        check_picture(f"{html}.svg")  # it holds such pictures


def _save(results: Results, json: str | None, picture: str | None, html: str | None) -> None:
    if json is not None:
        Path(json).write_text(json_module.dumps(results.to_json(), indent=1), "utf-8")
        print_line(f"written to {json}")
    if picture is not None:
        rates_figure(results).savefig(picture)
        print_line(f"drawn to {picture}")
    if html is not None:
        Path(html).write_text(report(results), "utf-8")
        print_line(f"written to {html}")


def _write(data: Data, name: str, cache: Path) -> Written:
    with ProgressBar(f"writing {data.name} as {name}"):
        return write(data, name, cache)


def _measure(
    name: str, tasks: Sequence[Task], repeats: int, interpreters: Mapping[str, str]
) -> tuple[Measurement, ...]:
    total = len(tasks) * repeats
    run = partial(run_task, interpreters=interpreters)
    with ProgressBar(f"measuring {name}") as bar:
        return agreeing(measure_all(tasks, repeats, run=run, progress=lambda done: bar(done, total)))


def _curves() -> tuple[Curve, ...]:
    with ProgressBar("measuring how costs grow"), TemporaryDirectory() as directory:
        return measure_scale(Path(directory))


def _peers(text: str) -> Sequence[str]:
    if text == "all":
        return tuple(PEERS)
    names: list[str] = []
    words = [word.strip() for word in text.split(",")]
    while words:  # some names have a comma in them
        taken = next((n for n in range(len(words), 1, -1) if ", ".join(words[:n]) in PEERS), 1)
        names.append(", ".join(words[:taken]))
        words = words[taken:]
    return _known("peers", text, [name for name in names if name], tuple(PEERS))


def _interpreters(settings: Sequence[str]) -> dict[str, str]:
    pairs = [setting.partition("=") for setting in settings]
    for setting, (name, _, python) in zip(settings, pairs, strict=True):
        if not python or name not in PEERS:
            raise ConfigError(
                f"--peer-python must be NAME=PATH with the name of a peer, got {setting!r}: {closest(name, PEERS)}",
                key="peer_python",
                value=setting,
            )
    return {name: python for name, _, python in pairs}


def _print(data: Data, written: dict[str, Written], measured: Sequence[Measurement], *, wide: bool) -> None:
    print_line(data.name, "bold")
    print_table(FILE_COLUMNS, file_rows([one.facts for one in written.values()]))
    print_line()
    rows = rate_rows(measured)
    print_table(*((RATE_COLUMNS, rows) if wide else shortened(RATE_COLUMNS, rows)))
    for problem in problems(measured):
        print_warning(problem)
    if wide:
        for line in settings(measured):
            print_line(line)
    print_line()


def _parsed(key: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    return _known(key, text, [name.strip() for name in text.split(",") if name.strip()], allowed)


def _known(key: str, text: str, names: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in allowed:
            raise ConfigError(f"--{key} has {name!r}: {closest(name, allowed)}", key=key, value=name)
    if not names:
        raise ConfigError(f"--{key} names none: give some of {', '.join(allowed)}", key=key, value=text)
    return tuple(names)


def _numbers(key: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise ConfigError(
            f"--{key} must be numbers of 0 or more with commas between, got {text!r}", key=key, value=text
        )
    return numbers
