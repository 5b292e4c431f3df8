"""Reading a source front to back in bounded memory, ahead of whoever writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, cast

import numpy as np

from dataload.executors import ThreadExecutor, WorkerStatus
from dataload.loader.prefetch import ordered_map

__all__ = ["BlockSize", "read_ahead", "read_records", "size_of"]

_TARGET_BYTES = 16 << 20
_MOST_RECORDS = 4096


class BlockSize:
    """How many records to read at once: as many as make about 16 MiB, judged by those read so far.

    A format's cost of a call is shared by many records, and the memory does not depend on their size.

    Attributes:
        records: The present answer.
    """

    def __init__(self) -> None:
        self.records = 1

    def learn(self, records: list[Any]) -> None:
        """Take a block that was read into account."""
        mean = sum(map(size_of, records)) // max(1, len(records))
        fitting = _TARGET_BYTES // max(1, mean)
        # Growing by steps: the first record may be a small one.
        self.records = max(1, min(fitting, self.records * 8, _MOST_RECORDS))


def size_of(value: Any) -> int:
    """Bytes that a record holds, roughly."""
    if isinstance(value, Mapping):
        return sum(map(size_of, cast("Mapping[str, Any]", value).values()))
    if isinstance(value, (bytes, str)):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def read_records(source: Any, start: int, stop: int) -> list[Any]:
    """Records [start, stop) of anything with ``__getitem__``, in one call where it can do that."""
    if hasattr(source, "__getitems__"):
        return source.__getitems__(np.arange(start, stop, dtype=np.int64))
    return [source[index] for index in range(start, stop)]


def read_ahead(source: Any, start: int, stop: int) -> Iterator[tuple[int, list[Any]]]:
    """Blocks of the records [start, stop): the index of the first, and the records.

    One block is read while the one before is used; three are in memory at most.
    """
    size = BlockSize()

    def spans() -> Iterator[tuple[int, int]]:
        first = start
        while first < stop:
            last = min(first + size.records, stop)
            yield first, last
            first = last

    def read(span: tuple[int, int], _: WorkerStatus) -> tuple[int, list[Any]]:
        records = read_records(source, *span)
        size.learn(records)
        return span[0], records

    executor = ThreadExecutor(read, 1)
    try:
        with closing(ordered_map(executor.submit, spans(), window=lambda: 1)) as blocks:
            yield from blocks
    finally:
        executor.close()
