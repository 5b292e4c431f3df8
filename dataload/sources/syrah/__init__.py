"""The format Syrah and its options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataload.sources.format import Format
from dataload.sources.options import CachedOptions, FileOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SyrahOptions(CachedOptions):
    """Options for reading Syrah files.

    Attributes:
        shapes: Shape of each record's array by field name, for files without shapes. One extent may be -1.
    """

    shapes: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        CachedOptions.__post_init__(self)
        shapes = {name: tuple(shape) for name, shape in (self.shapes or {}).items()}
        object.__setattr__(self, "shapes", shapes or None)


SYRAH = Format(
    name="syrah",
    source="dataload.sources.syrah.reader:SyrahSource",
    writer="dataload.sources.syrah.writer:SyrahWriter",
    reader_options=SyrahOptions,
    writer_options=FileOptions,
    suffixes=(".syr",),
    magic=b"GS\0",
    extra="syrah",
)
