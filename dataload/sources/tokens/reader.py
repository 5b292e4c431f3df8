"""Source of flat files of token ids, .npy and .bin, as windows for language models."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np

from dataload.catalog.arrays import IndexKey, remember, require, within
from dataload.codecs.npz import MAGIC, npy_layout
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.directory import WITHIN, ShardDirectory, ShardNumbers
from dataload.sources.file_source import FileSource
from dataload.sources.shards import ShardReader
from dataload.sources.tokens import COUNT_FIELD, POSITION_FIELD, SEGMENT_FIELD, TokenOptions, fitting_token
from dataload.sources.tokens.documents import Documents, check_starts, find_ends, index_path, load_documents
from dataload.storage import RecordFile, storage_of
from dataload.storage.kept import CachedTable
from dataload.types import Array, Batch, FieldSpec, Int64Array, Record


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
        """Count the windows of documents with `edges`, (documents + 1,) int64; with `pads`, also a last short one."""
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
    """Return the segments of windows, and positions in them; both (rows, window) int32."""
    # A window's segments are the parts of documents in it, numbered from 1; positions count from 0 in each. `edges`,
    # (documents + 1,) int64, are documents' starts and the last end; `starts`, (rows,) int64, are windows' first
    # tokens.
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


_LEAST_CACHED = 10_000_000  # tokens; scanning fewer takes a few milliseconds
_HEADER_BYTES = 1 << 14  # more than the longest header of a .npy file


class TokenSource(FileSource[Record]):
    """Windows of the tokens in flat files: .npy of one dimension, or raw .bin as nanoGPT and Megatron write them.

    A record is ``{"tokens": (window,) dtype}``. Windows begin every `stride` tokens. For next-token prediction over T
    tokens, use ``window=T + 1``: inputs are ``tokens[:-1]``, targets are ``tokens[1:]``. By default the last token of a
    window is the first of the next one, so each token but the first is a target once. No window crosses files.

    The option `ends` decides what happens at the end of a file or document of n tokens:

    - ``ends="across"``: windows ignore documents. A file has ``(n - window) // stride + 1`` windows, or none if it is
      shorter than one; the tokens after the last whole window are left out. Opening takes the same time for any size.
      If documents are given, two fields tell where they begin, both (window,) int32: ``"segment_ids"`` counts the
      documents in the window from 1, and ``"position_ids"`` the tokens of each from 0.
    - ``ends="drop"``: the same within each document, so that no window crosses its end.
    - ``ends="pad"``: the last window of a document may be short, if one of its tokens is in no earlier window. It is
      filled with `pad_token`, and a second field ``"token_count"``, an int64, has the number of real tokens. A document
      of one token has no input with a target, and gives no window unless windows do not overlap (``stride >= window``).

    Documents are given by their starts, or found by an end token in one pass over the file in each process that opens
    it, which is slower for large files. Without either, each file is one document.

    Args:
        paths: One file or several, each a shard. A file is read as .npy if its name ends in ``.npy`` or its content
            begins like one; any other file is raw.
        fields: Names of the fields to read; None means all.
        options: See `TokenOptions`; `window` is required.

    Raises:
        ConfigError: An option is invalid or contradicts another. On first use: the starts of documents do not rise, or
            a token does not fit the dtype.
        CorruptFileError: On first use, if a file is empty or its size is not a whole number of tokens.
        UnsupportedFormatError: On first use, if a .npy file holds anything but integers in one dimension.

    Examples:
        >>> source = TokenSource("train.bin", window=1025)  # doctest: +SKIP
        >>> source.read_batch([0, 7])["tokens"].shape  # doctest: +SKIP
        (2, 1025)
    """

    format_name = "tokens"
    options_type: ClassVar[Any] = TokenOptions

    def _prepare(self) -> None:
        self._documents = _pair_documents(self._paths, self.options.documents)

    @property
    def sequence_lengths(self) -> Int64Array:
        """(sequences,) int64, windows in each document, or in each file with ``ends="across"``.

        ``StreamSampler(source.sequence_lengths, ...)`` follows documents.
        """
        return np.concatenate([cast("_TokenFile", reader).windows.counts for reader in self._readers()])

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return _TokenFile(path, self.options, self._documents.get(path))

    def _known_fields(
        self, readers: Sequence[ShardReader[Record]], fields: Sequence[Mapping[str, FieldSpec]]
    ) -> Mapping[str, FieldSpec]:
        shards = zip(self._paths, readers, fields, strict=True)
        dtypes = {specs[self.options.field].dtype: path for path, reader, specs in shards if len(reader)}
        if len(dtypes) > 1:
            found = ", ".join(f"{path} contains {dtype} tokens" for dtype, path in dtypes.items())
            message = f"{found}: the files of a source must have one dtype; open them separately, or convert some"
            raise ConfigError(message, key="paths")
        return super()._known_fields(readers, fields)


class _TokenFile(ShardReader[Record]):
    """The windows of one file."""

    def __init__(self, path: str, options: TokenOptions, documents: Any) -> None:
        self._remote = options.remote_settings
        storage = storage_of(path, self._remote)
        self._file = storage.map(path, mapped=options.map)
        self._window, self._is_whole = options.window, documents is None and options.end_token is None
        found = load_documents(documents, self._remote) if isinstance(documents, str) else Documents(documents)
        # Writers finish the index last.
        is_complete = self._file.size > 0 or storage.exists(index_path(path))
        self._start, self._dtype = _layout(self._file, options.stored_as(found.dtype, path), is_complete=is_complete)
        self._length = (self._file.size - self._start) // self._dtype.itemsize
        self._specs = {options.field: FieldSpec(self._dtype.name, (options.window,))}
        self._pad: int | None = None
        self._shared: _SharedWindows | ShardNumbers | None = None  # of a reader of many files
        if options.ends == "pad":
            self._specs[COUNT_FIELD] = FieldSpec("int64", ())
            self._pad = fitting_token("pad_token", options.pad_token, self._dtype)
        if found.dtype is not None and found.starts[-1] != self._length:
            message = f"an index of {found.starts[-1]} tokens, beside a file of {self._length}: it belongs to another"
            raise CorruptFileError(message, path=documents)
        edges = self._find_edges(options, found.starts, documents)
        self._edges = edges if options.ends == "across" and options.has_documents else None
        if self._edges is not None:
            self._specs |= dict.fromkeys((SEGMENT_FIELD, POSITION_FIELD), FieldSpec("int32", (options.window,)))
        self.windows = TokenWindows.of(
            edges if self._edges is None else np.array([0, self._length]),
            window=options.window,
            stride=options.step,
            pads=self._pad is not None,
        )

    def _find_edges(self, options: TokenOptions, starts: Any, given: Any) -> Int64Array:
        """Return the edges of documents, whose `starts` are known from `given`."""
        if starts is not None:
            try:
                return check_starts(starts, self._length, self._file.path)
            except ConfigError as error:
                if not isinstance(given, str):
                    raise
                raise CorruptFileError(str(error), path=given) from error
        if options.end_token is None:
            return np.array([0, self._length])
        end_token = fitting_token("end_token", options.end_token, self._dtype)
        found = self._find_ends(end_token, cache=options.cache)
        closed = len(found) > 0 and found[-1] == self._length
        return np.concatenate([[0], found, [] if closed else [self._length]]).astype(np.int64)

    def _find_ends(self, end_token: int, *, cache: bool) -> Int64Array:
        path = self._file.path
        options = (self._start, self._dtype.str, end_token)
        is_kept = cache and self._length >= _LEAST_CACHED
        key = IndexKey.of("tokens", (path,), options, remote=self._remote) if is_kept else None

        def unpack(found: CachedTable) -> Int64Array:
            ends = found.arrays["ends"]
            require(ends.dtype == np.int64, within(ends, self._length + 1), ends[1:] > ends[:-1])
            return ends

        return remember(
            key,
            unpack,
            build=lambda: find_ends(path, self._start, self._dtype, end_token, self._remote),
            pack=lambda ends: CachedTable({"ends": ends}, {}),
        )

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        return dict(self._specs)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        columns = self.read_batch(indices, fields)
        # column[row, ...] is an array even if column[row] is a scalar
        return [{name: column[row, ...] for name, column in columns.items()} for row in range(len(indices))]

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        names = tuple(self._specs) if fields is None else fields
        if self._edges is not None:
            return self._marked(self._edges, indices, names)
        if self._pad is None:
            return {name: self._whole(indices) for name in names}
        starts, counts = self.windows.spans(indices)
        return {name: counts if name == COUNT_FIELD else self._padded(starts, counts, self._pad) for name in names}

    def _marked(self, edges: Int64Array, indices: Int64Array, names: tuple[str, ...]) -> Batch:
        marks: dict[str, Array] = {}
        if SEGMENT_FIELD in names or POSITION_FIELD in names:
            segments, positions = mark_documents(edges, self.windows.starts(indices), self._window)
            marks = {SEGMENT_FIELD: segments, POSITION_FIELD: positions}
        return {name: marks[name] if name in marks else self._whole(indices) for name in names}

    def ranges(self, indices: Int64Array, fields: tuple[str, ...] | None) -> tuple[Int64Array, Int64Array]:  # noqa: ARG002 - records are read whole
        size = self._dtype.itemsize
        starts = self.windows.starts(indices)
        # A short window is read together with what precedes it or follows; without one, `minimum` would take 1 us.
        first = starts if self._pad is None else np.minimum(starts, max(0, self._length - self._window))
        return first * size + self._start, np.full(len(starts), min(self._window, self._length) * size)

    def shared(self) -> tuple[RecordFile, Any] | None:
        if self._pad is not None or self._edges is not None:
            return None
        return self._file, (self._dtype, self.windows.window, self.windows.stride, len(self.windows.ends) == 1)

    def layout_ranges(self) -> Sequence[tuple[int, int]] | None:
        return [(0, self._start)] if self._start and self._is_whole else None

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        if len(self.windows.ends) == 1:
            joined._shared = directory.numbers(is_place=True)
        else:
            joined._shared = _SharedWindows(*(directory.numbers() for _ in range(3)))
        return joined

    def join(self, joined: Any, shard: int) -> None:
        if len(self.windows.ends) == 1:
            stride = self.windows.stride * self._dtype.itemsize
            joined._shared.put_line(shard, self._start, stride, len(self))
            return
        joined._shared.ends.put(shard, self.windows.ends)
        joined._shared.origins.put(shard, self.windows.origins)
        joined._shared.starts.put_line(shard, self._start, 0, 1)

    def _whole(self, indices: Int64Array) -> Array:
        size = self._dtype.itemsize
        if self._shared is not None:
            if isinstance(self._shared, ShardNumbers):
                places = self._shared[indices]
            else:
                places = self._shared.places(indices, self.windows.stride, size)
            return self._file.gather(places, self._window * size).view(self._dtype)
        if len(self.windows.ends) > 1:
            return self._gather(self.windows.starts(indices))
        stride, length = self.windows.stride * size, self._window * size
        return self._file.gather_every(self._start, stride, length, indices).view(self._dtype)

    def _gather(self, starts: Int64Array) -> Array:
        size = self._dtype.itemsize
        return self._file.gather(starts * size + self._start, self._window * size).view(self._dtype)

    def _padded(self, starts: Int64Array, counts: Int64Array, pad: int) -> Array:
        last = self._length - self._window  # no whole window starts after it
        shape = len(starts), self._window
        out = np.empty(shape, self._dtype) if last < 0 else self._gather(np.minimum(starts, last))
        short = np.flatnonzero(counts < self._window)
        for row, start, count in zip(short.tolist(), starts[short].tolist(), counts[short].tolist(), strict=True):
            if start > last:
                size = self._dtype.itemsize
                tokens = self._file.read(self._start + start * size, count * size)
                out[row, :count] = np.frombuffer(tokens, self._dtype)
            out[row, count:].fill(pad)
        return out

    def release(self) -> None:
        self._file.release()

    def identity(self) -> str:
        """Return a hash of the ends of documents, which may not come from the file."""
        stops = self.windows.stops if self._edges is None else self._edges
        return hashlib.blake2b(stops.tobytes(), digest_size=8).hexdigest()


class _SharedWindows(NamedTuple):
    """The windows of many files; see `TokenWindows`. `starts` is the offset of the first token of each file."""

    ends: ShardNumbers
    origins: ShardNumbers
    starts: ShardNumbers

    def places(self, indices: Int64Array, stride: int, itemsize: int) -> Int64Array:
        """Return the places of the first bytes of windows."""
        within = indices & WITHIN
        shards = indices - within
        tokens = self.origins[self.ends.search(indices)] + within * stride
        return shards + self.starts[shards] + tokens * itemsize


def _layout(file: RecordFile, dtype: np.dtype[Any], *, is_complete: bool) -> tuple[int, np.dtype[Any]]:
    """Return the offset of the tokens in a file, and their dtype; an empty raw file is refused unless `is_complete`."""
    head = file.read(0, min(_HEADER_BYTES, file.size))
    if not head.startswith(MAGIC) and not file.path.lower().endswith(".npy"):
        if not file.size and not is_complete:
            raise CorruptFileError("the file is empty: its writer did not finish", path=file.path)
        rest = file.size % dtype.itemsize
        if rest:
            message = f"{file.size} bytes are not a whole number of {dtype} tokens: the file is truncated, or has "
            raise CorruptFileError(message + "another dtype", path=file.path, offset=file.size - rest)
        return 0, dtype
    try:
        layout = npy_layout(head)
    except CorruptFileError as error:
        raise CorruptFileError(str(error), path=file.path, offset=0) from error
    if len(layout.shape) != 1 or layout.dtype.kind not in "iu" or layout.dtype.str.startswith(">"):
        raise UnsupportedFormatError(
            f"{file.path} holds {layout.dtype.str} {layout.shape}, not little-endian integers in one dimension: save "
            "the tokens as such, for example with array.ravel().astype('<u2')",
            path=file.path,
        )
    found = file.size - layout.start
    if found != layout.nbytes:
        message = f"{layout.shape[0]} tokens of {layout.dtype} have {layout.nbytes} bytes, found {found}"
        raise CorruptFileError(message, path=file.path, offset=layout.start)
    return layout.start, layout.dtype


def _pair_documents(paths: tuple[str, ...], documents: Any) -> dict[str, Any]:
    """Return the starts of the documents of each file, or the path of a file with them."""
    if documents is None:
        return {}
    if documents is True:
        return {path: index_path(path) for path in paths}
    is_list = not isinstance(documents, (str, PathLike))
    if is_list and len(paths) == 1:  # may also be the starts themselves
        is_list = isinstance(documents, (list, tuple)) and len(documents) == 1
        is_list = is_list and (isinstance(documents[0], (str, PathLike)) or np.ndim(documents[0]) > 0)
    several = list(documents) if is_list else [documents]
    if len(several) != len(paths):
        message = f"documents has {len(several)} entries for {len(paths)} files: give one for each, in the same order"
        raise ConfigError(message, key="documents")
    if len(set(paths)) < len(paths):
        raise ConfigError("with documents, paths must not name a file twice: name each once", key="documents")
    items = [fspath(item) if isinstance(item, (str, PathLike)) else np.asarray(item) for item in several]
    return dict(zip(paths, items, strict=True))
