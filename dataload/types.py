"""The types of dataload: records, batches, and the protocols of sources, samplers, codecs and writers.

The protocols are structural: a class with these methods satisfies them without inheriting.

To plug in your own data, write a `RandomAccessSource`. The other source protocols are optional and make it faster:
`BatchReader` reads many records at once, `ColumnReader` reads a batch as columns, `Sharded` tells where files begin
and end, `ReadsAhead` fetches records before they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, SupportsIndex, TypeAlias, TypeVar, cast, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "AheadReader",
    "Array",
    "Batch",
    "BatchReader",
    "BytesArray",
    "BytesColumn",
    "Codec",
    "ColumnReader",
    "FieldSpec",
    "Int64Array",
    "RandomAccessSource",
    "ReadsAhead",
    "Record",
    "RecordWriter",
    "Sampler",
    "Sharded",
    "StepsAhead",
    "TextColumn",
    "Value",
]

Array: TypeAlias = npt.NDArray[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BytesArray: TypeAlias = npt.NDArray[np.uint8]

Value: TypeAlias = "Array | bytes | str | int | float"
"""The value of one field of a record."""

Record: TypeAlias = dict[str, Any]
"""One record of a source with fields, as a dict from field name to `Value`."""

Batch: TypeAlias = dict[str, Any]
"""Several records as columns: a dict from field name to an array of shape ``(rows, *shape)``. Text is a list of `rows`
values or a `TextColumn`, bytes are a list or a `BytesColumn`."""

NullPolicy: TypeAlias = str | int | float | bool | Mapping[str, str | int | float | bool] | None
"""What stands for nulls of a table: ``"error"``, ``"mask"``, a value, or one of these by field."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class BytesColumn(Sequence[bytes]):
    """The bytes values of a batch in one block of memory. An item access returns a bytes object.

    It compares, concatenates and pickles as the list of its values. `view` returns a value without a copy.

    Args:
        blocks: Blocks of memory, (bytes,) uint8.
        block_of: (rows,) int64, the block of each value; None for a single block.
        starts: (rows,) int64, offset of each value in its block.
        stops: (rows,) int64, its end.
    """

    __slots__ = ("_block_of", "_blocks", "_starts", "_stops")
    __hash__: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride] # like a list

    def __init__(
        self, blocks: Sequence[BytesArray], block_of: Int64Array | None, starts: Int64Array, stops: Int64Array
    ) -> None:
        self._blocks = blocks
        self._block_of = block_of
        self._starts = starts
        self._stops = stops

    @classmethod
    def packed(cls, block: BytesArray, ends: Int64Array) -> Self:
        """Return a column of consecutive values in `block` that end at `ends`, (rows,) int64."""
        starts = np.empty_like(ends)  # zeros_like takes 4 us
        starts[:1], starts[1:] = 0, ends[:-1]
        return cls([block], None, starts, ends)

    @classmethod
    def scattered(cls, pieces: Sequence[tuple[Int64Array, BytesColumn]], rows: int) -> Self:
        """Merge `pieces`, pairs of row numbers, (k,) int64, and values; every row is in exactly one piece."""
        blocks: list[BytesArray] = []
        block_of, starts, stops = np.empty((3, rows), np.int64)
        for where, piece in pieces:
            block_of[where] = len(blocks) if piece._block_of is None else len(blocks) + piece._block_of
            starts[where], stops[where] = piece._starts, piece._stops
            blocks.extend(piece._blocks)
        return cls(blocks, block_of, starts, stops)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int((self._stops - self._starts).sum())

    def view(self, row: int) -> memoryview:
        """Return a value as a read-only view, which keeps the memory of the whole column alive."""
        block = self._blocks[0 if self._block_of is None else self._block_of[row]]
        return block.data[self._starts[row] : self._stops[row]].toreadonly()

    def views(self) -> Iterator[memoryview]:
        """Iterate over all values as read-only views; see `view`."""
        views = [block.data.toreadonly() for block in self._blocks]
        starts, stops = self._starts.tolist(), self._stops.tolist()
        if self._block_of is None:
            return map(views[0].__getitem__, map(slice, starts, stops))
        rows = zip(self._block_of.tolist(), starts, stops, strict=True)
        return (views[block][start:stop] for block, start, stop in rows)

    def parts(self) -> tuple[Sequence[BytesArray], Int64Array | None, Int64Array, Int64Array]:
        """Return the arguments of the constructor."""
        return self._blocks, self._block_of, self._starts, self._stops

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> bytes: ...
    @overload
    def __getitem__(self, index: slice, /) -> BytesColumn: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> bytes | BytesColumn:
        """Return a value, or for a slice a column that shares the memory."""
        if isinstance(index, slice):
            block_of = None if self._block_of is None else self._block_of[index]
            return type(self)(self._blocks, block_of, self._starts[index], self._stops[index])
        return self.view(operator.index(index)).tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return map(memoryview.tobytes, self.views())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, BytesColumn)):
            return NotImplemented
        return len(self) == len(cast("Sequence[Any]", other)) and list(self) == list(cast("Sequence[Any]", other))

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} values, {self.nbytes} bytes)"


