"""JSON Lines, a JSON object on each line of a file: the format and its options."""

from dataclasses import dataclass, field
from typing import Annotated

from dataload._util.caches import CACHED_BYTES
from dataload._util.settings import Least
from dataload.sources.format import Format
from dataload.sources.options import CachedOptions, FileOptions
from dataload.types import NullPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions(CachedOptions):
    """Options for reading JSON Lines.

    Attributes:
        nulls: What stands for nulls; see `dataload.sources.arrow.TableOptions`. The first thousand records
            of each file tell the types of fields, and a record without one has a null there. By default a record has
            None, and a null among numbers or text is an error of a batch.
        cached_bytes: Most bytes of decompressed files that a process keeps, or `max_record_bytes` if that is less; one
            stays, whatever its size.
        max_record_bytes: Most bytes of memory that a record may take, 32 for each byte of its line and the empty lines
            after it, and that a decompressed file with the places of its lines may take; a larger one is a
            CorruptFileError.
    """

    nulls: NullPolicy = field(default=None, metadata={"like_default": "error"})
    cached_bytes: Annotated[int, Least(0)] = field(default=CACHED_BYTES, metadata={"content": False})


JSONL = Format(
    name="jsonl",
    source="dataload.sources.jsonl.records:JsonlSource",
    writer="dataload.sources.jsonl.records:JsonlWriter",
    reader_options=JsonlOptions,
    writer_options=FileOptions,
    suffixes=tuple(f"{name}{compressed}" for name in (".jsonl", ".ndjson") for compressed in ("", ".gz", ".zst")),
    lies_beside=True,
    extra="arrow",
)
