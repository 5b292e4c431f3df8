"""Arrow types: their composition, and the types that their values become."""

from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from dataload._util.lazy import load_optional
from dataload._util.limits import fits
from dataload.types import FieldSpec

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
    """Raise a ValueError if a name in the field or its type is not UTF-8, or a tensor's shape is impossible."""
    _, kind = field.name, field.type  # pyarrow decodes names lazily
    numbers_of(kind)
    kind = getattr(kind, "storage_type", kind)
    kind = kind.value_type if pa_module().types.is_dictionary(kind) else kind
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
        inner = spec_of_type(_leaf(kind)) if shape is not None else spec_of_type(kind.value_type)
        if inner.dtype not in ("str", "bytes", "unknown") and inner.shape is not None and None not in inner.shape:
            return FieldSpec(inner.dtype, (None, *inner.shape) if shape is None else shape)
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
