"""Encodes records as ``TensorProtos``; for the layout, see `dataload.codecs.tensorprotos`."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dataload._util.arrays import to_array
from dataload.codecs.wire import VARINT, build_field, build_head, encode_varint, encode_varints
from dataload.errors import ConfigError
from dataload.types import Array

TENSOR = 1  # the only field of TensorProtos; fields of TensorProto:
DIMS, DATA_TYPE, FLOAT_DATA, INT32_DATA, BYTE_DATA, STRING_DATA, NAME = range(1, 8)
DOUBLE_DATA, INT64_DATA = 9, 10


class DataType(NamedTuple):
    """A data type of the schema."""

    name: str
    field: int  # number of the field that holds the values
    dtype: np.dtype[Any]  # of the decoded values; little-endian if their bytes are stored unchanged

    @property
    def is_varint(self) -> bool:
        return self.field in (INT32_DATA, INT64_DATA)


TYPES: Mapping[int, DataType] = {
    1: DataType("FLOAT", FLOAT_DATA, np.dtype("<f4")),
    2: DataType("INT32", INT32_DATA, np.dtype("int32")),
    3: DataType("BYTE", BYTE_DATA, np.dtype("uint8")),
    4: DataType("STRING", STRING_DATA, np.dtype(object)),
    5: DataType("BOOL", INT32_DATA, np.dtype(bool)),
    6: DataType("UINT8", INT32_DATA, np.dtype("uint8")),
    7: DataType("INT8", INT32_DATA, np.dtype("int8")),
    8: DataType("UINT16", INT32_DATA, np.dtype("uint16")),
    9: DataType("INT16", INT32_DATA, np.dtype("int16")),
    10: DataType("INT64", INT64_DATA, np.dtype("int64")),
    12: DataType("FLOAT16", INT32_DATA, np.dtype("float16")),
    13: DataType("DOUBLE", DOUBLE_DATA, np.dtype("<f8")),
}
FLOAT, BYTE, STRING, UINT8, INT64 = 1, 3, 4, 6, 10


# by kind and size, as in dtype.str, because dtype.name is slow
_BY_DTYPE = {kind.dtype.str[1:]: number for number, kind in TYPES.items() if number != UINT8}
_MAX_BYTES = 2**31 - 1  # protobuf's limit
_MOST_FRAMES = 1 << 10  # cached, about 200 bytes each


def encode(record: Mapping[str, Any]) -> bytes:
    """Serialize the fields of `record` as TensorProtos, each with its name."""
    if not isinstance(record, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass bytes
        raise ConfigError(f"TensorProtos hold fields, got a record of type {type(record).__name__}")
    parts: list[Any] = []
    for name, value in record.items():
        frame = None
        if type(value) is np.ndarray:
            frame = _frame(name, value.dtype, value.shape)
            value = value if frame is None or value.flags.c_contiguous else np.ascontiguousarray(value)
        elif type(value) is bytes:
            frame = _frame(name, None, (len(value),))
        if frame is None:
            parts.append(build_field(TENSOR, _tensor(name, value)))
        else:  # the values are copied once
            parts += frame[0], value, frame[1]
    data = b"".join(parts)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"a record of {len(data)} bytes; the limit of protobuf is {_MAX_BYTES}")
    return data


@lru_cache(_MOST_FRAMES)
def _frame(name: Any, dtype: np.dtype[Any] | None, shape: tuple[int, ...]) -> tuple[bytes, bytes] | None:
    """Return the bytes before and after an array, or bytes if `dtype` is None; None if they depend on the values."""
    data_type = BYTE if dtype is None else _data_type(dtype)
    kind = TYPES.get(data_type)
    if kind is None or kind.is_varint or data_type == STRING or (dtype is not None and kind.dtype != dtype):
        return None
    if data_type == BYTE and not shape:  # BYTE without dims is bytes
        return None
    try:
        called = _name_field(name)
    except (ConfigError, UnicodeEncodeError):
        return None
    size = math.prod(shape) * kind.dtype.itemsize
    head = _head(() if dtype is None else shape, data_type)
    opening = build_head(kind.field, size) if size or dtype is None else b""
    # in order of field numbers, as protobuf writes them: the name comes between the fields of the data
    before, after = (head + called + opening, b"") if kind.field > NAME else (head + opening, called)
    return build_head(TENSOR, len(before) + size + len(after)) + before, after


@lru_cache(_MOST_FRAMES)
def _data_type(dtype: np.dtype[Any]) -> int:
    return _BY_DTYPE.get(dtype.str[1:], 0)


@lru_cache(_MOST_FRAMES)
def _name_field(name: Any) -> bytes:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"names of fields must be non-empty strings; got {name!r}")
    return build_field(NAME, name.encode())


def _tensor(name: Any, value: Any) -> bytes:
    try:
        called = _name_field(name)
        if isinstance(value, str):
            return _head((), STRING) + build_field(STRING_DATA, value.encode()) + called
    except UnicodeEncodeError as error:
        raise ConfigError(f"field {name!r} holds text that UTF-8 cannot encode: {error.reason}", key=name) from None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _head((), BYTE) + build_field(BYTE_DATA, bytes(value)) + called
    if type(value) is int:  # for example a label
        if not -(2**63) <= value < 2**63:
            raise ConfigError(f"field {name!r} is {value}; the format's integers have 64 bits", key=name)
        return _head((), INT64) + called + build_field(INT64_DATA, encode_varint(value % 2**64))
    array = _array(name, value)
    if array.dtype.kind == "O":
        texts = b"".join(build_field(STRING_DATA, item) for item in array.ravel().tolist())
        return _head(array.shape, STRING) + texts + called
    data_type = _data_type(array.dtype)
    if data_type == BYTE and array.ndim == 0:
        data_type = UINT8  # BYTE without dims is bytes
    kind = TYPES[data_type]
    head, values = _head(array.shape, data_type), _values(array, kind)
    return head + (called + values if kind.field > NAME else values + called)


def _head(shape: tuple[int, ...], data_type: int) -> bytes:
    dims = b"".join(bytes((DIMS << 3 | VARINT,)) + encode_varint(dim) for dim in shape)
    return dims + bytes((DATA_TYPE << 3 | VARINT, data_type))


def _array(name: str, value: Any) -> Array:
    array = to_array(name, value)
    if array.dtype.kind == "O":
        # without dimensions it would be read as text
        if array.ndim and isinstance(value, np.ndarray) and all(isinstance(item, bytes) for item in array.flat):
            return array
    elif _data_type(array.dtype):
        return np.asarray(array, array.dtype.newbyteorder("="), order="C")
    found = f"has dtype {array.dtype}" if isinstance(value, np.ndarray) else f"is {type(value).__name__} {value!r:.80}"
    known = ", ".join(kind.dtype.name for number, kind in TYPES.items() if number not in (BYTE, STRING))
    raise ConfigError(
        f"field {name!r} {found}; TensorProtos hold {known}, text, bytes, and arrays of bytes objects", key=name
    )


def _values(array: Array, kind: DataType) -> bytes:
    if not array.size:
        return b""
    flat = array.ravel()
    if kind.is_varint:
        bits = flat.view(np.uint16) if kind.name == "FLOAT16" else flat
        return build_field(kind.field, encode_varints(bits.astype(np.int64)))
    return build_field(kind.field, np.asarray(flat, kind.dtype).tobytes())
