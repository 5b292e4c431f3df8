"""Columns of Arrow arrays as columns of a batch, for all sources of tables.

| type in Arrow | column | value in a record |
|---|---|---|
| numbers, bool | array | array without axes |
| date, timestamp; time, duration | array of datetime64 (UTC); of timedelta64 | array without axes |
| fixed_size_list of these, fixed_shape_tensor | array with the list's shape | array |
| list of these | list of arrays, stacked if lengths are equal | array with one more axis |
| string | `TextColumn` | str |
| binary; struct of ``bytes`` and ``path`` as Hugging Face stores files | `BytesColumn` | bytes |
| dictionary | as its values | as its values |
| struct | dict of columns | dict |
| anything else | list | a Python value, as pyarrow's ``to_pylist`` gives it |

Null is NaN in floats and NaT in times. A null in any other column is an error, if its record is read; see
`dataload.codecs.nulls` for values in place of nulls.
"""

from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from dataload._util.arrays import fits, pooled_empty
from dataload._util.lazy import load_optional
from dataload.collate import default_collate
from dataload.errors import CorruptFileError, UnsupportedFormatError
from dataload.types import Array, BytesColumn, FieldSpec, Int64Array, TextColumn

REMEDIES = (
    'pass nulls="mask" to mark nulls in a field of their own, nulls={field: value} to replace them, or fields=[...] '
    "without this field"
)
"""Remedies for a field with nulls, for messages."""

_FILE = {"bytes", "path"}
_STORED = {"date32[day]": "datetime64[D]", "date64[ms]": "datetime64[ms]"}


def load_arrow(needed_by: str, module: str = "pyarrow") -> Any:
    """Return pyarrow, or a module of it; MissingDependencyError if it is not installed."""
    return load_optional(module, needed_by=needed_by, extra="arrow", package="pyarrow")


@cache
def pa_module() -> Any:
    return load_arrow("reading tables")


class Numbers(NamedTuple):
    """A type whose values all have the same number of numbers."""

    stored: np.dtype[Any]  # in the buffer; bits for bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()
    permutation: tuple[int, ...] | None = None  # of the stored axes


@lru_cache(maxsize=4096)
def numbers_of(kind: Any) -> Numbers | None:
    types = pa_module().types
    if isinstance(kind, pa_module().FixedShapeTensorType):
        inner, shape = numbers_of(kind.value_type), tuple(kind.shape)
        if inner is None or inner.shape:
            return None
        order = None if kind.permutation is None else tuple(kind.permutation)
        if not fits(shape, kind.storage_type.list_size) or sorted(order or ()) not in ([], [*range(len(shape))]):
            raise ValueError(f"a tensor of {kind.storage_type.list_size} items has the shape {shape} in order {order}")
        return inner._replace(shape=shape, permutation=order)
    kind = getattr(kind, "storage_type", kind)
    if types.is_fixed_size_list(kind):
        inner = numbers_of(kind.value_type)
        if inner is None:
            return None
        order = None if inner.permutation is None else (0, *(axis + 1 for axis in inner.permutation))
        return inner._replace(shape=(kind.list_size, *inner.shape), permutation=order)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        return Numbers(dtype, dtype)
    if types.is_date(kind):
        return Numbers(np.dtype(f"i{kind.bit_width // 8}"), np.dtype(_STORED[str(kind)]))
    if types.is_timestamp(kind) or types.is_duration(kind) or types.is_time(kind):
        name = "datetime64" if types.is_timestamp(kind) else "timedelta64"
        return Numbers(np.dtype(f"i{kind.bit_width // 8}"), np.dtype(f"{name}[{kind.unit}]"))
    return None


def is_list(kind: Any) -> bool:
    types = pa_module().types
    return types.is_list(kind) or types.is_large_list(kind)


def is_file(kind: Any) -> bool:
    """Return whether values of a type are files as Hugging Face stores them."""
    types = pa_module().types
    return types.is_struct(kind) and {each.name for each in kind} == _FILE and is_bytes(kind.field("bytes").type)


