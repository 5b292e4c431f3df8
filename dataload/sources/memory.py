"""Sources in memory: records, for small data and as a reference in tests, and integers, for testing orders."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np

from dataload._util.arrays import IMMUTABLE, pooled_empty, split_records, to_array
from dataload._util.fingerprint import digest, fingerprint, shows_address
from dataload._util.settings import check_fields
from dataload.catalog.facts import require_known, select_fields, spec_of
from dataload.codecs.arrow import REMEDIES
from dataload.codecs.nulls import columns_of, with_masks
from dataload.collate import default_collate
from dataload.collate.columns import like
from dataload.errors import ConfigError, CorruptFileError
from dataload.sources.base import Source
from dataload.sources.expression import Expression
from dataload.sources.views.select import match_columns
from dataload.storage.core import core
from dataload.types import Array, Batch, FieldSpec, Int64Array, NullPolicy

_MOST_JOINED = 1 << 30  # bytes, which are copied once
_LARGE = 2048  # bytes of a row, which the core copies faster than numpy
_MOST_SHOWN = 1000  # elements of an array, by numpy's `repr`
_INDEX = ("index",)  # the fields of a range
_HASHED_ROWS, _HASHED_BYTES = 4096, 1 << 20  # at once


class MemorySource(Source[Any]):
    """Records from a list, or rows of columns.

    Args:
        data: A sequence of records (dicts of fields, or bytes), a mapping of columns of equal length (arrays or
            lists), or a table of pandas, Polars, pyarrow or another library that exports Arrow (this needs pyarrow;
            `dataload.codecs.arrow` has the types).
        fields: Names of the fields to read; None means all.
        nulls: What stands for nulls of a table; see `dataload.sources.arrow.TableOptions`. By default, reading a
            null that is neither a float nor a time is a CorruptFileError, and a warning tells how many there are.

    Raises:
        ConfigError: Columns differ in length, a field is unknown, or `nulls` does not fit it.

    Examples:
        >>> source = MemorySource({"x": np.arange(6).reshape(3, 2), "name": ["a", "b", "c"]})
        >>> source[1]
        {'x': array([2, 3]), 'name': 'b'}
    """

    def __init__(
        self, data: Sequence[Any] | Mapping[str, Any], *, fields: Sequence[str] | None = None, nulls: NullPolicy = None
    ) -> None:
        self._selected = check_fields(fields)
        self._columns: dict[str, Any] | None = None
        self._records: list[Any] = []
        self._nulls: dict[str, Array] = {}  # (rows,) bool, by column that may not be read there
        self._gone: dict[str, Array] = {}  # (rows,) bool, by column that has nulls, also where a value stands for them
        if hasattr(data, "__arrow_c_stream__"):
            data, self._nulls, self._gone = columns_of(data, self._selected, nulls)
            self._selected = with_masks(self._selected, data, nulls)
        elif nulls is not None:
            message = f"nulls is for tables, and the data are {type(data).__name__!r}"
            raise ConfigError(message, key="nulls", value=nulls)
        if self._nulls and nulls is None:
            counts = ", ".join(f"{where.sum():,} of {name!r}" for name, where in self._nulls.items())
            warnings.warn(f"the table has nulls ({counts}), and reading one is an error: {REMEDIES}", stacklevel=2)
        if isinstance(data, Mapping):
            self._columns = {name: _column(name, column) for name, column in data.items()}
            lengths = {name: len(column) for name, column in self._columns.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigError(f"columns differ in length: {lengths}", key="data")
            self._length = next(iter(lengths.values()), 0)
        else:
            if isinstance(data, (str, bytes)) or not hasattr(data, "__iter__"):
                raise TypeError(f"a MemorySource takes a list of records, columns or a table, got {data!r}")
            self._records = list(data)
            self._length = len(self._records)
        self._check(self._selected)

    def _check(self, fields: tuple[str, ...] | None) -> None:
        known = self._columns if self._columns is not None else (self._all_fields() if self._records else None)
        if known is not None:
            require_known(fields or (), known)

    def __len__(self) -> int:
        return self._length

    @classmethod
    def joined(cls, sources: Sequence[Source[Any]]) -> "MemorySource | None":
        """Return sources of the same columns as one, and let each use its part of that memory; None for others."""
        several = [source for source in {id(source): source for source in sources}.values() if type(source) is cls]
        if len(several) < max(2, len(sources)) or len({source._kind() for source in several}) > 1:
            return None
        columns = several[0]._columns
        size = sum(getattr(column, "nbytes", 0) for source in several for column in (source._columns or {}).values())
        if columns is None or size > _MOST_JOINED or any(source._nulls for source in several):
            return None
        ends = np.cumsum([len(source) for source in several])
        for name in columns:
            parts = [source._columns[name] for source in several if source._columns is not None]
            first: Any = parts[0]
            is_array = isinstance(first, np.ndarray)  # whose byte order its fingerprint counts
            of_all = np.concatenate(parts, dtype=first.dtype) if is_array else [*chain.from_iterable(parts)]
            columns = {**columns, name: of_all}
        for source, end in zip(several, ends.tolist(), strict=True):
            source._columns = {name: column[end - len(source) : end] for name, column in columns.items()}
        return cls(columns, fields=several[0]._selected)

    def _kind(self) -> Any:
        """Return what sources have in common whose columns can be joined."""
        columns = (self._columns or {}).items()
        return self._selected, *(
            (name, getattr(each, "dtype", 0), getattr(each, "shape", ())[1:]) for name, each in columns
        )

    def _all_fields(self) -> dict[str, FieldSpec]:
        if not self._length:
            return {}
        first = self._record(0)
        return {name: spec_of(value) for name, value in first.items()} if isinstance(first, Mapping) else {}

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the first record."""
        known = self._all_fields()
        return known if self._selected is None else {name: known[name] for name in self._selected if name in known}

    def _record(self, index: int) -> Any:
        if self._columns is not None:
            return {
                # column[index, ...] is an array even if column[index] is a scalar, as in all other sources
                name: column[index, ...].copy() if isinstance(column, np.ndarray) else owned(column[index])
                for name, column in self._columns.items()
            }
        record = self._records[index]
        return {name: owned(value) for name, value in record.items()} if isinstance(record, Mapping) else owned(record)

    def _read(self, indices: Int64Array) -> list[Any]:
        if self._columns is not None:
            chosen = self._columns if self._selected is None else self._selected
            return split_records({name: self._values(name, indices) for name in chosen}, len(indices))
        records = [self._record(index) for index in indices.tolist()]
        if self._selected is None:
            return records
        return [select_fields(record, self._selected) for record in records]

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        if self._columns is None:
            self._check(fields)
            return super()._read_columns(indices, fields)
        selected = self._columns if self._selected is None else dict.fromkeys(self._selected)
        chosen = selected if fields is None else fields
        require_known(chosen, selected)
        columns = {name: self._values(name, indices) for name in chosen}
        return {
            name: default_collate.column(c, name) if isinstance(c, list) and c else c for name, c in columns.items()
        }

    def _matches(self, condition: Expression, indices: Int64Array | None) -> Int64Array:
        """See `Source._matches`: nulls are null, whatever stands for them."""
        if not self._gone.keys() & {*condition.fields}:
            return super()._matches(condition, indices)
        return match_columns(
            lambda rows: {name: self._compared(name, rows) for name in condition.fields}, condition, len(self), indices
        )

    def _compared(self, name: str, indices: Int64Array) -> Any:
        """Return the values of a column that a condition compares, which are masked or None where it has nulls."""
        if name not in self._gone or self._columns is None:
            return self._values(name, indices)
        column, gone = self._columns[name], self._gone[name][indices]
        if not isinstance(column, np.ndarray):
            return [
                None if is_null else column[at] for at, is_null in zip(indices.tolist(), gone.tolist(), strict=True)
            ]
        values = column[indices]
        return np.ma.MaskedArray(values, gone.reshape(values.shape)) if values.size == gone.size else values

    def _values(self, name: str, indices: Int64Array) -> Any:
        column = self._columns[name] if self._columns is not None else ()
        if name in self._nulls and (refused := self._nulls[name][indices]).any():
            index = int(indices[np.argmax(refused)])
            raise CorruptFileError(f"field {name!r} is null, and not a float or a time: {REMEDIES}", index=index)
        if not isinstance(column, np.ndarray):
            return [owned(column[index]) for index in indices.tolist()]
        if column.dtype.hasobject:
            return np.take(column, indices, axis=0)
        if (native := column.dtype.newbyteorder("=")) != column.dtype:
            return column[indices].astype(native)  # as collation does
        out = pooled_empty((len(indices), *column.shape[1:]), column.dtype)
        if (size := column[:1].nbytes) >= _LARGE and column.flags.c_contiguous:
            core().gather(out.view(np.uint8), column.view(np.uint8), 0, size, indices, size, -1)
            return out
        # With mode="raise", numpy would buffer the output to protect `out`.
        return np.take(column, indices, axis=0, out=out, mode="clip")

    def fingerprint(self) -> str:
        """See `Source.fingerprint`: a hash of all records."""
        digest = hashlib.blake2b(digest_size=16)
        for record in self._records:
            items = record.items() if isinstance(record, Mapping) else [("", record)]
            for name, value in items:
                digest.update(_hashed(name, value))
        if self._length and (columns := self._columns):
            rows = max(1, min(_HASHED_ROWS, _HASHED_BYTES // (1 + sum(map(_first_bytes, columns.values())))))
            for start in range(0, self._length, rows):
                parts = [_hashed_column(name, each[start : start + rows]) for name, each in columns.items()]
                if all(isinstance(part, np.ndarray) for part in parts):
                    digest.update(np.concatenate(parts, axis=1).tobytes())
                    continue
                for row in zip(*parts, strict=True):
                    digest.update(b"".join(row))
        for name, where in self._nulls.items():
            digest.update(name.encode() + where.tobytes())
        digest.update(repr((self._length, self._selected)).encode())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"MemorySource({self._length} records)"


def _column(name: str, values: Any) -> Any:
    """Return numbers as an array, and text, bytes and objects as a list of Python values."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        message = f"column {name!r} is {values!r}: expected an array or a list, with a value for each record"
        raise ConfigError(message, key="data", value=values)
    if not isinstance(values, np.ndarray):
        return list(values)
    array = to_array(name, values)
    return array.tolist() if array.dtype.kind in "USTO" else array


def _first_bytes(column: Any) -> int:
    """Return the bytes of the first value of a column that has rows."""
    return column[:1].nbytes if isinstance(column, np.ndarray) else len(_content(column[0]))


def _hashed(name: str, value: Any) -> bytes:
    """Return what a fingerprint hashes of a field of a record."""
    content = _content(value)
    return f"{name}\x1f{spec_of(value)}\x1f{len(content)}\x1f".encode("utf-8", "surrogatepass") + content


def _hashed_column(name: str, column: Any) -> Any:
    """Return the same for each row of a column that has rows: (rows, bytes) uint8, or a list."""
    if not isinstance(column, np.ndarray):
        return [_hashed(name, value) for value in column]
    if column.dtype.hasobject:
        return [_hashed(name, column[row, ...]) for row in range(len(column))]
    first, size = np.frombuffer(_hashed(name, column[0, ...]), np.uint8), _first_bytes(column)
    hashed = np.tile(first, (len(column), 1))
    hashed[:, len(first) - size :] = np.ascontiguousarray(column).reshape(-1).view(np.uint8).reshape(len(column), size)
    return hashed


def _content(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.tobytes()
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    opaque = not isinstance(value, (list, tuple, Mapping)) and shows_address(value)  # such as an image of Pillow
    text = type(value).__qualname__ if opaque else repr(value)
    text = text + fingerprint(value) if "..." in text and _has_long_array(value) else text
    return text.encode("utf-8", "surrogatepass")


def _has_long_array(value: Any) -> bool:
    """Return whether `repr` shows only the ends of an array in a value."""
    if isinstance(value, np.ndarray):
        return value.size > _MOST_SHOWN
    values: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_has_long_array, values))


def owned(value: Any) -> Any:
    """Return a record or a value that the caller may modify."""
    if type(value) in IMMUTABLE or (isinstance(value, np.memmap) and not value.flags.writeable):
        return value  # a transform may need only some of the mapped bytes
    if isinstance(value, (np.ndarray, bytearray)):
        return value.copy()
    if type(value) is list:
        items: list[Any] = value
        return items.copy() if IMMUTABLE.issuperset(map(type, items)) else [*map(owned, items)]
    if type(value) is dict:
        return {key: owned(item) for key, item in value.items()}
    if type(value) is tuple or hasattr(value, "_make"):  # not other classes, such as `time.struct_time`
        return like(type(value), map(owned, cast("tuple[Any, ...]", value)))
    return value.clone() if hasattr(value, "__array__") and hasattr(value, "clone") else value  # a tensor of torch


class RangeSource(Source[dict[str, int]]):
    """Record i is ``{"index": start + i * step}``.

    Args:
        stop: End of the range, exclusive.
        start: First value.
        step: Difference between consecutive values; not 0.
        fields: Names of the fields to read: ``["index"]``, or none of them. None means all.
    """

    def __init__(self, stop: int, *, start: int = 0, step: int = 1, fields: Sequence[str] | None = None) -> None:
        self._names = _INDEX if (names := check_fields(fields)) is None else names
        require_known(self._names, _INDEX)
        if step == 0:
            raise ConfigError("step must not be 0", key="step", value=step)
        try:
            self._range = range(start, stop, step)
        except TypeError:
            message = f"a RangeSource takes integers, got {stop!r}, start={start!r}, step={step!r}"
            raise ConfigError(message, key="stop", value=stop) from None

    def __len__(self) -> int:
        return len(self._range)

    def _read(self, indices: Int64Array) -> list[dict[str, int]]:
        values: list[int] = self._values(indices).tolist()
        return [dict.fromkeys(self._names, value) for value in values]

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        require_known(fields or (), self._names)
        return {name: self._values(indices) for name in (self._names if fields is None else fields)}

    def _values(self, indices: Int64Array) -> Int64Array:
        return indices * self._range.step + self._range.start

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """The only field, ``index``."""
        return {name: FieldSpec("int64", ()) for name in self._names}

    def fingerprint(self) -> str:
        return digest("range", repr(self._range))

    def __repr__(self) -> str:
        return f"RangeSource({self._range.stop}, start={self._range.start}, step={self._range.step})"
