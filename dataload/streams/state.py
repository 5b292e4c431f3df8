"""The position of a multi-stream loader in a checkpoint, and its work, also by row. Pure (no I/O)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from dataload._util.fingerprint import digest
from dataload._util.randomness import ORDER_VERSION
from dataload._util.settings import check_choice
from dataload.errors import StateMismatchError
from dataload.loader.growth import OnGrowth
from dataload.loader.state import check_counts, check_same, is_count, upgrade
from dataload.loader.statistics import Statistics
from dataload.streams.rows import RowPosition, RowStart

_MIGRATIONS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = ()  # see `dataload.loader.state.upgrade`
_SAME_ORDER = {
    "sequences": "their number, or their own fingerprint",
    "mode": "how rows go through the sequences",
    "shuffle": "whether their order is shuffled",
    "seed": "the seed",
    "order_version": "the release's orders",
}
_SAME_RANKS = {"batch_size": "rows of each rank", "rank": "the rank of these rows", "world_size": "number of ranks"}
_SAME_STEP = {"epoch": "epoch", "step": "step", "batch_size": "rows of each rank", "world_size": "number of ranks"}


def identify_sequences(sequences: Sequence[Any], count: int) -> str:
    """Return the sequences' own fingerprint, or a fingerprint of the number of the first ones that rows follow."""
    own = getattr(sequences, "fingerprint", None)
    return str(own()) if callable(own) else digest(count)


def sequences_before(state: Any, sequences: Sequence[Any]) -> int:
    """Return how many sequences there were when a state was saved; all if that is unknown."""
    one = state[0] if isinstance(state, (list, tuple)) and state else state
    was, count = one.get("sequences") if isinstance(one, Mapping) else None, len(sequences)
    known = () if callable(getattr(sequences, "fingerprint", None)) else range(count, 0, -1)
    return next((number for number in known if digest(number) == was), count)


