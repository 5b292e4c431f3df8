"""The source of Parquet files."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dataload._util.limits import check_size
from dataload.codecs.arrow import load_arrow
from dataload.errors import CorruptFileError
from dataload.sources.arrow.format import TableOptions
from dataload.sources.arrow.table import TableReader, TableSource
from dataload.sources.decoded import DecodedCache
from dataload.sources.shards import ShardReader
from dataload.storage import storage_of
from dataload.storage.errors import rewritten_error
from dataload.storage.stream import FileStream
from dataload.types import Record

_DECODED_BYTES = 1 << 24  # at once, about, between two looks at the memory that they take
_FEWEST_ROWS, _MOST_ROWS = 64, 1 << 16


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
        counts = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        if min(counts, default=0) < 0 or sum(counts) >= 1 << 62:
            raise CorruptFileError("the footer claims impossible numbers of records", path=path)
        with self._errors():
            super().__init__(path, schema, np.cumsum(counts, dtype=np.int64), options, cache)

    def _decode(self, group: int, name: str) -> Any:
        if self._storage.identity(self._path) != self._identity:
            raise rewritten_error(self._path)
        # pyarrow ends the process where the metadata of a column are damaged, if they are asked for here.
        claims = self._metadata.row_group(group)
        row = max(1, claims.total_byte_size // max(1, claims.num_rows))
        rows = min(max(_DECODED_BYTES // row, _FEWEST_ROWS), _MOST_ROWS)
        arrays: list[Any] = []
        size = 0
        with self._storage.open(self._path, whole=True) as file:
            reader = self._parquet.ParquetFile(
                FileStream(file), metadata=self._metadata, page_checksum_verification=True
            )
            for batch in reader.iter_batches(rows, row_groups=[group], columns=[name], use_threads=False):
                array = _without_dictionary(batch.column(name))
                size += array.nbytes
                check_size(size, self._limit, f"field {name!r} of row group {group}", path=self._path)
                arrays.append(array)
        pa = load_arrow("format 'parquet'")
        return pa.chunked_array(arrays, arrays[0].type if arrays else self._schema.field(name).type)


def _without_dictionary(array: Any) -> Any:
    types = load_arrow("tables").types
    return array.dictionary_decode() if types.is_dictionary(array.type) else array
