"""One row and the iterator that it follows, in the worker that owns it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from dataload._util.randomness import generator
from dataload.errors import SourceError, StateMismatchError, printable
from dataload.streams.order import Cursor, RowOrder, SequenceOrder
from dataload.transforms import NamedTransform

__all__ = ["Ends", "Item", "RowStart", "RowStream", "StreamContext", "StreamPlan", "describe"]

Ends: TypeAlias = Literal["next", "pad", "drop"]
"""What becomes of a chunk at the end of a sequence."""

_REPR_CHARACTERS = 80


@dataclass(frozen=True)
class StreamContext:
    """Which stream is made, and its own random numbers.

    Attributes:
        index: Number of the sequence in `sequences`.
        row: Number of the row that will follow it, among the rows of all ranks.
        epoch: Number of the row's pass through the sequences; with ``mode="split"`` the epoch.
        seed: The loader's seed.
    """

    index: int
    row: int
    epoch: int
    seed: int

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random numbers of this stream: the same for any number of workers, and when a resume makes it again."""
        return generator(self.seed, "stream", self.epoch, self.row, self.index)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What is to be done with which sequences. Pickled once for each worker process.

    Attributes:
        make_stream: ``f(sequence)`` or ``f(sequence, context)``, which gives an iterable of samples.
        sequences: What streams are made of.
        order: Which of them each row goes through.
        chunk: Items of a row per step.
        ends: See `Ends`.
        stacks: Whether samples become columns in the worker; else the consumer collates them.
    """

    make_stream: NamedTransform
    sequences: Sequence[Any]
    order: SequenceOrder
    chunk: int
    ends: Ends
    stacks: bool

    def stream(self, sequence: int, context: StreamContext) -> Any:
        """Make a stream."""
        step = self.make_stream
        given = (self.sequences[sequence], context) if step.takes_context else (self.sequences[sequence],)
        return step.function(*given)


class RowStart(NamedTuple):
    """Where a row begins.

    Attributes:
        cursor: Where it stands.
        state: What the stream there has said of itself; None if it has not, and items are to be skipped.
    """

    cursor: Cursor
    state: Any = None


class Item(NamedTuple):
    """One sample of a row.

    Attributes:
        sequence: Number of its sequence.
        offset: Its number within that.
        sample: What the stream gave.
    """

    sequence: int
    offset: int
    sample: Any


def describe(sequences: Sequence[Any], number: int) -> str:
    """A sequence in a message, cut where it is long."""
    try:
        text = printable(repr(sequences[number]), _REPR_CHARACTERS)
    except Exception as error:
        text = f"which cannot be shown ({type(error).__name__})"
    return f"sequence {number}, {text}"


class RowStream:
    """What one row follows: streams are made when it comes to them, and closed when it leaves them.

    Args:
        plan: What is to be done.
        row: Number of the row among those of all ranks.
        start: Where it begins.
        note: Told the number of each sequence that the row comes to.

    Attributes:
        sequence: The sequence that it is at; -1 before the first.
    """

    def __init__(self, plan: StreamPlan, row: int, start: RowStart, note: Callable[[int], None]) -> None:
        self.sequence = -1
        self._turn, self._place, self._item = start.cursor
        self._plan = plan
        self._row = row
        self._order = RowOrder(plan.order, row)
        self._count = plan.order.count(row)
        self._saved = start.state
        self._note = note
        self._stream: Any = None
        self._iterator: Iterator[Any] | None = None
        self._tells = False  # whether the stream says where it is

    @property
    def cursor(self) -> Cursor:
        """Where the row stands."""
        return Cursor(self._turn, self._place, self._item)

    def take(self) -> list[Item]:
        """The items of the next step: `chunk` of them, fewer at the end of a sequence that is padded or of all.

        Raises:
            SourceError: All sequences in turn have given nothing.
            Exception: Whatever a stream raises.
        """
        plan, items, left = self._plan, list[Item](), 0
        if self._iterator is not None:
            self._note(self.sequence)
        while len(items) < plan.chunk:
            iterator = self._open() if self._iterator is None else self._iterator
            if iterator is None:
                break
            try:
                sample = next(iterator)
            except StopIteration:
                self._leave()
                if items and plan.ends == "pad":
                    break
                if plan.ends == "drop":
                    items.clear()
                left += 1
                if left > 2 * self._count and plan.order.mode == "independent":  # at least one pass is among them
                    raise SourceError(self._nothing()) from None
                continue
            items.append(Item(self.sequence, self._item, sample))
            self._item += 1
            if plan.ends != "drop":
                left = 0
        if plan.ends == "drop" and len(items) < plan.chunk:
            items.clear()
        return items

    def _nothing(self) -> str:
        if self._plan.ends == "drop" and self._plan.chunk > 1:
            return f"none of {self._count} sequences gave {self._plan.chunk} items, and ends='drop' drops fewer"
        return f"none of {self._count} sequences gave an item"

    def _open(self) -> Iterator[Any] | None:
        """Make the stream that the row stands at; None if it has been through all."""
        if self._place >= self._count:
            if self._plan.order.mode == "split":
                return None
            self._turn, self._place = self._turn + 1, 0
        self.sequence = sequence = self._order[self._turn, self._place]
        self._note(sequence)
        context = StreamContext(sequence, self._row, self._turn, self._plan.order.seed)
        self._stream = stream = self._plan.stream(sequence, context)
        self._tells = all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))
        saved, self._saved = self._saved, None
        if saved is not None:
            if not self._tells:
                raise StateMismatchError(
                    f"the state holds a stream's own, and {type(stream).__name__} has no state_dict and load_state_dict"
                )
            stream.load_state_dict(saved)
        iterator = iter(stream)
        if saved is None:
            for skipped in range(self._item):
                if next(iterator, _MISSING) is _MISSING:
                    raise StateMismatchError(
                        f"{self._item} items of this sequence were consumed when the state was saved, and now it has "
                        f"{skipped}"
                    )
        self._iterator = iterator
        return iterator

    def state(self) -> Any:
        """What the stream says of itself, if it does: a copy, for it goes on."""
        return copy.deepcopy(self._stream.state_dict()) if self._tells else None

    def _leave(self) -> None:
        self.close()
        self._place, self._item = self._place + 1, 0

    def close(self) -> None:
        """Close the stream, if that can be."""
        stream, iterator = self._stream, self._iterator
        self._stream = self._iterator = None
        self._tells = False
        for closed in (iterator, stream) if iterator is not stream else (stream,):
            close = getattr(closed, "close", None)
            if callable(close):
                with contextlib.suppress(ValueError):  # a generator that hangs in another thread
                    close()


_MISSING = object()
