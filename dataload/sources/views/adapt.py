"""Objects in place of sources: data in memory are accepted, others refused with a hint."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import repeat
from operator import getitem
from os import PathLike
from typing import Any, cast

import numpy as np

from dataload._util.arrays import to_array
from dataload._util.failures import mark_users, owner_of
from dataload._util.fingerprint import identify
from dataload.catalog.facts import spec_of
from dataload.collate.columns import describe_field
from dataload.errors import SourceError, redacted
from dataload.sources.base import Source
from dataload.sources.memory import MemorySource, owned
from dataload.sources.registry import built_in_formats, by_suffix
from dataload.sources.shards import Location, locate
from dataload.types import (
    AheadReader,
    Batch,
    BatchReader,
    BytesColumn,
    ColumnReader,
    FieldSpec,
    Int64Array,
    RandomAccessSource,
    ReadsAhead,
    Sharded,
    StepsAhead,
)

_TABLES = {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}


def loadable(data: Any) -> RandomAccessSource[Any]:
    """Return a source of any kind unchanged, and columns in memory as a `MemorySource`."""
    if isinstance(data, Source):
        return data
    kind: type[Any] = type(data)
    if (kind.__module__.partition(".")[0], kind.__name__) in _TABLES:
        return MemorySource(data)
    if isinstance(data, Mapping) and all(isinstance(key, str) for key in cast("Mapping[Any, Any]", data)):
        return MemorySource(_columns(cast("Mapping[str, Any]", data)))
    _refuse(data)
    with _hinting(data):
        len(data)
    return data


def entering_hint(source: Any) -> str:
    """Return what to do if a read failed because a source of another library was not entered; "" for other sources."""
    source = getattr(source, "dataset", source)  # of torch's Subset and the like
    if isinstance(source, Source) or not isinstance(source, AbstractContextManager):
        return ""
    named = type(cast("Any", source)).__name__
    return f"{named} is a context manager, which dataload never enters: if it must be entered, read inside its `with`"


@contextmanager
def _hinting(source: Any) -> Generator[None]:
    try:
        yield
    except Exception as error:
        if hint := entering_hint(source):
            error.add_note(hint)
        raise


def as_source(data: Any) -> Source[Any]:
    """Return a dataload source with the records of `data`, which is anything that a loader takes."""
    if isinstance(data, Source) and getattr(type(data), "has_proportions", False):  # of an instance, a miss is slow
        raise TypeError("a mix inside of another source has no proportions: join or window its sources, and mix those")
    found = loadable(data)
    return found if isinstance(found, Source) else WrappedSource(found)


def records_at(data: Any, indices: list[int], *, many: bool, own: bool = True) -> list[Any]:
    """Return records of a user's source, read by `__getitems__` if `many`. If `own`, records of a list are copied."""
    try:
        records: Any = data.__getitems__(indices) if many else [*map(getitem, repeat(data), indices)]
        if isinstance(records, Mapping) or not hasattr(records, "__len__"):
            raise SourceError(f"the source's __getitems__ returned {type(records).__name__!r} instead of a list")
        if len(records) != len(indices):  # `map` ends at a StopIteration
            if not many:
                raise SourceError(f"the source's __getitem__ raised StopIteration for index {indices[len(records)]}")
            raise SourceError(f"the source's __getitems__ returned {len(records)} records for {len(indices)} indices")
    except Exception as error:
        mark_users(error)
        raise
    return [*map(owned, records)] if own and type(data) in (list, tuple) else list(records)


