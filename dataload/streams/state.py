"""What a checkpoint of a multi-stream loader holds. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from dataload._util.fingerprint import digest
from dataload._util.randomness import ORDER_VERSION
from dataload.errors import StateMismatchError
from dataload.loader.state import check_same, is_count, upgrade
from dataload.streams.order import Cursor
from dataload.streams.rows import RowStart

__all__ = ["MultiStreamState", "identify_sequences"]

_MIGRATIONS = ()  # see `dataload.loader.state.upgrade`

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
    version: int = len(_MIGRATIONS) + 1

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
        values = upgrade(state, cls, "MultiStreamLoader", _MIGRATIONS)
        for name in ("epoch", "step"):
            if not is_count(values[name]):
                raise StateMismatchError(f"{name} in the state must be an integer >= 0, found {values[name]!r}")
        rows, streams = values["rows"], values["streams"]
        if not (isinstance(rows, (list, tuple)) and all(map(_is_cursor, cast("list[Any]", rows)))):
            raise StateMismatchError(f"rows in the state must be a list of three integers for each row, found {rows!r}")
        if not isinstance(streams, (list, tuple)) or len(cast("list[Any]", streams)) not in (0, len(rows)):
            raise StateMismatchError("streams in the state must be empty or have one state for each row")
        values.update(rows=tuple(Cursor(*row) for row in rows), streams=tuple(streams))
        return cls(**values)

    def check(self, here: MultiStreamState) -> None:
        """Refuse a state of other sequences or another order.

        Raises:
            StateMismatchError: One line per field that differs.
        """
        check_same(self, here, _MEANINGS)
        if len(self.rows) != self.batch_size:
            raise StateMismatchError(f"the state has {len(self.rows)} rows, and its batch_size is {self.batch_size}")


def _is_cursor(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(cast("list[Any]", value)) == 3
        and all(map(is_count, cast("list[Any]", value)))
    )
