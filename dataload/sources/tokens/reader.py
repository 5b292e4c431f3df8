"""Flat files of token ids, .npy and .bin, as windows for language models."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from dataload._util.checks import check_choice, check_count
from dataload.codecs.npy import MAGIC, npy_layout
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError
from dataload.sources.files import FileSource, ShardReader
from dataload.sources.tokens.windows import Ends, TokenWindows, check_starts, find_ends, load_starts
from dataload.storage.local.mapped import MappedFile
from dataload.types import Array, Batch, FieldSpec, Int64Array, Record

__all__ = ["Documents", "Ends", "TokenSource"]

Documents: TypeAlias = "str | os.PathLike[str] | Array | Sequence[Any]"
"""Starts of documents; see `TokenSource`."""

COUNT_FIELD = "token_count"
_HEADER_BYTES = 1 << 14  # more than the header of a .npy file may have


class TokenSource(FileSource[Record]):
    """Windows of the tokens in flat files: .npy of one dimension, or raw .bin as nanoGPT and Megatron write them.

    A record is ``{"tokens": (window,) dtype}``. Windows begin every `stride` tokens; for next-token prediction over T
    tokens take ``window=T + 1``: inputs are ``tokens[:-1]``, targets ``tokens[1:]``, and by default the last token of a
    window is the first of the next, so that each token but the first is a target once. No window crosses files.

    What becomes of documents and of rests, for a file or document of n tokens:

    - ``ends="across"``: windows pay no heed to documents. A file has ``(n - window) // stride + 1`` windows, none if it
      is shorter than one; the tokens behind the last whole window are left out. Opening costs the same for any size.
    - ``ends="drop"``: the same within each document, so that no window crosses its end.
    - ``ends="pad"``: windows go on as long as one holds a token that none before it has; what the last lacks is filled
      with `pad_token`, and a second field ``"token_count"``, an int64, says how many tokens are real. A document of one
      token has no input with a target and gives no window, unless windows do not overlap (``stride >= window``).

    Documents are found by an end token, in one pass over the file in each process that opens it, or given by their
    starts, which is quicker for large files. Without either each file is one document.

    Args:
        paths: One file or several, each a shard. A name that ends in ``.npy`` or a file that begins like one is read as
            such; all else is raw.
        window: Tokens of a record, at least 1.
        stride: Tokens from one window to the next, at least 1; by default ``window - 1``.
        dtype: Integer type of raw files, little-endian; a .npy file says its own.
        documents: Starts of the documents: the path of a .npy file or an array of integers, rising from 0, with or
            without the number of tokens as the last; of several files a list of these, one for each. An array is
            pickled with the source, a path is not read before it is needed.
        end_token: What ends a document, and belongs to it.
        ends: What windows do at the end of a document.
        pad_token: What fills windows under ``ends="pad"``.
        field: Name of the field.
        fields: Names of the fields to read; None means all.

    Raises:
        ConfigError: An option is none of these, or contradicts another; on first use, when the starts of documents do
            not rise or a token does not fit the dtype.
        CorruptFileError: On first use, when a file is empty, or no whole number of tokens.
        UnsupportedFormatError: On first use, when a .npy file holds anything but integers in one dimension.

    Example:
        >>> source = TokenSource("train.bin", window=1025)  # doctest: +SKIP
        >>> source.read_batch([0, 7])["tokens"].shape  # doctest: +SKIP
        (2, 1025)
    """

    format_name = "tokens"

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        window: int,
        stride: int | None = None,
        dtype: npt.DTypeLike = "uint16",
        documents: Documents | None = None,
        end_token: int | None = None,
        ends: Ends = "across",
        pad_token: int = 0,
        field: str = "tokens",
        fields: Sequence[str] | None = None,
    ) -> None:
        window = check_count("window", window, least=1)
        stride = max(1, window - 1) if stride is None else check_count("stride", stride, least=1)
        check_choice("ends", ends, get_args(Ends))
        if documents is not None and end_token is not None:
            raise ConfigError("documents and end_token both say where documents end: give one", key="documents")
        _check_heeded(ends, documents, end_token)
        if ends == "pad" and field == COUNT_FIELD:
            message = f'field is {field!r}, which ends="pad" needs for the number of real tokens: choose another name'
            raise ConfigError(message, key="field", value=field)
        stored = _integer_dtype(dtype)
        super().__init__(
            paths,
            fields=fields,
            window=window,
            stride=stride,
            dtype=stored.name if stored != np.uint16 else None,
            end_token=end_token,
            ends=ends if ends != "across" else None,
            pad_token=pad_token if ends == "pad" else None,
            field=field if field != "tokens" else None,
        )
        self._settings = _Settings(window, stride, stored, end_token, ends, pad_token, field)
        self._documents = _pair_documents(self._paths, documents)
        self._first: tuple[str, str] | None = None  # a file with windows, and its dtype

    @property
    def sequence_lengths(self) -> Int64Array:
        """(sequences,) int64: windows of each document, with ``ends="across"`` of each file; the sum is the length.

        With it ``StreamSampler(source.sequence_lengths, ...)`` follows documents.
        """
        opened = self._state()
        readers = (cast("_TokenFile", self._reader(opened, shard)) for shard in range(len(self._paths)))
        return np.concatenate([reader.windows.counts for reader in readers])

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return _TokenFile(path, self._settings, self._documents.get(path))

    def _open(self) -> Any:
        self._first = None
        return super()._open()

    def _check_fields(self, known: Mapping[str, FieldSpec], path: str) -> None:
        super()._check_fields(known, path)
        dtype = known[self._settings.field].dtype
        if self._first is None:
            self._first = path, dtype
        elif self._first[1] != dtype:
            raise ConfigError(
                f"{self._first[0]} holds tokens of {self._first[1]}, {path} of {dtype}: files of one source have one "
                "dtype; open them apart, or convert one",
                key="paths",
            )


@dataclass(frozen=True, slots=True)
class _Settings:
    """How files are read; see `TokenSource`."""

    window: int
    stride: int
    dtype: np.dtype[Any]
    end_token: int | None
    ends: Ends
    pad_token: int
    field: str


class _TokenFile(ShardReader[Record]):
    """One file.

    Attributes:
        windows: Where they begin.
    """

    def __init__(self, path: str, settings: _Settings, documents: Any) -> None:
        self._file = MappedFile(path)
        self._window = settings.window
        self._start, self._dtype = _layout(self._file, settings.dtype)
        self._length = (self._file.size - self._start) // self._dtype.itemsize
        self._tokens = self._file.data[self._start :].view(self._dtype)
        self._specs = {settings.field: FieldSpec(self._dtype.name, (settings.window,))}
        self._pad: int | None = None
        if settings.ends == "pad":
            self._specs[COUNT_FIELD] = FieldSpec("int64", ())
            self._pad = _fitting("pad_token", settings.pad_token, self._dtype)
        self.windows = TokenWindows.of(
            self._find_edges(settings, documents),
            window=settings.window,
            stride=settings.stride,
            pads=self._pad is not None,
        )

    def _find_edges(self, settings: _Settings, documents: Any) -> Int64Array:
        if documents is not None:
            if not isinstance(documents, str):
                return check_starts(documents, self._length, self._file.path)
            try:
                return check_starts(load_starts(documents), self._length, self._file.path)
            except ConfigError as error:  # of what a file holds
                raise CorruptFileError(str(error), path=documents) from error
        if settings.end_token is None:
            return np.array([0, self._length])
        end_token = _fitting("end_token", settings.end_token, self._dtype)
        found = find_ends(self._file.path, self._start, self._dtype, end_token)
        closed = len(found) > 0 and found[-1] == self._length
        return np.concatenate([[0], found, [] if closed else [self._length]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The tokens, and with padding how many are real."""
        return dict(self._specs)

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        """See `ShardReader.read`."""
        columns = self.read_batch(indices, fields)
        # column[row, ...] is an array even where column[row] would be a scalar
        return [{name: column[row, ...] for name, column in columns.items()} for row in range(len(indices))]

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """See `ShardReader.read_batch`: one gather for all windows."""
        self._file.check()
        names = tuple(self._specs) if fields is None else fields
        if self._pad is None:
            return {name: self._whole(indices) for name in names}
        starts, counts = self.windows.spans(indices)
        return {name: counts if name == COUNT_FIELD else self._padded(starts, counts, self._pad) for name in names}

    def _whole(self, indices: Int64Array) -> Array:
        size = self._dtype.itemsize
        if len(self.windows.ends) > 1:
            return self._gather(self.windows.starts(indices))
        stride, length = self.windows.stride * size, self._window * size
        return self._file.gather_every(self._start, stride, length, indices).view(self._dtype)

    def _gather(self, starts: Int64Array) -> Array:
        size = self._dtype.itemsize
        return self._file.gather(starts * size + self._start, self._window * size).view(self._dtype)

    def _padded(self, starts: Int64Array, counts: Int64Array, pad: int) -> Array:
        last = self._length - self._window  # no whole window starts behind it
        shape = len(starts), self._window
        out = np.empty(shape, self._dtype) if last < 0 else self._gather(np.minimum(starts, last))
        short = np.flatnonzero(counts < self._window)
        for row, start, count in zip(short.tolist(), starts[short].tolist(), counts[short].tolist(), strict=True):
            if start > last:
                out[row, :count] = self._tokens[start : start + count]
            out[row, count:].fill(pad)
        return out

    def identity(self) -> str:
        """Where documents end: given ones stand in no file of the data set."""
        return hashlib.blake2b(self.windows.stops.tobytes(), digest_size=8).hexdigest()


