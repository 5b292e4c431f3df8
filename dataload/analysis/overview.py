"""Records that follow one another in time, drawn together: a strip of images, and numbers as curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any, cast

import numpy as np

from dataload.analysis.shown import Shown, as_array
from dataload.errors import printable
from dataload.types import Array

_TIMES = {"time", "timestamp"}
_LEAST_ROWS = 3
_IMAGES = 6
_CURVES = 8  # elements of a field
_COLOURS = 6  # in page.css
_WIDTH, _HEIGHT = 480, 80  # pixels


def overview(shown: Shown, draw: Callable[[Any], str]) -> str:
    """Return what is above the records of a video or an episode; `draw` returns several images in a row."""
    rows: list[Any] = [row.values for row in shown.rows]
    if len(rows) < _LEAST_ROWS or not all(isinstance(row, Mapping) for row in rows):
        return ""
    fields = cast("Mapping[str, Any]", rows[0])
    if _TIMES.isdisjoint(fields):
        return ""
    parts: list[str] = []
    for name in fields:
        column = _stacked([as_array(row.get(name)) for row in rows])
        if column is None or name in _TIMES:
            continue
        drawn = draw(column) if column.ndim == 4 else _curves(column)
        if drawn:
            parts.append(f"<dt>{escape(printable(name, None))}</dt><dd>{drawn}</dd>")
    return f"<dl>{''.join(parts)}</dl>"


def _stacked(values: list[Any]) -> Array | None:
    """Return the values of all rows in one array, or some of them if they are images; None if they differ in kind."""
    arrays = [np.asarray(value) if isinstance(value, (float, np.ndarray, np.generic)) else None for value in values]
    found = [array for array in arrays if array is not None and array.dtype.kind in "uf"]
    if len(found) < len(values) or len({(array.shape, array.dtype) for array in found}) > 1:
        return None
    if found[0].ndim == 3:
        found = [found[at] for at in np.linspace(0, len(found) - 1, min(_IMAGES, len(found))).astype(int)]
    return np.stack(found)


def _curves(column: Array) -> str:
    """Draw floats, (rows,) or (rows, a few), each element as a curve over the rows."""
    values = column.reshape(len(column), -1).astype(np.float64)
    if column.dtype.kind != "f" or column.ndim > 2 or values.shape[1] > _CURVES or not np.isfinite(values).all():
        return ""
    low, high = float(values.min()), float(values.max())
    x = np.linspace(0, _WIDTH, len(values))
    y = _HEIGHT - 1 - (values - low) / max(high - low, 1e-9) * (_HEIGHT - 2)
    lines = "".join(
        f'<polyline fill="none" stroke="var(--s{number % _COLOURS})" points="'
        + " ".join(f"{at:.1f},{height:.1f}" for at, height in zip(x.tolist(), curve.tolist(), strict=True))
        + '"/>'
        for number, curve in enumerate(y.T)
    )
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">{lines}</svg>'
    return f'{svg}<br><span class="soft">{low:.4g} to {high:.4g}</span>'
