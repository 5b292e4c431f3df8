"""The picture of a timeline: a lane for each worker and for the consumer, with the batches as numbered boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dataload.analysis.design import (
    BLUE,
    GREEN,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Theme,
    key,
    new_figure,
    place,
    swatch,
)
from dataload.analysis.timeline import CONSUMER, Timeline, TimelineStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records: TypeAlias = Callable[[TimelineStep], Sequence[int]]
"""Returns the numbers of the records of a step."""

_WIDTH, _LEFT, _RIGHT = 14.0, 1.5, 1.15  # inches
_LANE, _LOW_LANE, _MANY_LANES = 0.85, 0.5, 8  # inches, and the number from which lanes are low
_SLICES = 120
_BOXED = 0.07  # inches: batches that take less are drawn without boxes
_STAGES = {
    "download": YELLOW,
    "read": BLUE,
    "decode": SKY,
    "transform": ORANGE,
    "collate": PURPLE,
    "batch_transform": GREEN,
}
_WAITS, _WORKS = "consumer waits", "consumer works"
_MAKES, _DOWNLOADS = "consumer makes", "downloads"
_START = 0.25  # part of the time that workers may take to start before that is left out
_KEEPS_UP = 0.05  # part of the time that a consumer may wait
_SIZE, _SMALL = 9.0, 7.0  # points, of the numbers of steps and of records
_SOME = 4  # numbers of records, if not all fit
_DIGIT = 0.64 / 72  # inches; width of a digit, in points


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The axes of a picture, and the places of its lanes."""

    axes: Axes
    heights: dict[str, int]  # y by name of the lane; the lowest is 0
    origin: float  # seconds
    seconds: float  # length of the picture
    scale: float  # units of the axis per second
    inch: float  # inches per unit of the axis
    boxed: bool
    low: bool
    theme: Theme

    def bars(self, name: str, spans: Iterable[tuple[float, float]], y: tuple[float, float], **look: Any) -> None:
        """Draw what lasts from one time to another as bars, in a part of a lane."""
        bars = [((begun - self.origin) * self.scale, (ended - begun) * self.scale) for begun, ended in spans]
        options: dict[str, Any] = {"linewidth": 0, **look}
        self.axes.broken_barh(bars, (self.heights[name] + y[0], y[1] - y[0]), **options)

    def parts(self, name: str, spans: Sequence[tuple[float, float]], bottom: Any, **look: Any) -> Any:
        """Draw the part of each slice of the time that is spent on something, above `bottom`; return where it ends."""
        edges = np.linspace(0.0, self.seconds, _SLICES + 1)
        begun, ended = np.array(spans).T - self.origin
        until = sum(np.clip(edges - first, 0, last - first) for first, last in zip(begun, ended, strict=True))
        top = np.minimum(bottom + np.diff(until) * _SLICES / self.seconds, 1.0)
        low, high = (self.heights[name] - 0.42 + 0.84 * np.broadcast_to(part, _SLICES) for part in (bottom, top))
        self.axes.stairs(high, edges * self.scale, baseline=low, fill=True, linewidth=0, **look)
        return top

    @property
    def strip(self) -> tuple[float, float]:
        """The part of a lane that shows stages."""
        return -0.38, -0.12

    @property
    def box(self) -> tuple[float, float]:
        """The part of a lane that shows batches."""
        return -0.08, 0.4


def finding(timeline: Timeline) -> str:
    """Return in one sentence whether the consumer gets its batches in time, and if not, why. Pure."""
    share, count = _waits(timeline), len(timeline.workers)
    if not timeline.steps:
        return "No batch was received"
    if not count:
        return f"The consumer makes its batches itself, {share:.0%} of the time{_most(timeline)}"
    who = "One worker" if count == 1 else f"{count} workers"
    waits_for = f"the consumer waits {share:.0%} of the time"
    if share < _KEEPS_UP:
        return f"{who} keep{'s' if count == 1 else ''} up: {waits_for}"
    return f"{who} {'does' if count == 1 else 'do'} not keep up: {waits_for}{_most(timeline)}"


