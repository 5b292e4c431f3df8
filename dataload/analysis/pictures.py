"""Pictures. Only this module knows matplotlib, which is loaded when the first is drawn."""

from __future__ import annotations

import math
import os
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from dataload._util.checks import check_directory
from dataload._util.optional import load_optional
from dataload.analysis.timeline import CONSUMER, Timeline
from dataload.errors import ConfigError
from dataload.samplers.order_sample import (
    OrderSample,
    Shards,
    displacements,
    expected_shards,
    shards_per_batch,
)
from dataload.samplers.streams.report import StreamPlanner, StreamReport, follow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_picture", "order_figure", "stream_figure", "timeline_figure"]

_SUFFIXES = (".pdf", ".png", ".svg")
_DOTS = 5_000
_BINS = 50
_FOUND, _IDEAL = "tab:blue", "tab:orange"
_COLOURS = {
    "read": "tab:blue",
    "transform": "tab:orange",
    "collate": "tab:purple",
    "batch_transform": "tab:brown",
    "consumer waits": "tab:red",
    "consumer works": "tab:green",
}
_NUMBERED_STEPS = 60
_ROWS = 64
_ROW_BEGINNINGS = 10  # of each row, about: more would be all lines
_CELLS = 1 << 20


def check_picture(path: str) -> None:
    """See that a picture can be drawn and put there, before there is work to lose.

    Raises:
        ConfigError: The name ends otherwise than ``.png``, ``.svg`` or ``.pdf``, or there is no such directory.
        MissingDependencyError: matplotlib is not installed.
    """
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: a picture ends in {', '.join(_SUFFIXES)}", key="picture", value=path)
    check_directory(path, "picture")
    _matplotlib()


