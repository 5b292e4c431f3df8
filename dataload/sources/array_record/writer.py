"""ArrayRecord files, written through the array_record package."""

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from dataload.errors import ConfigError, SourceError
from dataload.sources.array_record.format import ArrayRecordWriterOptions, load_array_record
from dataload.sources.array_record.layout import BLOCK_SIZE
from dataload.sources.array_record.recorded import build_padding
from dataload.sources.recorded import build_recorded
from dataload.sources.writer import Writer, choose_codec, codec_name, encode_bytes
from dataload.storage import storage_of
from dataload.storage.errors import system_error


class ArrayRecordWriter(Writer):
    """Writes an ArrayRecord file, which says by which built-in codec its records are read.

    The same records and options give the same bytes.

    Args:
        path: Destination.
        overwrite: Replace an existing file.
        options: See `ArrayRecordWriterOptions`.

    Raises:
        ConfigError: The codec is invalid, or an option is unknown.
        MissingDependencyError: array_record is not installed.
    """

    options_type: ClassVar[Any] = ArrayRecordWriterOptions

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
        codec = self._codec if len(self) else choose_codec(self._codec, record)
        data = encode_bytes(record, codec, "array_record")
        try:
            self._stream.write(data)
        except RuntimeError as error:
            raise self._failure(error) from error
        self._codec = codec
        self.stored_bytes += len(data)

    def _write_all(self, records: Sequence[Any]) -> None:
        if not len(self):  # the first record may choose the codec
            super()._write_all(records[:1])
            records = records[1:]
        codec, write = self._codec, self._stream.write
        try:
            for record in records:
                data = (
                    record if codec is None and type(record) is bytes else encode_bytes(record, codec, "array_record")
                )
                write(data)
                self._count += 1
                self.stored_bytes += len(data)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _finish(self) -> None:
        try:
            self._stream.close()
        except RuntimeError as error:
            raise self._failure(error) from error
        if (name := codec_name(self._codec)) is not None:
            with storage_of(self._part.temporary).open(self._part.temporary) as file:
                start = file.size - BLOCK_SIZE
                found = build_padding(file.read(max(0, start), BLOCK_SIZE), build_recorded({"codec": name}))
            if found is not None:
                self._part.patch(start + found[0], found[1])

    def _failure(self, error: RuntimeError) -> SourceError:
        if os.strerror(errno.ENOSPC) in str(error):
            return system_error("write", self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return SourceError(f"cannot write {self.path}: {error}", path=self.path)

    def _discard(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._stream.close()
