"""The words of dataload as types: records, batches, and the protocols that sources and samplers satisfy.

Everything here is structural. A class of yours that has the methods fits; nothing needs to be inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Batch",
    "BatchReader",
    "BytesArray",
    "Codec",
    "ColumnReader",
    "FieldSpec",
    "Int64Array",
    "RandomAccessSource",
    "Record",
    "RecordWriter",
    "Sampler",
    "Sharded",
    "Value",
]

Array: TypeAlias = npt.NDArray[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BytesArray: TypeAlias = npt.NDArray[np.uint8]

Value: TypeAlias = "Array | bytes | str | int | float"
"""What a field holds."""

Record: TypeAlias = dict[str, Any]
"""One record of a source with fields: field name -> `Value`."""

Batch: TypeAlias = dict[str, Any]
"""Columns: field name -> array of shape ``(rows, *shape)``, or a list of `rows` values for bytes and text."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What is known about a field without reading its records.

    Attributes:
        dtype: A numpy dtype name, or ``"bytes"``, ``"str"``; ``"unknown"`` where only a record would tell.
        shape: Shape of one record's value; None for a length that varies from record to record, and None
            for the whole when even the number of dimensions is unknown or varies.
    """

    dtype: str
    shape: tuple[int | None, ...] | None = None

    def __str__(self) -> str:
        if self.shape is None:
            return self.dtype
        return f"{self.dtype} ({', '.join('?' if n is None else str(n) for n in self.shape)})"


@runtime_checkable
class RandomAccessSource(Protocol[T_co]):
    """Records by index: all that a source of your own needs.

    Torch's map-style data sets and Grain's sources fit as they are. The loader calls `__getitem__` from
    several threads at once, may ask for any index at any time and more than once, and expects the same record
    for the same index each time. A record that was returned belongs to the caller. For worker processes the
    source is pickled, so it should carry its settings and reopen its files on first use.

    Example:
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
        """Number of records, constant for the life of the object."""
        ...

    def __getitem__(self, index: SupportsIndex, /) -> T_co:
        """The record at `index` in [0, len).

        Raises:
            IndexError: `index` is outside.
        """
        ...


@runtime_checkable
class BatchReader(Protocol[T]):
    """Optional: many records in one call, which is where a format can be fast.

    The name is the one that torch's own fetcher calls.
    """

    def __getitems__(self, indices: Any, /) -> list[T]:
        """Records in the order of the request. Duplicates are allowed; [] gives []; never a partial result."""
        ...


@runtime_checkable
class ColumnReader(Protocol):
    """Optional: a batch as columns, without making a record of each row first."""

    def read_batch(self, indices: Any, fields: Sequence[str] | None = None) -> Batch:
        """Equal to ``default_collate(self.__getitems__(indices))`` of the chosen fields."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """Optional: how the records lie in files."""

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Records per file, in index order; the sum is ``len``."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """An order: which index stands at which position of an epoch.

    A sampler is a frozen value and a pure function of its fields, the epoch and the positions: no state, no
    generator, no worker count. So any part of an order can be computed anywhere, and a position is all that a
    checkpoint needs.
    """

    def __len__(self) -> int:
        """Positions per epoch."""
        ...

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """Indices at `positions`.

        Args:
            positions: (n,) int64, each in [0, len); any order, duplicates allowed. Not modified.
            epoch: 0, 1, 2, ...

        Returns:
            (n,) int64.
        """
        ...


class Codec(Protocol):
    """Turns the bytes of a record into a record with fields, and back."""

    def decode(self, data: bytes | memoryview) -> Any:
        """The record that `data` holds. Values must not refer to `data` afterwards."""
        ...

    def encode(self, record: Mapping[str, Any]) -> bytes:
        """The bytes that `decode` turns back into `record`."""
        ...


class RecordWriter(Protocol[T_contra]):
    """Writes records one after another; nothing is visible at the destination before `close`."""

    def write(self, record: T_contra, /) -> None:
        """Append one record."""
        ...

    def close(self) -> None:
        """Make everything durable and put it in its place."""
        ...


Transform: TypeAlias = Callable[..., Any]
"""``f(sample) -> sample`` or ``f(sample, context) -> sample``."""
