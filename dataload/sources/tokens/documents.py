"""Documents in flat files of tokens: where they start, as given, in a file beside it or by an end token; the writer.

Files of the starts of documents are .npy, or the index that Megatron-LM writes beside a .bin file:

| bytes | |
|---|---|
| 9, 8 | ``MMIDIDX`` and two zero bytes; version 1 |
| 1 | code of the dtype of the tokens |
| 8, 8 | number of sequences, number of entries of the last array |
| 4 each | tokens in each sequence |
| 8 each | offset of each sequence in bytes |
| 8 each | the first sequence of each document, and the number of sequences |

Numbers are little-endian. Layout: ``megatron/core/datasets/indexed_dataset.py`` of https://github.com/NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dataload.codecs.npz import npy_layout, parse_npy
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.tokens import INDEX_DTYPES, TokenWriterOptions
from dataload.sources.writer import IndexedWriter
from dataload.storage import Remote, base_name, storage_of
from dataload.types import Array, Int64Array

_SCANNED_BYTES = 1 << 22

_MAGIC = b"MMIDIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")


def holds_tokens(head: bytes) -> bool:
    """Return whether a file begins as a .npy file of integers in one dimension."""
    try:
        layout = npy_layout(head)
    except CorruptFileError:
        return False
    return len(layout.shape) == 1 and layout.dtype.kind in "iu"


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents in another file, as an index describes them; `starts`, (documents,), may end with the last end."""

    starts: Any
    dtype: np.dtype[Any] | None = None


def index_path(path: str) -> str:
    """Return the path of the index beside a file of tokens: ``X.idx`` for ``X.bin`` and ``X.npy``."""
    stem, dot, _ = path.rpartition(".")
    return f"{stem if dot else path}.idx"


def load_documents(path: str, remote: Remote | None = None) -> Documents:
    """Read a .npy file of the starts of documents, or an index."""
    data = storage_of(path, remote).read(path)
    try:
        return _parse_index(data) if data.startswith(_MAGIC[:7]) else Documents(parse_npy(data))
    except CorruptFileError as error:
        raise CorruptFileError(str(error), path=path, offset=error.offset) from error


def _parse_index(data: bytes) -> Documents:
    if len(data) < _HEAD.size:
        raise CorruptFileError(f"an index has at least {_HEAD.size} bytes, found {len(data)}", offset=len(data))
    magic, version, code, sequences, entries = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != 1:
        raise CorruptFileError(f"expected an index of version 1, found {magic!r} and version {version}", offset=0)
    if code not in INDEX_DTYPES:
        known = ", ".join(f"{number} ({name})" for number, name in INDEX_DTYPES.items())
        raise CorruptFileError(f"dtype {code} is not one of integers: expected {known}", offset=17)
    needed = _HEAD.size + 12 * sequences + 8 * entries
    if len(data) not in (needed, needed + sequences):  # a byte for each sequence may follow
        message = f"an index of {sequences} sequences and {entries} entries has {needed} bytes, found {len(data)}"
        raise CorruptFileError(message, offset=18)
    dtype = np.dtype(INDEX_DTYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, _HEAD.size).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", sequences, _HEAD.size + 4 * sequences)
    firsts = np.frombuffer(data, "<i8", entries, _HEAD.size + 12 * sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    wrong = np.flatnonzero((lengths < 0) | (offsets != starts[:-1] * dtype.itemsize))
    if len(wrong):
        at = int(wrong[0])
        message = f"sequence {at} has {int(lengths[at])} tokens at byte {int(offsets[at])}, expected byte "
        message += f"{int(starts[at]) * dtype.itemsize}: dataload reads sequences that follow each other"
        raise CorruptFileError(message, offset=_HEAD.size + 4 * sequences + 8 * at)
    if entries and (int(firsts.min()) < 0 or int(firsts.max()) > sequences):
        raise CorruptFileError(f"a document begins outside of the {sequences} sequences", offset=needed - 8 * entries)
    edges = starts[firsts] if entries else starts
    return Documents(edges if len(edges) and edges[-1] == starts[-1] else np.append(edges, starts[-1]), dtype)


def build_index(lengths: Int64Array, dtype: np.dtype[Any]) -> Sequence[bytes]:
    """Return the pieces of the index of a file; each of its documents, (documents,) `lengths`, is one sequence."""
    code = next(code for code, name in INDEX_DTYPES.items() if name == dtype.name)
    head = _HEAD.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1)
    offsets = (np.cumsum(lengths) - lengths) * dtype.itemsize
    numbers = np.arange(len(lengths) + 1, dtype="<i8")
    return head, lengths.astype("<i4").tobytes(), offsets.astype("<i8").tobytes(), numbers.tobytes()


