"""LMDB environments, plain and TorchRecord: the formats and their options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from dataload._util.settings import Least
from dataload.sources.format import Format
from dataload.sources.options import CachedOptions, CodecOptions, CodecReadOptions, FileOptions, deprecated_verify

DATA_FILE = "data.mdb"


@dataclass(frozen=True, slots=True, kw_only=True)
class LMDBOptions(CodecReadOptions):
    """Options for reading LMDB environments.

    Attributes:
        subdatabase: Name of the database to read, in environments with several.
        verify_pages: Deprecated, see `verify`.
    """

    subdatabase: str | None = None
    verify_pages: bool | None = deprecated_verify()


@dataclass(frozen=True, slots=True, kw_only=True)
class LMDBWriterOptions(CodecOptions):
    """Options for writing LMDB environments.

    Attributes:
        keys: Function that returns a record's key, bytes or text of 1 to 511 bytes, given its index and the record. By
            default keys are 0, 1, ..., padded with zeros to 10 digits.
    """

    keys: Callable[[int, Any], bytes | str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecordOptions(CachedOptions):
    """Options for reading TorchRecord directories.

    Attributes:
        db_num: Expected number of sub-databases; by default any.
        verify_pages: Deprecated, see `verify`.
    """

    db_num: Annotated[int, Least(1)] | None = None
    verify_pages: bool | None = deprecated_verify()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecordWriterOptions(FileOptions):
    """Options for writing TorchRecord directories.

    Attributes:
        db_num: Number of sub-databases.
        num_records: Number of records that will be written; if it is known, nothing is written twice.
    """

    db_num: Annotated[int, Least(1)] = 1
    num_records: Annotated[int, Least(0)] | None = None


LMDB = Format(
    name="lmdb",
    source="dataload.sources.lmdb.reader:LMDBSource",
    writer="dataload.sources.lmdb.writer:LMDBWriter",
    reader_options=LMDBOptions,
    writer_options=LMDBWriterOptions,
    suffixes=(".lmdb", ".mdb"),
    magic="dataload.sources.lmdb.file:is_lmdb",
    directory_file=DATA_FILE,
    extra="lmdb",
    content="bytes",
    recorded_options="dataload.sources.lmdb.file:find_recorded",
)

TORCHRECORD = Format(
    name="torchrecord",
    source="dataload.sources.lmdb.torchrecord:TorchRecordSource",
    writer="dataload.sources.lmdb.writer:TorchRecordWriter",
    reader_options=TorchRecordOptions,
    writer_options=TorchRecordWriterOptions,
    suffixes=(".torchrecord",),
    variant_of="lmdb",
    is_variant="dataload.sources.lmdb.tree:is_torchrecord",
    directory_file=DATA_FILE,
    extra="lmdb",
)
