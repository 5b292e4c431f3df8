"""Results as pictures, and as one self-contained HTML file."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle, repeat
from typing import TYPE_CHECKING, Any

from dataload.analysis.pictures import new_figure
from dataload.bench import table
from dataload.bench.results import Curve, FileFacts, Measurement, Results
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

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5c6670; --page: #fff; --line: #d8dde2; --mark: #eef3f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #9aa4ae; --page: #16191c; --line: #363d44; --mark: #20262c }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
.table { overflow-x: auto; margin: 1rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { padding: .2rem .7rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap }
.right { text-align: right }
.limit td { color: var(--soft) }
.dataload td { background: var(--mark) }
pre { font: 13px/1.4 ui-monospace, monospace; background: var(--mark); padding: .6rem .8rem; white-space: pre-wrap }
img { max-width: 100%; background: #fff; border-radius: 6px; margin: .5rem 0 }
details details { margin-left: 1rem }
.note { color: var(--soft) }
""".strip()

_PAGE = """
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
""".lstrip()

_READING_IT = (
    "Each row is the median of its repeats; each repeat runs in a process of its own, and the repeats of all rows are "
    "interleaved. Records/s, page faults and system time are those of the steady state, after a warm-up; first touch/s "
    "is the rate of the first epoch. Spread: lowest and highest repeat over the median; of four or more repeats, the "
    "quartiles. Ratios are taken within each round, to the limit in the same order. CPU s/GB includes the workers. "
    "Mapped MB is memory of mapped files, which is part of peak MB, and which the system takes back when it needs it."
)


def report(results: Results) -> str:
    """Return the whole run as a page: tables with all columns, pictures, and the settings of each reading.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    title = _text(f"dataload bench, {results.date}")
    parts = [
        f"<h1>{title}</h1>",
        f"<pre>{_text(results.command)}</pre>",
        _details("Machine and versions", _pairs(results.machine) + _pairs(results.versions), opened=True),
    ]
    if results.measurements:
        parts.append(_image(rates_figure(results), "Records per second of each reading, with the limits"))
        parts.append(f'<p class="note">{_READING_IT}</p>')
    for workload, measurements in table.by_workload(results.measurements).items():
        parts += _workload(workload, measurements, [file for file in results.files if file.workload == workload])
    if results.curves:
        parts += ["<h2>How costs grow</h2>", _image(curves_figure(results.curves), "Costs against size")]
        parts += [_details(curve.title, _table(*table.curve_table(curve))) for curve in results.curves]
    return _PAGE.format(title=title, style=_STYLE, body="\n".join(parts))


def _workload(name: str, measurements: Sequence[Measurement], files: Sequence[FileFacts]) -> list[str]:
    named = zip(("limit", "best peer"), table.baselines(measurements), strict=True)
    compared = "; ".join(f"{what}: {_text(table.describe_task(m.task))}" for what, m in named if m is not None)
    failed = "".join(f"<li>{_text(line)}</li>" for line in table.problems(measurements))
    return [
        f"<h2>{_text(name)}</h2>",
        _table(table.FILE_COLUMNS, table.file_rows(files)) if files else "",
        _table(table.RATE_COLUMNS, table.rate_rows(measurements), [m.task.kind for m in measurements]),
        f'<p class="note">{compared}</p>' if compared else "",
        f"<p>Missing or incomplete:</p>\n<ul>{failed}</ul>" if failed else "",
        _details("Settings of each reading", "\n".join(map(_setup, measurements))),
    ]


def _setup(measurement: Measurement) -> str:
    """Return the settings of a reading: those of its task, then those that it reported itself."""
    task = measurement.task
    told = {name: getattr(task, name) for name in ("reading", "path", "batch_size", "seed", "seconds", "cold")}
    told |= {**task.options, **(measurement.answers[0].settings if measurement.answers else {})}
    told["records/s of each repeat"] = list(map(round, measurement.rates))
    return _details(table.describe_task(task), _pairs(told))


def _table(columns: Mapping[str, str], rows: Sequence[tuple[str, ...]], kinds: Sequence[str] | None = None) -> str:
    def line(tag: str, cells: Iterable[str], kind: str) -> str:
        sided = zip(cells, columns.values(), strict=True)
        return f'<tr class="{kind}">' + "".join(f'<{tag} class="{side}">{_text(cell)}</{tag}>' for cell, side in sided)

    lines = [line("th", columns, ""), *map(line, repeat("td"), rows, kinds or repeat(""))]
    return '<div class="table"><table>\n' + "</tr>\n".join(lines) + "</tr>\n</table></div>"


def _pairs(values: Mapping[str, Any]) -> str:
    rows = [(key, value if isinstance(value, str) else json.dumps(value, default=str)) for key, value in values.items()]
    return _table({"setting": "left", "value": "left"}, rows)


def _details(title: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{_text(title)}</summary>\n{content}\n</details>"


def _image(figure: Figure, what: str) -> str:
    # As an image and not inline: the styles and names of one picture do not reach the page or the other picture.
    data = base64.b64encode(as_svg(figure).encode()).decode()
    return f'<img alt="{what}" src="data:image/svg+xml;base64,{data}">'


def _text(text: str) -> str:
    return escape(printable(text, None))


def rates_figure(results: Results) -> Figure:
    """Draw records per second of each reading as bars, and the limits as lines, in a panel for each workload.

    A bar is the median of the repeats, the line at its end their spread; the number beside it is the ratio to the
    first limit, taken within each round. Readings without an answer are left out.
    """
    panels = table.by_workload([m for m in results.measurements if m.answers])
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
    ratios = [m.ratio_to(table.limit_of(m, measurements)) for m in read]
    box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7}
    labels = ["" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios]
    axes.bar_label(bars, labels, padding=5, fontsize=8, bbox=box)
    for limit, dashes in zip(limits, cycle(_DASHES), strict=False):
        rate = Spread.of(limit.rates).median
        axes.axvline(rate, color=_LIMIT, linestyle=dashes, linewidth=1.2, label=_shown(limit.task.name))
    axes.set_yticks(range(len(read)), [_shown(table.describe_task(m.task)) for m in read], parse_math=False)
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
