"""``dataload timeline``."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from time import sleep
from typing import Annotated, Any, cast

import typer

from dataload._util.checks import check_directory
from dataload.analysis.pictures import check_picture, timeline_figure
from dataload.analysis.timeline import CONSUMER, Timeline, record_timeline
from dataload.api import from_config
from dataload.cli.options import ConfigFile, JsonFlag, Overrides, Picture
from dataload.cli.output import print_json, print_line
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.loader.statistics import Statistics

__all__ = ["timeline_command"]


def timeline_command(
    config: ConfigFile,
    overrides: Overrides = None,
    epoch: Annotated[int, typer.Option("--epoch", min=0, help="Which epoch to begin with.")] = 0,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="How many steps, of more than one epoch if need be.")
    ] = 50,
    model_ms: Annotated[
        float, typer.Option("--model-ms", min=0, help="Milliseconds that a model would take for each batch.")
    ] = 0.0,
    picture: Picture = None,
    trace: Annotated[
        str | None, typer.Option("--trace", help="Write a .json for ui.perfetto.dev or chrome://tracing.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Run the loader of a config for some steps, and show who worked, who waited, and what the limit is."""
    if picture is not None:
        check_picture(picture)
    if trace is not None:
        check_directory(trace, "trace")
    with from_config(config, overrides=overrides or ()) as loader, closing(cast("Any", loader.source)):
        loader.set_epoch(epoch)
        with record_timeline(loader) as timeline:
            _consume(loader, steps, model_ms / 1000)
        statistics = loader.statistics()
    if not timeline.steps:
        raise ConfigError(f"{config} has no step in epoch {epoch}", key="epoch", value=epoch)
    if picture is not None:
        timeline_figure(timeline, f"{config}, epoch {epoch}: {statistics.verdict}").savefig(picture)
    if trace is not None:
        timeline.save_trace(trace)
    if json:
        written = {"picture": picture, "trace": trace}
        print_json({"statistics": statistics.to_json(), "timeline": timeline.to_json(), **written})
    else:
        _print(statistics, timeline, [name for name in (picture, trace) if name is not None])


def _consume(loader: Loader[Any], steps: int, model_seconds: float) -> None:
    """Take so many batches, or all that there are."""
    while steps:
        before = steps
        for _ in islice(loader, steps):
            steps -= 1
            sleep(model_seconds)
        if steps == before:
            return


def _print(statistics: Statistics, timeline: Timeline, written: list[str]) -> None:
    *lines, verdict = str(statistics).splitlines()
    for line in lines:
        print_line(line)
    seconds = timeline.ended - timeline.begun
    for worker in (*timeline.workers, CONSUMER):
        made = sum(step.worker == worker for step in timeline.steps)
        if made:
            busy = timeline.busy_seconds(worker) / seconds
            print_line(f"{worker} made {made:,} of them, at work {busy:.0%} of the time")
    print_line(verdict, "bold")
    for path in written:
        print_line(f"written to {path}")
