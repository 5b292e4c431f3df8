"""Writer of TorchRecord directories that the original can read."""

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from dataload._util.indexing import even_split
from dataload.codecs.tensorprotos import encode
from dataload.errors import ConfigError
from dataload.sources.lmdb.format import TORCHRECORD, TorchRecordWriterOptions
from dataload.sources.lmdb.write_environment import NewEnvironment, check_value
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

    options_type: ClassVar[Any] = TorchRecordWriterOptions

    def _begin(self, options: TorchRecordWriterOptions) -> None:
        self._expected = options.num_records
        self._spool = self._part.spool(_SPOOL_BYTES) if options.num_records is None else None
        self._lengths = array("q")  # of the values in the spool
        self._environment = NewEnvironment(self._part.temporary, TORCHRECORD, options.db_num)
        self._db_num = options.db_num
        self._place(options.num_records or 0)

    def _place(self, total: int) -> None:
        """Prepare to put so many records in all; keys have one width, as the original's reader expects."""
        self._spans = even_split(total, self._db_num)
        self._key = b"%%0%dd" % len(str(max(stop - start for start, stop in self._spans)))
        self._database = self._placed = 0

    def _write(self, record: Any) -> None:
        self._check_room(1)
        self._add([_encode(record)])

    def _write_all(self, records: Sequence[Any]) -> None:
        fitting = records if self._expected is None else records[: self._expected - len(self)]
        self._write_encoded(fitting, _encode, self._add)
        self._check_room(len(records) - len(fitting))

    def _check_room(self, records: int) -> None:
        if self._expected is not None and len(self) + records > self._expected:
            raise ConfigError(
                f"num_records is {self._expected}, but there are more records", key="num_records", value=self._expected
            )

    def _add(self, values: Sequence[bytes]) -> None:
        self.stored_bytes += sum(map(len, values))
        if self._spool is None:
            self._put_all(values)
        else:
            self._spool.writelines(values)
            self._lengths.extend(map(len, values))

    def _put_all(self, values: Sequence[bytes]) -> None:
        while values:
            start, stop = self._spans[self._database]
            if self._placed == stop:
                self._database += 1
                continue
            some, values = values[: stop - self._placed], values[stop - self._placed :]
            keys = [self._key % number for number in range(self._placed - start, self._placed - start + len(some))]
            self._environment.put_all(keys, some, database=self._database)
            self._placed += len(some)

    def _finish(self) -> None:
        if self._spool is not None:
            self._place(len(self))
            self._spool.seek(0)
            for length in self._lengths:
                self._put_all([self._spool.read(length)])
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


def _encode(record: Any) -> bytes:
    return check_value(encode(require_fields(record, "torchrecord")))