def _waits(timeline: Timeline) -> float:
    """Return the part of its time that the consumer waits, without the first wait, in which workers start."""
    waits = sorted({(step.asked, step.received) for step in timeline.steps})
    waited = sum(received - asked for asked, received in waits[1:])
    worked = sum(ended - begun for begun, ended in timeline.work)
    return waited / (waited + worked) if waited + worked else 0.0


def _most(timeline: Timeline) -> str:
    """Return which stage takes the most time."""
    shares = _shares(timeline)
    name = max(shares, key=lambda name: shares[name], default=None)
    return "" if name is None else f", and {name} takes {shares[name]:.0%} of the work"


def _shares(timeline: Timeline) -> dict[str, float]:
    """Return the part of the work that each stage takes, stages in their usual order."""
    seconds = dict.fromkeys(_STAGES, 0.0)
    for step in timeline.steps:
        for stage, begun, ended in step.spans:
            seconds[stage] += ended - begun
    total = sum(seconds.values())
    return {name: took / total for name, took in seconds.items() if took}


def timeline_figure(timeline: Timeline, about: str, *, records: Records | None = None, theme: Theme = LIGHT) -> Figure:
    """Draw who worked when: a lane for each worker, and the consumer's below them.

    A batch is a box with the number of its step, and below it, where they fit, those of its records; boxes of one batch
    have one colour, so that it can be followed from the workers that made it to the consumer. Under the boxes, a strip
    shows the stages of the work, or the consumer's waits. Boxes that would be too small are left out. Requests to
    object stores are in a lane at the bottom, one above another if there are several at once.

    Args:
        about: What was run, for the subtitle.
        records: Gives the numbers of the records of a step; without it, boxes show steps only.
    """
    made_here = any(step.worker == CONSUMER and step.rows for step in timeline.steps)  # not only joined
    names = [*timeline.workers, *([_MAKES] if made_here else []), CONSUMER, *([_DOWNLOADS] * bool(timeline.requests))]
    begun = _begin(timeline)
    seconds = max(timeline.ended - begun, 1e-6)
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3)
    low = len(names) >= _MANY_LANES
    tall = (_LOW_LANE if low else _LANE) * len(names)
    width = _WIDTH - _LEFT - _RIGHT
    took = [(step.spans[-1][2] - step.spans[0][1]) * width / seconds for step in timeline.steps if step.spans]
    boxed = bool(took) and median(took) > _BOXED
    about = _described(about, timeline, boxed=boxed)
    figure, height = new_figure(_WIDTH, 1.15 + tall, finding(timeline), about, theme)
    axes = place(figure, theme, left=_LEFT, bottom=0.6, width=width, height=tall)
    lanes = _Lanes(
        axes,
        heights={name: len(names) - 1 - number for number, name in enumerate(names)},
        origin=begun,
        seconds=seconds,
        scale=scale,
        inch=width / (seconds * scale),
        boxed=boxed,
        low=low,
        theme=theme,
    )
    axes.set(xlabel=f"time ({unit})", xlim=(0, seconds * scale), ylim=(-0.5, len(names) - 0.5))
    axes.set_yticks(list(lanes.heights.values()), [_label(name, timeline) for name in names])
    axes.tick_params(axis="y", labelcolor=theme.ink, labelsize=9.5)
    for name in names:
        lanes.bars(name, [(begun, begun + seconds)], (-0.42, 0.44), color=theme.band, zorder=0)
    _draw_work(lanes, timeline)
    _draw_requests(lanes, timeline)
    if lanes.boxed:
        _draw_boxes(lanes, timeline, records)
    _draw_epochs(lanes, timeline)
    _draw_shares(lanes, timeline, seconds)
    key(figure, theme, _entries(timeline, theme), left=_LEFT, top=height - 0.15)
    return figure


def _described(about: str, timeline: Timeline, *, boxed: bool) -> str:
    if not timeline.steps:
        return about
    first, last = timeline.steps[0], timeline.steps[-1]
    where = (
        f"step {first.step:,} to " if first.epoch == last.epoch else f"step {first.step:,} of epoch {first.epoch} to "
    )
    where += f"{'' if first.epoch == last.epoch else 'step '}{last.step:,} of epoch {last.epoch}"
    shown = "boxes of one colour are one batch, with the number of its step"
    left_out = _begin(timeline) - timeline.begun
    start = f"; the {left_out:.1f} s in which workers start are left out" if left_out else ""
    return f"{about}: {where}; {shown if boxed else 'heights are parts of the time'}{start}"