def order_figure(sample: OrderSample, shards: Shards, title: str) -> Figure:
    """Where records stand, how far they have moved, and how many shards batches mix, side by side.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    # Not pyplot: that keeps figures, and would choose a backend for whoever uses it next.
    figure: Figure = _matplotlib().Figure(figsize=(15, 5), dpi=120, layout="constrained")
    title = "\n".join(textwrap.wrap(title, 120))
    figure.suptitle(title if sample.whole else f"{title}\n{len(sample.indices):,} positions of {sample.length:,}")
    places, moves, mixing = figure.subplots(1, 3)
    _draw_places(places, sample)
    _draw_moves(moves, sample)
    _draw_mixing(mixing, sample, shards)
    return figure


def stream_figure(planner: StreamPlanner, report: StreamReport, title: str) -> Figure:
    """Which sequence each row follows, by colour: rows over steps, with a line where a row begins anew.

    Of a long epoch the first steps, in which a row begins anew about ten times; of many rows the first 64.

    Args:
        planner: The plan of any of the ranks.
        report: Of its epoch.
        title: Above the picture.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    run = report.run_steps or (report.steps if report.continuing else 1)
    steps = min(report.steps, max(20, math.ceil(_ROW_BEGINNINGS * run)))
    steps = min(steps, max(1, _CELLS // (report.rows * report.chunk)))
    rows = min(report.rows, _ROWS)
    found = follow(planner, range(steps), epoch=report.epoch)
    stream_id = found.stream_id[:, :rows].T

    figure: Figure = _matplotlib().Figure(figsize=(15, 2 + 0.15 * max(rows, 10)), dpi=120, layout="constrained")
    axes = figure.subplots()
    colours = np.ma.masked_array(stream_id % 20, stream_id < 0)
    extent = 0, steps, rows - 0.5, -0.5  # row 0 is above, and its middle is at 0
    axes.imshow(colours, cmap="tab20", vmin=0, vmax=19, aspect="auto", interpolation="nearest", extent=extent)
    axes.hlines(np.arange(rows - 1) + 0.5, 0, steps, color="white", linewidth=1)
    # Rows that never continue would be all lines.
    step, row, place = np.nonzero(found.is_first[:, :rows] & found.continues[:rows, None])
    axes.vlines(step + place / report.chunk, row - 0.45, row + 0.45, color="black", linewidth=1)
    shown = "" if steps == report.steps else f"the first {steps:,} of {report.steps:,} steps; "
    shown += "" if rows == report.rows else f"{rows} of {report.rows:,} rows; "
    axes.set(
        title=f"{textwrap.fill(title, 120)}\n{shown}colour: the sequence; black line: begins anew; white: no record",
        xlabel=f"step of epoch {report.epoch}",
        ylabel="row of all ranks",
        xlim=(0, steps),
    )
    axes.locator_params(integer=True)
    return figure


def timeline_figure(timeline: Timeline, title: str) -> Figure:
    """Who was at work when: a line for each worker, coloured by stage, and below them the consumer's.

    What the consumer made itself, having no workers or helping them, is on its own line, over its wait.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    names = [*timeline.workers, CONSUMER]
    figure: Figure = _matplotlib().Figure(figsize=(15, 2 + 0.5 * len(names)), dpi=120, layout="constrained")
    axes = figure.subplots()
    heights = {name: len(names) - 1 - number for number, name in enumerate(names)}
    origin = timeline.begun

    def draw(what: str, line: str, spans: list[tuple[float, float]], thickness: float) -> None:
        if spans:
            bars = [(begun - origin, ended - begun) for begun, ended in spans]
            place = heights[line] - thickness / 2, thickness
            axes.broken_barh(bars, place, color=_COLOURS.get(what, "tab:gray"), label=what, linewidth=0)

    waits = [(step.asked, step.received) for step in timeline.steps]
    draw("consumer waits", CONSUMER, waits, 0.8)
    draw("consumer works", CONSUMER, timeline.work, 0.8)
    for name in names:
        stages: dict[str, list[tuple[float, float]]] = {}
        for step in timeline.steps:
            for stage, begun, ended in step.spans if step.worker == name else ():
                stages.setdefault(stage, []).append((begun, ended))
        for stage, spans in stages.items():
            draw(stage, name, spans, 0.5 if name == CONSUMER else 0.8)
    if len(timeline.steps) <= _NUMBERED_STEPS:
        _number_steps(axes, timeline, heights)
    axes.set(
        title=title, xlabel="time (s)", xlim=(0, max(timeline.ended - origin, 1e-6)), ylim=(-0.6, len(names) - 0.4)
    )
    axes.set_yticks(list(heights.values()), list(heights))
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # one of each name
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries))
    return figure


def _number_steps(axes: Axes, timeline: Timeline, heights: dict[str, int]) -> None:
    for step in timeline.steps:
        if step.spans:
            middle = (step.spans[0][1] + step.spans[-1][2]) / 2 - timeline.begun
            axes.text(middle, heights[step.worker], str(step.step), ha="center", va="center", size=7, clip_on=True)


def _matplotlib() -> Any:
    return load_optional("matplotlib.figure", needed_by="a picture", extra="plot")


def _draw_places(axes: Axes, sample: OrderSample) -> None:
    shown = _evenly(len(sample.indices))
    axes.plot(sample.positions[shown], sample.indices[shown], ".", markersize=2, color=_FOUND)
    axes.set(
        title="Where records stand",
        xlabel=f"position in epoch {sample.epoch} (records)",
        ylabel="index in the data (records)",
        xlim=(0, sample.length),
        ylim=(0, sample.records),
    )


def _draw_moves(axes: Axes, sample: OrderSample) -> None:
    axes.hist(displacements(sample), _BINS, range=(0, 1), density=True, color=_FOUND, label="this order")
    axes.plot([0, 1], [2, 0], color=_IDEAL, label="uniform shuffle")
    axes.set(
        title="How far records move",
        xlabel="|index - position| (fraction of the epoch)",
        ylabel="density (per unit of that fraction)",
        xlim=(0, 1),
    )
    axes.legend()


def _draw_mixing(axes: Axes, sample: OrderSample, shards: Shards) -> None:
    found = shards_per_batch(sample, shards)
    ideal = expected_shards(shards, np.bincount(sample.batches, minlength=len(sample.steps)))
    shown = _evenly(len(found))
    axes.plot(sample.steps[shown], found[shown], ".", markersize=3, color=_FOUND, label="this order")
    axes.plot(sample.steps[shown], ideal[shown], color=_IDEAL, label="uniform shuffle")
    axes.set(
        title=f"How many of {len(shards):,} {shards.noun} a batch mixes",
        xlabel=f"step of epoch {sample.epoch}",
        ylabel=f"{shards.noun} per batch of all ranks",
        xlim=(0, max(1, sample.epoch_steps - 1)),
        ylim=(0, 1.05 * max(found.max(), ideal.max())),
    )
    axes.legend(loc="center")


def _evenly(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """At most so many of `count` things as a picture can show."""
    return np.unique(np.linspace(0, count - 1, min(count, _DOTS)).astype(np.int64))
