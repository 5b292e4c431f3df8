"""Commands about the run of a config: ``certify``, ``timeline``, ``trace`` and ``schema``."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from time import sleep
from typing import Annotated, Any, cast

import typer

from dataload._util.settings import check_directory
from dataload.analysis.certify import Certificate, certify, check_certificate
from dataload.analysis.pictures import check_picture, timeline_figure
from dataload.analysis.timeline import CONSUMER, FleetEstimate, Timeline, record_timeline
from dataload.analysis.trace import SpikeReport, StepLosses, Suspect, find_key, is_excluded, rank_by_loss, trace_record
from dataload.api import from_config, record_loader
from dataload.cli import options
from dataload.cli.output import count_of, print_error, print_json, print_line, print_table
from dataload.config import json_schema
from dataload.errors import ConfigError
from dataload.loader.base import LoaderBase
from dataload.loader.failures import shown
from dataload.loader.loader import Loader
from dataload.sources.shards import locate

DIFFERENT = 1


def certify_command(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch to certify.")] = 0,
    steps: Annotated[str | None, typer.Option(help="Steps to certify: one (10) or a range (0:5).")] = None,
    output: Annotated[str | None, typer.Option("--output", "-O", help="A new file for the certificate.")] = None,
    check: Annotated[str | None, typer.Option(help="Compare with this certificate instead.", metavar="FILE")] = None,
    world_size: options.WorldSize = None,
    state: options.State = None,
) -> None:
    """Write hashes of batches, or check that this machine, world size and release serve the same batches.

    Examples:
      dataload certify train.toml --steps 0:100 --output run.json
      dataload certify train.toml --check run.json --world-size 4 --set loader.batch_size=64
    """
    if check is not None and (steps is not None or output is not None or epoch):
        raise ConfigError("--check takes epoch and steps from the certificate: leave --epoch, --steps and --output out")
    if check is None and (steps is None or output is None):
        raise ConfigError("give --steps and --output to write a certificate, or --check to compare with one")
    if output is not None:
        options.check_new(output, "--output")
    expected = None if check is None else Certificate.from_json(options.read_file(check, "--check"))
    with ExitStack() as stack:
        loaders: list[Loader[Any]] = []
        while not loaders or len(loaders) < loaders[0].batch_sampler.world_size:
            ranks = world_size if not loaders else loaders[0].batch_sampler.world_size
            settings = [*(overrides or ()), *options.ranks_of(None if ranks is None else len(loaders), ranks)]
            loader = stack.enter_context(record_loader(config, overrides=settings))
            options.load_state(loader, state)
            loaders.append(loader)
        if expected is None:
            _write_hashes(loaders, epoch, options.parse_range(cast("str", steps), "--steps"), cast("str", output))
        else:
            _compare_hashes(loaders, expected)


def _write_hashes(loaders: list[Loader[Any]], epoch: int, steps: range, output: str) -> None:
    options.check_steps(steps, loaders[0].batch_sampler_of(epoch).steps(epoch), epoch, "--steps")
    from dataload import __version__

    options.write_file(output, certify(loaders, epoch, steps, release=__version__).to_json(), "--output")
    print_line(f"wrote {output}: {count_of(len(steps), 'step')} of epoch {epoch}")


def _compare_hashes(loaders: list[Loader[Any]], expected: Certificate) -> None:
    difference = check_certificate(expected, loaders)
    steps = f"steps {expected.first}:{expected.first + len(expected.steps)} of epoch {expected.epoch}"
    made = f"dataload {expected.versions.get('dataload')}, numpy {expected.versions.get('numpy')}"
    if difference is None:
        print_line(f"the same batches, bit for bit: {steps} (certified by {made})", "bold")
        return
    print_error(f"other batches than certified by {made}: {difference}")
    raise typer.Exit(DIFFERENT)


def timeline_command(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    epoch: Annotated[int, typer.Option(min=0, help="First epoch.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps, over several epochs if needed.")] = 50,
    model_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that a simulated model takes per batch.")] = 0.0,
    picture: options.Picture = None,
    trace: Annotated[str | None, typer.Option(help="Save a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    fleet: Annotated[int | None, typer.Option(min=1, help="Also estimate a Ray fleet of this many workers.")] = None,
    json: options.JsonFlag = False,
) -> None:
    """Run a loader for some steps and show who worked, who waited, and what limits it."""
    if picture is not None:
        check_picture(picture)
    if trace is not None:
        check_directory(trace, "trace")
    with from_config(config, overrides=overrides or ()) as loader:
        loader.set_epoch(epoch)
        with record_timeline(loader) as timeline:
            _consume(loader, steps, model_ms / 1000)
        statistics = loader.statistics()
        if timeline.steps and picture is not None:
            timeline_figure(timeline, statistics.verdict, config).savefig(picture)
    if not timeline.steps:
        raise ConfigError(f"{config} has no steps in epoch {epoch}", key="epoch", value=epoch)
    if trace is not None:
        timeline.save_trace(trace)
    estimate = None if fleet is None else FleetEstimate.of(statistics, fleet)
    if json:
        estimated = {} if estimate is None else {"fleet": asdict(estimate)}
        written = {"picture": picture, "trace": trace}
        print_json({"statistics": statistics.to_json(), "timeline": timeline.to_json(), **estimated, **written})
        return
    *lines, verdict = str(statistics).splitlines()
    for line in lines:
        print_line(line)
    _print_workers(timeline)
    if estimate is not None:
        print_line(str(estimate))
    print_line(verdict, "bold")
    for path in filter(None, (picture, trace)):
        print_line(f"wrote {path}")


def _consume(loader: LoaderBase[Any], steps: int, model_seconds: float) -> None:
    """Take this many batches, or all there are."""
    while steps:
        before = steps
        for _ in islice(loader, steps):
            steps -= 1
            sleep(model_seconds)
        if steps == before:
            return


def _print_workers(timeline: Timeline) -> None:
    seconds = timeline.ended - timeline.begun
    for worker in (*timeline.workers, CONSUMER):
        made = sum(step.worker == worker for step in timeline.steps)
        if made:
            busy = timeline.busy_seconds(worker) / seconds
            print_line(f"{worker} made {count_of(made, 'batch', 'batches')}, busy {busy:.0%} of the time")


_SHOWN_SERVINGS = 1000


def trace_command(
    config: options.ConfigFile,
    overrides: options.Overrides = None,
    index: Annotated[int | None, typer.Option(min=0, help="Index of the record to trace.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of the record to trace, where records have keys.")] = None,
    epochs: Annotated[str, typer.Option(help="Epochs to search: one (2) or a range (0:3).")] = "0:3",
    steps: Annotated[str | None, typer.Option(help="Search only these steps of each epoch.")] = None,
    world_size: options.WorldSize = None,
    state: options.State = None,
    changes: options.Changes = None,
    spike: Annotated[
        str | None,
        typer.Option(
            help="CSV of losses, with the columns step and loss: rank records and shards by the loss of their steps. "
            "With a column epoch, steps count from its start.",
            metavar="FILE",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="--spike: number of records and shards to list.")] = 20,
    exclude: Annotated[
        str | None,
        typer.Option(help="--spike: write the listed records to this new file, for the setting loader.exclude."),
    ] = None,
    json: options.JsonFlag = False,
) -> None:
    """Show when a record was or will be served, or which records were served when the loss was high.

    Computed from the order: no data are read, except the keys for --key.

    Examples:
      dataload trace train.toml --index 812345 --epochs 0:3
      dataload trace train.toml --spike losses.csv --exclude suspects.jsonl
    """
    if (index is not None) + (key is not None) + (spike is not None) != 1:
        raise ConfigError("give one of --index, --key and --spike")
    if exclude is not None and spike is None:
        raise ConfigError("--exclude goes with --spike")
    if exclude is not None:
        options.check_new(exclude, "--exclude")
    settings = [*(overrides or ()), *options.ranks_of(None, world_size)]
    with record_loader(config, overrides=settings) as loader:
        options.load_state(loader, state, changes)
        if spike is not None:
            _spike(loader, options.read_file(spike, "--spike"), top, exclude, json)
            return
        if index is None:
            index = find_key(loader.source, cast("str", key))
        _trace(loader, index, options.parse_range(epochs, "--epochs"), steps, json)


def _trace(loader: Loader[Any], index: int, epochs: range, steps: str | None, as_json: bool) -> None:
    found = trace_record(loader, index, epochs, None if steps is None else options.parse_range(steps, "--steps"))
    location = locate(loader.source, index)
    if as_json:
        servings = [dataclasses.asdict(serving) for serving in found]
        print_json({"index": index, "location": location._asdict(), "servings": servings})
        return
    ranks = loader.batch_sampler.world_size
    searched = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs.start}:{epochs.stop}"
    left_out = ", because exclude leaves it out" if is_excluded(loader, index) else ""
    print_line(f"record {index} ({location}): served {count_of(len(found), 'time')} in {searched}{left_out}", "bold")
    has_offset = any(serving.offset is not None for serving in found)
    columns = ["epoch", "step", *(["rank"] if ranks > 1 else []), "row", *(["offset"] if has_offset else [])]
    rows = [tuple(f"{getattr(serving, name):,}" for name in columns) for serving in found[:_SHOWN_SERVINGS]]
    if rows:
        print_table(dict.fromkeys(columns, "right"), rows)
    if len(found) > len(rows):
        print_line(f"... and {len(found) - len(rows):,} more; --json prints all")


def _spike(loader: Loader[Any], text: str, top: int, exclude: str | None, as_json: bool) -> None:
    report = rank_by_loss(loader, StepLosses.parse(text, loader), top=top)
    if exclude is not None:
        options.write_file(exclude, _exclude_lines(loader, report), "--exclude")
    if as_json:
        print_json({**dataclasses.asdict(report), "exclude": exclude})
        return
    print_line(f"mean loss {report.loss:.4g} ± {report.spread:.4g} per step", "bold")
    _print_suspects("record", report.records)
    if report.shards:
        _print_suspects("shard", report.shards)
    if exclude is not None:
        print_line(f"wrote {exclude}: use it as loader.exclude")


def _print_suspects(kind: str, suspects: Sequence[Suspect]) -> None:
    columns = {"mean loss": "right", "steps": "right", kind: "right", "location": "left"}
    rows = [(f"{each.loss:.4g}", f"{each.steps:,}", f"{each.index:,}", each.name) for each in suspects]
    print_line()
    print_table(columns, rows)


def _exclude_lines(loader: Loader[Any], report: SpikeReport) -> str:
    """Return lines of an error report, which `exclude` of a loader reads."""
    lines: list[str] = []
    for each in report.records:
        location = locate(loader.source, each.index)
        entry = {"index": each.index, "source": shown(loader.source), **location._asdict(), "loss": each.loss}
        lines.append(json_module.dumps(entry) + "\n")
    return "".join(lines)


def schema_command() -> None:
    """Print the JSON schema of a config, for editors that check and complete TOML or YAML.

    Example: dataload schema > dataload.schema.json
    """
    print_json(json_schema())