def _layout(file: MappedFile, dtype: np.dtype[Any]) -> tuple[int, np.dtype[Any]]:
    """The byte at which the tokens of a file start, and their dtype."""
    head = file.copy(0, min(_HEADER_BYTES, file.size))
    if not head.startswith(MAGIC) and not file.path.lower().endswith(".npy"):
        if not file.size:
            raise CorruptFileError("the file is empty: a writer of tokens did not finish", path=file.path)
        if file.size % dtype.itemsize:
            raise CorruptFileError(
                f"{file.size} bytes are no whole number of {dtype} tokens: the file is cut off, or has another dtype",
                path=file.path,
                offset=file.size - file.size % dtype.itemsize,
            )
        return 0, dtype
    try:
        layout = npy_layout(head)
    except CorruptFileError as error:
        raise CorruptFileError(str(error), path=file.path, offset=0) from error
    if len(layout.shape) != 1 or layout.dtype.kind not in "iu" or layout.dtype.str.startswith(">"):
        raise UnsupportedFormatError(
            f"{file.path} holds {layout.dtype.str} {layout.shape}; tokens are little-endian integers in one dimension: "
            "save them so, for example as array.ravel().astype('<u2')",
            path=file.path,
        )
    found = file.size - layout.start
    if found != layout.nbytes:
        raise CorruptFileError(
            f"{layout.shape[0]} tokens of {layout.dtype} have {layout.nbytes} bytes, found {found}",
            path=file.path,
            offset=layout.start,
        )
    return layout.start, layout.dtype


