"""caffe2's ``TensorProtos``, the records of TorchRecord: the wire format, read and written directly.

| value | data_type | field of the values | dims |
|---|---|---|---|
| bytes | BYTE | byte_data | none |
| str | STRING | string_data, UTF-8 | none |
| uint8 array | BYTE, or UINT8 if 0-d | byte_data, or int32_data | its shape |
| float32, float64 | FLOAT, DOUBLE | float_data, double_data | its shape |
| int64, int32 | INT64, INT32 | int64_data, int32_data | its shape |
| bool, int8, uint16, int16, float16 | the type's own | int32_data | its shape |
| object array of bytes | STRING | string_data | its shape |

A Python int is written as a 0-d int64 array, a float as a 0-d float64 array. Decoding gives back exactly what was
written. In records of other writers:

- A tensor without a name, or with a name that is taken, is named by its position: ``"0"``, ``"1"``, ...
- BYTE data that do not fit their dims become a flat array: the original's pictures have dims [width, height] and
  height * width * 3 bytes. For other types, dims that do not fit are an error.
- Without dims, one value becomes a 0-d array, several become a 1-d array.
- STRING without dims becomes text if it is UTF-8, otherwise bytes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from dataload._util.arrays import FIELD_BYTES, MAX_RECORD_BYTES, check_size, fits, to_array
from dataload.codecs.layout import Layout, Span, columns_by_layout
from dataload.codecs.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    build_field,
    build_head,
    encode_varint,
    encode_varints,
    parse_packed,
    parse_varint,
    parse_varints,
    walk,
)
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array, Batch, BytesArray, Int64Array, Value

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

_Data = bytes | memoryview

MAX_DIMS = 64  # numpy's limit
_NO_BYTES = 0, 0  # a span
_TEXT_BYTES = 192  # overhead of each text: span, bytes object and array item


# Wire types of repeated numbers that are not packed. A reader accepts packed ones, too, whatever the schema says.
_WIRES = {FLOAT_DATA: FIXED32, INT32_DATA: VARINT, DOUBLE_DATA: FIXED64, INT64_DATA: VARINT}


class Tensor:
    """One undecoded TensorProto."""

    __slots__ = ("data_type", "dims", "name", "texts", "values")

    def __init__(self) -> None:
        self.name: str = ""
        self.data_type: int = FLOAT  # the default; a key of `TYPES` if the record is valid
        self.dims: list[int] = []  # the first `MAX_DIMS` + 1 dimensions
        # Field number -> span of its bytes in the record, or the bytes themselves if they were in chunks.
        self.values: dict[int, tuple[int, int] | bytearray] = {}
        self.texts: list[tuple[int, int]] = []  # spans of the strings


def decode(data: _Data, limit: int = MAX_RECORD_BYTES) -> dict[str, Value]:
    """Decode serialized TensorProtos to fields, in the order of the bytes. The values belong to the caller."""
    return {name: _value(data, name, tensor, limit) for name, tensor in scan_record(data, limit).items()}


def decode_batch(buffers: Sequence[_Data], fields: Sequence[str] | None, limit: int = MAX_RECORD_BYTES) -> Batch | None:
    """Decode serialized TensorProtos, at least one record, to columns; see `columns_by_layout`."""
    return columns_by_layout(buffers, fields, partial(_layout, limit))


def _layout(limit: int, data: _Data) -> Layout | None:
    """Return the span of each tensor's values, if each is contiguous."""
    layout: dict[str, Span] = {}
    for name, tensor in scan_record(data, limit).items():
        value = _value(data, name, tensor, limit)
        kind = TYPES[tensor.data_type]
        is_text = tensor.data_type == STRING
        span = tensor.values.get(kind.field, _NO_BYTES)
        if isinstance(span, bytearray) or (is_text and isinstance(value, np.ndarray)):
            return None
        if is_text:
            (span,) = tensor.texts
            layout[name] = Span(*span, item=_text)
        elif not isinstance(value, np.ndarray):
            layout[name] = Span(*span)
        elif kind.is_varint:
            convert = partial(_narrow_varints, name, kind)
            layout[name] = Span(*span, kind.dtype, value.shape, convert, mask=0x80)
        else:
            layout[name] = Span(*span, kind.dtype, value.shape)
    return layout


def _narrow_varints(name: str, kind: DataType, rows: BytesArray) -> Array:
    return _narrow(parse_varints(rows), name, kind)


def _value(data: _Data, name: str, tensor: Tensor, limit: int) -> Value:
    kind = TYPES.get(tensor.data_type)
    if kind is None:
        raise CorruptFileError(
            f"tensor {name!r} has data type {tensor.data_type}; the format knows "
            f"{', '.join(f'{known.name} {number}' for number, known in TYPES.items())}"
        )
    if tensor.data_type == STRING:
        return _strings(data, name, tensor)
    span = tensor.values.get(kind.field, _NO_BYTES)
    raw = data[span[0] : span[1]] if isinstance(span, tuple) else span
    if tensor.data_type == BYTE and not tensor.dims:
        return bytes(raw)
    if kind.is_varint:
        array = _narrow(_varints(raw, name, limit), name, kind)
    elif len(raw) % kind.dtype.itemsize:
        raise CorruptFileError(
            f"tensor {name!r} has {len(raw)} bytes of {kind.name} data, not a multiple of {kind.dtype.itemsize}"
        )
    else:
        array = np.frombuffer(raw, kind.dtype).astype(kind.dtype.newbyteorder("="))
    return _shaped(array, name, tensor, kind)


