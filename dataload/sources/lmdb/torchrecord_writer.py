"""TorchRecord directories, as the original's own reader reads them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import IO, Any

from dataload._util.indexing import even_split
from dataload.codecs.tensorprotos import encode
from dataload.errors import ConfigError
from dataload.sources.lmdb.format import TORCHRECORD, TorchRecordWriterOptions
from dataload.sources.lmdb.write_environment import NewEnvironment
from dataload.sources.writer import Writer, require_fields

_SPOOL_BYTES = 1 << 26


class TorchRecordWriter(Writer):
    """Writes one TorchRecord directory: sub-databases db0, db1, ... of equal parts, in the order of writing.

    Values are arrays of the dtypes that TensorProtos hold, numbers, text or bytes; fields may differ from
    record to record.

    Implementation note: the original pads keys to the digits of the number of records, and deals them out to
    the sub-databases in equal parts, so neither a record's key nor its place is known before the last one.
    Records are therefore spooled, 64 MiB in memory and beyond that in an unnamed file beside the destination,
    and put into LMDB by `close`. That writes everything twice; `num_records` avoids it.

    Args:
        path: Destination, a directory.
        overwrite: Replace a directory that is there.
        options: See `TorchRecordWriterOptions`.

    Raises:
        ConfigError: `db_num` or `num_records` is out of range; when writing or closing, if `num_records`
            was wrong.
        MissingDependencyError: lmdb is not installed.
    """

    options_type = TorchRecordWriterOptions

    def _begin(self, options: TorchRecordWriterOptions) -> None:
        self._expected = options.num_records
        self._spool = _Spool(self._part.spool(_SPOOL_BYTES)) if options.num_records is None else None
        self._environment = NewEnvironment(self._part.temporary, TORCHRECORD, options.db_num)
        self._db_num = options.db_num
        self._places = _places(options.num_records or 0, options.db_num)

    def _write(self, record: Any) -> None:
        value = encode(require_fields(record, "torchrecord"))
        if self._spool is not None:
            self._spool.append(value)
        elif len(self) == self._expected:
            raise ConfigError(
                f"num_records says {self._expected}, and this is one more", key="num_records", value=self._expected
            )
        else:
            self._put(value)

    def _put(self, value: bytes) -> None:
        database, key = next(self._places)
        self._environment.put(key, value, database=database, append=True)

    def _finish(self) -> None:
        if self._spool is not None:
            self._places = _places(len(self), self._db_num)
            for value in self._spool.values():
                self._put(value)
            self._spool.close()
        elif len(self) != self._expected:
            raise ConfigError(
                f"num_records says {self._expected}, {len(self)} were written", key="num_records", value=self._expected
            )
        self._environment.finish()

    def _discard(self) -> None:
        if self._spool is not None:
            self._spool.close()
        self._environment.close()


def _places(total: int, parts: int) -> Iterator[tuple[int, bytes]]:
    """Sub-database and key of each record, in order; all keys have one width, as the original's reader expects."""
    spans = even_split(total, parts)
    width = len(str(max(stop - start for start, stop in spans)))
    for number, (start, stop) in enumerate(spans):
        for place in range(stop - start):
            yield number, b"%0*d" % (width, place)


class _Spool:
    """Values in the order of writing, in memory or in a file that has no name and so needs no cleaning up."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lengths = array("q")

    def append(self, value: bytes) -> None:
        self._file.write(value)
        self._lengths.append(len(value))

    def values(self) -> Iterator[bytes]:
        self._file.seek(0)
        for length in self._lengths:
            yield self._file.read(length)

    def close(self) -> None:
        self._file.close()