def _begin(timeline: Timeline) -> float:
    """Return when the picture begins: with the first work, if most of the time nothing happens before it."""
    works = [step.spans[0][1] for step in timeline.steps if step.spans]
    works += [request.begun for request in timeline.requests]
    first = min(works, default=timeline.begun)
    return first if first - timeline.begun > _START * (timeline.ended - timeline.begun) else timeline.begun


def _label(name: str, timeline: Timeline) -> str:
    worker = name.removeprefix("dataload-")
    if worker == name:
        return name
    rows = _rows_of(timeline).get(name)
    return f"worker {worker}" if rows is None else f"worker {worker}\nrows {rows.start}-{rows.stop - 1}"


def _rows_of(timeline: Timeline) -> dict[str, range]:
    """Return the rows that each worker makes in every batch; nothing if each worker makes whole batches."""
    found: dict[str, range] = {}
    first = timeline.steps[0] if timeline.steps else None
    for step in timeline.steps:
        if first is None or (step.epoch, step.step) != (first.epoch, first.step) or step.worker == CONSUMER:
            break
        begin = max((rows.stop for rows in found.values()), default=0)
        found[step.worker] = range(begin, begin + step.rows)
    return found if len(found) > 1 else {}


def _draw_work(lanes: _Lanes, timeline: Timeline) -> None:
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for step in timeline.steps:
        for stage, begun, ended in step.spans:
            name = _MAKES if step.worker == CONSUMER and _MAKES in lanes.heights else step.worker
            spans.setdefault((stage, name), []).append((begun, ended))
    waits = {(step.asked, step.received): None for step in timeline.steps}
    spans = {(_WAITS, CONSUMER): list(waits), (_WORKS, CONSUMER): timeline.work, **spans}
    colours: dict[str, Any] = {_WAITS: VERMILLION, _WORKS: lanes.theme.work, **_STAGES}
    bottoms: dict[str, Any] = {}
    for (what, name), found in sorted(spans.items(), key=lambda item: list(colours).index(item[0][0])):
        look: dict[str, Any] = {"color": colours[what], "label": what}
        if lanes.boxed:
            lanes.bars(name, found, lanes.strip, **look)
        elif found:
            bottoms[name] = lanes.parts(name, found, bottoms.get(name, 0.0), **look)


def _draw_requests(lanes: _Lanes, timeline: Timeline) -> None:
    lines = timeline.connections
    for number, line in enumerate(lines):
        y = -0.38 + 0.76 * number / len(lines), -0.38 + 0.76 * (number + 0.85) / len(lines)
        colours = [lanes.theme.ink if request.failed else YELLOW for request in line]
        spans = [(request.begun, request.ended) for request in line]
        lanes.bars(_DOWNLOADS, spans, y, color=colours, label="request")


def _draw_boxes(lanes: _Lanes, timeline: Timeline, records: Records | None) -> None:
    """Draw the batches: those that workers make, and when the consumer works on them."""
    tints, order = lanes.theme.tints, dict[tuple[int, int], int]()
    parts = bool(_rows_of(timeline))
    every = _every(lanes, timeline)
    works = dict(timeline.work)
    for step in timeline.steps:
        number = order.setdefault((step.epoch, step.step), len(order))
        drawn: list[tuple[str, float, float]] = []
        if step.spans and step.rows:
            name = _MAKES if step.worker == CONSUMER else step.worker
            drawn.append((name, step.spans[0][1], step.spans[-1][2]))
        if step.received in works:
            drawn.append((CONSUMER, step.received, works.pop(step.received)))
        shown = () if records is None or parts else records(step)
        text = f"{step.step} failed" if step.failed else str(step.step)
        look = {"facecolor": tints[number % len(tints)], "edgecolor": lanes.theme.page}
        for name, begun, ended in drawn:
            lanes.bars(name, [(begun, ended)], lanes.box, linewidth=0.8, label="batch", **look)
            if name != CONSUMER or every == 1:
                _write(lanes, name, (begun, ended), text, shown)
            elif step.step % every == 0:
                _write(lanes, name, (begun, ended), text, wide=True)


