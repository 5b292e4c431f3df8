"""The schema of caffe2's ``TensorProtos``, and a scan for the location of values in a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dataload.codecs.varints import parse_varint
from dataload.codecs.wire import FIXED32, FIXED64, LENGTH, VARINT, walk
from dataload.errors import CorruptFileError

TENSOR = 1  # the only field of TensorProtos; those of TensorProto:
DIMS, DATA_TYPE, _FLOAT_DATA, _INT32_DATA, BYTE_DATA, STRING_DATA, NAME = range(1, 8)
_DOUBLE_DATA, _INT64_DATA = 9, 10

MAX_DIMS = 64  # numpy's limit


class DataType(NamedTuple):
    """A data type of the schema.

    Attributes:
        name: Name in the schema.
        field: Number of the field that holds the values.
        dtype: Dtype of the decoded values. Little-endian if their bytes are stored unchanged.
    """

    name: str
    field: int
    dtype: np.dtype[Any]

    @property
    def is_varint(self) -> bool:
        """Whether values are stored as varints, of 1 to 10 bytes."""
        return self.field in (_INT32_DATA, _INT64_DATA)


TYPES: Mapping[int, DataType] = {
    1: DataType("FLOAT", _FLOAT_DATA, np.dtype("<f4")),
    2: DataType("INT32", _INT32_DATA, np.dtype("int32")),
    3: DataType("BYTE", BYTE_DATA, np.dtype("uint8")),
    4: DataType("STRING", STRING_DATA, np.dtype(object)),
    5: DataType("BOOL", _INT32_DATA, np.dtype(bool)),
    6: DataType("UINT8", _INT32_DATA, np.dtype("uint8")),
    7: DataType("INT8", _INT32_DATA, np.dtype("int8")),
    8: DataType("UINT16", _INT32_DATA, np.dtype("uint16")),
    9: DataType("INT16", _INT32_DATA, np.dtype("int16")),
    10: DataType("INT64", _INT64_DATA, np.dtype("int64")),
    12: DataType("FLOAT16", _INT32_DATA, np.dtype("float16")),
    13: DataType("DOUBLE", _DOUBLE_DATA, np.dtype("<f8")),
}
BYTE, STRING, UINT8 = 3, 4, 6
_DEFAULT_TYPE = 1

# Wire types of the repeated numbers, packed and not: a reader accepts both, whatever the schema says.
_WIRES = {
    _FLOAT_DATA: (LENGTH, FIXED32),
    _INT32_DATA: (LENGTH, VARINT),
    _DOUBLE_DATA: (LENGTH, FIXED64),
    _INT64_DATA: (LENGTH, VARINT),
}


class Tensor:
    """One TensorProto, with its values not decoded yet.

    Attributes:
        name: The name, or "".
        data_type: A key of `TYPES` if the record is valid.
        dims: The first `MAX_DIMS` + 1 dimensions.
        values: Field number -> span of its bytes in the record, or the bytes themselves if they were in pieces.
        texts: Spans of the strings.
    """

    __slots__ = ("data_type", "dims", "name", "texts", "values")

    def __init__(self) -> None:
        self.name = ""
        self.data_type = _DEFAULT_TYPE
        self.dims: list[int] = []
        self.values: dict[int, tuple[int, int] | bytearray] = {}
        self.texts: list[tuple[int, int]] = []

    def data(self, field: int, record: bytes | memoryview) -> bytes | bytearray | memoryview:
        """Return the bytes of a field, empty if it is absent."""
        span = self.values.get(field, (0, 0))
        return record[span[0] : span[1]] if isinstance(span, tuple) else span


def scan_record(data: bytes | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a record by field name, in the order of the bytes.

    Raises:
        CorruptFileError: The bytes are not TensorProtos, or two tensors get the same name.
    """
    tensors: dict[str, Tensor] = {}
    position = 0
    for number, wire, start, stop in walk(data, 0, len(data), "TensorProtos"):
        if number != TENSOR or wire != LENGTH:
            continue
        tensor = _scan_tensor(data, start, stop)
        name = tensor.name if tensor.name and tensor.name not in tensors else str(position)
        if name in tensors:
            raise CorruptFileError(f"two tensors are called {name!r}, one by its name and one by its position")
        tensors[name] = tensor
        position += 1
    return tensors


def _scan_tensor(data: bytes | memoryview, start: int, stop: int) -> Tensor:
    tensor = Tensor()
    for number, wire, first, last in walk(data, start, stop, "TensorProto"):
        if number == DIMS and wire == VARINT:
            tensor.dims.append(_signed(parse_varint(data, first)[0]))
            del tensor.dims[MAX_DIMS + 1 :]
        elif number == DATA_TYPE and wire == VARINT:
            tensor.data_type = parse_varint(data, first)[0]
        elif wire in _WIRES.get(number, ()):
            _append(tensor.values, number, data, first, last)
        elif number == BYTE_DATA and wire == LENGTH:
            tensor.values[number] = (first, last)
        elif number == STRING_DATA and wire == LENGTH:
            tensor.texts.append((first, last))
        elif number == NAME and wire == LENGTH:
            tensor.name = _name(data, first, last)
        elif number == DIMS and wire == LENGTH:
            _scan_packed_dims(data, first, last, tensor.dims)
    return tensor


def _scan_packed_dims(data: bytes | memoryview, start: int, stop: int, dims: list[int]) -> None:
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


def _append(
    values: dict[int, tuple[int, int] | bytearray],
    number: int,
    data: bytes | memoryview,
    start: int,
    stop: int,
) -> None:
    """Append a piece to a repeated field. Pieces are joined at once: as objects they would take 20 times the memory."""
    there = values.get(number)
    if there is None:
        values[number] = (start, stop)
    elif isinstance(there, tuple):
        values[number] = bytearray(data[there[0] : there[1]]) + data[start:stop]
    else:
        there += data[start:stop]


def _name(data: bytes | memoryview, start: int, stop: int) -> str:
    try:
        return str(data[start:stop], "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFileError(
            f"the name of a tensor at byte {start} of the record is not UTF-8: {error.reason}"
        ) from error
