"""Tables of Arrow, all read by pyarrow: Parquet, IPC files and streams, directories of Hugging Face, and CSV."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from dataload._util.caches import CACHED_BYTES
from dataload._util.settings import Least, setting_error
from dataload.sources.format import Format
from dataload.sources.options import FileOptions, ReadOptions
from dataload.types import NullPolicy

Decode: TypeAlias = Literal["auto"] | Mapping[str, str | Callable[[bytes], Any]]

STATE_FILE = "state.json"
"""File of a data set that Hugging Face's `save_to_disk` wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions(ReadOptions):
    """Options for reading tables.

    Attributes:
        decode: None returns bytes. A mapping gives, for a field, the name of a decoder or a function of bytes.
            ``"auto"`` decodes what Hugging Face declares as images.
        nulls: What stands for nulls: ``"mask"`` puts a neutral value (0, False, ``""``, an empty list) and adds the
            field ``<field>_is_null``, which is True where such a value stands; a value replaces the nulls of all fields
            whose type it has; ``{"age": "mask", "city": "unknown"}`` says it by field. Floats and times have NaN and
            NaT, unless they are named. ``"error"`` makes a null an error of its record, as by default, where opening
            warns of nulls that the files' statistics know.
        categories: Fields whose values become the numbers of classes, int64, named by ``source.fields[name].classes``.
            ``"auto"`` means those that are dictionaries, such as categories of pandas and Polars. The classes of all
            files are numbered together: a dictionary's in its order, others sorted. Opening reads these columns, unless
            ``{field: [class, ...]}`` gives the classes; another value is then an error of its record.
        cached_bytes: Most bytes of decoded row groups (Parquet), compressed batches (Arrow) and CSV files that a
            process keeps, or `max_record_bytes` if that is less; one stays, whatever its size. A shuffle is fast if
            those that it mixes fit.
        max_record_bytes: Most bytes of memory that a decoded record may take, with the objects of Python in it, or a
            column of a row group or compressed batch; a larger one is a CorruptFileError.
    """

    decode: Decode | None = None
    nulls: NullPolicy = field(default=None, metadata={"like_default": "error"})
    categories: Literal["auto"] | Sequence[str] | Mapping[str, Sequence[Any]] | None = None
    cached_bytes: Annotated[int, Least(0)] = field(default=CACHED_BYTES, metadata={"content": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowOptions(TableOptions):
    """Options for reading Arrow files; see `TableOptions`.

    Attributes:
        map: If False, read files with ``pread`` instead of mapping them into memory.
    """

    map: bool = field(default=True, metadata={"content": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvOptions(TableOptions):
    """Options for reading CSV files; see `TableOptions`.

    Attributes:
        delimiter: The character between two values.
        dtypes: dtype of a column by its name, such as ``"float32"`` or ``"str"``. By default the values of the file
            decide: int64, float64, bool, times or text.
        max_record_bytes: Most bytes of memory that a file may take, decompressed and parsed; a larger one is a
            CorruptFileError.
    """

    delimiter: str = ","
    dtypes: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        if len(self.delimiter.encode()) != 1 or self.delimiter in '\0\r\n"':
            raise setting_error("delimiter", self.delimiter, "must be one character of ASCII that is not a quote")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWriterOptions(FileOptions):
    """Options for writing tables.

    Attributes:
        ragged: Fields whose arrays of one axis differ in length, stored as lists. By default those are that differ in
            the first row group or batch. All other arrays of a field have one shape.
        group_bytes: About the bytes of a row group or batch.
        compression: Name of a codec of pyarrow, such as ``"zstd"``; None for none.
    """

    ragged: Sequence[str] = ()
    group_bytes: Annotated[int, Least(1)] = 16 << 20
    compression: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetWriterOptions(TableWriterOptions):
    """Options for writing Parquet files, whose row groups are decoded as a whole; see `TableWriterOptions`."""

    compression: str | None = "zstd"


PARQUET = Format(
    name="parquet",
    source="dataload.sources.arrow.parquet:ParquetSource",
    writer="dataload.sources.arrow.writer:ParquetWriter",
    reader_options=TableOptions,
    writer_options=ParquetWriterOptions,
    suffixes=(".parquet",),
    magic=b"PAR1",
    extra="arrow",
)

ARROW = Format(
    name="arrow",
    source="dataload.sources.arrow.reader:ArrowSource",
    writer="dataload.sources.arrow.writer:ArrowWriter",
    reader_options=ArrowOptions,
    writer_options=TableWriterOptions,
    suffixes=(".arrow", ".feather"),
    magic="dataload.sources.arrow.ipc:is_arrow",
    extra="arrow",
)

HUGGING_FACE = Format(
    name="hugging_face",
    source="dataload.sources.arrow.reader:HuggingFaceSource",
    reader_options=ArrowOptions,
    magic=lambda head: head[:1] == b"{" and b'"_data_files"' in head,
    directory_file=STATE_FILE,
    extra="arrow",
)

CSV = Format(
    name="csv",
    source="dataload.sources.arrow.reader:CsvSource",
    reader_options=CsvOptions,
    suffixes=(".csv", ".csv.gz", ".csv.zst"),
    lies_beside=True,
    extra="arrow",
)