def _strings(data: _Data, name: str, tensor: Tensor) -> Value:
    if not tensor.dims and len(tensor.texts) == 1:
        [(start, stop)] = tensor.texts
        return _text(data[start:stop])
    items = np.empty(len(tensor.texts), object)
    items[:] = [bytes(data[start:stop]) for start, stop in tensor.texts]
    return _shaped(items, name, tensor, TYPES[STRING])


def _text(data: _Data) -> str | bytes:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:  # caffe2 itself kept encoded pictures as STRING
        return bytes(data)


def _shaped(array: Array, name: str, tensor: Tensor, kind: DataType) -> Array:
    dims = tensor.dims
    if not dims:
        return array.reshape(()) if len(array) == 1 else array
    if fits(dims, len(array)):
        return array.reshape(dims)
    if tensor.data_type == BYTE and len(array):
        return array
    more = ", ..." if len(dims) > 8 else ""
    raise CorruptFileError(
        f"tensor {name!r} has dims [{', '.join(map(str, dims[:8]))}{more}] and {len(array)} {kind.name} values"
    )


def _varints(raw: _Data | bytearray, name: str, limit: int) -> Int64Array:
    try:
        return parse_packed(raw, limit)
    except CorruptFileError as error:
        raise CorruptFileError(f"tensor {name!r}: {error}") from None


def _narrow(numbers: Int64Array, name: str, kind: DataType) -> Array:
    if kind.name == "INT64":
        return numbers
    low = numbers.astype(np.int32)  # protobuf takes the low 32 bits of longer numbers
    if kind.name == "INT32":
        return low
    if kind.name == "BOOL":
        return low != 0
    bits = np.dtype("uint16") if kind.name == "FLOAT16" else kind.dtype
    limits = np.iinfo(bits)
    # some writers store the 16 bits of a float16 as a signed number
    lowest = -0x8000 if kind.name == "FLOAT16" else limits.min
    if low.size and (low.min() < lowest or low.max() > limits.max):
        raise CorruptFileError(f"tensor {name!r} of type {kind.name} has values from {low.min()} to {low.max()}")
    narrow = low.astype(bits)
    return narrow.view(np.float16) if kind.name == "FLOAT16" else narrow


def scan_record(data: _Data, limit: int = MAX_RECORD_BYTES) -> dict[str, Tensor]:
    """Return the tensors of a record by field name, in the order of the bytes, if they take at most `limit` bytes."""
    tensors: dict[str, Tensor] = {}
    position = 0
    for number, wire, start, stop in walk(data, 0, len(data), "TensorProtos"):
        if number != TENSOR or wire != LENGTH:
            continue
        tensor = _scan_tensor(data, start, stop, limit)
        name = tensor.name if tensor.name and tensor.name not in tensors else str(position)
        if name in tensors:
            raise CorruptFileError(f"two tensors are called {name!r}, one by its name and one by its position")
        tensors[name] = tensor
        position += 1
        if position * FIELD_BYTES > limit:
            check_size(position * FIELD_BYTES, limit, f"a record of {position:,} tensors and more")
    return tensors


def _scan_tensor(data: _Data, start: int, stop: int, limit: int) -> Tensor:
    tensor = Tensor()
    for number, wire, first, last in walk(data, start, stop, "TensorProto"):
        if number == DIMS and wire == VARINT:
            tensor.dims.append(_signed(parse_varint(data, first)[0]))
            del tensor.dims[MAX_DIMS + 1 :]
        elif number == DATA_TYPE and wire == VARINT:
            tensor.data_type = parse_varint(data, first)[0]
        elif number in _WIRES and wire in (LENGTH, _WIRES[number]):
            _append(tensor, number, data, first, last)
        elif number == BYTE_DATA and wire == LENGTH:
            tensor.values[number] = (first, last)
        elif number == STRING_DATA and wire == LENGTH:
            tensor.texts.append((first, last))
            if len(tensor.texts) * _TEXT_BYTES > limit:
                check_size(len(tensor.texts) * _TEXT_BYTES, limit, f"a tensor of {len(tensor.texts):,} texts and more")
        elif number == NAME and wire == LENGTH:
            tensor.name = _name(data, first, last)
        elif number == DIMS and wire == LENGTH:
            tensor.dims += parse_packed(data[first:last], limit)[: MAX_DIMS + 1].tolist()
    return tensor


def _signed(number: int) -> int:
    """Return the int64 that protobuf reads from a varint; bits beyond the 64th are dropped."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _append(tensor: Tensor, number: int, data: _Data, start: int, stop: int) -> None:
    """Append a chunk to a repeated field. Chunks are joined at once, as objects take 20 times the memory."""
    there = tensor.values.get(number)
    if there is None:
        tensor.values[number] = (start, stop)
    elif isinstance(there, tuple):
        tensor.values[number] = bytearray(data[there[0] : there[1]]) + data[start:stop]
    else:
        there += data[start:stop]


def _name(data: _Data, start: int, stop: int) -> str:
    try:
        return str(data[start:stop], "utf-8")
    except UnicodeDecodeError as error:
        where = f"the name of a tensor at byte {start} of the record"
        raise CorruptFileError(f"{where} is not UTF-8: {error.reason}") from error


# by kind and size, as in dtype.str, because dtype.name is slow
_BY_DTYPE = {kind.dtype.str[1:]: number for number, kind in TYPES.items() if number != UINT8}
_MAX_BYTES = 2**31 - 1  # protobuf's limit
_MOST_FRAMES = 1 << 10  # cached, about 200 bytes each


def encode(record: Mapping[str, Any]) -> bytes:
    """Serialize the fields of `record` as TensorProtos, each with its name."""
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
