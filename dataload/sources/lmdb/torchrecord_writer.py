"""Writer of TorchRecord directories that the original can read."""

from array import array
from collections.abc import Iterator
from typing import Any

from dataload._util.indexing import even_split
from dataload.codecs.tensorprotos import encode
from dataload.errors import ConfigError
from dataload.sources.lmdb.format import TORCHRECORD, TorchRecordWriterOptions
from dataload.sources.lmdb.write_environment import NewEnvironment
from dataload.sources.writer import Writer, require_fields

_SPOOL_BYTES = 1 << 26


class TorchRecordWriter(Writer):
    """Writes one TorchRecord directory, with records split evenly over sub-databases db0, db1, ... in writing order.

    Values are arrays with dtypes that TensorProtos support, numbers, text or bytes. Fields may differ between records.

    Implementation note: the original pads keys to the digits of the number of records, and splits the records evenly
    over the sub-databases, so a record's key and sub-database are unknown before the last record. Records are therefore
    spooled, up to 64 MiB in memory, then in an unnamed file beside the destination, and `close` writes them to LMDB.
    That writes everything twice; `num_records` avoids it.

    Args:
        path: Destination, a directory.
        overwrite: Replace an existing directory.
        options: See `TorchRecordWriterOptions`.

    Raises:
        ConfigError: `db_num` or `num_records` is out of range; when writing or closing, if `num_records` is wrong.
        MissingDependencyError: lmdb is not installed.
    """

    options_type = TorchRecordWriterOptions

    def _begin(self, options: TorchRecordWriterOptions) -> None:
        self._expected = options.num_records
        self._spool = self._part.spool(_SPOOL_BYTES) if options.num_records is None else None
        self._lengths = array("q")  # of the values in the spool
        self._environment = NewEnvironment(self._part.temporary, TORCHRECORD, options.db_num)
        self._db_num = options.db_num
        self._targets = _targets(options.num_records or 0, options.db_num)

    def _write(self, record: Any) -> None:
        value = encode(require_fields(record, "torchrecord"))
        if self._spool is not None:
            self._spool.write(value)
            self._lengths.append(len(value))
        elif len(self) == self._expected:
            raise ConfigError(
                f"num_records is {self._expected}, but there are more records", key="num_records", value=self._expected
            )
        else:
            self._put(value)
        self.stored_bytes += len(value)

    def _put(self, value: bytes) -> None:
        database, key = next(self._targets)
        self._environment.put(key, value, database=database, append=True)

    def _finish(self) -> None:
        if self._spool is not None:
            self._targets = _targets(len(self), self._db_num)
            self._spool.seek(0)
            for length in self._lengths:
                self._put(self._spool.read(length))
            self._spool.close()
        elif len(self) != self._expected:
            raise ConfigError(
                f"num_records is {self._expected}, but {len(self)} records were written",
                key="num_records",
                value=self._expected,
            )
        self._environment.finish()

    def _discard(self) -> None:
        if self._spool is not None:
            self._spool.close()
        self._environment.close()


def _targets(total: int, parts: int) -> Iterator[tuple[int, bytes]]:
    """Yield sub-database and key of each record in order; keys have one width, as the original's reader expects."""
    spans = even_split(total, parts)
    width = len(str(max(stop - start for start, stop in spans)))
    for number, (start, stop) in enumerate(spans):
        for record in range(stop - start):
            yield number, b"%0*d" % (width, record)