def _every(lanes: _Lanes, timeline: Timeline) -> int:
    """Return how many of the consumer's boxes share a number, because those of all do not fit."""
    room = min((ended - begun for begun, ended in timeline.work), default=1.0) * lanes.scale * lanes.inch
    most = max((len(str(step.step)) for step in timeline.steps), default=1) * _SIZE * _DIGIT + 0.04
    return 1 if room > most else next((every for every in (2, 5, 10, 20, 50) if every * room > 1.5 * most), 100)


def _write(
    lanes: _Lanes,
    name: str,
    span: tuple[float, float],
    number: str,
    records: Sequence[int] = (),
    *,
    wide: bool = False,
) -> None:
    """Write the number of a step and below it those of its records, as far as they fit; `wide` may leave the box."""
    begun, ended = ((time - lanes.origin) * lanes.scale for time in span)
    room = (ended - begun) * lanes.inch - 0.04
    if room < len(number) * _SIZE * _DIGIT and not wide:
        return
    x, y = (begun + ended) / 2, lanes.heights[name] + sum(lanes.box) / 2
    most = int(room / (_SMALL * _DIGIT))
    line = " ".join(map(str, records))
    if len(line) > most:
        line = f"{line[: max(0, most - 1)].rpartition(' ')[0]} …"
    below = "" if lanes.low or line.count(" ") < min(_SOME, len(records)) - 1 else line
    options: dict[str, Any] = {"ha": "center", "color": lanes.theme.ink}
    lanes.axes.text(x, y + (0.1 if below else 0), number, va="center", size=_SIZE, fontweight="bold", **options)
    if below:
        lanes.axes.text(x, y - 0.12, below, va="center", size=_SMALL, **options)


def _draw_epochs(lanes: _Lanes, timeline: Timeline) -> None:
    """Mark where the consumer asks for the first batch of another epoch."""
    epoch = timeline.steps[0].epoch if timeline.steps else 0
    top, labelled = len(lanes.heights) - 0.5, -math.inf
    for step in timeline.steps:
        if step.epoch == epoch:
            continue
        epoch, x = step.epoch, (step.asked - lanes.origin) * lanes.scale
        lanes.axes.axvline(x, color=lanes.theme.ink, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0.5)
        text = f"epoch {epoch}"
        if (x - labelled) * lanes.inch > _SIZE * _DIGIT * (len(text) + 1):
            options: dict[str, Any] = {"ha": "left", "va": "bottom", "size": _SIZE, "color": lanes.theme.ink}
            lanes.axes.text(x, top, text, **options)
            labelled = x


def _draw_shares(lanes: _Lanes, timeline: Timeline, seconds: float) -> None:
    """Write beside each lane how much of the time it is busy."""
    shares = {name: f"busy {timeline.busy_seconds(name) / seconds:.0%}" for name in timeline.workers}
    shares[_MAKES] = f"busy {timeline.busy_seconds(CONSUMER) / seconds:.0%}"
    shares[CONSUMER] = f"waits {_waits(timeline):.0%}"
    shares[_DOWNLOADS] = f"{len(timeline.requests):,} request{'' if len(timeline.requests) == 1 else 's'}"
    for name, y in lanes.heights.items():
        options: dict[str, Any] = {"va": "center", "size": 9, "color": lanes.theme.soft, "clip_on": False}
        lanes.axes.text(seconds * lanes.scale + 0.12 / lanes.inch, y, shares[name], **options)


def _entries(timeline: Timeline, theme: Theme) -> dict[str, Any]:
    """Return the texts of the key and what they explain."""
    entries = {
        f"{name} {'<1%' if share < 0.005 else f'{share:.0%}'}": swatch(_STAGES[name])
        for name, share in _shares(timeline).items()
    }
    entries[_WAITS] = swatch(VERMILLION)
    entries[_WORKS] = swatch(theme.work)
    if any(request.failed for request in timeline.requests):
        entries["failed request"] = swatch(theme.ink)
    return {**entries, "idle": swatch(theme.band, theme.line)}
