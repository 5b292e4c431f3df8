"""Documents in a flat file of tokens, and the windows over them, computed by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload.codecs.npy import parse_npy
from dataload.errors import ConfigError, CorruptFileError
from dataload.storage import Remote, base_name, storage_of
from dataload.types import Array, Int64Array

_SCANNED_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """The windows of one file, numbered through all its documents.

    Attributes:
        ends: (documents,) int64, cumulative number of windows.
        origins: (documents,) int64; if window i of the file is in a document, it starts at ``origin + i * stride``.
        stops: (documents,) int64, the position after each document.
        window: Tokens per window.
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
            edges: (documents + 1,) int64, the start of each document and the length of the file.
            window: See `TokenWindows`.
            stride: See `TokenWindows`.
            pads: Whether the last window of a document may be longer than the rest of the document.
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


def find_ends(path: str, start: int, dtype: np.dtype[Any], end_token: int, remote: Remote | None = None) -> Int64Array:
    """Return the position after each end token, (end tokens,) int64, in one pass over the file.

    Args:
        path: A flat file.
        start: Offset of its tokens in bytes.
        dtype: Dtype of the tokens.
        end_token: The token that ends a document.
        remote: The settings of data at URLs.
    """
    block = np.empty(_SCANNED_BYTES // dtype.itemsize, dtype)
    found: list[Int64Array] = []
    first = 0
    # Reading a file that is not in memory yet is several times faster than mapping it.
    with storage_of(path, remote).open(path, whole=True) as file:
        while count := file.read_into(start + first * dtype.itemsize, block.data) // dtype.itemsize:
            found.append(np.flatnonzero(block[:count] == end_token) + (first + 1))
            first += count
    return np.concatenate(found) if found else np.empty(0, np.int64)


def load_starts(path: str, remote: Remote | None = None) -> Array:
    """Return the array in a .npy file."""
    data = storage_of(path, remote).read(path)
    try:
        return parse_npy(data)
    except CorruptFileError as error:
        raise CorruptFileError(str(error), path=path) from error


def check_starts(starts: Any, tokens: int, path: str) -> Int64Array:
    """Return the edges of documents, (documents + 1,) int64; the last is the number of tokens.

    Args:
        starts: Integers in one dimension that rise from 0, with or without the number of tokens as the last. A document
            with the same start as the next one is empty.
        tokens: Number of tokens in the file.
        path: The file, for error messages.

    Raises:
        ConfigError: The starts are not like that.
    """
    array = np.asarray(starts)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise _wrong(f"one integer per document, got an array of {array.dtype} {array.shape}", path)
    edges = array.astype(np.int64)
    if not edges.size or edges[-1] != tokens:
        edges = np.append(edges, tokens)
    if edges[0] != 0:
        found = f"{int(edges[0])}" if array.size else "none"
        raise _wrong(f"0 as the first start, got {found}: give starts, not ends or lengths", path)
    falls = np.flatnonzero(np.diff(edges) < 0)
    if not falls.size:
        return edges
    at = int(falls[0])
    if at + 1 == array.size:
        raise _wrong(f"starts up to the {tokens} tokens of the file, got {int(edges[at])} at {at}", path)
    raise _wrong(f"rising starts, got {int(edges[at])} at {at} and {int(edges[at + 1])} after it", path)


def _wrong(what: str, path: str) -> ConfigError:
    return ConfigError(f"documents of {base_name(path)}: expected {what}", key="documents")
