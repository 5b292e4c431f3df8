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

from collections.abc import Sequence
from functools import partial

import numpy as np

from dataload._util.arrays import FIELD_BYTES, MAX_RECORD_BYTES, check_size, fits
from dataload.codecs.layout import Layout, Span, columns_by_layout
from dataload.codecs.tensorprotos_encoding import (
    BYTE,
    BYTE_DATA,
    DATA_TYPE,
    DIMS,
    DOUBLE_DATA,
    FLOAT,
    FLOAT_DATA,
    INT32_DATA,
    INT64_DATA,
    NAME,
    STRING,
    STRING_DATA,
    TENSOR,
    TYPES,
    DataType,
    encode,
)
from dataload.codecs.wire import FIXED32, FIXED64, LENGTH, VARINT, parse_packed, parse_varint, parse_varints, walk
from dataload.errors import CorruptFileError
from dataload.types import Array, Batch, BytesArray, Int64Array, Value

__all__ = ["TYPES", "decode", "decode_batch", "encode"]

_Data = bytes | memoryview

MAX_DIMS = 64  # numpy's limit
_NO_BYTES = 0, 0  # a span
_TEXT_BYTES = 192  # overhead of each text: span, bytes object and array item


# Wire types of the repeated numbers, packed and not: a reader accepts both, whatever the schema says.
_WIRES = {
    FLOAT_DATA: (LENGTH, FIXED32),
    INT32_DATA: (LENGTH, VARINT),
    DOUBLE_DATA: (LENGTH, FIXED64),
    INT64_DATA: (LENGTH, VARINT),
}


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

    def data(self, field: int, record: _Data) -> _Data | bytearray:
        span = self.values.get(field, _NO_BYTES)
        return record[span[0] : span[1]] if isinstance(span, tuple) else span


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
    raw = tensor.data(kind.field, data)
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
        elif wire in _WIRES.get(number, ()):
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
            _scan_packed_dims(data, first, last, tensor.dims)
    return tensor


def _scan_packed_dims(data: _Data, start: int, stop: int, dims: list[int]) -> None:
    packed = data[start:stop]
    position = 0
    try:
        while position < len(packed) and len(dims) <= MAX_DIMS:
            dim, position = parse_varint(packed, position)
            dims.append(_signed(dim))
    except IndexError:
        raise CorruptFileError(f"the dims at byte {start} of the record end in the middle of a number") from None


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
