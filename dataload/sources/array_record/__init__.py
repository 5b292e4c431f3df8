"""ArrayRecord files, and the directories of TensorFlow Datasets that hold them: formats and options."""

import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

from dataload._util.caches import CACHED_BYTES, first_process
from dataload._util.settings import Least
from dataload.errors import ConfigError
from dataload.sources.format import Format
from dataload.sources.options import CodecOptions, CodecReadOptions, ReadOptions, deprecated_verify


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecordOptions(CodecReadOptions):
    """Options for reading ArrayRecord files.

    Attributes:
        reader_options: Options of array_record's reader in its own syntax, ``""`` for its defaults. None reads without
            the package if possible, and never reads ahead.
        cached_bytes: Most bytes of decompressed groups that a process keeps, of files that were written with a
            `group_size` other than 1; one stays, whatever its size. A group may take `max_record_bytes`.
        verify_hashes: Deprecated, see `verify`.
    """

    reader_options: str | None = None
    cached_bytes: Annotated[int, Least(0)] = field(default=CACHED_BYTES, metadata={"content": False})
    verify_hashes: bool | None = deprecated_verify()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecordWriterOptions(CodecOptions):
    """Options for writing ArrayRecord files.

    Attributes:
        options: Options of array_record's writer in its own syntax. Random access needs ``group_size:1``; larger groups
            compress better, but are slower to read.
    """

    options: str = "group_size:1"


ARRAY_RECORD = Format(
    name="array_record",
    source="dataload.sources.array_record.reader:ArrayRecordSource",
    writer="dataload.sources.array_record.package:ArrayRecordWriter",
    reader_options=ArrayRecordOptions,
    writer_options=ArrayRecordWriterOptions,
    suffixes=(".array_record", ".arrayrecord"),
    # Every Riegeli file begins with these bytes, even if it is not an ArrayRecord.
    magic=b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f",
    split_selection="dataload.sources.array_record.layout:file_of",
    extra="arrayrecord",
    content="bytes",
    recorded_options="dataload.sources.array_record.package:find_recorded",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TfdsOptions(ReadOptions):
    """Options for reading data sets of TensorFlow Datasets.

    Attributes:
        split: Records to read: ``"train"``, ``"train[:75%]"``, ``"train[10:20]+test"``, ``"train[2shard]"`` or
            ``"all"``. Percentages are rounded as in TensorFlow Datasets.
        reader_options: Options of array_record's reader in its own syntax; see `ArrayRecordOptions`.
    """

    split: str
    reader_options: str | None = None


_VERSION = re.compile(r":(\d+\.\d+\.\d+)/?$")

TFDS = Format(
    name="tfds",
    source="dataload.sources.array_record.tfds:TfdsSource",
    reader_options=TfdsOptions,
    # The content of `directory_file`.
    magic=lambda head: b'"pythonClassName": "tensorflow_datasets.' in head,
    directory_file="features.json",
    split_selection=lambda path: _VERSION.sub(r"/\1", path),
    extra="arrayrecord",
)


def load_array_record() -> Any:
    """Return the array_record package's module; a ConfigError in a fork of a process that used the package."""
    # The package starts threads and waits for them, and a fork does not have them: most reads there crash or never end.
    module = ARRAY_RECORD.require("array_record.python.array_record_module", package="array_record")
    if first_process("array_record") != os.getpid():
        raise ConfigError(
            "the package array_record was used before this process was forked, and does not work in a fork: start "
            "workers with multiprocessing_context=\"forkserver\" (torch's DataLoader) or executor='forkserver' "
            "(dataload's loaders), or convert the data with options='group_size:1,uncompressed', which is read without "
            "the package",
            key="executor",
        )
    return module