def _integer_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.kind not in "iu" or found.str.startswith(">"):
        message = f"dtype must be a little-endian integer type such as 'uint16' or 'int32', got {dtype!r}"
        raise ConfigError(message, key="dtype", value=dtype)
    return found


def _fitting(name: str, token: int, dtype: np.dtype[Any]) -> int:
    """`token`, which tokens of `dtype` can be."""
    limits = np.iinfo(dtype)
    return check_count(name, token, least=int(limits.min), below=int(limits.max) + 1)


def _check_heeded(ends: Ends, documents: Any, end_token: int | None) -> None:
    name = "documents" if documents is not None else "end_token"
    if ends == "across" and (documents is not None or end_token is not None):
        raise ConfigError(
            f'{name} says where documents end, and ends="across" pays no heed to that: choose ends="drop" or "pad", or '
            f"leave {name} out",
            key="ends",
            value=ends,
        )


def _pair_documents(paths: tuple[str, ...], documents: Any) -> dict[str, Any]:
    """File -> the starts of its documents, or their path."""
    if documents is None:
        return {}
    if len(paths) == 1:
        several = documents if _is_list_of_one(documents) else [documents]
    else:
        several = [documents] if isinstance(documents, (str, os.PathLike)) else list(documents)
    if len(several) != len(paths):
        raise ConfigError(
            f"documents has {len(several)} entries for {len(paths)} files: give one for each, in the same order",
            key="documents",
        )
    if len(set(paths)) < len(paths):
        raise ConfigError("documents are given by file, and paths name a file twice: name each once", key="documents")
    return {path: _path_or_array(item) for path, item in zip(paths, several, strict=True)}


def _is_list_of_one(documents: Any) -> bool:
    """A list that holds the one file's starts or their path, and not starts."""
    if not isinstance(documents, (list, tuple)) or len(documents) != 1:
        return False
    return isinstance(documents[0], (str, os.PathLike)) or np.ndim(documents[0]) > 0


def _path_or_array(item: Any) -> Any:
    return os.fspath(item) if isinstance(item, (str, os.PathLike)) else np.asarray(item)
