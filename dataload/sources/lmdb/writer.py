"""Writer of plain LMDB directories."""

from collections.abc import Sequence
from typing import Any, ClassVar

from dataload.sources.lmdb.file import RECORDED_OFFSET
from dataload.sources.lmdb.format import DATA_FILE, LMDB, LMDBWriterOptions
from dataload.sources.lmdb.write_environment import NewEnvironment, check_value, values_fit
from dataload.sources.recorded import build_recorded
from dataload.sources.writer import Writer, choose_codec, codec_name, encode_bytes


class LMDBWriter(Writer):
    """Writes one LMDB directory with ``data.mdb``, which says by which built-in codec it is read, and no lock file.

    Keys are 0, 1, ..., padded with zeros to 10 digits, so that LMDB's order is the writing order. With custom `keys`,
    a reader finds the records in key order.

    Args:
        path: Destination, a directory.
        overwrite: Replace an existing directory.
        options: See `LMDBWriterOptions`. A key that occurs twice is an error, which `close` raises at the latest; the
            directory is then discarded.

    Raises:
        ConfigError: The codec is invalid.
        MissingDependencyError: lmdb is not installed.
    """

    options_type: ClassVar[Any] = LMDBWriterOptions

    def _begin(self, options: LMDBWriterOptions) -> None:
        self._codec: Any = options.codec
        self._keys = options.keys
        self._environment = NewEnvironment(self._part.temporary, LMDB)

    def _write(self, record: Any) -> None:
        codec = self._codec if len(self) else choose_codec(self._codec, record)
        value = encode_bytes(record, codec, "lmdb")
        if self._keys is None:
            key = b"%010d" % len(self)
        else:
            key = self._keys(len(self), record)
            key = key.encode() if isinstance(key, str) else bytes(key)
        self._environment.put(key, value, append=self._keys is None)
        self._codec = codec
        self.stored_bytes += len(value)

    def _write_all(self, records: Sequence[Any]) -> None:
        if not len(self):  # the first record may choose the codec
            super()._write_all(records[:1])
            records = records[1:]
        if self._keys is not None:
            super()._write_all(records)
        elif self._codec is None and set(map(type, records)) == {bytes} and values_fit(records):
            self._put_all(records)
            self._count += len(records)
        else:
            # A value that LMDB cannot hold is refused here, so that those before it are written and counted.
            self._write_encoded(
                records, lambda record: check_value(encode_bytes(record, self._codec, "lmdb")), self._put_all
            )

    def _put_all(self, values: Sequence[bytes]) -> None:
        keys = [b"%010d" % number for number in range(len(self), len(self) + len(values))]
        self._environment.put_all(keys, values)
        self.stored_bytes += sum(map(len, values))

    def _finish(self) -> None:
        self._environment.finish()
        if (name := codec_name(self._codec)) is not None:
            self._part.patch(RECORDED_OFFSET, build_recorded({"codec": name}), DATA_FILE)

    def _discard(self) -> None:
        self._environment.close()
