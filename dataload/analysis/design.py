"""The look of pictures: colours, titles, legends and numbers. matplotlib is loaded when the first one is drawn."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

from dataload._util.lazy import load_optional
from dataload._util.settings import check_directory
from dataload.errors import ConfigError, printable

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
