"""What a checkpoint of a multi-stream loader holds. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from dataload._util.fingerprint import digest
from dataload._util.randomness import ORDER_VERSION
from dataload.errors import StateMismatchError
from dataload.streams.order import Cursor
from dataload.streams.rows import RowStart

__all__ = ["STATE_VERSION", "MultiStreamState", "identify_sequences"]

STATE_VERSION = 1

_MEANINGS = {
    "sequences": "how many there are, or their own fingerprint",
    "mode": "how rows go through the sequences",
    "shuffle": "whether their order is shuffled",
    "seed": "the seed",
    "batch_size": "rows of this rank",
    "rank": "whose rows these are",
    "world_size": "ranks",
    "order_version": "the release's orders",
}


def identify_sequences(sequences: Sequence[Any]) -> str:
    """The fingerprint of the sequences: their own, or their number."""
    own = getattr(sequences, "fingerprint", None)
    return str(own()) if callable(own) else digest(len(sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStreamState:
    """Where the rows of one rank stand: independent of workers, prefetch and chunk.

    Attributes:
        epoch: Number of the epoch.
        step: Steps of it that the consumer has received.
        rows: For each row its `Cursor`.
        streams: For each row what its stream says of itself; empty if none does.
        sequences: Fingerprint of the sequences.
        mode: See `dataload.streams.order.Mode`.
        shuffle: Whether they are shuffled.
        seed: The seed of the order.
        batch_size: Rows.
        rank: Whose rows these are.
        world_size: Number of ranks.
    """

    epoch: int
    step: int
    rows: tuple[Cursor, ...]
    streams: tuple[Any, ...]
    sequences: str
    mode: str
    shuffle: bool
    seed: int
    batch_size: int
    rank: int
    world_size: int
    order_version: int = ORDER_VERSION
    version: int = STATE_VERSION

    def starts(self) -> tuple[RowStart, ...]:
        """Where each row goes on."""
        return tuple(map(RowStart, self.rows, self.streams or (None,) * len(self.rows)))

    def to_json(self) -> dict[str, Any]:
        """As a dict of numbers and text: three numbers a row, and what streams say of themselves."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "rows": [list(cursor) for cursor in self.rows], "streams": list(self.streams)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave.

        Raises:
            StateMismatchError: It is no such dict, or of another version.
        """
        if not isinstance(cast("object", state), Mapping):  # from a file it may be anything
            raise StateMismatchError(f"a loader's state is a dict, found {type(state).__name__}")
        if state.get("version") != STATE_VERSION or "streams" not in state:
            raise StateMismatchError(
                "this is not a state of a MultiStreamLoader that this release can read",
                differences=[f"version: {state.get('version')!r} in the state, {STATE_VERSION} here"],
            )
        names = {f.name for f in dataclasses.fields(cls)}
        if set(state) != names:
            wrong = ", ".join(sorted(names ^ set(state)))
            raise StateMismatchError(f"the state is incomplete or has foreign keys: {wrong}")
        for name in ("epoch", "step"):
            if not _is_count(state[name]):
                raise StateMismatchError(f"{name} in the state is {state[name]!r}; it is a number of 0 or more")
        rows, streams = state["rows"], state["streams"]
        if not (isinstance(rows, (list, tuple)) and all(map(_is_cursor, cast("list[Any]", rows)))):
            raise StateMismatchError(f"rows in the state is {rows!r}; it is a list of three numbers for each row")
        if not isinstance(streams, (list, tuple)) or len(cast("list[Any]", streams)) not in (0, len(rows)):
            raise StateMismatchError("streams in the state is a list of nothing, or of one state for each row")
        values: dict[str, Any] = {**state, "rows": tuple(Cursor(*row) for row in rows), "streams": tuple(streams)}
        return cls(**values)

    def check(self, here: MultiStreamState) -> None:
        """Refuse a state of other sequences or another order.

        Raises:
            StateMismatchError: One line per field that differs.
        """
        differences = [
            f"{name} ({meaning}): {getattr(self, name)} in the state, {getattr(here, name)} here"
            for name, meaning in _MEANINGS.items()
            if getattr(self, name) != getattr(here, name)
        ]
        if differences:
            raise StateMismatchError(
                "the state was saved with other sequences or another order; load it into a loader built as then, "
                "or start anew",
                differences=differences,
            )
        if len(self.rows) != self.batch_size:
            raise StateMismatchError(f"the state has {len(self.rows)} rows, and its batch_size is {self.batch_size}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_cursor(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(cast("list[Any]", value)) == 3 and all(map(_is_count, value))