def check_added(on_growth: OnGrowth, mode: str, before: int, count: int) -> None:
    """Refuse a state from before sequences were added, unless its epoch is to be finished without them."""
    check_choice("on_growth", on_growth, get_args(OnGrowth))
    if mode == "split" and on_growth == "finish":
        return
    remedy = "pass load_state_dict(state, on_growth='finish'), or start over"
    if mode == "independent":
        remedy = f"rows of mode='independent' end no epoch together: continue with sequences[:{before}], or start over"
    message = f"{count - before} sequences were added after the state was saved: {remedy}"
    raise StateMismatchError(message, differences=[f"sequences: {before} in the state, {count} here"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiStreamState:
    """The position of the rows of one rank: independent of workers, prefetch and chunk."""

    epoch: int
    step: int  # steps that the consumer has received in this epoch
    rows: tuple[RowPosition, ...]
    streams: tuple[Any, ...]  # `state_dict()` of each row's stream; empty if no stream has that method
    sequences: str
    mode: str
    shuffle: bool
    seed: int
    batch_size: int  # rows of this rank
    rank: int  # row b of this rank is row ``b * world_size + rank`` of all
    world_size: int
    order_version: int = ORDER_VERSION
    version: int = len(_MIGRATIONS) + 1

    def starts(self) -> tuple[RowStart, ...]:
        return tuple(map(RowStart, self.rows, self.streams or (None,) * len(self.rows)))

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON, if the streams' states are: three numbers per row, and those states."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "rows": [list(position) for position in self.rows], "streams": list(self.streams)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Read a state of this or an earlier release."""
        values = upgrade(state, cls, "MultiStreamLoader", _MIGRATIONS)
        check_counts(values, "epoch", "step", "batch_size", "rank", "world_size")
        rows, streams = values["rows"], values["streams"]
        if not (isinstance(rows, (list, tuple)) and all(map(_is_position, cast("list[Any]", rows)))):
            raise StateMismatchError(f"rows in the state must be a list of three integers for each row, found {rows!r}")
        if len(cast("list[Any]", rows)) != values["batch_size"]:
            raise StateMismatchError(f"the state has {len(rows)} rows, but its batch_size is {values['batch_size']}")
        if not isinstance(streams, (list, tuple)) or len(cast("list[Any]", streams)) not in (0, len(rows)):
            raise StateMismatchError("streams in the state must be empty or have one state for each row")
        values.update(rows=tuple(RowPosition(*row) for row in rows), streams=tuple(streams))
        return cls(**values)

    @classmethod
    def load(cls, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], here: Self) -> Self:
        """Return this rank's saved position, from its own state or a list of the states of all ranks."""
        if isinstance(state, Sequence) and not isinstance(state, (str, bytes)):
            return cls.deal([cls.from_json(each) for each in state], here)
        saved = cls.from_json(cast("Mapping[str, Any]", state))
        if saved.world_size == 1:
            return cls.deal([saved], here)
        check_same(saved, here, _SAME_ORDER | _SAME_RANKS, hint=". With other ranks, load a list of all ranks' states")
        return saved

    @classmethod
    def deal(cls, states: Sequence[Self], here: Self) -> Self:
        """Deal the rows saved by all ranks (states in any order) to the ranks of this run."""
        ranks = {state.rank: state for state in states}
        if not states or sorted(ranks) != list(range(states[0].world_size)) or len(ranks) != len(states):
            raise StateMismatchError(
                f"load_state_dict needs one state from every rank; found ranks {sorted(s.rank for s in states)}"
                + (f" of {states[0].world_size}" if states else "")
            )
        for state in states:
            check_same(state, states[0], _SAME_ORDER | _SAME_STEP, hint=". All ranks must save at the same step")
        saved = states[0]
        total, rows = saved.batch_size * saved.world_size, here.batch_size * here.world_size
        differences = [f"rows (of all ranks): {total} in the state, {rows} here"] if total != rows else []
        check_same(saved, here, _SAME_ORDER, more=differences)
        starts = [state.starts() for _, state in sorted(ranks.items())]
        mine = [
            starts[row % saved.world_size][row // saved.world_size] for row in range(here.rank, rows, here.world_size)
        ]
        return dataclasses.replace(
            here,
            epoch=saved.epoch,
            step=saved.step,
            rows=tuple(start.position for start in mine),
            streams=tuple(start.state for start in mine),
        )


def _is_position(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(numbers := cast("list[Any]", value)) == 3
        and all(map(is_count, numbers))
    )


StateT = TypeVar("StateT")


def reset_state(state: StateT, is_first: Any, *, axis: int = 0, initial: Any = 0) -> StateT:
    """Return the model state for the next step: `initial` in rows that start a sequence, `state` in the others.

    Args:
        state: A numpy array or torch tensor with an axis for the rows; a tuple, list or dict of these, as for an LSTM;
            or None. It is not modified; gradients flow through a tensor.
        is_first: A batch's ``is_first``, (rows,) or (rows, chunk): array or tensor. For a model that takes whole
            chunks, only the first column counts. If sequences may also start inside a chunk (``ends="next"``), either
            accept that, or run the model record by record, each with its column.
        axis: The axis of the rows: 0, or 1 for the ``(layers, rows, hidden)`` of torch's LSTM and GRU.
        initial: The initial state: a number, or a value that broadcasts to `state`.

    Examples:
        >>> import numpy as np
        >>> reset_state(np.ones((2, 3)), np.array([True, False])).tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    return cast("StateT", _reset(state, is_first if is_first.ndim == 1 else is_first[:, 0], axis, initial))


def _reset(state: Any, rows: Any, axis: int, initial: Any) -> Any:
    if state is None:
        return None
    if isinstance(state, Mapping):
        return {name: _reset(value, rows, axis, initial) for name, value in cast("Mapping[Any, Any]", state).items()}
    if isinstance(state, (tuple, list)):
        kind = cast("type[Any]", type(state))
        parts = [_reset(value, rows, axis, initial) for value in cast("list[Any]", state)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    shape = [1] * state.ndim
    shape[axis] = -1
    if not hasattr(state, "new_tensor"):
        return np.where(np.asarray(rows).reshape(shape), initial, state).astype(state.dtype, copy=False)
    # A torch tensor. Its own methods make new tensors on its device, so torch is not imported here.
    flags = rows.to(state.device) if hasattr(rows, "new_tensor") else state.new_tensor(np.asarray(rows, np.float32))
    start = state.new_tensor(initial) if isinstance(initial, np.ndarray) else initial
    return state.where((flags == 0).reshape(shape), start).to(state.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class MultiStreamStatistics(Statistics):
    """The work of a multi-stream loader since it was built. Its rows are rows of batches.

    Attributes:
        row_seconds: (rows,) float64, time taken by the streams of each row.
    """

    row_seconds: npt.NDArray[np.float64]

    @property
    def slowest_row(self) -> int:
        """The row whose streams took the longest."""
        return int(self.row_seconds.argmax())

    @classmethod
    def of(cls, statistics: Statistics, row_seconds: npt.NDArray[np.float64]) -> Self:
        """Return statistics with the times of rows."""
        fields = {f.name: getattr(statistics, f.name) for f in dataclasses.fields(Statistics)}
        return cls(**fields, row_seconds=row_seconds)

    def since(self, earlier: Self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride] # of one loader
        return self.of(Statistics.since(self, earlier), self.row_seconds - earlier.row_seconds)

    def to_json(self) -> dict[str, Any]:
        return {**Statistics.to_json(self), "row_seconds": self.row_seconds.tolist()}

    def __str__(self) -> str:
        row, *lines = self.slowest_row, *Statistics.__str__(self).splitlines()
        slowest = f"the slowest row is {row} with {self.row_seconds[row]:.2f} s, the mean is"
        lines.insert(-1, f"{slowest} {self.row_seconds.mean():.2f} s")
        return "\n".join(lines)
