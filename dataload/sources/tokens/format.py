"""The format of flat token files and its options."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from dataload._util.checks import check_choice, check_count
from dataload.codecs.npy import npy_layout
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.format import Format
from dataload.sources.options import FileOptions
from dataload.types import Array

DocumentEnd: TypeAlias = Literal["across", "drop", "pad"]
Documents: TypeAlias = str | PathLike[str] | Array | Sequence[Any]

COUNT_FIELD = "token_count"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions(FileOptions):
    """Options for reading flat token files.

    Attributes:
        window: Tokens per record, at least 1.
        stride: Tokens from the start of a window to the start of the next, at least 1; by default ``window - 1``.
        dtype: Little-endian integer type of raw files; a .npy file states its own.
        documents: Starts of the documents: an array of integers that rise from 0, or the path of a .npy file with one.
            The number of tokens may follow as the last element. For several files, a list with one of these per file.
            An array is pickled with the source; a path is read on first use.
        end_token: The token that ends a document, and is part of it.
        ends: How windows end at the end of a document; see `TokenSource`.
        pad_token: The token that fills windows with ``ends="pad"``.
        field: Name of the field.
        cache: Keep the ends of documents that `end_token` tells in a hidden file for later runs; see
            `dataload.storage.table_cache`.
        map: If False, read files with ``pread`` instead of mapping them into memory.
    """

    window: int
    stride: int | None = None
    dtype: npt.DTypeLike = "uint16"
    documents: Documents | None = field(default=None, metadata={"content": False})
    end_token: int | None = None
    ends: DocumentEnd = "across"
    pad_token: int = 0
    cache: bool = field(default=True, metadata={"content": False})
    map: bool = field(default=True, metadata={"content": False})
    field: str = "tokens"

    def __post_init__(self) -> None:
        FileOptions.__post_init__(self)
        object.__setattr__(self, "window", check_count("window", self.window, least=1))
        if self.stride is not None:
            object.__setattr__(self, "stride", check_count("stride", self.stride, least=1))
        check_choice("ends", self.ends, get_args(DocumentEnd))
        if self.documents is not None and self.end_token is not None:
            raise ConfigError("documents and end_token both say where documents end: give only one", key="documents")
        given = "documents" if self.documents is not None else "end_token"
        if self.ends == "across" and (self.documents is not None or self.end_token is not None):
            message = f'{given} has no effect with ends="across": give ends="drop" or "pad", or leave {given} out'
            raise ConfigError(message, key="ends", value=self.ends)
        if self.ends == "pad" and self.field == COUNT_FIELD:
            message = f'field is {COUNT_FIELD!r}, which ends="pad" uses for the number of real tokens: use another name'
            raise ConfigError(message, key="field", value=self.field)
        _integer_dtype(self.dtype)

    @property
    def step(self) -> int:
        """The stride, given or default."""
        return max(1, self.window - 1) if self.stride is None else self.stride

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of raw files."""
        return _integer_dtype(self.dtype)

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


def _holds_tokens(head: bytes) -> bool:
    """Return whether a file begins as a .npy file of integers in one dimension."""
    try:
        layout = npy_layout(head)
    except CorruptFileError:
        return False
    return len(layout.shape) == 1 and layout.dtype.kind in "iu"


TOKENS = Format(
    name="tokens",
    source="dataload.sources.tokens.reader:TokenSource",
    reader_options=TokenOptions,
    # No suffixes, because .npy and .bin mean many things, and lie beside the shards of other formats.
    magic=_holds_tokens,
)
