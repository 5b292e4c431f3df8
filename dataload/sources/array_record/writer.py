"""ArrayRecord files, written through the array_record package."""

import contextlib
from collections.abc import Sequence
from typing import Any

from dataload.errors import ConfigError, SourceError
from dataload.sources.array_record.format import ArrayRecordWriterOptions, load_array_record
from dataload.sources.writer import Writer, encode_bytes


class ArrayRecordWriter(Writer):
    """Writes an ArrayRecord file. The same records and options give the same bytes.

    Args:
        path: Destination.
        overwrite: Replace an existing file.
        options: See `ArrayRecordWriterOptions`.

    Raises:
        ConfigError: The codec is invalid, or an option is unknown.
        MissingDependencyError: array_record is not installed.
    """

    options_type = ArrayRecordWriterOptions

    def _begin(self, options: ArrayRecordWriterOptions) -> None:
        self._codec: Any = options.codec
        try:
            self._stream = load_array_record().ArrayRecordWriter(self._part.temporary, options.options)
        except ValueError as error:
            message = f"options {options.options!r}: {error}"
            raise ConfigError(message, key="options", value=options.options) from error
        if not self._stream.ok():
            self._finish()

    def _write(self, record: Any) -> None:
        data = encode_bytes(record, self._codec, "array_record")
        try:
            self._stream.write(data)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _write_all(self, records: Sequence[Any]) -> None:
        codec, write = self._codec, self._stream.write
        try:
            for record in records:
                write(
                    record if codec is None and type(record) is bytes else encode_bytes(record, codec, "array_record")
                )
                self._count += 1
        except RuntimeError as error:
            raise self._failure(error) from error

    def _finish(self) -> None:
        try:
            self._stream.close()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> SourceError:
        return SourceError(f"cannot write {self.path}: {error}", path=self.path)

    def _discard(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._stream.close()
