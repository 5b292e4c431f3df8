"""Sequential reads of a source in blocks, and a search for the records and files that cannot be read."""

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeAlias, cast

import numpy as np

from dataload._util.failures import BUG, owner_of
from dataload._util.threads import DaemonThreads
from dataload.errors import SourceError
from dataload.jobs.engine import select_part
from dataload.sources.base import Source
from dataload.sources.views.adapt import records_at
from dataload.types import BatchReader

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
    """Return records [start, stop), which the caller may modify, in one call if the source has ``__getitems__``."""
    if isinstance(source, Source):
        return source.read(np.arange(start, stop, dtype=np.int64))
    return records_at(source, [*range(start, stop)], many=isinstance(source, BatchReader))


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


def read_ahead(records_of: Callable[[int, int], list[Any]], start: int, stop: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield records [start, stop) in blocks, with the first index; a thread reads one block ahead."""
    size = BlockSize()

    def read(first: int) -> list[Any]:
        records = records_of(first, min(first + size.records, stop))
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


Opening: TypeAlias = "Callable[[str | None], Any]"
"""Opens a file, or for None the whole data set."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A record or a file that cannot be read."""

    path: str | None  # the file, if known
    index: int | None  # of the record in the data set; None if this file or one before it was not opened
    record: int | None  # index of the record in the file; None if the file cannot be opened
    offset: int | None  # of the damage, in bytes, if known
    error: str  # name of the exception
    cause: str  # its message

    @classmethod
    def of(cls, error: Exception, path: str | None, *, index: int | None = None, record: int | None = None) -> Self:
        """Describe an exception; its own path, if it has one, takes precedence over `path`."""
        path, offset = getattr(error, "path", None) or path, getattr(error, "offset", None)
        return cls(path, index, record, offset, type(error).__name__, str(error))

    def line(self) -> str:
        text = f"{self.error}: {self.cause}"
        if self.path is not None:
            # Messages of our own errors begin with the path, offset and record.
            text = self.cause if self.path in self.cause else f"{self.path}, record {self.record}: {text}"
        return text if self.index is None else f"[{self.index}] {text}"


class Reading:
    """Reads sources from front to back, and counts the `records` read so far, good or bad."""

    def __init__(self, progress: Callable[[int, int], None]) -> None:
        self._progress = progress
        self.records: int = 0

    def failures(self, source: Any) -> Iterator[tuple[int, Exception]]:
        """Yield the index and the error of each record that cannot be read."""
        size, start, length = BlockSize(), 0, len(source)
        while start < length:
            stop = min(start + size.records, length)
            self.records += stop - start
            for index, found in read_each(source, start, stop):
                if isinstance(found, Exception):
                    yield index, found
                else:
                    size.learn(found)
            start = stop
            self._progress(start, length)

    def findings(self, opening: Opening, paths: Sequence[str], part: int | None) -> Generator[Finding]:
        """Yield the findings of a data set, or of the files of a part, in index order."""
        first: int | None = 0 if part in (None, 1) else None  # the number of records in earlier parts is unknown
        pending: list[str | None] = [None] if part is None else [*paths]  # None stands for the whole data set
        while pending:
            path = pending.pop(0)
            try:
                source = opening(path)
            except SourceError as error:
                if owner_of(error) != "record":
                    raise
                if path is None and len(paths) > 1:
                    pending += paths  # one of the files does not open: check each by itself
                else:
                    yield Finding.of(error, path or (paths[0] if paths else None))
                    first = None  # the number of records that it should have is unknown
                continue
            with source:
                ends = np.cumsum(source.shard_lengths)
                files = paths if path is None else [path]
                for index, error in self.failures(source):
                    shard = int(np.searchsorted(ends, index, side="right"))
                    file = files[shard] if len(files) == len(ends) else None
                    record = index - (int(ends[shard - 1]) if shard else 0)
                    yield Finding.of(error, file, index=None if first is None else first + index, record=record)
                first = None if first is None else first + len(source)


def verify_part(
    opening: Opening,
    paths: Sequence[str],
    limit: int | None,
    *,
    part: tuple[int, int],
    progress: Callable[[int, int], None],
) -> tuple[int, list[Finding]]:
    """Return the number of records in a part, and its findings; the first record of the part has index 0."""
    reading = Reading(lambda _done, _length: progress(reading.records, 0))
    with closing(reading.findings(opening, select_part(paths, *part), 1)) as findings:
        found = [*islice(findings, limit)]
    return reading.records, found


def merge_findings(reports: Sequence[tuple[int, list[Finding]]]) -> Iterator[Finding]:
    """Yield the findings of all parts with their indices in the data set."""
    first: int | None = 0
    for records, findings in reports:
        for finding in findings:
            index = None if first is None or finding.index is None else first + finding.index
            yield dataclasses.replace(finding, index=index)
        if first is not None:
            first = None if any(finding.index is None for finding in findings) else first + records
