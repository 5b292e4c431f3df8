"""Locations of records, for messages and reports."""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from dataload.types import Int64Array


class Location(NamedTuple):
    """Location of a record, for messages and reports.

    Attributes:
        shard: Path or name of the record's shard; None for the only shard of a source without files.
        record: Index of the record within the shard.
        key: The record's key in the format; None if there are no keys or this one cannot be read.
        offset: First byte in the shard's file of what is read for the record; None if the format does not tell it, as
            with tables and compressed shards, or if it cannot be read.
    """

    shard: str | None
    record: int
    key: str | None
    offset: int | None = None

    def __str__(self) -> str:
        parts = [self.shard, f"record {self.record}", None if self.key is None else f"key {self.key!r}"]
        return ", ".join(part for part in parts if part is not None)


def locate(source: Any, index: int) -> Location:
    """Return the location of a record in any source, including one without `locate` or with one that fails."""
    find: Any = getattr(source, "locate", None)
    if callable(find):
        with contextlib.suppress(Exception):  # an error here must not hide the one being reported
            found = find(index)
            if isinstance(found, Location):
                return found
    return Location(None, index, None)


def shard_of(ends: Int64Array, index: int) -> tuple[int, int]:
    """Return the shard of an index and the index within it; `ends`, (shards,) int64, are cumulative record counts."""
    shard = int(np.searchsorted(ends, index, side="right"))
    return shard, index - (int(ends[shard - 1]) if shard else 0)
