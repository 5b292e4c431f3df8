"""The base class of all that has records: index checks and batches, without what `Source` makes of sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, SupportsIndex, TypeVar

import numpy as np

from dataload._util.indexing import as_indices, check_index
from dataload._util.interactive import SaysInstead, html_table
from dataload._util.settings import check_fields
from dataload.catalog.facts import row_bytes, select_fields
from dataload.codecs.codec import functions_in
from dataload.collate import default_collate
from dataload.sources.shards import Location, shard_of
from dataload.storage import Remote
from dataload.storage.remote.traffic import Traffic
from dataload.types import Batch, FieldSpec, Int64Array

T_co = TypeVar("T_co", covariant=True)

_ITERATION_BLOCK, _ITERATION_BYTES = 256, 1 << 26


class Records(SaysInstead, ABC, Generic[T_co]):
    """A sequence of records, from which `Source` makes others; see there."""

    _habits = "source"
    _content: Mapping[str, Any] = {}  # options that affect the records, of sources of files

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records, which never changes."""

    @abstractmethod
    def _read(self, indices: Int64Array) -> list[T_co]:
        """Return the records at `indices`, (rows,) int64, which have been checked to be in [0, len)."""

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """Return columns of the records at `indices`; `fields` None means all."""
        records: list[Any] = self._read(indices)
        if fields is not None:
            records = [select_fields(record, fields) for record in records]
        return default_collate(records)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Specifications by field name; empty if records are plain bytes."""
        return {}

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records per shard, in index order."""
        return (len(self),)

    @property
    def groups(self) -> tuple[int, ...]:
        """Number of records per group, in index order; a shuffle by shards takes one group after another.

        A group is a shard, unless the records of a smaller part of one are much faster to read together.
        """
        return self.shard_lengths

    def locate(self, index: SupportsIndex, /) -> Location:
        """Return the location of the record at `index`, without reading the record, which may be damaged.

        Raises:
            IndexError: The index is outside [-len, len).
            ClosedSourceError: `close` was called.
        """
        return self._locate(check_index(index, len(self)))

    def _locate(self, index: int) -> Location:
        """See `locate`; `index` is in [0, len)."""
        lengths = self.shard_lengths
        shard, record = shard_of(np.cumsum(lengths), index)
        return Location(f"shard {shard}" if len(lengths) > 1 else None, record, None)

    @property
    def reads_in_order(self) -> bool:
        """Whether reading in index order is so much faster that a shuffle should stay close to it.

        This is a property of the data, not of the machine, because the default order depends on it.
        """
        return False

    def _add_mapped(self, paths: list[str], versions: dict[int, Int64Array]) -> None:
        """Add mapped files, and their versions when they were opened, by the id of their source."""

    def _traffics(self) -> Sequence[Traffic]:
        """Return what counts the downloads of this source in this process; nothing if no data are remote."""
        return ()

    def _files(self) -> Sequence[tuple[str, Remote | None]]:
        """Return the files that hold the records, with the settings for URLs; none if they are elsewhere, too."""
        return ()

    def _functions(self) -> Sequence[Any]:
        """Return the user's functions that make records of the files; a fingerprint has only their names."""
        return [*functions_in(self._content)]

    def _repr_html_(self) -> str | None:
        with suppress(Exception):  # it may be closed: notebooks then show its `repr`
            return html_table(repr(self), [f"{len(self):,} records"], ("field", "type"), self.fields.items())
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """Return an identifier of the content: equal for a copy elsewhere, different for other data.

        Returns:
            32 hexadecimal digits.
        """

    def __getitems__(self, indices: Any, /) -> list[T_co]:
        """Return records in the requested order, like `read`; torch's fetcher calls this name."""
        rows = as_indices(indices, len(self))
        return self._read(rows) if rows.size else []

    def read(self, indices: Any) -> list[T_co]:
        """Return records in the requested order.

        Args:
            indices: Integers in any order, duplicates allowed; negative ones count from the end.

        Raises:
            IndexError: An index is out of range; no partial result is returned.
            CorruptFileError: A record contradicts its format.
            ChangedFileError: A file was written to since it was opened.
            ClosedSourceError: `close` was called.
        """
        return self.__getitems__(indices)

    def read_batch(self, indices: Any, fields: Sequence[str] | None = None) -> Batch:
        """Return columns: equal to ``default_collate(read(indices))``, but much faster.

        Args:
            indices: See `read`.
            fields: Names of the fields to read; None means all.

        Returns:
            Arrays of shape ``(rows, *shape)``, or lists of bytes or text, by field name; ``{}`` for no indices.

        Raises:
            ConfigError: A field is unknown, or shapes differ from record to record.
        """
        rows, names = as_indices(indices, len(self)), check_fields(fields)
        return self._read_columns(rows, names) if rows.size else {}

    def __iter__(self) -> Iterator[T_co]:
        """Iterate over all records in index order, reading them in blocks."""
        block = max(1, min(_ITERATION_BLOCK, _ITERATION_BYTES // max(1, row_bytes(self.fields))))
        for start in range(0, len(self), block):
            yield from self._read(np.arange(start, min(start + block, len(self)), dtype=np.int64))

    def close(self) -> None:
        """Release files; later reads raise `ClosedSourceError`. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
