"""The format Syrah and its options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dataload.sources.format import FileOptions, Format, ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SyrahOptions(ReadOptions):
    """Options for reading Syrah files.

    Attributes:
        shapes: Shape of each record's array by field name, for files without shapes. One extent may be -1.
        cache: Keep the layout of a large file in a hidden file for later runs; see `dataload.storage.table_cache`.
        map: If False, read files with ``pread`` instead of mapping them into memory.
    """

    shapes: Mapping[str, Sequence[int]] | None = None
    cache: bool = field(default=True, metadata={"content": False})
    map: bool = field(default=True, metadata={"content": False})

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
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
