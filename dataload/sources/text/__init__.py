"""Text files, a record for each file, line or paragraph: the format and its options."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from dataload._util.caches import CACHED_BYTES
from dataload._util.settings import Least
from dataload.sources.format import Format
from dataload.sources.options import MappedOptions
from dataload.storage import Remote, files_below

_SUFFIXES = tuple(f"{name}{compressed}" for name in (".txt", ".md") for compressed in ("", ".gz", ".zst"))
_ABOUT = ("readme", "license", "licence")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(MappedOptions):
    """Options for reading text files.

    Attributes:
        records: What a record is: a ``"file"``, a ``"line"``, or a ``"paragraph"``, which ends at an empty line. Empty
            lines are left out.
        cached_bytes: Most bytes of decompressed files that a process keeps, or `max_record_bytes` if that is less; one
            stays, whatever its size.
    """

    records: Literal["file", "line", "paragraph"] = "file"
    cached_bytes: Annotated[int, Least(0)] = field(default=CACHED_BYTES, metadata={"content": False})


def is_about(name: str) -> bool:
    """Return whether a file is about the data rather than data."""
    return name.rpartition("/")[2].lower().startswith(_ABOUT)


def texts_among(names: Iterable[str]) -> list[str]:
    """Return the names of texts, sorted, but of none that are about the data."""
    return sorted(name for name in names if name.lower().endswith(_SUFFIXES) and not is_about(name))


def has_only_texts(directory: str, remote: Remote | None = None) -> bool:
    """Return whether a directory has texts, and nothing else that may be data."""
    names = [name for name in files_below(directory, remote) if not is_about(name)]
    return bool(names) and len(texts_among(names)) == len(names)


TEXT = Format(
    name="text",
    source="dataload.sources.text.reader:TextSource",
    reader_options=TextOptions,
    # No suffixes: notes lie beside data of other formats.
    is_data_set_without_shards=has_only_texts,
    extra="arrow",
)
