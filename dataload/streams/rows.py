"""One row of a batch and the stream that it follows, in the worker that owns the row."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from dataload._util.caches import Memo
from dataload._util.randomness import KEY_WORDS, derive_key, generator, permute
from dataload.errors import ConfigError, SourceError, StateMismatchError, printable
from dataload.executors.base import WorkerStatus
from dataload.samplers.streams.sampler import ChunkEnd
from dataload.sources.memory import owned
from dataload.transforms import NamedTransform
from dataload.types import Int64Array

SequenceMode: TypeAlias = Literal["independent", "split"]
"""`independent`: every row repeats all sequences. `split`: each sequence goes to one row, once per epoch."""

_BLOCK = 1024


class RowPosition(NamedTuple):
    """The position of a row in its sequences."""

    epoch: int  # the row's passes through its sequences so far; in mode `split` the loader's epoch
    position: int  # position in the order of this pass
    offset: int  # items taken from the current sequence


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """The order of sequences for every row of every rank."""

    sequences: int
    rows: int  # over all ranks
    mode: SequenceMode  # see `SequenceMode`
    # whether each pass (in mode `independent`, of each row) is a new permutation
    shuffle: bool
    seed: int

    def count(self, row: int) -> int:
        """Return the number of sequences in one pass of a row."""
        return self.sequences if self.mode == "independent" else len(range(row, self.sequences, self.rows))

    def check_ends(self, tail: str | None, epochs: int | None) -> None:
        """Raise a ConfigError for a tail or epochs that rows of this order do not have."""
        if self.mode == "independent":
            for key, value in (("epochs", epochs), ("tail", tail)):
                if value is not None:
                    message = f"{key} needs mode='split': rows of mode='independent' never end"
                    raise ConfigError(message, key=key, value=value)
        elif tail == "drop" and self.sequences < self.rows:
            raise ConfigError(
                f"{self.sequences} sequences do not fill {self.rows} rows, and tail='drop' needs full rows: use "
                "tail='pad', fewer rows or mode='independent'",
                key="tail",
                value=tail,
            )

    def find(self, row: int, epoch: int, positions: Int64Array) -> Int64Array:
        """Return the sequences at positions of a pass, both (n,) int64. `row` counts the rows of all ranks."""
        address = ("split", epoch) if self.mode == "split" else ("independent", epoch, row)
        positions = row + positions * self.rows if self.mode == "split" else positions
        if not self.shuffle:
            return positions
        return permute(positions, self.sequences, derive_key(self.seed, "multistream", *address, words=KEY_WORDS))


_REPR_CHARACTERS = 80
_MISSING = object()


@dataclass(frozen=True)
class StreamContext:
    """Identifies a stream to `make_stream`, and has its own random generator.

    Attributes:
        index: Number of the sequence in `sequences`.
        row: Number of the row that will follow the stream, among the rows of all ranks.
        epoch: Number of the row's pass through the sequences; with ``mode="split"`` the epoch.
        seed: The loader's seed.
    """

    index: int
    row: int
    epoch: int
    seed: int

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random numbers of this stream: the same for any number of workers, and after a resume."""
        return generator(self.seed, "stream", self.epoch, self.row, self.index)


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """The settings of all rows. Pickled once per worker process."""

    make_stream: NamedTransform
    sequences: Sequence[Any]
    order: SequenceOrder  # the sequences of each row
    chunk: int  # items of a row per step
    ends: ChunkEnd
    stacks: bool  # whether workers stack samples into columns; otherwise the consumer collates them

    def stream(self, sequence: int, context: StreamContext) -> Any:
        step = self.make_stream
        return step.function(self.sequences[sequence], *([context] if step.takes_context else []))


class RowStart(NamedTuple):
    """The position of a row, and the ``state_dict()`` of its stream there."""

    position: RowPosition
    state: Any = None  # None: skip the items before the position


class Taken(NamedTuple):
    """The items of a row for one step. Without items, `sequence` and `offset` are -1."""

    sequence: int  # of the first item
    offset: int  # number of the first item within its sequence
    samples: list[Any]
    starts: list[bool]  # for each item, whether it starts its sequence


def describe(sequences: Sequence[Any], number: int) -> str:
    """Return a sequence's number and shortened repr, for messages."""
    try:
        text = printable(repr(sequences[number]), _REPR_CHARACTERS)
    except Exception as error:
        text = f"which cannot be shown ({type(error).__name__})"
    return f"sequence {number}, {text}"


