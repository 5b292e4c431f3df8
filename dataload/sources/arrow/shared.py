"""Columns of numbers and bytes, gathered from the record batches of many files at once."""

from typing import Any

import numpy as np

from dataload._util.limits import Claims
from dataload.errors import CorruptFileError
from dataload.sources.arrow.gather import Gatherer
from dataload.sources.directory import WITHIN, ShardDirectory, ShardNumbers
from dataload.types import Int64Array


class SharedColumns:
    """The columns of many files; see `Gatherer`. Records and batches are places."""

    def __init__(self, directory: ShardDirectory, gatherer: Gatherer) -> None:
        self._file, self._kinds = directory.files, gatherer.kinds()
        self._ends: ShardNumbers = directory.numbers()  # of batches, and their starts
        self._starts: ShardNumbers = directory.numbers()
        self._tables = [self._new_tables(directory, kind) for kind in self._kinds]

    @staticmethod
    def _new_tables(directory: ShardDirectory, kind: Any) -> list[ShardNumbers]:
        """Return empty tables of a column, which are those of `Gatherer.tables`."""
        of_bytes = [directory.numbers(is_place=True), directory.numbers(is_place=True), directory.numbers()]
        return [] if kind is None else of_bytes if isinstance(kind, int) else of_bytes[:1]

    def join(self, shard: int, gatherer: Gatherer, starts: Int64Array, ends: Int64Array) -> None:
        """Add a file, whose batches have the records from `starts` to `ends`, (batches,) int64."""
        self._starts.put(shard, starts)
        self._ends.put(shard, ends)
        for column, tables in enumerate(self._tables):
            for table, numbers in zip(tables, gatherer.tables(column) if tables else (), strict=True):
                table.put(shard, numbers)

    def locate(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the batch of each record, and its row there."""
        batch = self._ends.search(indices)
        return batch, (indices & WITHIN) - self._starts[batch]

    def column(self, column: int, batch: Int64Array, rows: Int64Array, claims: Claims) -> Any:
        """Return values of a column as a column."""
        kind, tables = self._kinds[column], self._tables[column]
        if kind is None:
            raise CorruptFileError("a column is read one file at a time")
        places = tables[0][batch]
        if not isinstance(kind, int):
            numbers, nbytes = kind
            claims.add(nbytes)
            data = self._file.gather(places + rows * nbytes, nbytes)
            return data.view(numbers.dtype).reshape(len(rows), *numbers.shape)
        pairs = self._file.gather(places + rows * kind, 2 * kind).view(f"<i{kind}")
        starts, stops = pairs.T.astype(np.int64, order="C")
        if int((starts | (stops - starts) | (tables[2][batch] - stops)).min()) < 0:
            raise CorruptFileError("a value begins or ends outside of its batch")
        claims.add(stops - starts)
        return self._file.gather_ranges(tables[1][batch] + starts, stops - starts)
