"""caffe2's messages `TensorProto` and `TensorProtos`, built with protobuf on first use."""

import functools
from typing import Any, Final

from dataload._util.lazy import load_optional
from dataload.codecs.tensorprotos import TYPES

BYTE: Final = 3  # TensorProto.BYTE

_PACKAGE: Final = "torchrecord"
_MODULE: Final = "dataload.compat.torchrecord"


@functools.cache
def message_class(name: str) -> Any:
    """Return the class ``"TensorProto"`` or ``"TensorProtos"``."""
    found = _load("message_factory").GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))
    found.__module__ = _MODULE  # where pickle looks for it
    return found


@functools.cache
def _pool() -> Any:
    # A private pool, because another package may have registered caffe2's messages.
    pool = _load("descriptor_pool").DescriptorPool()
    pool.Add(_load("descriptor_pb2").FileDescriptorProto(**_SCHEMA))
    return pool


def _load(module: str) -> Any:
    return load_optional(f"google.protobuf.{module}", needed_by="TensorProtos", extra="lmdb", package="protobuf")


def _field(name: str, number: int, kind: int | str, label: int = 1, **more: Any) -> dict[str, Any]:
    """Return a FieldDescriptorProto; `kind` is the number of a scalar type or the name of a message."""
    typed = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".{_PACKAGE}.{kind}"}
    return {"name": name, "number": number, "label": label, **typed, **more}


_DOUBLE, _FLOAT, _INT64, _INT32, _STRING, _BYTES, _ENUM = 1, 2, 3, 5, 9, 12, 14
_REQUIRED, _REPEATED = 2, 3  # labels
_PACKED: Final = {"packed": True}
_TENSOR_FIELDS: Final = [
    _field("dims", 1, _INT64, _REPEATED),
    _field("data_type", 2, _ENUM, type_name=f".{_PACKAGE}.TensorProto.DataType", default_value="FLOAT"),
    _field("float_data", 3, _FLOAT, _REPEATED, options=_PACKED),
    _field("int32_data", 4, _INT32, _REPEATED, options=_PACKED),
    _field("byte_data", 5, _BYTES),
    _field("string_data", 6, _BYTES, _REPEATED),
    _field("name", 7, _STRING),
    _field("double_data", 9, _DOUBLE, _REPEATED, options=_PACKED),
    _field("int64_data", 10, _INT64, _REPEATED, options=_PACKED),
    _field("segment", 11, "TensorProto.Segment"),
]
_SEGMENT_FIELDS: Final = [_field("begin", 1, _INT64, _REQUIRED), _field("end", 2, _INT64, _REQUIRED)]
_DATA_TYPES: Final = {0: "UNDEFINED", **{number: kind.name for number, kind in TYPES.items()}}
_TENSOR: Final = {
    "name": "TensorProto",
    "field": _TENSOR_FIELDS,
    "nested_type": [{"name": "Segment", "field": _SEGMENT_FIELDS}],
    "enum_type": [
        {"name": "DataType", "value": [{"name": name, "number": number} for number, name in _DATA_TYPES.items()]}
    ],
}
_SCHEMA: Final = {
    "name": "dataload_tensor_protos.proto",
    "package": _PACKAGE,
    "syntax": "proto2",
    "message_type": [_TENSOR, {"name": "TensorProtos", "field": [_field("protos", 1, "TensorProto", _REPEATED)]}],
}
