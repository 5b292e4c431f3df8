"""Pictures of a run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from dataload.analysis.pictures import new_figure
from dataload.bench.results import Curve, Measurement, Results
from dataload.bench.table import baselines, by_workload, describe_task
from dataload.bench.timing import Spread
from dataload.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"dataload": "tab:blue", "peer": "tab:orange"}
_DASHES = ("-", "--", ":", "-.")
_LIMIT = "tab:red"
_WIDTH = 11.0  # inches
_LABEL_CHARACTERS = 80


def rates_figure(results: Results) -> Figure:
    """Draw records per second of each reading as bars, and the limits as lines, in a panel for each workload.

    A bar is the median of the repeats, the line at its end their spread; the number beside it is the ratio to the
    first limit, taken within each round. Readings without an answer are left out.
    """
    panels = by_workload([m for m in results.measurements if m.answers])
    bars = [max(1, sum(m.task.kind != "limit" for m in found)) for found in panels.values()]
    figure = new_figure(_WIDTH, 0.8 + sum(1.3 + 0.28 * count for count in bars))
    if not panels:
        return figure
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[4 + count for count in bars])[:, 0]
    for panel, (workload, found) in zip(axes, panels.items(), strict=True):
        _draw_rates(panel, found)
        panel.set_title(_shown(workload), parse_math=False, loc="left", fontweight="bold")
    return figure


def curves_figure(curves: Sequence[Curve]) -> Figure:
    """Draw costs against size, two panels a row, all axes logarithmic: a straight line is a power of the size."""
    rows = max(1, (len(curves) + 1) // 2)
    figure = new_figure(_WIDTH, 0.5 + 3.6 * rows)
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for panel, curve in zip(panels, curves, strict=False):
        for name, points in curve.lines.items():
            shown = [(x, y) for x, y in points if x > 0 and y > 0]  # zero has no logarithm
            if shown:
                panel.plot(*zip(*shown, strict=True), marker="o", markersize=3, label=_shown(name))
        panel.set(xscale="log", yscale="log")
        panel.set_title(_shown(curve.title), parse_math=False, fontsize=9)
        panel.set_xlabel(_shown(curve.x_label), parse_math=False)
        panel.set_ylabel(_shown(curve.y_label), parse_math=False)
        panel.grid(visible=True, alpha=0.3)
        if panel.lines:
            _legend(panel, loc="best")
    for panel in panels[len(curves) :]:
        panel.set_axis_off()
    return figure


def as_svg(figure: Figure) -> str:
    """Return a figure as an SVG document whose texts are outlines, so that it needs no font."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _draw_rates(axes: Axes, measurements: Sequence[Measurement]) -> None:
    read = [m for m in measurements if m.task.kind != "limit"]
    limits = [m for m in measurements if m.task.kind == "limit"]
    rates = [Spread.of(m.rates) for m in read]
    spread = [rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]
    colours = [_COLOURS[m.task.kind] for m in read]
    bars = axes.barh(
        range(len(read)), [rate.median for rate in rates], 0.7, color=colours, alpha=0.85, xerr=spread, capsize=3
    )
    ratios = [m.ratio_to(baselines(measurements)[0]) for m in read]
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
    labels = ["" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios]
    axes.bar_label(bars, labels, padding=5, fontsize=8, bbox=box)
    for limit, dashes in zip(limits, cycle(_DASHES), strict=False):
        rate = Spread.of(limit.rates).median
        axes.axvline(rate, color=_LIMIT, linestyle=dashes, linewidth=1.2, label=_shown(limit.task.name))
    axes.set_yticks(range(len(read)), [_shown(describe_task(m.task)) for m in read], parse_math=False)
    axes.set_ylim(max(1, len(read)) - 0.4, -0.6)  # the first bar is on top
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("records/s")
    axes.spines[["top", "right"]].set_visible(False)
    if limits:
        _legend(axes, loc="lower right", title="limits")


def _legend(axes: Axes, **options: Any) -> None:
    for text in axes.legend(fontsize=8, **options).get_texts():
        text.set_parse_math(False)  # a dollar sign in a name is a dollar sign


def _shown(text: str) -> str:
    return printable(text, _LABEL_CHARACTERS, kept="")
