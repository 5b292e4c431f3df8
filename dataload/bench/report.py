"""Results as pictures, and as one self-contained HTML file."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from itertools import cycle, repeat
from typing import TYPE_CHECKING, Any

from dataload.analysis.design import (
    BLUE,
    DARK,
    LIGHT,
    ORANGE,
    PURPLE,
    SERIES,
    VERMILLION,
    Theme,
    key,
    logarithmic,
    new_figure,
    place,
    short,
    swatch,
    whole,
)
from dataload.bench import table
from dataload.bench.results import Curve, FileFacts, Measurement, Results
from dataload.bench.timing import Spread
from dataload.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"dataload": BLUE, "peer": ORANGE}
_DASHES = ("-", "--", ":", "-.")
_WIDTH, _BAR = 12.0, 0.32  # inches
_KEYS = 5  # entries in a line of the key
_FAR = 3  # times the fastest reading: limits beyond are drawn at the end of the axis
_LABEL_CHARACTERS, _READING_CHARACTERS = 80, 44

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
img { max-width: 100%; margin: .5rem 0 }
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
    """Return the whole run as a page: tables with all columns, pictures, and the settings of each reading."""
    title = _text(f"dataload bench, {results.date}")
    parts = [
        f"<h1>{title}</h1>",
        f"<pre>{_text(results.command)}</pre>",
        _details("Machine and versions", _pairs(_with_units(results.machine)) + _pairs(results.versions), opened=True),
    ]
    if results.measurements:
        parts.append(_image(partial(rates_figure, results), "Records per second of each reading, with the limits"))
        parts.append(f'<p class="note">{_READING_IT}</p>')
    for workload, measurements in table.by_workload(results.measurements).items():
        parts += _workload(workload, measurements, [file for file in results.files if file.workload == workload])
    if results.curves:
        parts += ["<h2>How costs grow</h2>", _image(partial(curves_figure, results.curves), "Costs against size")]
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


def _with_units(machine: Mapping[str, Any]) -> dict[str, Any]:
    memory = machine.get("memory")
    return {**machine, **({"memory": f"{memory / 1e9:.1f} GB"} if isinstance(memory, int) else {})}


def _pairs(values: Mapping[str, Any]) -> str:
    rows = [(key, value if isinstance(value, str) else json.dumps(value, default=str)) for key, value in values.items()]
    return _table({"setting": "left", "value": "left"}, rows)


def _details(title: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{_text(title)}</summary>\n{content}\n</details>"


def _image(draw: Callable[..., Figure], what: str) -> str:
    """Return a picture that is light or dark as the page is."""
    # As an image and not inline: the styles and names of one picture do not reach the page or the other picture.
    light, dark = (
        f"data:image/svg+xml;base64,{base64.b64encode(as_svg(draw(theme=theme)).encode()).decode()}"
        for theme in (LIGHT, DARK)
    )
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return f'<picture>{source}<img alt="{what}" src="{light}"></picture>'


def _text(text: str) -> str:
    return escape(printable(text, None))


def rates_figure(results: Results, *, theme: Theme = LIGHT) -> Figure:
    """Draw records per second of each reading as bars, with its limits as marks, in a panel for each workload.

    A bar is the median of the repeats, the thin line at its end their spread, if there are several. The ratio beside it
    is to the first limit of its order, taken within each round. Readings without an answer are left out.
    """
    panels = table.by_workload([m for m in results.measurements if m.answers])
    bars = {name: [m for m in found if m.task.kind != "limit"] for name, found in panels.items()}
    tall = [_BAR * max(1, len(read)) for read in bars.values()]
    findings = [_finding(name, found) for name, found in panels.items()]
    title = findings[0] if len(findings) == 1 else f"Records per second in {len(findings)} workloads"
    names = {_limit_name(m): None for m in results.measurements if m.task.kind == "limit" and m.answers}
    lines = -(-max(1, len(names) + 2) // _KEYS)
    about = (
        "Bars: medians; lines at their ends: spread of repeats; marks: limits of the machine for that format and order"
    )
    figure, height = new_figure(_WIDTH, 0.35 + 0.25 * lines + sum(tall) + 1.15 * len(tall), title, about, theme)
    left = min(3.6, 0.5 + 0.075 * max((len(_reading(m)) for read in bars.values() for m in read), default=10))
    at: dict[str, Any] = {"left": left, "width": _WIDTH - left - 2.1}
    looks = dict(zip(names, zip(cycle((theme.ink, VERMILLION, PURPLE)), cycle(_DASHES), strict=False), strict=False))
    entries: dict[str, Any] = {
        name: swatch(_COLOURS[kind])
        for kind, name in (("dataload", "dataload"), ("peer", "other loaders"))
        if any(m.task.kind == kind for read in bars.values() for m in read)
    }
    top = height - 0.15 - 0.25 * lines
    heading: dict[str, Any] = {"fontweight": "bold", "fontsize": 10, "color": theme.ink}
    for (workload, found), inches, finding in zip(panels.items(), tall, findings, strict=True):
        top -= 0.55
        axes = place(figure, theme, bottom=top - inches, height=inches, **at)
        entries |= _draw_rates(axes, bars[workload], found, looks, theme)
        if len(findings) > 1:
            axes.set_title(finding, parse_math=False, loc="left", pad=24, **heading)
        top -= inches + 0.65
    key(figure, theme, entries, left=min(left, 0.4), top=height - 0.15, columns=_KEYS)
    return figure


def _finding(workload: str, measurements: Sequence[Measurement]) -> str:
    """Return in one sentence how the fastest reading of this library compares."""
    ours = [m for m in measurements if m.task.kind == "dataload"]
    name = _shown(workload)
    if not ours:
        return f"{name}: only limits were measured" if measurements else name
    best = max(ours, key=lambda m: Spread.of(m.rates).median)
    _, peer = table.baselines(measurements)
    to_limit, to_peer = best.ratio_to(table.limit_of(best, measurements)), best.ratio_to(peer)
    text = f"{name}: up to {short(Spread.of(best.rates).median)} records/s"
    text += "" if to_limit is None else f", {_of_limit(to_limit.median)} of the limit"
    return (
        text
        if to_peer is None or peer is None
        else f"{text}, {to_peer.median:.1f} times as many as {_shown(peer.task.name)}"
    )


def curves_figure(curves: Sequence[Curve], *, theme: Theme = LIGHT) -> Figure:
    """Draw costs against size, two panels a row, all axes logarithmic: a straight line is a power of the size."""
    rows = max(1, (len(curves) + 1) // 2)
    about = "Both axes are logarithmic: a flat line costs the same at any size, a straight one grows as a power of it"
    figure, height = new_figure(_WIDTH, 3.95 * rows + 0.1, "How costs grow with the size of the data", about, theme)
    for number, curve in enumerate(curves):
        row, column = divmod(number, 2)
        left, top = 0.95 + column * _WIDTH / 2, height - 0.2 - 3.95 * row
        labels: dict[str, Any] = {"xscale": "log", "yscale": "log"}
        panel = place(figure, theme, left=left, bottom=top - 3.2, width=_WIDTH / 2 - 1.3, height=2.45, **labels)
        entries: dict[str, Any] = {}
        heading: dict[str, Any] = {"fontweight": "bold", "fontsize": 10, "color": theme.ink}
        for (name, points), colour, marker in zip(curve.lines.items(), cycle(SERIES), cycle("osD^vP"), strict=False):
            shown = [(x, y) for x, y in points if x > 0 and y > 0]  # zero has no logarithm
            if shown:
                look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "clip_on": False}
                (entries[_shown(name)],) = panel.plot(*zip(*shown, strict=True), **look, label=_shown(name))
        panel.set_title(_shown(curve.title), parse_math=False, loc="left", pad=30, **heading)
        panel.set_xlabel(_shown(curve.x_label), parse_math=False)
        panel.set_ylabel(_shown(curve.y_label), parse_math=False)
        panel.grid(visible=True, color=theme.line, linewidth=0.6)
        for axis in (panel.xaxis, panel.yaxis):
            logarithmic(axis)
        key(figure, theme, entries, left=left, top=top - 0.42)
    return figure


def as_svg(figure: Figure) -> str:
    """Return a figure as an SVG document whose texts are outlines, so that it needs no font."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _draw_rates(
    axes: Axes,
    read: Sequence[Measurement],
    measurements: Sequence[Measurement],
    looks: Mapping[str, tuple[str, str]],
    theme: Theme,
) -> dict[str, Any]:
    """Draw the bars of a workload and their limits, and return the entries of the limits for the key."""
    limits = [m for m in measurements if m.task.kind == "limit"]
    rates = [Spread.of(m.rates) for m in read]
    axes.barh(range(len(read)), [rate.median for rate in rates], 0.62, color=[_COLOURS[m.task.kind] for m in read])
    fastest = max((rate.high for rate in rates), default=max(Spread.of(m.rates).median for m in measurements))
    most = 1.04 * min(max([fastest, *(Spread.of(m.rates).median for m in limits)]), _FAR * fastest)
    entries: dict[str, Any] = {}
    for y, (m, rate) in enumerate(zip(read, rates, strict=True)):
        if len(m.rates) > 1:
            spread = [[rate.median - rate.low], [rate.high - rate.median]]
            axes.errorbar(rate.median, y, xerr=spread, color=theme.ink, capsize=3, linewidth=1)
        for limit in limits:
            if not _limits(limit, m):
                continue
            at, (colour, dashes) = Spread.of(limit.rates).median, looks[_limit_name(limit)]
            mark = axes.vlines(
                min(at, most), y - 0.42, y + 0.42, color=colour, linestyle=dashes, linewidth=2, label="limit"
            )
            mark.set_clip_on(False)
            entries[_limit_name(limit) + (" (beyond the right end)" if at > most else "")] = mark
        ratio = m.ratio_to(table.limit_of(m, measurements))
        _write_column(axes, y, (short(rate.median), "" if ratio is None else _of_limit(ratio.median)), theme.ink)
    if read:
        _write_column(axes, -0.85, ("records/s", "of the limit" if limits else ""), theme.soft)
    axes.set_yticks(range(len(read)), [_reading(m) for m in read], parse_math=False, color=theme.ink)
    axes.set(xlim=(0, most), ylim=(max(1, len(read)) - 0.5, -0.5), xlabel="records/s")  # the first bar is on top
    whole(axes.xaxis, 8)
    return entries


def _write_column(axes: Axes, y: float, texts: tuple[str, str], colour: str) -> None:
    """Write two figures to the right of a bar."""
    width = axes.get_position().width * _WIDTH
    for text, inches in zip(texts, (0.85, 1.8), strict=True):
        options: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 8.5, "color": colour, "clip_on": False}
        axes.text(1 + inches / width, y, text, transform=axes.get_yaxis_transform(), **options)


def _of_limit(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.005 else "<0.01"


def _limits(limit: Measurement, measurement: Measurement) -> bool:
    """Return whether a limit holds for a reading: a format's own library reads only that format."""
    mine, its = measurement.task, limit.task
    return its.order == mine.order and (its.workers > 0 or its.format == mine.format)


def _limit_name(limit: Measurement) -> str:
    return _shown(limit.task.name.removesuffix(f", {limit.task.order}"))


def _reading(measurement: Measurement) -> str:
    return printable(table.describe_task(measurement.task), _READING_CHARACTERS, kept="")


def _shown(text: str) -> str:
    return printable(text, _LABEL_CHARACTERS, kept="")
