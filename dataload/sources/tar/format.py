"""The format tar, described."""

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
"""The field that holds what the names of a sample's files have in common."""

Decode: TypeAlias = Literal["auto"] | Mapping[str, str | Callable[[bytes], Any]]
Missing: TypeAlias = Literal["error", "skip", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TarOptions(Options):
    """Options for reading tar archives.

    Attributes:
        index: DALI's index files, one for each archive. None looks for ``X.idx`` beside ``X.tar``, and scans the
            archive where there is none; False always scans.
        decode: None gives `bytes`. ``"auto"`` decodes by the last part of the extension: ``cls`` to int, ``txt`` to
            str, ``json``, ``npy``, ``npz``, and images to (height, width, 3) uint8. It takes that part off where there
            is more than it: ``image.npy`` becomes ``image``, and so does the ``image.png`` of other samples; where one
            sample has two of them, their names stay whole. A mapping gives extension (or its last part) -> name of a
            decoder, or a function of bytes; others stay `bytes`. Nothing is ever unpickled.
        missing: What happens if `fields` names something that a sample lacks. `error` refuses to open, naming the
            sample; `skip` leaves such samples out; `empty` reads ``b""``, for text ``""``, for an image one of no
            pixels, and refuses what has no empty value.
        case_sensitive: False reads all names of fields in lower case.
        on_damage: `stop` ends a scan at a damaged or truncated member, with a warning, instead of raising.
        verify_index: Compare some members with what the index says of them, so that an index of another archive is
            noticed. False believes it, as DALI does, as long as it stays inside the archive.
        cache: Keep where the samples of a large archive lie in a hidden file, for the next time; see
            `dataload.storage.table_cache`.
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
        index: Write the index of DALI beside the archive: ``X.idx`` for ``X.tar``. It cannot list an archive without
            samples.
        key: Makes the key of a sample from its number and record. By default the record's ``"__key__"``, or the
            number in eight digits. A key is a path whose last part has no dot, and differs from the one before it.
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
