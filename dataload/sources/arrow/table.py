"""What all sources of tables share: columns as columns, and decoded groups of records, which are kept."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from dataload._util.buffers import pooled_empty
from dataload._util.decoding import decoding
from dataload._util.indexing import split_by_shard
from dataload.codecs import arrow
from dataload.codecs.arrow import Rows, load_arrow
from dataload.codecs.decoders import DECODERS, Decoder, find_decoder, for_extension
from dataload.collate import scatter_columns
from dataload.errors import ConfigError, CorruptFileError, DataloadError, UnsupportedFormatError, closest
from dataload.sources.arrow.format import TableOptions
from dataload.sources.decoded import DecodedCache
from dataload.sources.files import FileSource
from dataload.sources.shards import ShardReader
from dataload.types import Batch, FieldSpec, Int64Array, Record


class TableSource(FileSource[Record]):
    """The base class of sources of tables; see `dataload.codecs.arrow` for the values."""

    def __init__(
        self,
        paths: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        fields: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(paths, fields=fields, **options)
        self._cache = DecodedCache(self.options.cached_bytes)

    def close(self) -> None:
        """See `FileSource.close`."""
        super().close()
        self._cache.clear()


class TableReader(ShardReader[Record]):
    """A table in a file.

    Args:
        path: The file.
        schema: Its schema, of pyarrow.
        ends: (groups,) int64, cumulative number of records of its row groups or batches.
        options: The options.
        cache: Decoded columns of row groups.
    """

    whole = True

    def __init__(self, path: str, schema: Any, ends: Int64Array, options: TableOptions, cache: DecodedCache) -> None:
        self._path, self._schema, self._ends, self._cache = path, schema, ends, cache
        self._limit: int = options.max_record_bytes
        str(schema)  # raises if a name, of a field in any field, is not UTF-8
        twice = [name for name, count in Counter(schema.names).items() if count > 1]
        if twice:
            message = f"{path} has several columns called {twice[0]!r}: rename them where the table is made"
            raise UnsupportedFormatError(message, path=path)
        self._numbers = {name: number for number, name in enumerate(schema.names)}
        features = _features(schema)
        self._shapes = {name: shape for name in schema.names if (shape := _shape(features.get(name)))}
        self._decoders = _plan_decoders(schema, features, options, path)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """See `ShardReader.fields`."""
        decoded = FieldSpec("unknown", None)
        return {
            each.name: decoded
            if each.name in self._decoders
            else arrow.spec_of_type(each.type, self._shapes.get(each.name))
            for each in self._schema
        }

    def read(self, indices: Int64Array, fields: tuple[str, ...] | None) -> list[Record]:
        """See `ShardReader.read`."""
        return arrow.split(self._columns(indices, fields), len(indices))

    def read_batch(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        """See `ShardReader.read_batch`."""
        return arrow.stacked(self._columns(indices, fields))

    def _columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> dict[str, Any]:
        names = tuple(self._schema.names) if fields is None else fields
        for name in names:
            if name not in self._numbers:
                known = closest(name, self._schema.names)
                raise ConfigError(f"{self._path} has no field {name!r}: {known}", key="fields", value=name)
        with self._errors():
            columns = self._pick(indices, names)
        for name in names:
            if name in self._decoders:
                columns[name] = self._decode_values(columns[name], self._decoders[name], name, indices)
        return columns

    def _pick(self, indices: Int64Array, names: Sequence[str]) -> dict[str, Any]:
        """Return columns of records, by decoding the groups that they are in."""
        parts = list(split_by_shard(self._ends, indices))
        columns: dict[str, Any] = {}
        for name in names:
            found = [(self._group(group, name, int(indices[rows[0]])), local, rows) for group, local, rows in parts]
            columns[name] = self._join(found, name, indices)
        return columns

    def _join(self, found: list[tuple[Any, Int64Array, Int64Array]], name: str, indices: Int64Array) -> Any:
        """Return values of several groups as one column: of each the prepared column, rows in it, and ours."""
        first, shape = found[0][0], self._shapes.get(name)
        if all(isinstance(each, np.ndarray) and each.dtype == first.dtype for each, _, _ in found):
            out = pooled_empty((len(indices), *first.shape[1:]), first.dtype)
            for each, local, rows in found:
                out[rows] = each[local]
            return out
        pieces = [
            (rows, {name: arrow.pick(each, name, local, Rows(self._path, indices[rows]), shape)})
            for each, local, rows in found
        ]
        return scatter_columns(pieces, len(indices))[name]

    def _group(self, group: int, name: str, index: int) -> Any:
        """Return a column of a group; `index` is one of its records, for messages."""

        def decode() -> tuple[Any, int]:
            with self._errors(group, index):
                with decoding():
                    array = arrow.prepare(self._decode(group, name))
                count = int(self._ends[group] - (self._ends[group - 1] if group else 0))
                if len(array) != count:
                    raise ValueError(f"{len(array)} values of {name!r} for {count} records")
                return array, array.nbytes

        return self._cache.get((self._path, group, name), decode)

    @abstractmethod
    def _decode(self, group: int, name: str) -> Any:
        """Return a column of a group as an array of pyarrow."""

    @contextmanager
    def _errors(self, group: int | None = None, index: int | None = None) -> Generator[None]:
        """Translate errors about the file's content; those of storage stay."""
        try:
            yield
        except (DataloadError, MemoryError):
            raise
        except (load_arrow("tables").ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
            where = "" if group is None else f"row group {group}: "
            raise CorruptFileError(f"{where}{error}", path=self._path, index=index) from error

    def _decode_values(self, column: Any, decoder: Decoder, name: str, indices: Int64Array) -> list[Any]:
        values: list[Any] = []
        with decoding():
            for row, value in enumerate(column):
                try:
                    values.append(decoder.decode(value))
                except CorruptFileError as error:
                    message = f"field {name!r}: {error}"
                    raise CorruptFileError(message, path=self._path, index=int(indices[row])) from error
        return values


def _features(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's library has written about the columns."""
    try:
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _shape(feature: Any) -> tuple[int, ...] | None:
    """Return the shape that Hugging Face declares for a list of lists, if it is constant."""
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if isinstance(shape, list) and shape and all(type(extent) is int and extent > 0 for extent in shape):
        return tuple(shape)
    return None


def _plan_decoders(schema: Any, features: Mapping[str, Any], options: TableOptions, path: str) -> dict[str, Decoder]:
    """Return the decoder of each field that has one."""
    chosen: Mapping[str, Any] = options.decode if isinstance(options.decode, Mapping) else {}
    if options.decode == "auto":
        kinds = {name: str(each.get("_type")).lower() for name, each in features.items() if isinstance(each, dict)}
        chosen = {name: kind for name, kind in kinds.items() if kind in DECODERS and name in schema.names}
    for name in chosen:
        spec = arrow.spec_of_type(schema.field(name).type) if name in schema.names else None
        if spec is None or spec.dtype != "bytes":
            known = closest(name, schema.names) if spec is None else f"it is {spec}, and decoders take bytes"
            raise ConfigError(f"decode names the field {name!r} of {path}: {known}", key="decode", value=name)
    return {
        name: for_extension(find_decoder(what, name), "", options.max_record_bytes) for name, what in chosen.items()
    }
