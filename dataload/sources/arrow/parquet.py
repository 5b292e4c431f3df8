"""The source of Parquet files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from dataload._util.limits import Claims, check_size
from dataload.codecs.arrow_types import load_arrow, without_views
from dataload.codecs.expansion import longest_in_dictionaries, total_bytes
from dataload.errors import CorruptFileError
from dataload.sources.arrow.format import TableOptions
from dataload.sources.arrow.pages import claim_of, read_chunks
from dataload.sources.arrow.table import TableReader, TableSource
from dataload.sources.decoded import DecodedCache
from dataload.sources.shards import ShardReader
from dataload.storage import storage_of, unchanged
from dataload.storage.stream import FileStream
from dataload.types import Int64Array, Record

_DECODED_BYTES = 1 << 24  # at once, about, between two looks at the memory that they take
_MOST_ROWS = 1 << 16


class ParquetSource(TableSource):
    """Records of Parquet files. A column comes out as a column.

    A row group is decoded as a whole, and those used last are kept (`cached_bytes`). So the default shuffle goes by
    shards, through a pool (`reads_in_order`).

    Args:
        paths: One or more files.
        fields: Names of the columns to read; None means all. Others are not decoded.
        options: See `TableOptions`.

    Raises:
        CorruptFileError: A file is damaged, a row group takes more than `max_record_bytes`, or a value is null where
            numpy has none.
        MissingDependencyError: On first use, if pyarrow is not installed.
    """

    format_name = "parquet"
    options_type: ClassVar[Any] = TableOptions

    @property
    def reads_in_order(self) -> bool:
        """See `Source.reads_in_order`."""
        return True

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return _ParquetFile(path, self.options, self._cache)


class _ParquetFile(TableReader):
    def __init__(self, path: str, options: TableOptions, cache: DecodedCache) -> None:
        self._parquet = load_arrow("format 'parquet'", "pyarrow.parquet")
        self._path = path
        self._storage = storage_of(path, options.place)
        self._identity = self._storage.identity(path)
        with self._errors(), self._storage.open(path) as file:
            self._metadata = self._parquet.read_metadata(FileStream(file))
            schema = self._metadata.schema.to_arrow_schema()
        leaves = [self._metadata.schema.column(number) for number in range(self._metadata.num_columns)]
        self._texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        self._leaves: dict[str, list[tuple[int, Any]]] = {name: [] for name in schema.names}
        for number, leaf in enumerate(leaves):
            for parent in accumulate(leaf.path.split("."), "{}.{}".format):
                if parent in self._leaves:
                    self._leaves[parent].append((number, leaf))
        self._opened = _Opened()
        self._chunks: list[list[Any]] | None = None
        counts = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) >= 1 << 62:
            raise CorruptFileError("the footer claims impossible numbers of records", path=path)
        with self._errors():
            super().__init__(path, schema, np.cumsum(counts, dtype=np.int64), options, cache)

    def _pick(self, indices: Int64Array, names: Sequence[str], claims: Claims) -> dict[str, Any]:
        try:
            return super()._pick(indices, names, claims)
        finally:
            self._opened.close()

    def _decode(self, group: int, name: str) -> Any:
        arrays: list[Any] = []
        size, what = 0, f"field {name!r} of row group {group}"
        with unchanged(self._storage, self._path, self._identity):
            file = self._opened.file = self._opened.file or self._storage.open(self._path, whole=True)
            rows, numbered = self._plan(file, group, name, what)
            for batch in self._batches(file, rows, group, name, numbered=numbered):
                array = batch.column(name)
                kind = without_views(array.type, keep=False)
                size += array.nbytes if kind == array.type else total_bytes(array)
                check_size(size, self._limit, what, path=self._path)
                arrays.append(array if kind == array.type else array.cast(kind))
        pa = load_arrow("format 'parquet'")
        return pa.chunked_array(arrays, arrays[0].type if arrays else self._schema.field(name).type)

    def _plan(self, file: Any, group: int, name: str, what: str) -> tuple[int, bool]:
        """Return how many rows of a column to decode at once, and whether to decode numbers of texts first."""
        # pyarrow ends the process where the metadata of a column are damaged, if they are asked for.
        chosen = self._leaves[name]
        try:
            if self._chunks is None:
                self._chunks = read_chunks(file.read, file.size)
            claims = [claim_of(file.read, self._chunks[group][number], leaf) for number, leaf in chosen]
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the headers of the pages are damaged: {error}") from error
        total, prefixed = sum(claim.bytes for claim in claims), sum(claim.prefixed for claim in claims)
        check_size(total, self._limit, what, path=self._path)
        count = min(self._metadata.row_group(group).num_rows, max((claim.values for claim in claims), default=1))
        rows = _DECODED_BYTES // max(1, total // max(1, count), prefixed if prefixed * count > self._limit else 0)
        rows = min(max(rows, 1), _MOST_ROWS)
        # Texts of a dictionary are decoded at once only if they cannot take more than the limit.
        if sum(claim.numbered * claim.dictionary for claim in claims) <= self._limit:
            return rows, False
        if all(claim.numbered in (0, claim.values) for claim in claims):
            return rows, True
        # pyarrow is slow with numbers if other pages have text, so look for the longest text in the dictionary.
        first = next(self._batches(file, 1, group, name, numbered=True), None)
        longest = 0 if first is None else longest_in_dictionaries(first.column(name))
        return rows, sum(claim.numbered for claim in claims) * longest > self._limit

    def _batches(self, file: Any, rows: int, group: int, name: str, *, numbered: bool) -> Iterator[Any]:
        readers = self._opened.readers
        if numbered not in readers:
            readers[numbered] = self._parquet.ParquetFile(
                FileStream(file),
                metadata=self._metadata,
                page_checksum_verification=True,
                read_dictionary=self._texts if numbered else [],
            )
        return readers[numbered].iter_batches(rows, row_groups=[group], columns=[name], use_threads=False)


class _Opened(threading.local):
    """The file while a thread decodes columns, and its readers, which take long to make if there are many columns.

    One decodes texts, the other their numbers in dictionaries.
    """

    def __init__(self) -> None:
        self.file: Any = None
        self.readers: dict[bool, Any] = {}

    def close(self) -> None:
        file, self.file = self.file, None
        self.readers.clear()
        if file is not None:
            file.close()
