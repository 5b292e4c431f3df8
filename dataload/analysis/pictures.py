"""Pictures of orders, streams and timelines."""

from __future__ import annotations

import math
import os
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dataload._util.lazy import load_optional
from dataload._util.settings import check_directory
from dataload.analysis.timeline import CONSUMER, Timeline
from dataload.errors import ConfigError, printable
from dataload.samplers.quality import (
    OrderReport,
    OrderSample,
    ShardLayout,
    displacements,
    expected_shards,
    shards_per_batch,
)
from dataload.samplers.streams.report import Followed, StreamPlanner, StreamReport, follow
from dataload.types import Int64Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".pdf", ".png", ".svg")
_DPI = 120
_TITLE_CHARACTERS, _TEXT_CHARACTERS = 7.6, 13.2  # of the title and other text, per inch

# Okabe and Ito's colours, which differ for colour-blind readers, too.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
PAGE, BAND, LINE, SOFT, INK = "#ffffff", "#f1f3f5", "#d3d9df", "#59636e", "#1b1f24"
TINTS = ("#c1d9f7", "#f5e1a8", "#bdadf7", "#d4a8bf", "#83c397")
"""Fills under text in `INK`, told apart by colour-blind readers if they touch."""


def check_picture(path: str) -> None:
    """Check that a picture can be drawn and saved to `path`, before any other work is done."""
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: the suffix of a picture must be one of {', '.join(_SUFFIXES)}", key="picture")
    check_directory(path, "picture")
    load_optional("matplotlib.figure", needed_by="a picture", extra="plot")


def new_figure(width: float, height: float, finding: str, about: str) -> Figure:
    """Return a figure of this size in inches, with the finding as its title, and what is drawn below the axes."""
    # pyplot would keep every figure alive and select a backend for the whole process.
    module = load_optional("matplotlib.figure", needed_by="a picture", extra="plot")
    figure = module.Figure(figsize=(width, height), dpi=_DPI, facecolor=PAGE)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)  # inches
    text: dict[str, Any] = {"x": 0.01, "ha": "left", "parse_math": False}
    title = textwrap.fill(printable(finding, None), int(width * _TITLE_CHARACTERS))
    figure.suptitle(title, fontsize=15, fontweight="bold", color=INK, **text)
    below = textwrap.fill(printable(about, None), int(width * _TEXT_CHARACTERS))
    figure.supxlabel(below, fontsize=9.5, color=SOFT, **text)
    return figure


def frame(axes: Axes, **labels: Any) -> None:
    """Style axes with the least that frames data; `labels` are properties of axes."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=SOFT, labelsize=8.5, length=3, color=LINE)
    axes.tick_params(axis="y", length=0)
    axes.set(**labels)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=SOFT, fontsize=9)


def key(axes: Axes, entries: dict[str, Any]) -> None:
    """Add a legend in one line above axes; `entries` maps texts to marks."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": len(entries)}
    look: dict[str, Any] = {"fontsize": 9, "frameon": False, "labelcolor": INK, "handlelength": 1.2}
    legend = axes.legend(entries.values(), entries.keys(), **place, **look)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is a dollar sign


def swatch(colour: str, edge: str | None = None) -> Any:
    """Return a filled square for `key`."""
    patches: Any = load_optional("matplotlib.patches", needed_by="a picture", extra="plot")
    return patches.Patch(facecolor=colour, edgecolor=edge or colour, linewidth=0.8)


def whole(axis: Any, most: int = 6) -> None:
    """Put at most `most` ticks on an axis, at integers, with short labels."""
    ticker: Any = load_optional("matplotlib.ticker", needed_by="a picture", extra="plot")
    axis.set_major_locator(ticker.MaxNLocator(most, integer=True, min_n_ticks=1))
    axis.set_major_formatter(_tick)


def _tick(value: float, _: object) -> str:
    return short(value)


def short(value: float) -> str:
    """Return a number with at most three digits or, below 10,000, as it is: ``"9,500"``, ``"12.5k"``, ``"10G"``."""
    if abs(value) < 9_999.5:
        return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    unit, name = next((unit, name) for unit, name in units if abs(value) >= 0.9995 * unit)
    return f"{float(f'{value:.3g}') / unit:g}{name}"


_WIDTH = 14.0  # inches
_DOTS = 5_000
_BINS = 50
_PANEL_TITLE = 44  # characters
_ROWS = 64
_ROW_BEGINNINGS = 10  # per row, approximately; with more, the picture would be all lines
_CELLS = 1 << 20
_DIGIT = 0.078  # inches; width of a digit of a sequence's number


