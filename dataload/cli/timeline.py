"""``dataload timeline``."""

from dataclasses import asdict
from itertools import islice
from time import sleep
from typing import Annotated, Any

import typer

from dataload._util.settings import check_directory
from dataload.analysis.pictures import check_picture, timeline_figure
from dataload.analysis.timeline import CONSUMER, FleetEstimate, Timeline, record_timeline
from dataload.api import from_config
from dataload.cli.options import ConfigFile, JsonFlag, Overrides, Picture
from dataload.cli.output import count_of, print_json, print_line
from dataload.errors import ConfigError
from dataload.loader.base import LoaderBase


def timeline_command(
    config: ConfigFile,
    overrides: Overrides = None,
    epoch: Annotated[int, typer.Option(min=0, help="First epoch.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps, over several epochs if needed.")] = 50,
    model_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that a simulated model takes per batch.")] = 0.0,
    picture: Picture = None,
    trace: Annotated[str | None, typer.Option(help="Save a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    fleet: Annotated[int | None, typer.Option(min=1, help="Also estimate a Ray fleet of this many workers.")] = None,
    json: JsonFlag = False,
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
