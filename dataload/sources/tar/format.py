"""The format tar and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, TypeAlias, get_args

from dataload._util.checks import check_choice
from dataload.sources.format import Format
from dataload.sources.options import Options
from dataload.sources.tar.header import OnDamage, is_tar

KEY = "__key__"
"""The field with the part that the names of a sample's files have in common."""

Decode: TypeAlias = Literal["auto"] | Mapping[str, str | Callable[[bytes], Any]]
Missing: TypeAlias = Literal["error", "skip", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TarOptions(Options):
    """Options for reading tar archives.

    Attributes:
        index: DALI index files, one per archive. By default ``X.idx`` beside ``X.tar`` is used if it exists, otherwise
            the archive is scanned; False always scans.
        decode: Decoding of members, by default none: values are `bytes`. ``"auto"`` decodes by the last part of the
            extension: ``cls`` to int, ``txt`` to str, ``json``, ``npy``, ``npz``, and images to (height, width, 3)
            uint8. It removes that part from longer extensions: ``image.npy`` becomes ``image``, as does ``image.png``
            in other samples, but a sample that has both keeps the full names. A mapping from extension (or its last
            part) to the name of a decoder or a function of bytes decodes only these. Nothing is ever unpickled.
        missing: Handling of samples that lack one of `fields`. `error` refuses to open and names the sample; `skip`
            leaves out such samples; `empty` reads ``b""``, ``""`` for text and an image without pixels, and refuses
            types without an empty value.
        case_sensitive: False converts field names to lower case.
        on_damage: `stop` ends a scan at a damaged or truncated member, with a warning, instead of raising.
        verify_index: Compare some members with the index, to detect an index of another archive. False only checks that
            it stays inside the archive, like DALI.
        cache: Keep the locations of a large archive's samples in a hidden file, to open it faster next time.
    """

    index: str | PathLike[str] | Sequence[str | PathLike[str]] | Literal[False] | None = field(
        default=None, metadata={"content": False}
    )
    decode: Decode | None = None
    missing: Missing = "error"
    case_sensitive: bool = True
    on_damage: OnDamage = "error"
    verify_index: bool = field(default=True, metadata={"content": False})
    cache: bool = field(default=True, metadata={"content": False})

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, get_args(Missing))
        check_choice("on_damage", self.on_damage, get_args(OnDamage))


@dataclass(frozen=True, slots=True, kw_only=True)
class TarWriterOptions(Options):
    """Options for writing tar archives.

    Attributes:
        index: Write DALI's index beside the archive, ``X.idx`` for ``X.tar``, unless the archive has no samples.
        key: Function that returns the key of a sample, given its number and record. By default the record's
            ``"__key__"``, or the number in eight digits. A key is a path whose last component has no dot, and differs
            from the previous key.
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
    magic=is_tar,
    key_field=KEY,
    index_writer="dataload.sources.tar.writer:write_index",
)