def is_bytes(kind: Any) -> bool:
    types = pa_module().types
    return any(is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)) or (
        kind == pa_module().binary_view()
    )


def is_text(kind: Any) -> bool:
    types = pa_module().types
    return types.is_string(kind) or types.is_large_string(kind) or kind == pa_module().string_view()


def check_field(field: Any) -> None:
    """Raise a ValueError if a name in the field or its type is not UTF-8, or a type cannot be read."""
    name, kind = field.name, field.type  # pyarrow decodes names lazily
    numbers_of(kind)
    kind = getattr(kind, "storage_type", kind)
    types = pa_module().types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_run_end_encoded(kind):
        message = f"field {name!r} is run-end encoded, which pyarrow cannot take from: decode it by `run_end_decode`"
        raise UnsupportedFormatError(message)
    for number in range(kind.num_fields):
        check_field(kind.field(number))


def spec_of_type(kind: Any, shape: tuple[int, ...] | None = None) -> FieldSpec:
    """Return the specification of a field of an Arrow type; `shape` is the known shape of a list of lists."""
    numbers = numbers_of(kind)
    if numbers is not None:
        order = numbers.permutation or range(len(numbers.shape))
        return FieldSpec(str(numbers.dtype), tuple(numbers.shape[axis] for axis in order))
    kind = getattr(kind, "storage_type", kind)
    if pa_module().types.is_dictionary(kind):
        return spec_of_type(kind.value_type)
    if is_text(kind):
        return FieldSpec("str", ())
    if is_bytes(kind) or is_file(kind):
        return FieldSpec("bytes", ())
    if is_list(kind):
        item = _leaf(kind) if shape is not None else kind.value_type
        if numbers_of(item) is not None:
            inner = spec_of_type(item)
            return FieldSpec(inner.dtype, (None, *(inner.shape or ())) if shape is None else shape)
    return FieldSpec("unknown", None)


def _leaf(kind: Any) -> Any:
    while is_list(kind):
        kind = kind.value_type
    return kind


@lru_cache(maxsize=4096)
def without_views(kind: Any, *, keep: bool = True) -> Any:
    """Return a type without views, which cannot be taken by row, and without dictionaries unless `keep`."""
    pa = pa_module()
    inner = partial(without_views, keep=keep)
    if kind in (pa.string_view(), pa.binary_view()):
        return large(kind)
    if pa.types.is_dictionary(kind) and not keep:
        return inner(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(inner(each.type)) for each in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_type), kind.list_size)
    if is_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(inner(kind.value_type)))
    if pa.types.is_map(kind) and (inner(kind.key_type), inner(kind.item_type)) != (kind.key_type, kind.item_type):
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    return kind


