"""Windows of tokens over a flat file: where documents begin, and where each window does, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.codecs.npy import parse_npy
from dataload.errors import ConfigError, CorruptFileError
from dataload.storage import base_name, storage_of
from dataload.types import Array, Int64Array

_SCANNED_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """The windows of one file, numbered through its documents.

    Attributes:
        ends: (documents,) int64, windows of this document and all before it.
        origins: (documents,) int64; window i of the file, in this document, starts at token ``origin + i * stride``.
        stops: (documents,) int64, the token behind each document.
        window: Tokens of a window.
        stride: Tokens from the start of a window to the start of the next one in its document.
    """

    ends: Int64Array
    origins: Int64Array
    stops: Int64Array
    window: int
    stride: int

    @classmethod
    def of(cls, edges: Int64Array, *, window: int, stride: int, pads: bool) -> TokenWindows:
        """Count the windows of documents; see `TokenSource` for the rules.

        Args:
            edges: (documents + 1,) int64, the token at which each document starts, and the length of the file.
            window: Tokens of a window.
            stride: Tokens from one window to the next.
            pads: Whether the last window of a document may be longer than what is left of it.
        """
        lengths = np.diff(edges)
        if pads:
            shared = max(0, window - stride)  # tokens that a window has in common with the one before
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
        """(documents,) int64, windows of each."""
        return np.diff(self.ends, prepend=0)

    def starts(self, indices: Int64Array) -> Int64Array:
        """The first token of windows; (rows,) int64."""
        return self.origins[self._documents(indices)] + indices * self.stride

    def spans(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The first token of windows, and how many tokens of its document each holds; (rows,) int64 both."""
        documents = self._documents(indices)
        starts = self.origins[documents] + indices * self.stride
        return starts, np.minimum(self.window, self.stops[documents] - starts)

    def _documents(self, indices: Int64Array) -> Int64Array:
        return np.searchsorted(self.ends, indices, side="right")


def find_ends(path: str, start: int, dtype: np.dtype[Any], end_token: int) -> Int64Array:
    """The number of the token behind each end token, by one pass over the file.

    Args:
        path: A flat file.
        start: Byte at which its tokens start.
        dtype: Of the tokens.
        end_token: What ends a document.

    Returns:
        (end tokens,) int64.
    """
    block = np.empty(_SCANNED_BYTES // dtype.itemsize, dtype)
    found: list[Int64Array] = []
    first = 0
    # Read rather than mapped: a file that is not in memory yet comes several times faster so.
    with storage_of(path).open(path) as file:
        while count := file.read_into(start + first * dtype.itemsize, block.data) // dtype.itemsize:
            found.append(np.flatnonzero(block[:count] == end_token) + (first + 1))
            first += count
    return np.concatenate(found) if found else np.empty(0, np.int64)


def load_starts(path: str) -> Array:
    """The starts of documents that a .npy file holds.

    Raises:
        SourceNotFoundError: There is no such file.
        CorruptFileError: It is no .npy file.
    """
    data = storage_of(path).read(path)
    try:
        return parse_npy(data)
    except CorruptFileError as error:
        raise CorruptFileError(str(error), path=path) from error


def check_starts(starts: Any, tokens: int, path: str) -> Int64Array:
    """Starts of documents, with or without the number of tokens behind them, as edges.

    Args:
        starts: Integers in one dimension, rising from 0; of equal ones all but the last are of empty documents.
        tokens: Of the file.
        path: Of the file, for messages.

    Returns:
        (documents + 1,) int64, the last is `tokens`.

    Raises:
        ConfigError: They are not so.
    """
    array = np.asarray(starts)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise _wrong(f"one integer per document, got an array of {array.dtype} {array.shape}", path)
    edges = array.astype(np.int64)
    if not edges.size or edges[-1] != tokens:
        edges = np.append(edges, tokens)
    if edges[0] != 0:
        found = f"{int(edges[0])}" if array.size else "none"
        raise _wrong(f"0 as the first start, got {found}: starts are wanted, not ends or lengths", path)
    falls = np.flatnonzero(np.diff(edges) < 0)
    if not falls.size:
        return edges
    place = int(falls[0])
    if place + 1 == array.size:
        raise _wrong(f"starts up to the {tokens} tokens of the file, got {int(edges[place])} at {place}", path)
    raise _wrong(f"rising starts, got {int(edges[place])} at {place} and {int(edges[place + 1])} behind it", path)


def _wrong(what: str, path: str) -> ConfigError:
    return ConfigError(f"documents of {base_name(path)}: expected {what}", key="documents")
