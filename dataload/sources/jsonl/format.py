"""The format of JSON Lines and its options."""

from dataclasses import dataclass, field
from typing import Annotated

from dataload._util.caches import CACHED_BYTES
from dataload._util.settings import Least
from dataload.sources.format import FileOptions, Format, ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions(ReadOptions):
    """Options for reading JSON Lines.

    Attributes:
        cache: Keep the offsets of the lines of a large file in a hidden file for later runs; see
            `dataload.storage.table_cache`.
        map: If False, read files with ``pread`` instead of mapping them into memory.
        cached_bytes: Most bytes of decompressed files that a process keeps, or `max_record_bytes` if that is less; one
            stays, whatever its size.
        max_record_bytes: Most bytes of memory that a record may take, 32 for each byte of its line and the empty lines
            after it, and that a decompressed file with the places of its lines may take; a larger one is a
            CorruptFileError.
    """

    cache: bool = field(default=True, metadata={"content": False})
    map: bool = field(default=True, metadata={"content": False})
    cached_bytes: Annotated[int, Least(0)] = field(default=CACHED_BYTES, metadata={"content": False})


JSONL = Format(
    name="jsonl",
    source="dataload.sources.jsonl.reader:JsonlSource",
    writer="dataload.sources.jsonl.writer:JsonlWriter",
    reader_options=JsonlOptions,
    appends=True,
    writer_options=FileOptions,
    suffixes=tuple(f"{name}{compressed}" for name in (".jsonl", ".ndjson") for compressed in ("", ".gz", ".zst")),
    lies_beside=True,
    extra="arrow",
)