class RowStream:
    """The streams of one row, each made when the row reaches it and closed when the row leaves it."""

    def __init__(self, plan: StreamSpec, row: int, start: RowStart, status: WorkerStatus, base: int) -> None:
        self.sequence: int = -1  # -1 before the first
        self._epoch, self._position, self._offset = start.position
        # `row` counts the rows of all ranks. `status` gets `base` plus the sequence; see `locate`.
        self._plan = plan
        self._row = row
        self._blocks: Memo[Int64Array] = Memo()  # of the order
        self._count = plan.order.count(row)
        self._saved = start.state
        self._status = status
        self._base = base
        self._stream: Any = None
        self._iterator: Iterator[Any] | None = None
        self._has_state = False

    @property
    def position(self) -> tuple[int, int, int]:
        """The `RowPosition` after the items taken so far, as a plain tuple."""
        return self._epoch, self._position, self._offset

    def take(self) -> Taken:
        """Return the items of the next step: fewer than `chunk` at the end of a padded sequence or of the epoch."""
        chunk, ends = self._plan.chunk, self._plan.ends
        taken, left = Taken(-1, -1, [], []), 0
        if self._iterator is not None:
            self._status.at_index(self._base + self.sequence)
        while len(taken.samples) < chunk:
            iterator = self._iterator
            if iterator is None and (iterator := self._open()) is None:
                break
            if taken.samples:
                taken.samples[-1] = owned(taken.samples[-1])  # the stream may fill the same buffer again
            try:
                sample = next(iterator)
            except StopIteration:
                self.close()
                self._position, self._offset = self._position + 1, 0
                if taken.samples and ends == "pad":
                    break
                if ends == "drop":
                    taken = Taken(-1, -1, [], [])
                left += 1
                if left > 2 * self._count and self._plan.order.mode == "independent":  # this includes a complete pass
                    raise SourceError(self._nothing()) from None
                continue
            if not taken.samples:
                taken = Taken(self.sequence, self._offset, [], [])
            taken.samples.append(sample)
            taken.starts.append(not self._offset)
            self._offset += 1
            if ends != "drop":
                left = 0
        return taken if ends != "drop" or len(taken.samples) == chunk else Taken(-1, -1, [], [])

    def _nothing(self) -> str:
        if self._plan.ends == "drop" and self._plan.chunk > 1:
            return f"none of {self._count} sequences gave {self._plan.chunk} items, and ends='drop' drops fewer"
        return f"none of {self._count} sequences gave an item"

    def _open(self) -> Iterator[Any] | None:
        """Open the stream at the current position, or return None if the row has no more sequences."""
        if self._position >= self._count:
            if self._plan.order.mode == "split":
                return None
            self._epoch, self._position = self._epoch + 1, 0
        self.sequence = sequence = self._next_sequence()
        self._status.at_index(self._base + sequence)
        context = StreamContext(sequence, self._row, self._epoch, self._plan.order.seed)
        self._stream = stream = self._plan.stream(sequence, context)
        self._has_state = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
        saved, self._saved = self._saved, None
        if saved is not None:
            if not self._has_state:
                raise StateMismatchError(
                    f"the saved state includes a stream's state, but {type(stream).__name__} has no state_dict and "
                    "load_state_dict"
                )
            stream.load_state_dict(saved)
        iterator = iter(stream)
        if saved is None:
            for skipped in range(self._offset):
                if next(iterator, _MISSING) is _MISSING:
                    raise StateMismatchError(
                        f"{self._offset} items of this sequence were consumed when the state was saved, but now it has "
                        f"only {skipped}"
                    )
        self._iterator = iterator
        return iterator

    def _next_sequence(self) -> int:
        """Return the sequence at this position; the order is computed in blocks, which take little longer than one."""
        block, within = divmod(self._position, _BLOCK)
        known = self._blocks.recall((self._epoch, block))
        if known is None:
            positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._count), dtype=np.int64)
            found = self._plan.order.find(self._row, self._epoch, positions)
            known = self._blocks.keep((self._epoch, block), found)
        return int(known[within])

    def state(self) -> Any:
        """Return a copy of the stream's ``state_dict()``, or None if it has no such method."""
        return copy.deepcopy(self._stream.state_dict()) if self._has_state else None

    def close(self) -> None:
        stream, iterator = self._stream, self._iterator
        self._stream = self._iterator = None
        self._has_state = False
        for closed in (iterator, stream) if iterator is not stream else (stream,):
            close = getattr(closed, "close", None)
            if callable(close):
                with contextlib.suppress(ValueError):  # a generator that still runs in another thread
                    close()
