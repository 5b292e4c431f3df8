"""States of a mixture to which sources were added, or that has lost retired ones. Pure, but for fingerprints."""

from __future__ import annotations

import itertools
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from dataload._util.fingerprint import digest, fingerprint, identify
from dataload.errors import StateMismatchError
from dataload.loader.state import LoaderState
from dataload.samplers import Mixture
from dataload.samplers.mixture_changes import COUNTS, Change
from dataload.samplers.mixture_weights import rows_of
from dataload.sources.views.concat import ConcatSource

_SHOWN = 5


def marks_of(mixture: Mixture, source: ConcatSource) -> str:
    """Return a checksum of each source, its order and its settings in the mixture, as text."""
    columns = zip(*rows_of(mixture.weights), strict=True)
    limits = cast("Any", mixture.max_epochs or itertools.repeat(None))
    frame = mixture.stop, mixture.seed, mixture.window
    each = zip(source.sources, mixture.samplers, columns, limits, strict=False)
    texts = [digest(frame, identify(part), fingerprint(order), *more) for part, order, *more in each]
    return b64encode(np.array([zlib.crc32(text.encode()) for text in texts], "<u4").tobytes()).decode()


def fitted(saved: LoaderState, names: Mapping[str, str], mixture: Mixture, source: ConcatSource) -> LoaderState:
    """Return a state as this mixture continues it: of the same sources, or of some more or less that give nothing.

    Args:
        saved: The state.
        names: The fields of a state that identify this mixture.
        mixture: The mixture.
        source: Its sources.
    """
    if (saved.source, saved.order) == (names["source"], names["order"]):
        return saved
    if not saved.changes:
        return replace(saved, **names) if _is_of_first(saved, mixture, source) else saved
    then, now = (np.frombuffer(b64decode(text), "<u4").tolist() for text in (saved.parts, marks_of(mixture, source)))
    places, since = list[int](), 0  # the place of each source in the state, -1 if it was added
    for mark in now:
        places.append(then.index(mark, since) if mark in then[since:] else -1)
        since = max(since, places[-1] + 1)
    if max(places) < 0:
        return saved  # of another mixture
    first, reached = saved.changes[0], (saved.epoch, min((*saved.missing, saved.position)))
    is_retired = np.all([change.weights == 0 for change in saved.changes], axis=0)
    is_retired &= (first.epoch, first.position) <= reached
    lost = [f"number {at}" for at in range(len(then)) if at not in {*places} and not is_retired[at]]
    base = np.sum(rows_of(mixture.weights), axis=0)
    known = mixture.names or [f"number {at}" for at in range(len(now))]
    added = [name for name, at, weight in zip(known, places, base, strict=True) if at < 0 and weight]
    if lost or added:
        differences = {"only in the state": lost, "only here, with a weight": added}
        raise StateMismatchError(
            "the state is of other sources (those whose data or order changed are others): leave out only sources that "
            "were retired by weight 0, at the end; add new ones at the end, with weight 0 in the mix, and call "
            "change_weights when the state is loaded",
            differences=[f"{where}: {', '.join(which[:_SHOWN])}" for where, which in differences.items() if which],
        )
    at = np.array(places)

    def placed(change: Change) -> Change:
        values = {name: np.where(at < 0, 0, getattr(change, name)[at]) for name in ("weights", *COUNTS)}
        return replace(change, **values)

    return replace(saved, **names, changes=tuple(map(placed, saved.changes)), parts="")


def _is_of_first(saved: LoaderState, mixture: Mixture, source: ConcatSource) -> bool:
    """Return whether a state is of this mixture without the last sources, whose weight is 0."""
    is_used = np.any(rows_of(mixture.weights), axis=0)
    return any(
        fingerprint(mixture.first(count)) == saved.order
        and ConcatSource(source.sources[:count]).fingerprint() == saved.source
        for count in range(int(np.flatnonzero(is_used)[-1]) + 1, len(is_used))
    )
