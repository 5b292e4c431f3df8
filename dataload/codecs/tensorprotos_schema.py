"""The schema of caffe2's ``TensorProtos``: the numbers of its fields and its data types."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

TENSOR = 1  # the only field of TensorProtos; those of TensorProto:
DIMS, DATA_TYPE, FLOAT_DATA, INT32_DATA, BYTE_DATA, STRING_DATA, NAME = range(1, 8)
DOUBLE_DATA, INT64_DATA = 9, 10


class DataType(NamedTuple):
    """A data type of the schema."""

    name: str
    field: int  # number of the field that holds the values
    dtype: np.dtype[Any]  # of the decoded values; little-endian if their bytes are stored unchanged

    @property
    def is_varint(self) -> bool:
        """True for types whose values are varints, of 1 to 10 bytes each."""
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
