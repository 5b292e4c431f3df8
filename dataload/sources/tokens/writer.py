"""Writer of flat files of tokens, with an index of their documents."""

from array import array
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dataload.errors import ConfigError
from dataload.sources.tokens import TokenWriterOptions
from dataload.sources.tokens.documents import build_index, index_path
from dataload.sources.writer import IndexedWriter
from dataload.types import Array

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
