"""Flat files of tokens: the format and its options."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload._util.settings import Least, check_choice, check_count
from dataload.errors import ConfigError
from dataload.sources.format import Format
from dataload.sources.options import CachedOptions, FileOptions
from dataload.types import Array

DocumentEnd: TypeAlias = Literal["across", "drop", "pad"]
DocumentStarts: TypeAlias = Literal[True] | str | PathLike[str] | Array | Sequence[Any]

COUNT_FIELD = "token_count"
SEGMENT_FIELD, POSITION_FIELD = "segment_ids", "position_ids"

INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""The dtypes of tokens that an index of documents can name, by its codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions(CachedOptions):
    """Options for reading flat token files.

    Attributes:
        window: Tokens per record, at least 1.
        stride: Tokens from the start of a window to the start of the next, at least 1; by default ``window - 1``.
        dtype: Little-endian integer type of raw files; a .npy file states its own.
        documents: Starts of the documents: an array of integers that rise from 0, or the path of a .npy file with one,
            or of an index that Megatron-LM wrote. The number of tokens may follow as the last element. For several
            files, a list with one of these per file. An array is pickled with the source; a path is read on first use.
            True takes the index beside each file, ``X.idx``, which also says the dtype of raw files.
        end_token: The token that ends a document, and is part of it.
        ends: How windows end at the end of a document; see `TokenSource`.
        pad_token: The token that fills windows with ``ends="pad"``.
        field: Name of the field.
    """

    window: Annotated[int, Least(1)]
    stride: Annotated[int, Least(1)] | None = None
    dtype: npt.DTypeLike = "uint16"
    documents: DocumentStarts | None = field(default=None, metadata={"content": False})
    end_token: int | None = None
    ends: DocumentEnd = "across"
    pad_token: int = 0
    field: str = "tokens"

    def __post_init__(self) -> None:
        CachedOptions.__post_init__(self)
        if self.documents is not None and self.end_token is not None:
            raise ConfigError("documents and end_token both say where documents end: give only one", key="documents")
        added = {"pad": (COUNT_FIELD,), "across": (SEGMENT_FIELD, POSITION_FIELD) if self.has_documents else ()}
        if self.field in added.get(self.ends, ()):
            message = f"field is {self.field!r}, which ends={self.ends!r} adds: use another name"
            raise ConfigError(message, key="field", value=self.field)
        if self.window * self.stored.itemsize > self.max_record_bytes:
            message = f"window is {self.window}, more tokens of {self.stored} than max_record_bytes allows"
            raise ConfigError(f"{message}, {self.max_record_bytes:,}", key="window", value=self.window)

    @property
    def has_documents(self) -> bool:
        """True if the reader knows where documents start."""
        return self.documents is not None or self.end_token is not None

    @property
    def step(self) -> int:
        """The stride, given or default."""
        return max(1, self.window - 1) if self.stride is None else self.stride

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of raw files."""
        return _integer_dtype(self.dtype)

    def stored_as(self, found: np.dtype[Any] | None, path: str) -> np.dtype[Any]:
        """Return the dtype of a raw file, given what its index says.

        Raises:
            ConfigError: The index contradicts the option.
        """
        if found is None or found == self.stored or self.stored == np.uint16:
            return found or self.stored
        raise ConfigError(f"dtype is {self.stored}, but the index of {path} says {found}: leave it out", key="dtype")

    def content(self) -> dict[str, Any]:
        """See `Options.content`. Includes the stride even if it is the default, and the dtype by its name."""
        chosen = {
            "window": self.window,
            "stride": self.step,
            "dtype": self.stored.name if self.stored != np.uint16 else None,
            "end_token": self.end_token,
            "ends": self.ends if self.ends != "across" else None,
            "pad_token": self.pad_token if self.ends == "pad" else None,
            "field": self.field if self.field != "tokens" else None,
        }
        return {name: value for name, value in chosen.items() if value is not None}


def _integer_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.kind not in "iu" or found.str.startswith(">"):
        message = f"dtype must be a little-endian integer type such as 'uint16' or 'int32', got {dtype!r}"
        raise ConfigError(message, key="dtype", value=dtype)
    return found


def fitting_token(name: str, token: int, dtype: np.dtype[Any]) -> int:
    """Return `token`, or raise a ConfigError if `dtype` cannot hold it."""
    limits = np.iinfo(dtype)
    return check_count(name, token, least=int(limits.min), below=int(limits.max) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWriterOptions(FileOptions):
    """Options for writing flat token files.

    Attributes:
        dtype: Integer type of the tokens: one of those that Megatron-LM's index knows.
        end_token: A token to write after each document.
        field: Name of the field with the tokens of a document.
    """

    dtype: npt.DTypeLike = "uint16"
    end_token: int | None = None
    field: str = "tokens"

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        check_choice("dtype", _integer_dtype(self.dtype).name, tuple(INDEX_DTYPES.values()))
        if self.end_token is not None:
            fitting_token("end_token", self.end_token, self.stored)

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of the file."""
        return _integer_dtype(self.dtype)


TOKENS = Format(
    name="tokens",
    source="dataload.sources.tokens.reader:TokenSource",
    writer="dataload.sources.tokens.documents:TokenWriter",
    reader_options=TokenOptions,
    writer_options=TokenWriterOptions,
    # No suffixes, because .npy and .bin mean many things, and lie beside the shards of other formats.
    magic="dataload.sources.tokens.documents:holds_tokens",
    index_path="dataload.sources.tokens.documents:index_path",
)
