"""Tar archives of samples, with or without an index, and wids' lists of them: the formats and their options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, TypeAlias

from dataload.sources.format import Format
from dataload.sources.options import CachedOptions, FileOptions

KEY = "__key__"
"""The field with the common path of a sample's files."""

Decode: TypeAlias = Literal["auto", "written"] | Mapping[str, str | Callable[[bytes], Any]]
Missing: TypeAlias = Literal["error", "skip", "empty"]
OnDamage: TypeAlias = Literal["error", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TarOptions(CachedOptions):
    """Options for reading tar archives.

    Attributes:
        index: DALI's index files, one for each archive. None uses ``X.idx`` beside ``X.tar`` if it exists, and scans
            the archive otherwise; False always scans.
        decode: None returns `bytes`. ``"auto"`` decodes by the last part of the extension: ``cls`` to int, ``txt`` to
            str, ``json``, ``npy``, ``npz``, images to (height, width, 3) uint8, and audio (``wav``, ``flac``, ``mp3``,
            ``ogg``) to (frames, channels) float32, with its rate in a field of its own: ``sample_rate`` for ``audio``,
            else ``wav.sample_rate``, ... A longer extension loses that part: ``image.npy`` becomes ``image``, and so
            does ``image.png`` of other samples; if one sample has both, they keep their full names. ``"written"`` does
            the same, but leaves images and audio as `bytes`: it undoes what our writer does, and `dataload.open` takes
            it for archives that say so. A mapping gives, for an extension or its last part, the name of a decoder or a
            function of bytes; other fields stay `bytes`. Nothing is ever unpickled.
        missing: What happens if a sample lacks one of `fields`. ``"error"`` refuses to open the archive and names the
            sample; ``"skip"`` leaves such samples out; ``"empty"`` reads ``b""``, ``""`` for text or an image without
            pixels, and refuses fields that have no empty value.
        case_sensitive: If False, names of fields are in lower case.
        on_damage: ``"stop"`` ends a scan at a damaged or truncated member with a warning, instead of raising an error.
        verify_index: Compare some members with the index, to notice the index of another archive. If False, the index
            is trusted, as in DALI, as long as it stays inside the archive.
    """

    index: str | PathLike[str] | Sequence[str | PathLike[str]] | Literal[False] | None = field(
        default=None, metadata={"content": False}
    )
    decode: Decode | None = None
    missing: Missing = "error"
    case_sensitive: bool = True
    on_damage: OnDamage = "error"
    verify_index: bool = field(default=True, metadata={"content": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class TarWriterOptions(FileOptions):
    """Options for writing tar archives.

    Attributes:
        index: Write DALI's index beside the archive: ``X.idx`` for ``X.tar``. An archive without samples gets none.
        key: A function from the number of a sample and its record to its key. By default the key is the record's
            ``"__key__"``, or the number in eight digits. A key is a path whose last part has no dot, and differs from
            the key before it.
    """

    index: bool = True
    key: Callable[[int, Mapping[str, Any]], str] | None = None


TAR = Format(
    name="tar",
    source="dataload.sources.tar.reader:TarSource",
    writer="dataload.sources.tar.writer:TarWriter",
    reader_options=TarOptions,
    writer_options=TarWriterOptions,
    suffixes=(".tar",),
    magic="dataload.sources.tar.header:is_tar",
    key_field=KEY,
    index_path="dataload.sources.tar.table:index_path",
    index_writer="dataload.sources.tar.writer:write_index",
    recorded_options="dataload.sources.tar.table:find_recorded",
)

WIDS = Format(
    name="wids",
    source="dataload.sources.tar.reader:WidsSource",
    reader_options=TarOptions,
    magic=lambda head: b'"wids-shard-index-v1"' in head and head.lstrip().startswith(b"{"),
    key_field=KEY,
)
