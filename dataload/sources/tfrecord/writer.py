"""TFRecord files, written."""

import contextlib
from typing import Any, ClassVar

from dataload.sources.tfrecord.format import TFRECORD, TFRecordWriterOptions
from dataload.sources.tfrecord.reader import build_head, mask
from dataload.sources.writer import Writer, choose_codec, encode_bytes


class TFRecordWriter(Writer):
    """Writes a TFRecord file. The same records and codec give the same bytes.

    Options: `TFRecordWriterOptions`.
    """

    options_type: ClassVar[Any] = TFRecordWriterOptions

    def _begin(self, options: TFRecordWriterOptions) -> None:
        self._crc32c: Any = TFRECORD.require("google_crc32c", package="google-crc32c").value
        self._codec: Any = options.codec
        self._stream = self._part.create()

    def _write(self, record: Any) -> None:
        codec = self._codec if len(self) else choose_codec(self._codec, record, TFRECORD.default_codec)
        data = encode_bytes(record, codec, "tfrecord")
        self._stream.write(build_head(len(data)) + data + mask([self._crc32c(data)]).astype("<u4").tobytes())
        self._codec = codec
        self.stored_bytes += len(data)

    def _finish(self) -> None:
        self._stream.close()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