def find_ends(path: str, start: int, dtype: np.dtype[Any], end_token: int, remote: Remote | None = None) -> Int64Array:
    """Return the position after each `end_token`, (n,) int64, in one pass over a flat file, from byte `start`."""
    block = np.empty(_SCANNED_BYTES // dtype.itemsize, dtype)
    found: list[Int64Array] = []
    first = 0
    # Reading a file that is not in memory yet is several times faster than mapping it.
    with storage_of(path, remote).open(path, whole=True) as file:
        while count := file.read_into(start + first * dtype.itemsize, block.data) // dtype.itemsize:
            found.append(np.flatnonzero(block[:count] == end_token) + (first + 1))
            first += count
    return np.concatenate(found) if found else np.empty(0, np.int64)


def check_starts(starts: Any, tokens: int, path: str) -> Int64Array:
    """Return the edges of documents, (documents + 1,) int64; the last is the number of tokens in the file."""
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


_HEADER_BYTES = 128
_LONGEST = (1 << 31) - 1  # tokens of a document in an index


class TokenWriter(IndexedWriter):
    """Writes the tokens of documents back to back, as .npy or raw .bin, and an index of the documents beside it.

    A record is a document: a field of tokens, or tokens; (n,) integers. The index, ``X.idx``, is Megatron-LM's,
    which reads a .bin file with it. ``documents=True`` reads it again.

    The suffix of the path, .npy or any other, decides whether the file begins with a header. Options:
    `TokenWriterOptions`.
    """

    options_type: ClassVar[Any] = TokenWriterOptions

    def _begin(self, options: TokenWriterOptions) -> None:
        self._dtype = options.stored
        self._field = options.field
        self._end = np.array([] if options.end_token is None else [options.end_token], self._dtype)
        self._lengths = array("q")
        self._begin_index(index_path(self.path))
        self._stream = self._part.create()
        if self.path.lower().endswith(".npy"):
            self._stream.write(bytes(_HEADER_BYTES))

    def _write(self, record: Any) -> None:
        tokens = self._check(record[self._field] if isinstance(record, Mapping) and self._field in record else record)
        self._stream.write(tokens.astype(self._dtype).tobytes())
        self._stream.write(self._end.tobytes())
        self._lengths.append(len(tokens) + len(self._end))
        self.stored_bytes += self._lengths[-1] * self._dtype.itemsize

    def _check(self, value: Any) -> Array:
        tokens: Array = np.asarray(value)
        if tokens.dtype.hasobject or tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            what = f"the fields {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"{value!r:.80}"
            message = f"record {len(self)} has no tokens: expected integers in one dimension in {self._field!r}, "
            raise ConfigError(f"{message}got {what}; a tokenizer makes tokens of texts", key=self._field)
        limits = np.iinfo(self._dtype)
        if tokens.size and not (limits.min <= int(tokens.min()) and int(tokens.max()) <= limits.max):
            wrong = int(tokens.max()) if int(tokens.max()) > limits.max else int(tokens.min())
            message = f"record {len(self)} has the token {wrong}, which {self._dtype} does not hold: pass dtype='int32'"
            raise ConfigError(message, key="dtype", value=self._dtype.name)
        if len(tokens) + len(self._end) > _LONGEST:
            raise ConfigError(f"record {len(self)} has {len(tokens):,} tokens; an index allows {_LONGEST:,}")
        return tokens

    def _finish(self) -> None:
        lengths = np.array(self._lengths, np.int64)
        self._stream.close()
        if self.path.lower().endswith(".npy"):
            self._part.patch(0, _header(self._dtype, int(lengths.sum())))
        self._finish_index(build_index(lengths, self._dtype))

    def _discard(self) -> None:
        self._stream.close()


def _header(dtype: np.dtype[Any], tokens: int) -> bytes:
    """Return the header of a .npy file, padded to a length that is known before the tokens are counted."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({tokens},), }}"
    return b"\x93NUMPY\x01\0" + (_HEADER_BYTES - 10).to_bytes(2, "little") + f"{text:<{_HEADER_BYTES - 11}}\n".encode()
