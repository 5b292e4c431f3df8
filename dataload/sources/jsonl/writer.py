"""The writer of JSON Lines."""

import gzip
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dataload._util.lazy import load_optional
from dataload.errors import ConfigError
from dataload.sources.options import FileOptions
from dataload.sources.writer import Writer, require_fields


class JsonlWriter(Writer):
    """Writes JSON Lines: numbers, text, lists and dicts unchanged, arrays as lists. Bytes are refused.

    The suffixes ``.gz`` and ``.zst`` of the path compress the file.

    Options: `FileOptions`.
    """

    options_type: ClassVar[Any] = FileOptions

    def _begin(self, options: FileOptions) -> None:  # noqa: ARG002 - none is for the records
        self._stream: Any = self._part.create()
        self._out: Any = self._stream
        if self.path.lower().endswith(".gz"):
            # Without a name and a time, the same records give the same bytes.
            self._out = gzip.GzipFile("", "wb", 6, self._stream, 0)
        elif self.path.lower().endswith(".zst"):
            arrow = load_optional("pyarrow", needed_by="writing .zst", extra="arrow")
            self._out = arrow.CompressedOutputStream(self._stream, "zstd")

    def _write(self, record: Any) -> None:
        values = require_fields(record, "jsonl")
        try:
            line = json.dumps(dict(values), default=_plain, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"record {len(self)} cannot be written as JSON: {error}") from error
        self._out.write(line + b"\n")
        self.stored_bytes += len(line) + 1

    def _finish(self) -> None:
        if not len(self):
            self._out.write(b"\n")
        self._close()

    def _discard(self) -> None:
        self._close()

    def _close(self) -> None:
        self._out.close()
        self._stream.close()


def _plain(value: Any) -> Any:
    """Return a value of a record as `json` can write it."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    kind = f"an array of {value.dtype}" if isinstance(value, (np.ndarray, np.generic)) else type(value).__name__
    raise TypeError(f"{kind} has no form in JSON: decode or drop this field, or choose another format")
