"""Pictures. Only this module knows matplotlib, which is loaded when the first is drawn."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dataload._optional import load_optional
from dataload.errors import ConfigError
from dataload.samplers.order_sample import (
    OrderSample,
    Shards,
    displacements,
    expected_shards,
    shards_per_batch,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_picture", "order_figure"]

_SUFFIXES = (".pdf", ".png", ".svg")
_DOTS = 5_000
_BINS = 50
_FOUND, _IDEAL = "tab:blue", "tab:orange"


def check_picture(path: str) -> None:
    """See that a picture can be drawn and put there, before there is work to lose.

    Raises:
        ConfigError: The name ends otherwise than ``.png``, ``.svg`` or ``.pdf``, or there is no such directory.
        MissingDependencyError: matplotlib is not installed.
    """
    if os.path.splitext(path)[1].lower() not in _SUFFIXES:
        raise ConfigError(f"{path}: a picture ends in {', '.join(_SUFFIXES)}", key="picture", value=path)
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"there is no directory {directory} to write to", key="picture", value=path)
    _matplotlib()


def order_figure(sample: OrderSample, shards: Shards, title: str) -> Figure:
    """Where records stand, how far they have moved, and how many shards batches mix, side by side.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    # Not pyplot: that keeps figures, and would choose a backend for whoever uses it next.
    figure: Figure = _matplotlib().Figure(figsize=(15, 5), dpi=120, layout="constrained")
    figure.suptitle(title if sample.whole else f"{title}\n{len(sample.indices):,} positions of {sample.length:,}")
    places, moves, mixing = figure.subplots(1, 3)
    _draw_places(places, sample)
    _draw_moves(moves, sample)
    _draw_mixing(mixing, sample, shards)
    return figure


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
