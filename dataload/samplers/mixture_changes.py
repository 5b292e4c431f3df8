"""What a mixture is told while it is read, and what it tells of its sources. Pure (no I/O)."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.samplers.common import ArrayValue, Float64Array
from dataload.types import Int64Array


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
    """

    epoch: int
    position: int
    number: int
    weights: Float64Array
    drawn: Int64Array
    firsts: Int64Array

    def to_json(self) -> dict[str, Any]:
        """Return numbers and text, up to 32 bytes a component."""
        arrays = (self.weights.astype("<f8"), self.drawn.astype("<i8"), self.firsts.astype("<i8"))
        content = b"".join(each.tobytes() for each in arrays)
        where = {"epoch": self.epoch, "position": self.position, "number": self.number}
        return {**where, "components": b64encode(content).decode()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Change:
        """Read what `to_json` returned; a ValueError, TypeError or KeyError for anything else."""
        content = b64decode(value["components"], validate=True)
        weights, drawn, firsts = np.frombuffer(content, "<f8").reshape(3, -1)
        drawn, firsts = (each.view("<i8").astype(np.int64) for each in (drawn, firsts))
        epoch, position, number = (int(value[name]) for name in ("epoch", "position", "number"))
        return cls(epoch, position, number, weights.astype(np.float64), drawn, firsts)


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Records that a source of a mixture has given in the whole run, to all ranks."""

    share: float  # by the weights now
    records: int
    epochs: float
    tokens: int | None  # None unless all its records have the same number
