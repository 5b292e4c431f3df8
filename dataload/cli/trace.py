"""``dataload trace``."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from dataload.analysis.trace import SpikeReport, StepLosses, Suspect, find_key, rank_by_loss, trace_record
from dataload.api import record_loader
from dataload.cli.options import (
    Changes,
    ConfigFile,
    JsonFlag,
    Overrides,
    State,
    WorldSize,
    check_new,
    load_state,
    parse_range,
    ranks_of,
    read_file,
    write_file,
)
from dataload.cli.output import count_of, print_json, print_line, print_table
from dataload.errors import ConfigError
from dataload.loader.bad_records import shown
from dataload.loader.loader import Loader
from dataload.sources.shards import locate

_SHOWN_SERVINGS = 1000


def trace_command(
    config: ConfigFile,
    overrides: Overrides = None,
    index: Annotated[int | None, typer.Option(min=0, help="Index of the record to trace.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of the record to trace, where records have keys.")] = None,
    epochs: Annotated[str, typer.Option(help="Epochs to search: one (2) or a range (0:3).")] = "0:3",
    steps: Annotated[str | None, typer.Option(help="Search only these steps of each epoch.")] = None,
    world_size: WorldSize = None,
    state: State = None,
    changes: Changes = None,
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
    json: JsonFlag = False,
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
        check_new(exclude, "--exclude")
    settings = [*(overrides or ()), *ranks_of(None, world_size)]
    with record_loader(config, overrides=settings) as loader:
        load_state(loader, state, changes)
        if spike is not None:
            _spike(loader, read_file(spike, "--spike"), top, exclude, json)
            return
        if index is None:
            index = find_key(loader.source, cast("str", key))
        _trace(loader, index, parse_range(epochs, "--epochs"), steps, json)


def _trace(loader: Loader[Any], index: int, epochs: range, steps: str | None, as_json: bool) -> None:
    found = trace_record(loader, index, epochs, None if steps is None else parse_range(steps, "--steps"))
    location = locate(loader.source, index)
    if as_json:
        servings = [dataclasses.asdict(serving) for serving in found]
        print_json({"index": index, "location": location._asdict(), "servings": servings})
        return
    ranks = loader.batch_sampler.world_size
    searched = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs.start}:{epochs.stop}"
    print_line(f"record {index} ({location}): served {count_of(len(found), 'time')} in {searched}", "bold")
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
        write_file(exclude, _exclude_lines(loader, report), "--exclude")
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
