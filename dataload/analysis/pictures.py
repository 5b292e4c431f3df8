"""Pictures of orders, streams and timelines. matplotlib is loaded when the first one is drawn."""

from __future__ import annotations

import math
import os
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from dataload._util.checks import check_directory
from dataload._util.optional import load_optional
from dataload.analysis.job_plan import JobPlan
from dataload.analysis.timeline import CONSUMER, Timeline
from dataload.errors import ConfigError
from dataload.samplers.order_sample import OrderSample, Shards, displacements, expected_shards, shards_per_batch
from dataload.samplers.streams.report import StreamPlanner, StreamReport, follow
from dataload.types import Int64Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".pdf", ".png", ".svg")
_WIDTH = 15  # inches
_DOTS = 5_000
_BINS = 50
_FOUND, _IDEAL = {"color": "tab:blue", "label": "this order"}, {"color": "tab:orange", "label": "uniform shuffle"}
_COLOURS = {
    "download": "tab:olive",
    "read": "tab:blue",
    "decode": "tab:cyan",
    "transform": "tab:orange",
    "collate": "tab:purple",
    "batch_transform": "tab:brown",
    "consumer waits": "tab:red",
    "consumer works": "tab:green",
}
_CONNECTIONS = "downloads"
_NUMBERED_STEPS = 60
_ROWS = 64
_ROW_BEGINNINGS = 10  # per row, approximately; with more, the picture would be all lines
_CELLS = 1 << 20