def order_figure(sample: OrderSample, shards: ShardLayout, report: OrderReport, about: str) -> Figure:
    """Draw where records end up, how far they move, and how many shards each batch mixes, side by side."""
    if not sample.whole:
        about = f"{about} (a sample: {len(sample.indices):,} positions of {sample.length:,})"
    figure = new_figure(_WIDTH, 5.4, _sentence(report.mixing.verdict), about)
    places, moves, mixing = figure.subplots(1, 3)
    _head(places, "where each record of the data comes")
    _draw_places(places, sample)

    _, _, found = moves.hist(displacements(sample), _BINS, range=(0, 1), density=True, color=BLUE)
    (ideal,) = moves.plot([0, 1], [2, 0], color=ORANGE, linewidth=2)
    _head(moves, report.displacement.verdict)
    frame(
        moves,
        xlabel="distance from index order (fraction of the epoch)",
        ylabel="density of records (per such fraction)",
        xlim=(0, 1),
        ylim=(0, None),
    )
    moves.legend([found, ideal], ["this order", "a uniform shuffle"], fontsize=9, frameon=False, labelcolor=INK)

    noun = "shards" if shards.files else "parts"
    per_batch = shards_per_batch(sample, shards)
    expected = expected_shards(shards, np.bincount(sample.batches, minlength=len(sample.steps)))
    shown = _evenly(len(per_batch))
    dots: dict[str, Any] = {"markersize": 4 if len(shown) < 500 else 2, "clip_on": False, "markeredgewidth": 0}
    mixing.plot(sample.steps[shown], per_batch[shown], "o", color=BLUE, **dots)
    mixing.plot(sample.steps[shown], expected[shown], color=ORANGE, linewidth=2, marker="o" if len(shown) == 1 else "")
    most = max(1, sample.epoch_steps - 1)
    _head(mixing, f"how many {noun} each batch mixes")
    frame(
        mixing,
        xlabel=f"step of epoch {sample.epoch}",
        ylabel=f"{noun} in a batch of all ranks, of {len(shards):,}",
        xlim=(-0.02 * most, 1.02 * most),
        ylim=(0, 1.08 * max(per_batch.max(), expected.max())),
    )
    for axis in (mixing.xaxis, mixing.yaxis):
        whole(axis)
    return figure


def _draw_places(axes: Axes, sample: OrderSample) -> None:
    shown = _evenly(len(sample.indices))
    size = 5 if len(shown) < 500 else 2
    dots: dict[str, Any] = {"markersize": size, "clip_on": False, "markeredgewidth": 0}
    axes.plot(sample.positions[shown], sample.indices[shown], "o", color=BLUE, **dots)
    frame(
        axes,
        xlabel=f"position in epoch {sample.epoch} (records)",
        ylabel="index in the data (records)",
        xlim=(-0.02 * sample.length, 1.02 * sample.length),
        ylim=(-0.02 * sample.records, 1.02 * sample.records),
    )
    for axis in (axes.xaxis, axes.yaxis):
        whole(axis)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _head(axes: Axes, finding: str) -> None:
    text = textwrap.fill(_sentence(finding), _PANEL_TITLE)
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK, pad=9)


def _evenly(count: int) -> Int64Array:
    """Return at most `_DOTS` evenly spaced numbers in [0, count)."""
    return np.unique(np.linspace(0, count - 1, min(count, _DOTS)).astype(np.int64))


