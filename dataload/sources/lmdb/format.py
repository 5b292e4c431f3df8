"""The formats plain LMDB and TorchRecord, described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataload._util.checks import check_count
from dataload.codecs.codec import CodecLike, resolve_codec
from dataload.sources.format import Format
from dataload.sources.lmdb.file import DATA_FILE, is_lmdb, is_torchrecord
from dataload.sources.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class LMDBOptions(Options):
    """Options for reading LMDB environments.

    Attributes:
        codec: Turns a value into a record: the name of a codec, a function ``bytes -> record``, or an object with
            ``decode``. None gives bytes.
        subdatabase: Name of the database to read, in environments with several.
        cache: Keep which key stands at which index of a large environment in a hidden file, for the next time. Keys
            that are the numbers from 0 need none.
    """

    codec: CodecLike = None
    subdatabase: str | None = None
    cache: bool = field(default=True, metadata={"content": False})

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))


@dataclass(frozen=True, slots=True, kw_only=True)
class LMDBWriterOptions(Options):
    """Options for writing LMDB environments.

    Attributes:
        codec: Turns records into bytes: the name of a codec or an object with ``encode``. None takes bytes.
        keys: ``keys(index, record)`` gives the key of a record, as bytes or text of 1 to 511 bytes. By default keys
            are 0, 1, ..., padded with zeros to 10 digits.
    """

    codec: CodecLike = None
    keys: Callable[[int, Any], bytes | str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec))


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecordOptions(Options):
    """Options for reading TorchRecord directories.

    Attributes:
        db_num: Number of sub-databases that there should be; by default those that are there.
    """

    db_num: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRecordWriterOptions(Options):
    """Options for writing TorchRecord directories.

    Attributes:
        db_num: Number of sub-databases.
        num_records: Number of records that will be written, if it is known: it saves writing everything twice.
    """

    db_num: int = 1
    num_records: int | None = None

    def __post_init__(self) -> None:
        check_count("db_num", self.db_num, least=1)
        if self.num_records is not None:
            check_count("num_records", self.num_records, least=0)


LMDB = Format(
    name="lmdb",
    source="dataload.sources.lmdb.reader:LMDBSource",
    writer="dataload.sources.lmdb.writer:LMDBWriter",
    reader_options=LMDBOptions,
    writer_options=LMDBWriterOptions,
    suffixes=(".lmdb", ".mdb"),
    magic=is_lmdb,
    directory_file=DATA_FILE,
    extra="lmdb",
    content="bytes",
)

TORCHRECORD = Format(
    name="torchrecord",
    source="dataload.sources.lmdb.torchrecord:TorchRecordSource",
    writer="dataload.sources.lmdb.torchrecord_writer:TorchRecordWriter",
    reader_options=TorchRecordOptions,
    writer_options=TorchRecordWriterOptions,
    suffixes=(".torchrecord",),
    variant_of="lmdb",
    is_variant=is_torchrecord,
    directory_file=DATA_FILE,
    extra="lmdb",
)
