"""The source of Parquet files."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dataload._util.arrays import check_size
from dataload._util.caches import DecodedCache
from dataload.codecs.arrow import is_text, load_arrow, pa_module, without_views
from dataload.codecs.expansion import longest_in_dictionaries, total_bytes
from dataload.codecs.nulls import shows_nulls
from dataload.errors import CorruptFileError, DataloadError
from dataload.sources.arrow import TableOptions
from dataload.sources.arrow.columns import classes_in
from dataload.sources.arrow.ipc import Read
from dataload.sources.arrow.table import TableReader, TableSource
from dataload.sources.shards import ShardReader
from dataload.storage import storage_of, unchanged
from dataload.storage.backend import FileStream
from dataload.types import Record

_DICTIONARY, _DATA, _DATA_2 = 2, 5, 8  # a type of page; fields of headers
_NUMBERS, _PREFIXES = (2, 8), 7  # encodings: numbers of values in the dictionary; text that begins as the one before
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}  # bytes of a value; of text, of its offset
_DEPTH = 12  # of structs and lists
_USUAL_HEADER, _LONGEST_HEADER = 4096, 1 << 20  # bytes


class _Chunk(NamedTuple):
    """A column in a row group: its number of values, where its pages are, and its statistics by their numbers."""

    values: int
    size: int
    start: int
    statistics: dict[int, Any]  # 3: nulls; 5: most, 6: least, bytes


class Claim(NamedTuple):
    """The bytes that the numbers or texts of a column claim in a row group."""

    values: int  # nulls included
    bytes: int  # of its pages; or of its numbers and the offsets of its texts, if that is more
    numbered: int  # texts that are numbers of values in the dictionary
    dictionary: int  # bytes
    prefixed: int  # bytes of the largest page of texts that begin as those before


def read_chunks(read: Read, size: int) -> list[list[_Chunk]]:
    """Return where the pages of each row group's columns are; an error of Python if that is damaged."""
    length = int.from_bytes(read(size - 8, 4), "little")
    footer = read(size - 8 - length, length)
    groups: list[list[_Chunk]] = []

    def column(at: int) -> int:
        fields, at = _struct(footer, at)
        found = fields[3]
        statistics = found.get(12) if isinstance(found.get(12), dict) else {}
        groups[-1].append(_Chunk(found[5], found[7], min(found[9], found.get(11) or found[9]), statistics))
        return at

    def group(at: int) -> int:
        groups.append([])
        return _struct(footer, at, {1: column})[1]

    _struct(footer, 0, {4: group})
    if sum(max(0, chunk.size) for group in groups for chunk in group) > size:
        raise ValueError("the columns claim more bytes than the file has")
    return groups


def claim_of(read: Read, chunk: _Chunk, column: Any) -> Claim:
    """Return what a column of pyarrow's schema claims, from its metadata and the headers of its pages."""
    values = numbered = dictionary = prefixed = stored = texts = 0
    nested = column.max_repetition_level > 0
    for page, data in _pages(read, chunk):
        encoding = data.get(4 if _DATA_2 in page else 2) if column.physical_type == "BYTE_ARRAY" else None
        stored += page[2]
        if page[1] == _DICTIONARY:
            dictionary, texts = page[2], texts + 16 * page[7][1]
        elif encoding in _NUMBERS:
            if numbered < values:
                raise ValueError("a page of numbers in a dictionary follows one of text")
            numbered += data[1]
        elif encoding == _PREFIXES:
            prefixed = max(prefixed, page[2])
            texts += nested * data[1] * page[2]  # of a record, they cannot be decoded piece by piece
        values += data[1]
    fixed = column.physical_type == "FIXED_LEN_BYTE_ARRAY"
    width = (column.length if fixed else _WIDTHS.get(column.physical_type, 8)) + 4 * nested
    return Claim(values, max(stored, values * width) + texts, numbered, dictionary, prefixed)


def _pages(read: Read, chunk: _Chunk) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """Yield the headers of pages as pyarrow finds them, and what each says of its values."""
    at, stop, values = chunk.start, chunk.start + chunk.size, 0
    while values < chunk.values and at < stop:
        try:
            page, length = _struct(read(at, min(_USUAL_HEADER, stop - at)), 0)
        except IndexError:  # long statistics
            page, length = _struct(read(at, min(_LONGEST_HEADER, stop - at)), 0)
        data = page.get(_DATA) or page.get(_DATA_2) or {1: 0}
        if min(page[2], page[3], data[1], page.get(7, {1: 0})[1]) < 0:
            raise ValueError("a page claims a negative size")
        yield page, data
        values += data[1]
        at += length + page[3]


