"""Windows over the documents in a flat file of tokens, computed by arithmetic. Pure (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataload.types import Array, Int64Array


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """The windows of one file, numbered through all its documents; arrays are (documents,) int64.

    `ends` is the cumulative number of windows. Window i of the file, if in a document, starts at ``origin + i *
    stride``. `stops` are the positions after documents; `window` and `stride` are in tokens.
    """

    ends: Int64Array
    origins: Int64Array
    stops: Int64Array
    window: int
    stride: int

    @classmethod
    def of(cls, edges: Int64Array, *, window: int, stride: int, pads: bool) -> TokenWindows:
        """Count the windows of documents with `edges`, (documents + 1,) int64; see `TokenSource` for the rules.

        With `pads`, the last window of a document may be longer than the rest of the document.
        """
        lengths = np.diff(edges)
        if pads:
            shared = max(0, window - stride)  # tokens that two consecutive windows have in common
            counts = np.maximum(1, -((shared - lengths) // stride))
            counts[lengths < (2 if shared else 1)] = 0
        else:
            counts = np.maximum(0, (lengths - window) // stride + 1)
        ends = np.cumsum(counts)
        return cls(ends, edges[:-1] - (ends - counts) * stride, edges[1:], window, stride)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def counts(self) -> Int64Array:
        """(documents,) int64, windows in each document."""
        return np.diff(self.ends, prepend=0)

    def starts(self, indices: Int64Array) -> Int64Array:
        """Return the first token of windows, (rows,) int64."""
        return self.origins[self._documents(indices)] + indices * self.stride

    def spans(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the first token of windows, and the number of real tokens in each; both (rows,) int64."""
        documents = self._documents(indices)
        starts = self.origins[documents] + indices * self.stride
        return starts, np.minimum(self.window, self.stops[documents] - starts)

    def _documents(self, indices: Int64Array) -> Int64Array:
        return np.searchsorted(self.ends, indices, side="right")


def mark_documents(edges: Int64Array, starts: Int64Array, window: int) -> tuple[Array, Array]:
    """Return the segments of windows, and positions in them; both (rows, window) int32.

    A window's segments are the parts of documents in it, numbered from 1; positions count from 0 in each. `edges`,
    (documents + 1,) int64, are documents' starts and the last end; `starts`, (rows,) int64, are windows' first tokens.
    """
    first, last = np.searchsorted(edges, starts, "right"), np.searchsorted(edges, starts + window, "left")
    counts = last - first
    rows = np.repeat(np.arange(len(starts)), counts)
    inside = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.zeros((len(starts), window), np.int32)
    places = edges[np.repeat(first, counts) + inside] - starts[rows]
    begins[rows, places] = 1
    begun = np.zeros_like(begins)
    begun[rows, places] = places
    np.maximum.accumulate(begun, axis=1, out=begun)
    return np.cumsum(begins, axis=1, dtype=np.int32) + np.int32(1), np.arange(window, dtype=np.int32) - begun
