"""Changes of a mixture while it is read, and the report on its sources. Pure (no I/O)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dataload.samplers.basic import positions_without_end
from dataload.samplers.batch import positions_of
from dataload.samplers.common import MAX_LENGTH, ArrayValue, Float64Array, split_by_group
from dataload.samplers.quotas import MOST_POSITIONS
from dataload.samplers.together import Orders
from dataload.types import Int64Array

COUNTS = ("drawn", "firsts", "earlier", "origins", "passes", "shards")
"""The counts of a change for each component, in the order of its text."""


@dataclass(frozen=True, slots=True, eq=False)
class Change(ArrayValue):
    """Weights that a mixture has from a position on, and what its components have given before.

    Attributes:
        epoch: The epoch of the position.
        position: The first position with these weights.
        number: Number of the change, from 1.
        weights: Weight of each component, (components,) float64.
        drawn: Records of each component before the position, of this epoch, (components,) int64.
        firsts: Number of the pass with which each component begins this epoch, (components,) int64.
        earlier: Records of each component in earlier epochs, (components,) int64.
        origins: Records of each component in this epoch until its next pass began when it last grew, (components,)
            int64; 0 if it has not grown.
        passes: Passes of each component until then, (components,) int64.
        shards: The shards of a component that has grown, while the last of those passes lasts, else 0, (components,)
            int64.
    """

    epoch: int
    position: int
    number: int
    weights: Float64Array
    drawn: Int64Array
    firsts: Int64Array
    earlier: Int64Array
    origins: Int64Array
    passes: Int64Array
    shards: Int64Array

    def lengths(self, orders: Orders) -> Int64Array:
        """Return the length of the pass that each component ends in the order from before it grew, or of any pass."""
        found = orders.lengths.copy()
        for i in np.flatnonzero(self.shards).tolist():
            found[i] = len(orders.before[i, int(self.shards[i])])
        return found

    def limits(self, orders: Orders, max_epochs: Sequence[float] | None) -> Int64Array | None:
        """Return the most records of each component in the epoch, (components,); None without limits."""
        if max_epochs is None:
            return None
        left = np.array(max_epochs) - self.passes
        limits = self.origins + np.floor(left * np.where(left < 0, self.lengths(orders), orders.lengths))
        return np.where(limits < MAX_LENGTH, limits, MOST_POSITIONS).astype(np.int64)

    def given(self, orders: Orders, drawn: Int64Array) -> tuple[Int64Array, Float64Array]:
        """Return the records of components, and their number in passes, when some were drawn in the epoch."""
        more, lengths = drawn - self.origins, np.maximum(1, orders.lengths)
        epochs = self.earlier / lengths + self.passes + more / np.where(more < 0, self.lengths(orders), lengths)
        return self.earlier + drawn, epochs

    def following(self, orders: Orders, drawn: Int64Array, length: int) -> tuple[Int64Array, Int64Array]:
        """Return `firsts` and `earlier` of the next epoch; an epoch without end does not count as given."""
        begun = -(-np.maximum(0, drawn - self.origins) // np.maximum(1, orders.lengths))
        return self.firsts + self.passes + begun, self.earlier + (0 if length == MAX_LENGTH else drawn)

    def grown(self, orders: Orders, drawn: Int64Array, shards: Int64Array) -> Change:
        """Return the counts once the components with `shards` have grown: each first ends its pass."""
        more = np.where(shards > 0, -(-np.maximum(0, drawn - self.origins) // np.maximum(1, orders.lengths)), 0)
        origins = self.origins + more * orders.lengths
        shards = np.where(more > 0, shards, self.shards)
        return replace(self, drawn=drawn, origins=origins, passes=self.passes + more, shards=shards).ended()

    def ended(self) -> Change:
        """Return this change without the orders of passes that have ended."""
        return replace(self, shards=np.where(self.drawn < self.origins, self.shards, 0))

    def indices(self, orders: Orders, components: Int64Array, draws: Int64Array) -> Int64Array:
        """Return what draws of the epoch from components yield, all (rows,)."""
        firsts = self.firsts + self.passes
        draws = draws - self.origins[components] if self.origins.any() else draws
        if not self.shards.any():
            return orders.indices(components, draws, firsts)
        found, is_late = np.empty_like(draws), draws >= 0
        found[is_late] = orders.indices(components[is_late], draws[is_late], firsts)
        rest = np.flatnonzero(~is_late)
        for component, rows in split_by_group(components[rest]):
            order, at = orders.before[component, int(self.shards[component])], rest[rows]
            found[at] = order.indices(draws[at] + len(order), epoch=int(firsts[component]) - 1)
        return found

    def draws_of(self, orders: Orders, component: int, index: int, draws: range) -> Int64Array:
        """Return the draws from a component that yield an index, (n,)."""
        origin, shards = int(self.origins[component]), int(self.shards[component])
        first, sampler = int(self.firsts[component] + self.passes[component]), orders.samplers[component]
        found = positions_without_end(sampler, index, first_epoch=first, below=max(0, draws.stop - origin)) + origin
        if shards:  # of the pass before the origin, only a part is known
            order = orders.before[component, shards]
            ended = positions_of(order, index, epoch=first - 1, below=len(order)) + origin - len(order)
            found = np.append(ended[ended < draws.stop], found)
        return found[found >= draws.start]

    def to_json(self) -> dict[str, Any]:
        """Return numbers and text: 11 to 32 bytes a component, as few as its greatest counts need."""
        counts = [getattr(self, name).astype("<i8") for name in COUNTS]
        widths = [8, *(-(-int(each.max()).bit_length() // 8) for each in counts)]
        columns = zip((self.weights.astype("<f8"), *counts), widths, strict=True)
        packed = b"".join(each.view(np.uint8).reshape(-1, 8)[:, :width].tobytes() for each, width in columns)
        found = {"epoch": self.epoch, "position": self.position, "number": self.number}
        return {**found, "sources": b64encode(packed).decode(), "widths": widths}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Change:
        """Read what `to_json` returned; a ValueError, TypeError or KeyError for anything else."""
        widths = value["widths"]
        content, size = np.frombuffer(b64decode(value["sources"], validate=True), np.uint8), sum(widths)
        if size < 8 or len(content) % size:
            raise ValueError(f"{len(content)} bytes are not of components of {size}")
        count, start = len(content) // size, 0
        wide = np.zeros((1 + len(COUNTS), count, 8), np.uint8)
        for row, width in enumerate(widths):
            wide[row, :, :width] = content[start : start + count * width].reshape(count, width)
            start += count * width
        weights, counts = wide[0].view("<f8")[:, 0].astype(np.float64), wide[1:].view("<i8")[:, :, 0].astype(np.int64)
        epoch, position, number = (int(value[name]) for name in ("epoch", "position", "number"))
        return cls(epoch, position, number, weights, *counts)


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Records that a source of a mixture has given in the whole run, to all ranks; epochs left early count in full."""

    share: float  # by the weights now
    records: int
    epochs: float
    tokens: int | None  # None unless all its records have the same number