def _struct(
    data: bytes, at: int, items: Mapping[int, Callable[[int], int]] | None = None, depth: int = _DEPTH
) -> tuple[dict[int, Any], int]:
    """Parse a struct of Thrift's compact protocol; return its numbers, bytes and structs by field, and its end."""
    if not depth:
        raise ValueError("too many structs within each other")
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        kind = head & 15
        if head >> 4:
            number, at = number + (head >> 4), at + 1
        else:
            number, at = _integer(data, at + 1)
        if 4 <= kind <= 6:
            value = data[at]
            if value > 127:
                fields[number], at = _integer(data, at)
            else:
                fields[number], at = value >> 1 ^ -(value & 1), at + 1
        elif kind <= 2:
            fields[number] = kind == 1
        elif kind == 12:
            fields[number], at = _struct(data, at, None, depth - 1)
        elif kind == 8:
            size, at = _varint(data, at)
            fields[number], at = data[at : at + size], at + size
        elif kind == 9 and items and number in items:
            kind, count, at = _list(data, at)
            if kind != 12:
                raise ValueError(f"a list of the type {kind}")
            for _ in range(count):
                at = items[number](at)
        else:
            at = _skip(data, at, kind, depth)
    return fields, at + 1


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return the end of a value."""
    if kind == 8:
        size, at = _varint(data, at)
        at += size
    elif kind in (3, 7):
        at += 1 if kind == 3 else 8
    elif kind in (4, 5, 6):
        at = _varint(data, at)[1]
    elif kind == 12:
        at = _struct(data, at, None, depth)[1]
    elif kind in (9, 10) and depth:
        kind, count, at = _list(data, at)
        for _ in range(count):
            at = _skip(data, at, kind, depth - 1)
    else:
        raise ValueError(f"a field of the type {kind}")
    if at > len(data):
        raise IndexError("it ends in a value")
    return at


def _list(data: bytes, at: int) -> tuple[int, int, int]:
    """Return type and number of the items of a list, and where they begin; a truth takes a byte here."""
    head, at = data[at], at + 1
    count, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
    return max(3, head & 15), count, at


def _integer(data: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(data, at)
    return number >> 1 ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at


_DAMAGED = (ValueError, LookupError, TypeError, AttributeError)
_MOST_COUNTED = 10_000  # columns of row groups whose statistics are looked at when a file is opened
_DECODED_BYTES = 1 << 24  # at once, about, between two looks at the memory that they take
_MOST_ROWS = 1 << 16


class ParquetSource(TableSource):
    """Records of Parquet files. A column comes out as a column.

    A row group is decoded as a whole, and those used last are kept (`cached_bytes`). So the default shuffle goes by
    shards, through a pool (`reads_in_order`).

    Options: `TableOptions`.
    """

    format_name = "parquet"
    options_type: ClassVar[Any] = TableOptions

    @property
    def reads_in_order(self) -> bool:
        return True

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return self._with_classes(_ParquetFile(path, self.options, self._cache))


class _ParquetFile(TableReader):
    def __init__(self, path: str, options: TableOptions, cache: DecodedCache) -> None:
        self._parquet = load_arrow("format 'parquet'", "pyarrow.parquet")
        self._path = path
        self._storage = storage_of(path, options.remote_settings)
        self._identity = self._storage.identity(path)
        self._chunks: list[list[_Chunk]] | None = None
        with self._errors(), self._storage.open(path) as file:
            end = _End(file)
            self._metadata = self._parquet.read_metadata(FileStream(end))
            schema = self._metadata.schema.to_arrow_schema()
            columns = self._metadata.num_columns * self._metadata.num_row_groups
            if options.nulls is None and columns <= _MOST_COUNTED and any(shows_nulls(each.type) for each in schema):
                with suppress(*_DAMAGED):  # raised again when a column is read
                    self._chunks = read_chunks(end.read, file.size)
        leaves = [self._metadata.schema.column(number) for number in range(self._metadata.num_columns)]
        self._texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        self._leaves: dict[str, list[tuple[int, Any]]] = {name: [] for name in schema.names}
        for number, leaf in enumerate(leaves):
            for parent in accumulate(leaf.path.split("."), "{}.{}".format):
                if parent in self._leaves:
                    self._leaves[parent].append((number, leaf))
        counts = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) >= 1 << 62:
            raise CorruptFileError("the footer claims impossible numbers of records", path=path)
        with self._errors():
            super().__init__(path, lambda: schema, np.cumsum(counts, dtype=np.int64), options, cache)

    def null_counts(self) -> Mapping[str, int]:
        counts: dict[str, int] = {}
        for each in self._schema if self._chunks is not None else ():
            leaves = self._leaves[each.name]
            if shows_nulls(each.type) and len(leaves) == 1:
                found = [chunks[leaves[0][0]].statistics.get(3, 0) for chunks in self._chunks or ()]
                counts[each.name] = sum(max(0, count) for count in found if isinstance(count, int))
        return counts

    def _bounds(self, group: int, name: str) -> tuple[Any, Any] | None:
        if self._chunks is None:
            with self._storage.open(self._path) as file, suppress(*_DAMAGED):  # raised when the column is read
                self._chunks = read_chunks(file.read, file.size)
        leaves = self._leaves.get(name, ())
        if self._chunks is None or len(leaves) != 1:
            return None
        statistics, kind = self._chunks[group][leaves[0][0]].statistics, self._schema.field(name).type
        return bounds_of(kind, statistics.get(6), statistics.get(5))

    @contextmanager
    def _opened(
        self,
        block: int,
        names: Sequence[str],  # noqa: ARG002 - the file is read by columns
        *,
        keep: bool = False,
    ) -> Generator[Callable[[str], Any]]:
        with unchanged(self._storage, self._path, self._identity), self._storage.open(self._path, whole=True) as file:
            yield partial(self._decode_column, file, {}, block, keep=keep)

    def classes_in(self, group: int, name: str) -> Any:
        with self._errors(group), self._opened(group, [name], keep=self.is_dictionary(name)) as decode:
            return classes_in(decode(name))

    def _decode_column(self, file: Any, readers: dict[bool, Any], group: int, name: str, *, keep: bool) -> Any:
        """Return a column of a row group, without its dictionary unless `keep`.

        `readers` read texts, and their numbers in dictionaries.
        """
        arrays: list[Any] = []
        size, what = 0, f"field {name!r} of row group {group}"
        rows, numbered = self._plan(file, readers, group, name, what)
        for batch in self._batches(file, readers, rows, group, name, numbered=numbered):
            array = batch.column(name)
            kind = without_views(array.type, keep=False)
            size += array.nbytes if kind == array.type else total_bytes(array)
            check_size(size, self._limit, what, path=self._path)
            arrays.append(array if keep or kind == array.type else array.cast(kind))
        pa = load_arrow("format 'parquet'")
        return pa.chunked_array(arrays, arrays[0].type if arrays else self._schema.field(name).type)

    def _plan(self, file: Any, readers: dict[bool, Any], group: int, name: str, what: str) -> tuple[int, bool]:
        """Return how many rows of a column to decode at once, and whether to decode numbers of texts first."""
        # pyarrow ends the process where the metadata of a column are damaged, if they are asked for.
        chosen = self._leaves[name]
        try:
            if self._chunks is None:
                self._chunks = read_chunks(file.read, file.size)
            claims = [claim_of(file.read, self._chunks[group][number], leaf) for number, leaf in chosen]
        except DataloadError:  # of storage
            raise
        except _DAMAGED as error:
            raise ValueError(f"the headers of the pages are damaged: {error}") from error
        total, prefixed = sum(claim.bytes for claim in claims), sum(claim.prefixed for claim in claims)
        check_size(total, self._limit, what, path=self._path)
        count = min(self._metadata.row_group(group).num_rows, max((claim.values for claim in claims), default=1))
        if not any(leaf.physical_type == "BYTE_ARRAY" or leaf.max_repetition_level for _, leaf in chosen):
            return max(1, count), False  # what they take is known
        rows = _DECODED_BYTES // max(1, total // max(1, count), prefixed if prefixed * count > self._limit else 0)
        rows = min(max(rows, 1), _MOST_ROWS)
        # Texts of a dictionary are decoded at once only if they cannot take more than the limit.
        if sum(claim.numbered * claim.dictionary for claim in claims) <= self._limit:
            return rows, False
        if all(claim.numbered in (0, claim.values) for claim in claims):
            return rows, True
        # pyarrow is slow with numbers if other pages have text, so look for the longest text in the dictionary.
        first = next(self._batches(file, readers, 1, group, name, numbered=True), None)
        longest = 0 if first is None else longest_in_dictionaries(first.column(name))
        return rows, sum(claim.numbered for claim in claims) * longest > self._limit

    def _batches(
        self, file: Any, readers: dict[bool, Any], rows: int, group: int, name: str, *, numbered: bool
    ) -> Iterator[Any]:
        if numbered not in readers:
            readers[numbered] = self._parquet.ParquetFile(
                FileStream(file),
                metadata=self._metadata,
                page_checksum_verification=True,
                read_dictionary=self._texts if numbered else [],
            )
        return readers[numbered].iter_batches(rows, row_groups=[group], columns=[name], use_threads=False)


def bounds_of(kind: Any, least: Any, most: Any) -> tuple[Any, Any] | None:
    """Return statistics of Parquet as values of an Arrow type, of integers and text only: others may have NaN."""
    types = pa_module().types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not isinstance(least, bytes) or not isinstance(most, bytes):
        return None
    if types.is_integer(kind):
        signed = types.is_signed_integer(kind)
        return int.from_bytes(least, "little", signed=signed), int.from_bytes(most, "little", signed=signed)
    if is_text(kind):
        with suppress(UnicodeDecodeError):  # cut off in the middle of a character
            return least.decode(), most.decode()
    return None


class _End:
    """A file whose end is read once, by pyarrow and by `read_chunks`."""

    def __init__(self, file: Any) -> None:
        self._file, self._start, self._data, self.size = file, file.size, b"", file.size

    def read(self, offset: int, length: int) -> bytes:
        if offset < self._start or offset + length > self._start + len(self._data):
            self._start, self._data = offset, self._file.read(offset, length)
        return self._data[offset - self._start :][:length]