class TextColumn(BytesColumn):
    """The texts of a batch in one block of memory, as valid UTF-8. An item access makes a str.

    It compares, concatenates and pickles as the list of its texts; ``list(column)`` makes all of them. `view` returns
    the bytes of a text without a copy.
    """

    __slots__ = ()

    @classmethod
    def checked(cls, column: BytesColumn) -> Self | None:
        """Return a column of consecutive values in one block as text; None if one of them is not UTF-8."""
        blocks, block_of, starts, stops = column.parts()
        data = blocks[0][int(starts[0]) : int(stops[-1])] if len(starts) else np.empty(0, np.uint8)
        if data.size and int(data.max()) > 127:
            try:
                str(data.data, "utf-8")
            except UnicodeDecodeError:
                return None
            heads = data[(starts - starts[0])[starts < stops]]
            if bool((heads & 0xC0 == 0x80).any()):  # a character is cut in two
                return None
        return cls(blocks, block_of, starts, stops)

    def __getitem__(self, index: Any, /) -> Any:
        found = super().__getitem__(index)
        return found.decode() if isinstance(found, bytes) else found

    def __iter__(self) -> Iterator[Any]:
        if self._block_of is None and len(self) and bool((self._starts[1:] == self._stops[:-1]).all()):
            first = int(self._starts[0])
            text = str(self._blocks[0][first : int(self._stops[-1])].data, "utf-8")
            if len(text) == int(self._stops[-1]) - first:  # of ASCII, characters are bytes
                starts, stops = (self._starts - first).tolist(), (self._stops - first).tolist()
                return map(text.__getitem__, map(slice, starts, stops))
        return (str(view, "utf-8") for view in self.views())


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The dtype and shape of a field, as far as they are known without reading records.

    Attributes:
        dtype: A numpy dtype name, ``"bytes"``, ``"str"``, or ``"unknown"`` if only a record can tell.
        shape: Shape of the value in one record. An axis is None if its length varies between records; the whole
            shape is None if the number of dimensions is unknown or varies.
        classes: Class names for the numbers 0, 1, ...; None if values are not labels.
    """

    dtype: str
    shape: tuple[int | None, ...] | None = None
    classes: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if self.shape is None:
            return self.dtype
        classes = "" if self.classes is None else f", {len(self.classes)} classes"
        return f"{self.dtype} ({', '.join('?' if n is None else str(n) for n in self.shape)}){classes}"


@runtime_checkable
class RandomAccessSource(Protocol[T_co]):
    """A source of records by index: the minimum for your own source.

    PyTorch's map-style datasets and Grain's data sources satisfy it unchanged. A source has these obligations:

    - `__getitem__` is thread-safe, and may be called with any index, in any order and repeatedly.
    - The same index always gives the same record.
    - A returned record belongs to the caller; later reads do not change it.
    - With worker processes, the source can be pickled. It should pickle its settings and reopen its files on first
      use.

    Examples:
        >>> class Squares:
        ...     def __len__(self):
        ...         return 10
        ...     def __getitem__(self, index):
        ...         return {"x": index, "y": index**2}
        >>> import dataload
        >>> [batch["y"].tolist() for batch in dataload.Loader(Squares(), batch_size=5)]
        [[0, 1, 4, 9, 16], [25, 36, 49, 64, 81]]
    """

    def __len__(self) -> int:
        """Return the number of records, which is constant for the life of the object."""
        ...

    def __getitem__(self, index: SupportsIndex, /) -> T_co:
        """Return the record at `index`.

        Raises:
            IndexError: `index` is outside [0, len).
        """
        ...


@runtime_checkable
class BatchReader(Protocol[T]):
    """Optional: reads many records in one call, which is usually much faster than one call per record.

    PyTorch's `DataLoader` calls a method of the same name.
    """

    def __getitems__(self, indices: Any, /) -> list[T]:
        """Return the records at `indices`, in the order requested.

        Indices may repeat, and no indices give an empty list. If any index is out of range, raise IndexError instead
        of returning some of the records.
        """
        ...


@runtime_checkable
class ColumnReader(Protocol):
    """Optional: reads a batch as columns, without building a record for each row first."""

    def read_batch(self, indices: Any, fields: Sequence[str] | None = None) -> Batch:
        """Return the records at `indices` as columns; `fields` limits and orders the fields.

        The result equals ``default_collate(self.__getitems__(indices))``, restricted to `fields`.
        """
        ...


@runtime_checkable
class Sharded(Protocol):
    """Optional: gives the division of records among files."""

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """The number of records in each file, in index order; their sum is ``len``."""
        ...


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """Consecutive future steps of a loader in one epoch.

    Attributes:
        epoch: Number of the epoch.
        indices: (rows,) int64, the indices of all records that this rank reads, step after step.
        ends: (steps,) int64, end of each step's indices.
        epoch_steps: Number of steps in the whole epoch.
    """

    epoch: int
    indices: Int64Array
    ends: Int64Array
    epoch_steps: int


class AheadReader(Protocol):
    """Fetches the records of the next steps in the background."""

    def received(self) -> None:
        """Report that the consumer has received another step."""
        ...

    def close(self) -> None:
        """Stop within a second. May be called twice, and by a forked child, where it has no effect."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """Optional: fetches records before they are read, because a loader knows its next records."""

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """Start to fetch the records of the next steps; return None if that gains nothing.

        Args:
            steps: The steps from the first one that the consumer has not received, across epochs. They are computed on
                demand; iterate in one thread only.
            fields: Names of the fields to read; None means all.
            here: Whether this process reads them, and not others.
            share: Fraction of the cache's budget that it may use, in (0, 1].
        """
        ...


@runtime_checkable
class Sampler(Protocol):
    """An order of records: maps positions in an epoch to indices in a source.

    A sampler is immutable, and `indices` is a pure function of the sampler's fields, the epoch and the positions. It
    keeps no state, no random generator and no worker count. Any part of the order can therefore be computed anywhere,
    and a checkpoint needs only a position.
    """

    def __len__(self) -> int:
        """Return the number of positions in an epoch."""
        ...

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """Return the indices of the records at `positions`.

        Args:
            positions: (n,) int64, each in [0, len), in any order and possibly repeated. Must not be modified.
            epoch: Number of the epoch, counted from 0.

        Returns:
            (n,) int64, the index for each position.
        """
        ...


class Codec(Protocol):
    """Decodes the bytes of a record into a record with fields, and encodes it again."""

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the record encoded in `data`. Its values must not refer to the memory of `data`."""
        ...

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """Return the bytes that `decode` turns back into `record`."""
        ...


class RecordWriter(Protocol[T_contra]):
    """Writes records one after another. Nothing appears at the destination before `close` is called."""

    def write(self, record: T_contra, /) -> None:
        """Append one record."""
        ...

    def close(self) -> None:
        """Finish the data, make it durable and publish it at the destination."""
        ...


Transform: TypeAlias = Callable[..., Any]
"""A function ``f(sample) -> sample`` or ``f(sample, context) -> sample``."""