def stream_figure(planner: StreamPlanner, report: StreamReport, about: str) -> Figure:
    """Draw which sequence each row follows: rows over steps, with the numbers of the sequences where they fit."""
    # A long epoch is cut after the steps in which a row starts about ten sequences; of many rows the first 64 are
    # shown.
    run = report.run_steps or (report.steps if report.continuing else 1)
    steps = min(report.steps, max(20, math.ceil(_ROW_BEGINNINGS * run)))
    steps = min(steps, max(1, _CELLS // (report.rows * report.chunk)))
    rows = min(report.rows, _ROWS)
    found = follow(planner, range(steps), epoch=report.epoch)
    shown = f"steps 0 to {steps - 1:,} of {report.steps:,}" if steps < report.steps else f"all {steps:,} steps"
    shown += "" if rows == report.rows else f", rows 0 to {rows - 1:,} of {report.rows:,}"

    tall = 0.34 if rows <= 12 else 0.16
    figure = new_figure(_WIDTH, 2.1 + tall * rows, _finding(report), f"{about}: {shown}")
    axes = figure.subplots()
    _draw_rows(axes, found, rows, report.chunk, numbered=tall > 0.3)
    frame(axes, xlabel=f"step of epoch {report.epoch}", ylabel="row of all ranks", xlim=(0, steps))
    whole(axes.xaxis, 12)
    whole(axes.yaxis, 12)
    entries = {
        "one sequence, with its number": swatch(TINTS[0]),
        "a new sequence starts": axes.plot([], [], color=INK, linewidth=1.5)[0],
        "no record": swatch(BAND, LINE),
    }
    key(axes, entries)
    return figure


def _finding(report: StreamReport) -> str:
    finding = "Every row takes chunks from anywhere, none continues" if not report.continuing else "No row starts anew"
    if report.run_steps is not None:
        finding = f"Rows continue: each starts a new sequence every {report.run_steps:.3g} steps on average"
    return f"{finding}; {report.filler:.1%} of the cells are empty" if report.filler else finding


def _draw_rows(axes: Axes, found: Followed, rows: int, chunk: int, *, numbered: bool) -> None:
    from matplotlib.colors import ListedColormap

    stream_id = found.stream_id[:, :rows].T
    steps, most = stream_id.shape[1], len(TINTS)
    tints = np.ma.masked_array(stream_id % most, stream_id < 0)
    axes.imshow(
        tints,
        cmap=ListedColormap(TINTS),
        vmin=0,
        vmax=most - 1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, steps, rows - 0.5, -0.5),  # row 0 is at the top, centred at 0
    )
    axes.set_facecolor(BAND)
    axes.hlines(np.arange(rows - 1) + 0.5, 0, steps, color=PAGE, linewidth=1.5)
    # Rows that never continue would be all lines.
    step, row, offset = np.nonzero(found.is_first[:, :rows] & found.continues[:rows, None])
    axes.vlines(step + offset / chunk, row - 0.45, row + 0.45, color=INK, linewidth=1.5)
    if not numbered:
        return
    cell = (_WIDTH - 1.15) / steps
    for number, ids in enumerate(stream_id):
        starts = np.flatnonzero(np.diff(ids, prepend=-2))
        for start, stop in zip(starts, [*starts[1:], steps], strict=True):
            text = str(ids[start])
            if ids[start] >= 0 and (stop - start) * cell > _DIGIT * (len(text) + 1):
                axes.text((start + stop) / 2, number, text, ha="center", va="center", size=8.5, color=INK)


_STAGES = {
    "download": YELLOW,
    "read": BLUE,
    "decode": SKY,
    "transform": ORANGE,
    "collate": PURPLE,
    "batch_transform": GREEN,
}
_WAITS, _WORKS, _MAKES, _DOWNLOADS = "consumer waits", "consumer works", "consumer makes", "downloads"
_LANE = 0.5  # inches
_START = 0.25  # fraction of the time that workers may take to start before that is left out


def timeline_figure(timeline: Timeline, verdict: str, about: str) -> Figure:
    """Draw who worked when: a lane for each worker, below them the consumer and requests; bars are stages."""
    made_here = any(step.worker == CONSUMER and step.rows for step in timeline.steps)  # not only joined
    names = [*timeline.workers, *([_MAKES] if made_here else []), CONSUMER, *([_DOWNLOADS] * bool(timeline.requests))]
    begun = _begin(timeline)
    seconds = max(timeline.ended - begun, 1e-6)
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    figure = new_figure(_WIDTH, 2.1 + _LANE * len(names), _sentence(verdict), _described(about, timeline))
    axes = figure.subplots()
    frame(axes, xlabel=f"time ({unit})", xlim=(0, seconds * scale), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), [_label(name, timeline) for name in names])
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9.5)
    axes.barh(range(len(names)), seconds * scale, 0.84, color=BAND, zorder=0)
    for (what, name), (spans, colours) in _spans(timeline, _MAKES if made_here else CONSUMER).items():
        bars = [((first - begun) * scale, (last - first) * scale) for first, last in spans]
        axes.broken_barh(bars, (names.index(name) - 0.42, 0.84), color=colours, linewidth=0, label=what)
    entries = _entries(timeline)
    for before, step in pairwise(timeline.steps):
        if step.epoch != before.epoch:
            look: dict[str, Any] = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 0.5}
            entries["a new epoch"] = axes.axvline((step.asked - begun) * scale, **look)
    for number, name in enumerate(names):
        options: dict[str, Any] = {"va": "center", "size": 9, "color": SOFT, "clip_on": False}
        axes.text(1.01, number, _share(timeline, name, seconds), transform=axes.get_yaxis_transform(), **options)
    key(axes, entries)
    return figure


