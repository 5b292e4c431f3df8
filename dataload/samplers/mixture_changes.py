"""Changes of a mixture while it is read, and the report on its sources. Pure (no I/O)."""

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
        """Return numbers and text, 27 bytes a component, or 32 if counts are great."""
        where = {"epoch": self.epoch, "position": self.position, "number": self.number}
        arrays = (self.weights.astype("<f8"), self.drawn.astype("<i8"), self.firsts.astype("<i8"))
        if max(self.drawn.max(), self.firsts.max()) >> 48:
            return {**where, "components": b64encode(b"".join(each.tobytes() for each in arrays)).decode()}
        weights, drawn, firsts = (each.view(np.uint8).reshape(-1, 8) for each in arrays)
        packed = np.concatenate([weights, drawn[:, :6], firsts[:, :6]], axis=1)
        return {**where, "packed": b64encode(packed.tobytes()).decode()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Change:
        """Read what `to_json` returned; a ValueError, TypeError or KeyError for anything else."""
        if "packed" in value:
            packed = np.frombuffer(b64decode(value["packed"], validate=True), np.uint8).reshape(-1, 20)
            wide = np.zeros((3, len(packed), 8), np.uint8)
            wide[0], wide[1, :, :6], wide[2, :, :6] = packed[:, :8], packed[:, 8:14], packed[:, 14:]
            weights, drawn, firsts = wide.view("<f8")[:, :, 0]
        else:
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