def columns_at(data: Any, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
    """Return a batch of a source of one's own by its `read_batch`, whose columns need a row for each index."""
    try:
        batch = data.read_batch(indices, fields)
        if batch is None:
            raise SourceError("the source's read_batch returned None: does it end without `return`?")
        is_tuple = isinstance(batch, tuple)
        columns: Any = batch.items() if isinstance(batch, dict) else enumerate(batch) if is_tuple else [("", batch)]
        for name, column in columns:
            shape = getattr(column, "shape", ()) or ((len(column),) if isinstance(column, (list, BytesColumn)) else ())
            if shape and shape[0] != len(indices):
                returned = f"{shape[0]} values of {describe_field(str(name))}"
                raise SourceError(f"the source's read_batch returned {returned} for {len(indices)} indices")
    except Exception as error:
        mark_users(error)
        raise
    return batch


class WrappedSource(Source[Any]):
    """The records of a source of another library or of one's own.

    Args:
        data: Anything with ``__len__`` and ``__getitem__``; other methods of `dataload.types` make it faster.
    """

    def __init__(self, data: RandomAccessSource[Any]) -> None:
        self._data: Any = data
        self._fields: Mapping[str, FieldSpec] | None = None

    @property
    def reads_columns(self) -> bool:
        """True if a field can be read without the others."""
        return isinstance(self._data, ColumnReader)

    def __len__(self) -> int:
        return len(self._data)

    def _read(self, indices: Int64Array) -> list[Any]:
        with _hinting(self._data):
            return records_at(self._data, indices.tolist(), many=isinstance(self._data, BatchReader))

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        if isinstance(self._data, ColumnReader):
            return columns_at(self._data, indices, fields)
        return super()._read_columns(indices, fields)

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the first record; none if it is a bad record, for which a loader may have a remedy."""
        if self._fields is None:
            record = None
            try:
                record = self._read(np.zeros(1, np.int64))[0] if len(self) else None
            except Exception as error:
                if owner_of(error) != "record":
                    raise
            known = cast("Mapping[str, Any]", record if isinstance(record, Mapping) else {})
            self._fields = {name: spec_of(value) for name, value in known.items()}
        return self._fields

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        return self._data.shard_lengths if isinstance(self._data, Sharded) else (len(self),)

    def _locate(self, index: int) -> Location:
        return locate(self._data, index)

    @property
    def reads_in_order(self) -> bool:
        return bool(getattr(self._data, "reads_in_order", False))

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        if not isinstance(self._data, ReadsAhead):
            return None
        return self._data.read_ahead(steps, fields, here=here, share=share)

    def fingerprint(self) -> str:
        """See `Source.fingerprint`; without that method, the class and the number of records."""
        return identify(self._data)

    def close(self) -> None:
        """Close the data, if they can be closed."""
        close = getattr(self._data, "close", None)
        if callable(close):
            close()

    def __repr__(self) -> str:
        return f"WrappedSource({self._data!r})"


def _columns(data: Mapping[str, Any]) -> dict[str, Any]:
    for name, column in data.items():
        if _is_data_set(column):
            named = f"[{name!r}]"
            message = f"{_shown(data)} holds data sets: pass one of them, as in data{named}"
            raise TypeError(f"{message}, or join them with dataload.concat([...]) or dataload.mix({{...}})")
        if isinstance(column, (str, bytes, Mapping)) or not hasattr(column, "__len__"):
            raise TypeError(
                f"a dict is read as columns, arrays or lists of one value per record, and {name!r} is "
                f"{_shown(column)}: pass a list of records instead, [{{...}}, ...]"
            )
    return {name: to_array(name, column) if hasattr(column, "__array__") else column for name, column in data.items()}


def _refuse(data: Any) -> None:
    """Raise TypeError, with advice, for data that are not a source."""
    if isinstance(data, (str, bytes, PathLike)):
        path = redacted(data.decode("utf-8", "replace") if isinstance(data, bytes) else str(cast("Any", data)))
        raise TypeError(f"a path is not a source: pass dataload.open({path!r})")
    if isinstance(data, type):
        raise TypeError(f"{data.__name__} is a class: pass an object of it, {data.__name__}(...)")
    if isinstance(data, (list, tuple)) and data:
        first: Any = cast("Sequence[Any]", data)[0]
        if _is_data_set(first):
            message = "a list of sources is not a source: pass dataload.concat([...]), or dataload.mix([...]) to draw"
            raise TypeError(message)
        if isinstance(first, PathLike) or (isinstance(first, str) and by_suffix(first, built_in_formats()) is not None):
            raise TypeError(
                f"a list of paths is not a source: pass dataload.open([{redacted(str(cast('Any', first)))!r}, ...])"
            )
    if isinstance(data, Mapping) and any(map(_is_data_set, cast("Mapping[Any, Any]", data))):
        raise TypeError("sources with weights are not a source: pass dataload.mix({...})")
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(data, name)]
    named, package = type(data).__name__, type(data).__module__.partition(".")[0]
    is_iterable = any(each.__name__ == "IterableDataset" for each in type(data).__mro__)
    if is_iterable or ("__len__" in missing and hasattr(data, "__iter__")):
        streaming = "load the data set without streaming=True, or " if package == "datasets" else ""
        raise TypeError(
            f"{named} gives its records one after another, and a loader reads them by index: {streaming}pass list(...) "
            "of it if they fit in memory, or write them with dataload.create(...) and open that, or use "
            "dataload.streams.MultiStreamLoader"
        )
    if missing:
        raise TypeError(f"{named} has no {' and no '.join(missing)}; a source needs __len__ and __getitem__")


def _is_data_set(value: Any) -> bool:
    """Return whether a value is a source, rather than a record or a column."""
    if isinstance(value, Source):
        return True
    plain = isinstance(value, (str, bytes, bytearray, memoryview, list, tuple, Mapping, np.ndarray, np.generic))
    return not plain and not hasattr(value, "__array__") and isinstance(value, RandomAccessSource)


def _shown(value: Any) -> str:
    return f"{type(value).__name__!r}" if isinstance(value, Mapping) else f"of type {type(value).__name__}"