def large(kind: Any) -> Any:
    return pa_module().large_string() if is_text(kind) else pa_module().large_binary()


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of fields whose type is a list of lists, by name."""


class ColumnContext(NamedTuple):
    """The file, record numbers and ends of lists of a column, (rows,) int64 or None, for messages."""

    path: str | None = None
    indices: Int64Array | None = None
    ends: Int64Array | None = None

    def error(self, row: int, message: str) -> CorruptFileError:
        row = row if self.ends is None else int(np.searchsorted(self.ends, row, side="right"))
        return CorruptFileError(message, path=self.path, index=row if self.indices is None else int(self.indices[row]))


def prepare(array: Any) -> Any:
    """Return an Arrow array in the form that is fastest for `pick`: numbers as a numpy array."""
    array = combined(array)
    if pa_module().types.is_dictionary(array.type):  # a long value may be used many times
        return array
    array = plain_array(array)
    numbers = numbers_of(array.type)
    if numbers is None or (_nulls(array) and (numbers.shape or numbers.dtype.kind not in "fmM")):
        return array
    return to_column(array, "")


def pick(prepared: Any, name: str, local: Int64Array, rows: ColumnContext, shape: tuple[int, ...] | None = None) -> Any:
    """Return the values at `local`, (rows,) int64, of a `prepare` result, as a column; see `to_column`."""
    if not isinstance(prepared, np.ndarray):
        return to_column(_taken(prepared, pa_module().array(local)), name, rows, shape)
    out = pooled_empty((len(local), *prepared.shape[1:]), prepared.dtype)
    # With mode="raise", numpy would buffer the output to protect `out`. The indices have been checked.
    return np.take(prepared, local, axis=0, out=out, mode="clip")


_NO_CONTEXT = ColumnContext()


def to_column(array: Any, name: str, rows: ColumnContext = _NO_CONTEXT, shape: tuple[int, ...] | None = None) -> Any:
    """Return an Arrow array as a column; lists of numbers become a list of arrays, of `shape` if nested."""
    array = plain_array(array)
    kind = array.type
    numbers = numbers_of(kind)
    if numbers is not None:
        return _number_column(array, numbers, name, rows)
    _refuse_null(array, name, rows)
    if is_text(kind):
        return as_text(_bytes(array), name, rows)
    if is_bytes(kind):
        return _bytes(array)
    if is_file(kind):
        return to_column(array.field("bytes"), f"{name}.bytes", rows)
    if pa_module().types.is_struct(kind):
        columns = ((each.name, array.field(number)) for number, each in enumerate(kind))  # `flatten` aborts at unions
        return {inner: to_column(column, f"{name}.{inner}", rows) for inner, column in columns}
    if is_list(kind) and shape is not None:
        return _nested(array, name, rows, shape)
    if is_list(kind) and numbers_of(kind.value_type) is not None:
        stops = (array.offsets.to_numpy() - array.offsets[0].as_py())[1:]
        values = to_column(array.flatten(), name, rows._replace(ends=stops))
        return [values[start:stop] for start, stop in zip([0, *stops.tolist()], stops.tolist(), strict=False)]
    return array.to_pylist()


def plain_array(array: Any) -> Any:
    """Return an array in one chunk, without dictionary, views and extension types."""
    array = combined(array)
    kind = array.type
    if pa_module().types.is_dictionary(kind):
        return _taken(plain_array(array.dictionary), array.indices)
    wanted = without_views(kind)
    return array if wanted == kind else array.cast(wanted)


def _taken(values: Any, indices: Any) -> Any:
    try:
        return values.take(indices)
    except pa_module().ArrowInvalid:  # more than 2 GB of text, perhaps
        if not (is_text(values.type) or is_bytes(values.type)):
            raise
        return values.cast(large(values.type)).take(indices)


def combined(array: Any) -> Any:
    """Return an array in one chunk, without extension types other than tensors."""
    pa = pa_module()
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):  # of more than 2 GB of text
            array = pa.concat_arrays([chunk.cast(large(chunk.type)) for chunk in array.chunks])
    is_tensor = isinstance(array.type, pa.FixedShapeTensorType)
    return combined(array.storage) if isinstance(array.type, pa.BaseExtensionType) and not is_tensor else array


def _nulls(array: Any) -> int:
    if not pa_module().types.is_fixed_size_list(getattr(array.type, "storage_type", array.type)):
        return array.null_count
    storage = getattr(array, "storage", array)
    return storage.null_count or _nulls(storage.flatten())


def _refuse_null(array: Any, name: str, rows: ColumnContext, items: int = 1) -> None:
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]) // items
        message = f"field {name!r} is null, and only floats and times have a value for that (NaN, NaT): {REMEDIES}"
        if pa_module().types.is_null(array.type):  # with which no value can stand for nulls
            remedy = f"pass nulls={{{name!r}: value}} to replace them, or fields=[...] without this field"
            message = f"field {name!r} has only nulls and no type: {remedy}"
        raise rows.error(row, message)


def _number_column(array: Any, numbers: Numbers, name: str, rows: ColumnContext) -> Array:
    pa = pa_module()
    count, leaf = len(array), getattr(array, "storage", array)
    while pa.types.is_fixed_size_list(leaf.type):
        _refuse_null(leaf, name, rows, max(1, len(leaf) // max(1, count)))
        leaf = leaf.flatten()
        leaf = getattr(leaf, "storage", leaf)  # of lists of tensors
    if numbers.dtype.kind not in "fmM":
        _refuse_null(leaf, name, rows, max(1, len(leaf) // max(1, count)))
    if pa.types.is_boolean(leaf.type):
        values = leaf.to_numpy(zero_copy_only=False)
    else:
        data = leaf.buffers()[1]
        size = numbers.stored.itemsize
        values = np.frombuffer(b"" if data is None else data, numbers.stored, len(leaf), leaf.offset * size)
    values = _with_missing(values, leaf, numbers)
    values = values.reshape(count, *numbers.shape)
    if numbers.permutation is not None:
        values = values.transpose(0, *(axis + 1 for axis in numbers.permutation))
    # An array that belongs to the caller may be written to.
    return np.ascontiguousarray(values) if values.flags.writeable else values.copy()


def _with_missing(values: Array, leaf: Any, numbers: Numbers) -> Array:
    """Return stored numbers in their dtype, with NaN or NaT for nulls."""
    if numbers.dtype != numbers.stored:
        # numpy's times have 8 bytes, and their unit.
        values = np.asarray(values, np.int64).view(numbers.dtype)
    if leaf.null_count:
        values = values.copy()
        values[leaf.is_null().to_numpy(zero_copy_only=False)] = np.nan if numbers.dtype.kind == "f" else "NaT"
    return values


def as_text(column: BytesColumn, name: str, rows: ColumnContext) -> TextColumn:
    """Return a column of bytes as text; an error names the record of bytes that are not UTF-8."""
    if (checked := TextColumn.checked(column)) is not None:
        return checked
    for row, value in enumerate(column):
        try:
            value.decode()
        except UnicodeDecodeError as found:
            message = f"field {name!r} is not UTF-8: {found.reason} at byte {found.start} of it"
            raise rows.error(row, message) from found
    raise AssertionError("one of them is not UTF-8")


def _bytes(array: Any) -> BytesColumn:
    pa = pa_module()
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        ends = np.arange(array.offset, array.offset + len(array) + 1, dtype=np.int64) * width
        data = array.buffers()[1]
    else:
        size = 8 if array.type in (pa.large_binary(), pa.large_string()) else 4
        offsets, data = array.buffers()[1:]
        ends = np.zeros(1, np.int64)
        if len(array):
            ends = np.frombuffer(offsets, f"i{size}", len(array) + 1, array.offset * size).astype(np.int64)
    return BytesColumn([np.frombuffer(b"" if data is None else data, np.uint8)], None, ends[:-1], ends[1:])


def _nested(array: Any, name: str, rows: ColumnContext, shape: tuple[int, ...]) -> Array:
    count = len(array)
    for extent in shape:
        if not is_list(array.type):
            break
        lengths = np.diff(array.offsets.to_numpy())
        if (lengths != extent).any():
            row = int(np.argmax(lengths != extent)) // max(1, len(lengths) // max(1, count))
            raise rows.error(row, f"field {name!r} has the shape {shape}, but one of its lists has another length")
        array = array.flatten()
    items = max(1, len(array) // max(1, count))
    return to_column(array, name, rows._replace(ends=np.arange(1, count + 1) * items)).reshape(count, *shape)


def stacked(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of a batch, in which lists of arrays are stacked; ConfigError if the shapes of a field differ."""
    batch: dict[str, Any] = {**columns}
    if not {list, dict} & {*map(type, columns.values())}:  # of hundreds of columns, looking at each takes as long
        return batch
    for name, column in columns.items():
        if isinstance(column, list):
            batch[name] = default_collate([{name: value} for value in column])[name]
        else:
            batch[name] = stacked(column) if isinstance(column, dict) else column
    return batch