def check_picture(path: str) -> None:
    """Check that a picture can be drawn and saved to `path`, before any other work is done.

    Raises:
        ConfigError: The suffix is not ``.png``, ``.svg`` or ``.pdf``, or the directory does not exist.
        MissingDependencyError: matplotlib is not installed.
    """
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: the suffix of a picture must be one of {', '.join(_SUFFIXES)}", key="picture")
    check_directory(path, "picture")
    load_optional("matplotlib.figure", needed_by="a picture", extra="plot")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; `width` and `height` are in inches."""
    # pyplot would keep every figure alive and select a backend for the whole process.
    module = load_optional("matplotlib.figure", needed_by="a picture", extra="plot")
    return module.Figure(figsize=(width, height), dpi=120, layout="constrained")


def order_figure(sample: OrderSample, shards: Shards, title: str) -> Figure:
    """Draw where records end up, how far they move, and how many shards each batch mixes, side by side."""
    figure = new_figure(_WIDTH, 5)
    title = textwrap.fill(title, 120)
    figure.suptitle(title if sample.whole else f"{title}\n{len(sample.indices):,} positions of {sample.length:,}")
    positions, moves, mixing = figure.subplots(1, 3)

    shown = _evenly(len(sample.indices))
    positions.plot(sample.positions[shown], sample.indices[shown], ".", markersize=2, **_FOUND)
    positions.set(
        title="Order of the records",
        xlabel=f"position in epoch {sample.epoch} (records)",
        ylabel="index in the data (records)",
        xlim=(0, sample.length),
        ylim=(0, sample.records),
    )

    moves.hist(displacements(sample), _BINS, range=(0, 1), density=True, **_FOUND)
    moves.plot([0, 1], [2, 0], **_IDEAL)
    moves.set(
        title="How far records move",
        xlabel="|index - position| (fraction of the epoch)",
        ylabel="density (per unit of that fraction)",
        xlim=(0, 1),
    )
    moves.legend()

    noun = "shards" if shards.files else "parts"
    found = shards_per_batch(sample, shards)
    ideal = expected_shards(shards, np.bincount(sample.batches, minlength=len(sample.steps)))
    shown = _evenly(len(found))
    mixing.plot(sample.steps[shown], found[shown], ".", markersize=3, **_FOUND)
    mixing.plot(sample.steps[shown], ideal[shown], **_IDEAL)
    mixing.set(
        title=f"How many of {len(shards):,} {noun} a batch mixes",
        xlabel=f"step of epoch {sample.epoch}",
        ylabel=f"{noun} per batch of all ranks",
        xlim=(0, max(1, sample.epoch_steps - 1)),
        ylim=(0, 1.05 * max(found.max(), ideal.max())),
    )
    mixing.legend(loc="center")
    return figure


def _evenly(count: int) -> Int64Array:
    """Return at most `_DOTS` evenly spaced numbers in [0, count)."""
    return np.unique(np.linspace(0, count - 1, min(count, _DOTS)).astype(np.int64))


def stream_figure(planner: StreamPlanner, report: StreamReport, title: str) -> Figure:
    """Draw which sequence each row follows: rows over steps, coloured by sequence, a line where a row starts anew.

    A long epoch is cut after the steps in which a row starts about ten sequences; of many rows the first 64 are shown.
    `planner` may be that of any rank.
    """
    run = report.run_steps or (report.steps if report.continuing else 1)
    steps = min(report.steps, max(20, math.ceil(_ROW_BEGINNINGS * run)))
    steps = min(steps, max(1, _CELLS // (report.rows * report.chunk)))
    rows = min(report.rows, _ROWS)
    found = follow(planner, range(steps), epoch=report.epoch)
    stream_id = found.stream_id[:, :rows].T

    figure = new_figure(_WIDTH, 2 + 0.15 * max(rows, 10))
    axes = figure.subplots()
    colours = np.ma.masked_array(stream_id % 20, stream_id < 0)
    extent = 0, steps, rows - 0.5, -0.5  # row 0 is at the top, centred at 0
    axes.imshow(colours, cmap="tab20", vmin=0, vmax=19, aspect="auto", interpolation="nearest", extent=extent)
    axes.hlines(np.arange(rows - 1) + 0.5, 0, steps, color="white", linewidth=1)
    # Rows that never continue would be all lines.
    step, row, offset = np.nonzero(found.is_first[:, :rows] & found.continues[:rows, None])
    axes.vlines(step + offset / report.chunk, row - 0.45, row + 0.45, color="black", linewidth=1)
    shown = "" if steps == report.steps else f"the first {steps:,} of {report.steps:,} steps; "
    shown += "" if rows == report.rows else f"{rows} of {report.rows:,} rows; "
    axes.set(
        title=f"{textwrap.fill(title, 120)}\n{shown}colour: sequence; black line: new sequence; white: no record",
        xlabel=f"step of epoch {report.epoch}",
        ylabel="row of all ranks",
        xlim=(0, steps),
    )
    axes.locator_params(integer=True)
    return figure


def timeline_figure(timeline: Timeline, title: str) -> Figure:
    """Draw who worked when: a line per worker, coloured by stage, and the consumer's line below them.

    Batches that the consumer makes itself are drawn on its own line, over its wait. Requests to object stores are on a
    line at the bottom, one above another if there are several at once.
    """
    connections = timeline.connections
    names = [*timeline.workers, CONSUMER, *([_CONNECTIONS] if connections else [])]
    figure = new_figure(_WIDTH, 2 + 0.5 * len(names))
    axes = figure.subplots()
    heights = {name: len(names) - 1 - number for number, name in enumerate(names)}
    origin = timeline.begun

    bars: dict[tuple[str, str], list[tuple[float, float]]] = {
        ("consumer waits", CONSUMER): [(step.asked, step.received) for step in timeline.steps],
        ("consumer works", CONSUMER): timeline.work,
    }
    for step in timeline.steps:
        for stage, begun, ended in step.spans:
            bars.setdefault((stage, step.worker), []).append((begun, ended))
    for (what, name), spans in bars.items():
        thickness = 0.5 if name == CONSUMER and not what.startswith("consumer") else 0.8
        if spans:
            axes.broken_barh(
                [(begun - origin, ended - begun) for begun, ended in spans],
                (heights[name] - thickness / 2, thickness),
                color=_COLOURS.get(what, "tab:gray"),
                label=what,
                linewidth=0,
            )
    for number, line in enumerate(connections):
        axes.broken_barh(
            [(request.begun - origin, request.ended - request.begun) for request in line],
            (heights[_CONNECTIONS] - 0.4 + 0.8 * number / len(connections), 0.8 / len(connections)),
            color=["tab:red" if request.failed else _COLOURS["download"] for request in line],
            linewidth=0,
        )
    for step in timeline.steps if len(timeline.steps) <= _NUMBERED_STEPS else ():
        if step.spans:
            middle = (step.spans[0][1] + step.spans[-1][2]) / 2 - origin
            axes.text(middle, heights[step.worker], str(step.step), ha="center", va="center", size=7, clip_on=True)
    seconds = max(timeline.ended - origin, 1e-6)
    axes.set(title=title, xlabel="time (s)", xlim=(0, seconds), ylim=(-0.6, len(names) - 0.4))
    axes.set_yticks(list(heights.values()), names)
    entries = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # one entry per label
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries))
    return figure


def plan_figure(plan: JobPlan, title: str) -> Figure:
    """Draw which shards nodes begin to read when, and how many nodes begin to read shards at a time."""
    figure = new_figure(_WIDTH, 6)
    figure.suptitle(textwrap.fill(title, 120))
    shards, total = figure.subplots(1, 2)
    image = shards.imshow(plan.load, aspect="auto", origin="lower", extent=(0, plan.steps, 0, plan.shards))
    figure.colorbar(image, ax=shards, label="times that a node begins to read a shard")
    shards.set(title="Load by shard", xlabel="step of epoch 0", ylabel="shard")
    starts = np.arange(len(plan.load)) * plan.steps / len(plan.load)
    total.bar(starts, plan.load.sum(axis=0), plan.steps / len(plan.load), align="edge", **_FOUND)
    total.set(
        title="Load of the store",
        xlabel="step of epoch 0",
        ylabel="shards that nodes begin to read (per hundredth of the epoch)",
        xlim=(0, plan.steps),
    )
    return figure