def _waits(timeline: Timeline) -> float:
    """Return the fraction of its time that the consumer waits, without the first wait, in which workers start."""
    waits = sorted({(step.asked, step.received) for step in timeline.steps})
    waited = sum(received - asked for asked, received in waits[1:])
    worked = sum(ended - begun for begun, ended in timeline.work)
    return waited / (waited + worked) if waited + worked else 0.0


def _shares(timeline: Timeline) -> dict[str, float]:
    """Return the fraction of the work that each stage takes, stages in their usual order."""
    seconds = dict.fromkeys(_STAGES, 0.0)
    for stage, begun, ended in (span for step in timeline.steps for span in step.spans):
        seconds[stage] += ended - begun
    total = sum(seconds.values())
    return {name: took / total for name, took in seconds.items() if took}


def _begin(timeline: Timeline) -> float:
    """Return when the picture begins: with the first work, if most of the time nothing happens before it."""
    works = [step.spans[0][1] for step in timeline.steps if step.spans]
    works += [request.begun for request in timeline.requests]
    first = min(works, default=timeline.begun)
    return first if first - timeline.begun > _START * (timeline.ended - timeline.begun) else timeline.begun


def _described(about: str, timeline: Timeline) -> str:
    if not timeline.steps:
        return about
    first, last = timeline.steps[0], timeline.steps[-1]
    of_first, word = ("", "") if first.epoch == last.epoch else (f" of epoch {first.epoch}", "step ")
    left_out = _begin(timeline) - timeline.begun
    start = f"; the {left_out:.1f} s in which workers start are left out" if left_out else ""
    return f"{about}: step {first.step:,}{of_first} to {word}{last.step:,} of epoch {last.epoch}{start}"


def _label(name: str, timeline: Timeline) -> str:
    """Return the name of a lane, with the rows of a worker that makes the same ones of every batch."""
    worker = name.removeprefix("dataload-")
    first = timeline.steps[0] if timeline.steps else None
    same = [s for s in timeline.steps if first is not None and (s.epoch, s.step) == (first.epoch, first.step)]
    ends = np.cumsum([step.rows for step in same]).tolist()
    rows = {step.worker: f"\nrows {end - step.rows}-{end - 1}" for step, end in zip(same, ends, strict=True)}
    return name if worker == name else f"worker {worker}{rows.get(name, '') if len(rows) > 1 else ''}"


def _spans(timeline: Timeline, makes: str) -> dict[tuple[str, str], tuple[list[tuple[float, float]], Any]]:
    """Return spans of time and their colours by kind and lane; `makes` is the consumer's lane of work."""
    found: dict[tuple[str, str], tuple[list[tuple[float, float]], Any]] = {
        (_WAITS, CONSUMER): (list(dict.fromkeys((step.asked, step.received) for step in timeline.steps)), VERMILLION),
        (_WORKS, CONSUMER): (timeline.work, SOFT),
    }
    for step in timeline.steps:
        for stage, begun, ended in step.spans:
            name = makes if step.worker == CONSUMER else step.worker
            found.setdefault((stage, name), ([], _STAGES[stage]))[0].append((begun, ended))
    if timeline.requests:
        spans = [(request.begun, request.ended) for request in timeline.requests]
        found["request", _DOWNLOADS] = spans, [INK if request.failed else YELLOW for request in timeline.requests]
    return found


def _share(timeline: Timeline, name: str, seconds: float) -> str:
    """Return how much of the time a lane is busy, as text."""
    if name == _DOWNLOADS:
        return f"{len(timeline.requests):,} request{'' if len(timeline.requests) == 1 else 's'}"
    if name == CONSUMER:
        return f"waits {_waits(timeline):.0%}"
    return f"busy {timeline.busy_seconds(CONSUMER if name == _MAKES else name) / seconds:.0%}"


def _entries(timeline: Timeline) -> dict[str, Any]:
    """Return the entries of the legend: texts and marks."""
    entries = {
        f"{name} {'<1%' if share < 0.005 else f'{share:.0%}'}": swatch(_STAGES[name])
        for name, share in _shares(timeline).items()
    }
    entries |= {_WAITS: swatch(VERMILLION), _WORKS: swatch(SOFT)}
    if any(request.failed for request in timeline.requests):
        entries["failed request"] = swatch(INK)
    return {**entries, "idle": swatch(BAND, LINE)}
