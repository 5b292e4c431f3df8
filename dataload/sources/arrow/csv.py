"""The source of CSV files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from dataload._util.caches import DecodedCache
from dataload._util.clock import decoding
from dataload._util.limits import check_size
from dataload.codecs.arrow import load_arrow
from dataload.codecs.nulls import shows_nulls
from dataload.errors import ConfigError, CorruptFileError, closest
from dataload.sources.arrow.format import CsvOptions
from dataload.sources.arrow.table import TableReader, TableSource
from dataload.sources.shards import ShardReader
from dataload.storage import storage_of, unchanged
from dataload.storage.backend import read_text
from dataload.types import Record

_VALUE_BYTES, _COLUMN_BYTES = 8, 2048  # about what pyarrow takes
_FEW_COLUMNS = 256
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class CsvSource(TableSource):
    """Records of CSV files with a header line, plain or compressed (``.csv.gz``, ``.csv.zst``).

    A file is parsed as a whole by pyarrow, and those used last are kept (`cached_bytes`). So CSV is for small data and
    for import: convert larger files to another format.

    Options: `CsvOptions`.
    """

    format_name = "csv"
    options_type: ClassVar[Any] = CsvOptions

    @property
    def reads_in_order(self) -> bool:
        """True if there are several files, since each is parsed as a whole."""
        return len(self.paths) > 1

    def _open_shard(self, path: str) -> ShardReader[Record]:
        return self._with_classes(_CsvFile(path, self.options, self._cache))


class _CsvFile(TableReader):
    def __init__(self, path: str, options: CsvOptions, cache: DecodedCache) -> None:
        self._path, self._options, self._cache = path, options, cache
        self._storage = storage_of(path, options.remote_settings)
        self._identity = self._storage.identity(path)
        table = cache.get(path, self._parse)
        super().__init__(path, lambda: table.schema, np.array([len(table)], np.int64), options, cache)

    @contextmanager
    def _opened(self, block: int, names: Sequence[str]) -> Generator[Callable[[str], Any]]:  # noqa: ARG002 - all are parsed
        yield self._cache.get(self._path, self._parse).column

    def null_counts(self) -> Mapping[str, int]:
        table = self._cache.get(self._path, self._parse)
        return {each.name: table.column(each.name).null_count for each in self._schema if shows_nulls(each.type)}

    def _parse(self) -> tuple[Any, int]:
        csv = load_arrow("format 'csv'", "pyarrow.csv")
        pa, options = load_arrow("format 'csv'"), self._options
        with unchanged(self._storage, self._path, self._identity):
            data = read_text(self._path, options.max_record_bytes, options.remote_settings)
        comma, head = options.delimiter.encode(), data.find(b"\n")
        head = len(data) if head < 0 else head + 1
        cells = data.count(comma, head) + data.count(b"\n", head)
        size = _VALUE_BYTES * cells + _COLUMN_BYTES * max(0, data.count(comma, 0, head) - _FEW_COLUMNS)
        check_size(size, options.max_record_bytes, "the table", path=self._path)
        types = {name: _type_of(name, dtype) for name, dtype in (options.dtypes or {}).items()}
        with self._errors():
            with decoding():
                table = csv.read_csv(
                    pa.BufferReader(data),
                    csv.ReadOptions(use_threads=False),
                    csv.ParseOptions(delimiter=options.delimiter, newlines_in_values=True),
                    csv.ConvertOptions(column_types=types),
                )
            self._check(table, types)
            return table, table.nbytes

    def _check(self, table: Any, types: Mapping[str, Any]) -> None:
        for name in types:
            if name not in table.column_names:
                message = (
                    f"dtypes names {name!r}, which {self._path} does not have: {closest(name, table.column_names)}"
                )
                raise ConfigError(message, key=f"dtypes.{name}")
        first, *others = table.column_names
        if not others and (found := next((each for each in ";\t|" if each in first), "")):
            message = f"{self._path} has one column, {first!r}: pass delimiter={found!r} if this separates columns"
            warnings.warn(message, stacklevel=2)
        if _look_like_values(table.column_names):
            line = self._options.delimiter.join(table.column_names)
            message = (
                f"{self._path} has numbers as names of columns: write names above {line!r:.80} if this is a record"
            )
            warnings.warn(message, stacklevel=2)
        for each in table.schema:
            if load_arrow("format 'csv'").types.is_binary(each.type):
                raise CorruptFileError(f"the column {each.name!r} is not UTF-8", path=self._path)
        check_size(table.nbytes, self._options.max_record_bytes, "the table", path=self._path)


def _look_like_values(names: Sequence[str]) -> bool:
    """Return whether all names are numbers. 0, 1, 2, ... are names: pandas gives them to columns that have none."""
    return all(map(_NUMBER.fullmatch, names)) and list(names) != [str(number) for number in range(len(names))]


def _type_of(name: str, dtype: str) -> Any:
    pa = load_arrow("format 'csv'")
    try:
        return pa.string() if dtype == "str" else pa.from_numpy_dtype(np.dtype(dtype))
    except (TypeError, pa.ArrowException) as error:
        message = f"dtypes: {dtype!r} is not the dtype of a column; expected one such as 'int64', 'float32' or 'str'"
        raise ConfigError(message, key=f"dtypes.{name}", value=dtype) from error
