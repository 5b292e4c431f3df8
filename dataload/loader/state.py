"""The position of a loader in its data, as a checkpoint holds it. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, cast

from dataload._util.randomness import ORDER_VERSION
from dataload.errors import StateMismatchError

__all__ = ["STATE_VERSION", "LoaderState"]

STATE_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Where a loader stands: the same on every rank, and independent of workers and prefetch.

    Attributes:
        epoch: Number of the epoch.
        position: Positions of the epoch's order that the consumer has received, over all ranks.
        length: Positions per epoch.
        source: Fingerprint of the data.
        order: Fingerprint of the sampler, seed included.
        missing: With ``in_order=False``, where the steps begin that this rank has not received though they lie before
            `position`; rising.
        step_size: Positions per step, if there are such; else 0.
    """

    epoch: int
    position: int
    length: int
    source: str
    order: str
    missing: tuple[int, ...] = ()
    step_size: int = 0
    order_version: int = ORDER_VERSION
    version: int = STATE_VERSION

    def to_json(self) -> dict[str, Any]:
        """As a dict of numbers and text, under 1 KiB as JSON."""
        return {**dataclasses.asdict(self), "missing": list(self.missing)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave.

        Raises:
            StateMismatchError: It is no such dict, or of another version.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(cast("object", state), Mapping):  # from a file it may be anything
            raise StateMismatchError(f"a loader's state is a dict, found {type(state).__name__}")
        if state.get("version") != STATE_VERSION:
            raise StateMismatchError(
                "this is not a loader's state that this release can read",
                differences=[f"version: {state.get('version')!r} in the state, {STATE_VERSION} here"],
            )
        if set(state) != names:
            wrong = ", ".join(sorted(names ^ set(state)))
            raise StateMismatchError(f"the state is incomplete or has foreign keys: {wrong}")
        if not isinstance(state["missing"], (list, tuple)):
            raise StateMismatchError(f"missing in the state is {state['missing']!r}; it is a list of positions")
        values: dict[str, Any] = {**state, "missing": tuple(state["missing"])}
        loaded = cls(**values)
        for name in ("epoch", "position", "length", "step_size"):
            value = getattr(loaded, name)
            if type(value) is not int or value < 0:
                raise StateMismatchError(f"{name} in the state is {value!r}; it is a number of 0 or more")
        if loaded.position > loaded.length:
            raise StateMismatchError(f"the state stands at position {loaded.position} of {loaded.length}")
        loaded._check_missing()
        return loaded

    def _check_missing(self) -> None:
        missing, size = self.missing, self.step_size
        if not missing:
            return
        rise = all(type(position) is int for position in missing) and all(a < b for a, b in pairwise(missing))
        if not rise or missing[0] < 0 or missing[-1] >= self.position:
            raise StateMismatchError(
                f"missing in the state is {list(missing)}; they are rising positions before {self.position}"
            )
        if not size or any((position - missing[0]) % size for position in missing):
            raise StateMismatchError(f"missing in the state is {list(missing)}; they lie whole steps of {size} apart")

    def check(self, here: LoaderState) -> None:
        """Refuse a state of other data or another order.

        Raises:
            StateMismatchError: One line per field that differs.
        """
        meanings = {
            "source": "the data set",
            "order": "the sampler or its seed",
            "length": "records per epoch",
            "order_version": "the release's orders",
            "step_size": "rows of all ranks a step, which a state of in_order=False needs",
        }
        differences = [
            f"{name} ({meaning}): {getattr(self, name)} in the state, {getattr(here, name)} here"
            for name, meaning in meanings.items()
            if getattr(self, name) != getattr(here, name)
        ]
        if differences:
            raise StateMismatchError(
                "the state was saved with other data or another order; load it into a loader built as then, "
                "or start anew",
                differences=differences,
            )
