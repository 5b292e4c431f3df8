"""Weights and limits of a mixture, as they are given and as they are stored. Pure (no I/O)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any, TypeAlias, cast

import numpy as np

from dataload._util.settings import as_tuple, setting_error
from dataload.samplers.common import MAX_LENGTH
from dataload.samplers.mixture_rules import changes_of
from dataload.samplers.weighted import check_weights, scaled

Row: TypeAlias = Sequence[float] | Mapping[str, float]
"""One weight per component, in order or by name."""

Changes: TypeAlias = Mapping[int, Row] | tuple[tuple[int, tuple[float, ...]], ...]
"""Weights by the position of the epoch from which they hold."""

MaxEpochs: TypeAlias = float | Sequence[float] | Mapping[str, float]
"""The most passes over each component; for all, in order, or by name for some. Infinity is no limit."""


def check_rows(weights: Any, components: int, names: tuple[str, ...] | None, step: int) -> Any:
    """Return weights as floats in tuples, with the nesting they were given in, and changes as pairs."""

    def row(given: Any) -> tuple[float, ...]:
        if isinstance(given, Mapping):
            by_name = cast("Mapping[str, float]", given)
            if names is None or {*by_name} != {*names}:
                rule = "must hold weights by position in the epoch, from 0 on, or by the names of the samplers"
                raise setting_error("weights", given, rule)
            given = [by_name[name] for name in names]
        checked = tuple(check_weights(as_tuple(given) or given).tolist())
        if len(checked) != components:
            raise setting_error("weights", checked, f"must hold one weight for each of the {components} samplers")
        return checked

    def entry(given: Any) -> Any:
        pairs = changes_of(given)
        if pairs is None:
            return row(given)
        for start, _ in pairs:
            if isinstance(start, bool) or not hasattr(start, "__index__") or not 0 <= start < MAX_LENGTH // step:
                rule = f"must hold weights by position in the epoch, from 0 on and below {MAX_LENGTH // step}"
                raise setting_error("weights", start, rule)
        starts = [int(start) * step for start, _ in pairs]
        changes = sorted(zip(starts, [row(held) for _, held in pairs], strict=True))
        if starts.count(0) != 1 or len({*starts}) < len(starts):
            raise setting_error("weights", [*dict(pairs)], "must hold weights for position 0, and once for each other")
        # Constant weights are the same value however they are written.
        return tuple(changes) if len(changes) > 1 else changes[0][1]

    if isinstance(weights, Mapping) or changes_of(weights) is not None:
        return entry(weights)
    given = as_tuple(weights)
    # Anything that is not a row of rows is checked as a single row.
    nested = [isinstance(item, (Sequence, Mapping, np.ndarray)) and not isinstance(item, str) for item in given]
    return tuple(map(entry, given)) if given and all(nested) else row(given or weights)


def by_row(weights: Any, change: Callable[[Any], Any]) -> Any:
    """Return weights, of epochs and positions, with each row changed."""
    if (pairs := changes_of(weights)) is not None:
        return tuple((start, change(row)) for start, row in pairs)
    if isinstance(weights[0], (tuple, Mapping)):
        return tuple(by_row(row, change) for row in weights)
    return change(weights)


def rows_of(weights: Any) -> list[tuple[float, ...]]:
    """Return all rows of weights, of epochs and positions."""
    rows: list[tuple[float, ...]] = []
    by_row(weights, rows.append)
    return rows


def blend_weights(sizes: Sequence[float], *, temperature: float = 1.0, min_share: float = 0.0) -> tuple[float, ...]:
    """Return weights of sources by their sizes, for `Mixture` or `dataload.mix`; they add up to 1.

    Args:
        sizes: Records, or tokens, of each source; or any weights. A source of size 0 gets weight 0.
        temperature: Weights are in proportion to ``sizes ** (1 / temperature)``: 1 keeps the proportions of the sizes,
            greater ones even them out. ``lengths ** 0.3`` is ``temperature=1 / 0.3``.
        min_share: The least share of a source that is not empty. Those below get it, the others share the rest.

    Raises:
        ConfigError: The sizes are no weights, `temperature` is less than 1, or the shares add up to more than 1.

    Examples:
        >>> [round(weight, 3) for weight in blend_weights([9, 900, 8100], temperature=2, min_share=0.05)]
        [0.05, 0.237, 0.712]
    """
    weights = scaled(check_weights(sizes))
    if not temperature >= 1:
        rule = "must be at least 1: weights are sizes ** (1 / temperature), so sizes ** 0.3 is temperature=1 / 0.3"
        raise setting_error("temperature", temperature, rule)
    used = weights > 0
    if not 0 <= min_share * int(used.sum()) <= 1:
        raise setting_error("min_share", min_share, f"must be from 0 to 1 / {int(used.sum())}, the number of sources")
    weights = weights ** (1 / temperature)
    shares, is_low = weights / weights.sum(), ~used
    while (now := used & (is_low | (shares < min_share))).any() and not np.array_equal(now, is_low & used):
        is_low = now
        rest = np.where(is_low, 0, weights)
        shares = np.where(is_low, min_share, (1 - min_share * is_low.sum()) * rest / (rest.sum() or 1))
    return tuple(shares.tolist())


def check_max_epochs(given: Any, components: int, names: tuple[str, ...] | None) -> tuple[float, ...] | None:
    """Return the most passes over each component; None if no component has a limit."""
    if given is None:
        return None
    rule = f"must be one number for all, or for each of the {components} samplers, or numbers by the names of some"
    if isinstance(given, Mapping):
        by_name = cast("Mapping[str, float]", given)
        if names is None or not {*by_name} <= {*names}:
            raise setting_error("max_epochs", given, rule)
        given = [by_name.get(name, np.inf) for name in names]
    values = as_tuple(given) if isinstance(given, (Sequence, np.ndarray)) else (given,) * components
    if len(values) != components:
        raise setting_error("max_epochs", given, rule)
    for value in values:
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not number or isnan(value) or value <= 0:
            raise setting_error("max_epochs", value, "must be numbers above 0; float('inf') is no limit")
    return tuple(map(float, values)) if np.isfinite(values).any() else None
