"""Sequential reads of a source in blocks: bounded memory, one block ahead of the consumer."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from dataload._util.failures import BUG, owner_of
from dataload._util.threads import DaemonThreads

_TARGET_BYTES = 8 << 20  # larger blocks leave the caches of the processor before they are written
_MAX_RECORDS = 4096
_MOST_SAMPLES = 256


class BlockSize:
    """The number of `records` to read at once, adapted to blocks of about 8 MiB."""

    def __init__(self) -> None:
        self.records = 1

    def learn(self, records: list[Any]) -> None:
        some = records[:: len(records) // _MOST_SAMPLES | 1]  # measuring all takes as long as reading small ones
        mean = sum(map(size_of, some)) // max(1, len(some))
        fitting = _TARGET_BYTES // max(1, mean)
        # Grow in steps: the first record may be unusually small.
        self.records: int = max(1, min(fitting, self.records * 8, _MAX_RECORDS))


def size_of(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(size_of, cast("Mapping[str, Any]", value).values()))
    if isinstance(value, (bytes, str)):
        return len(value)
    return int(getattr(value, "nbytes", 8))


def read_records(source: Any, start: int, stop: int) -> list[Any]:
    """Return records [start, stop), in one call if the source has ``__getitems__``."""
    if hasattr(source, "__getitems__"):
        return source.__getitems__(np.arange(start, stop, dtype=np.int64))
    return [source[index] for index in range(start, stop)]


def read_each(source: Any, start: int, stop: int) -> Iterator[tuple[int, list[Any] | Exception]]:
    """Yield records [start, stop) in runs, with the first index, and by bisection the error of each bad record."""
    try:
        found = read_records(source, start, stop)
    except Exception as error:  # a user's codec may raise anything
        if (owner := owner_of(error)) != "record":
            if owner == "dataload":
                error.add_note(BUG)
            raise
        if stop - start == 1:
            yield start, error
            return
    else:
        yield start, found
        return
    middle = (start + stop) // 2
    yield from read_each(source, start, middle)
    yield from read_each(source, middle, stop)


def read_ahead(source: Any, start: int, stop: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield records [start, stop) in blocks, with the first index; a thread reads one block ahead."""
    size = BlockSize()

    def read(first: int) -> list[Any]:
        records = read_records(source, first, min(first + size.records, stop))
        size.learn(records)
        return records

    with DaemonThreads(1) as pool:
        block = pool.submit(read, start)
        while start < stop:
            first, records = start, block.result()
            start += len(records)
            if start < stop:
                block = pool.submit(read, start)
            yield first, records
