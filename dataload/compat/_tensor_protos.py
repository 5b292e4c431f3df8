"""caffe2's messages `TensorProto` and `TensorProtos`, built by protobuf when they are first asked for."""

from __future__ import annotations

import functools
from typing import Any, Final

from dataload._util.optional import load_optional
from dataload.codecs.caffe2 import TYPES

__all__ = ["BYTE", "message_class"]

BYTE: Final = 3  # TensorProto.BYTE

_PACKAGE: Final = "torchrecord"
_MODULE: Final = "dataload.compat.torchrecord"


@functools.cache
def message_class(name: str) -> Any:
    """The class of a message; all of them come from one pool, so that they fit each other.

    Args:
        name: ``"TensorProto"`` or ``"TensorProtos"``.

    Raises:
        MissingDependencyError: protobuf is not installed.
    """
    made = _load("message_factory").GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))
    made.__module__ = _MODULE  # where pickle finds it
    return made


@functools.cache
def _pool() -> Any:
    # One of its own: another package may have registered caffe2's messages.
    pool = _load("descriptor_pool").DescriptorPool()
    pool.Add(_load("descriptor_pb2").FileDescriptorProto(**_SCHEMA))
    return pool


def _load(module: str) -> Any:
    return load_optional(f"google.protobuf.{module}", needed_by="TensorProtos", extra="lmdb", package="protobuf")


def _field(name: str, number: int, kind: int | str, *, many: bool = False, **more: Any) -> dict[str, Any]:
    """A FieldDescriptorProto; `kind` is a scalar's number or a message's name."""
    typed = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".{_PACKAGE}.{kind}"}
    return {"name": name, "number": number, "label": 3 if many else 1, **typed, **more}


_DOUBLE, _FLOAT, _INT64, _INT32, _STRING, _BYTES, _ENUM = 1, 2, 3, 5, 9, 12, 14
_PACKED: Final = {"packed": True}
_SCHEMA: Final = {
    "name": "dataload_tensor_protos.proto",
    "package": _PACKAGE,
    "syntax": "proto2",
    "message_type": [
        {
            "name": "TensorProto",
            "field": [
                _field("dims", 1, _INT64, many=True),
                _field("data_type", 2, _ENUM, type_name=f".{_PACKAGE}.TensorProto.DataType", default_value="FLOAT"),
                _field("float_data", 3, _FLOAT, many=True, options=_PACKED),
                _field("int32_data", 4, _INT32, many=True, options=_PACKED),
                _field("byte_data", 5, _BYTES),
                _field("string_data", 6, _BYTES, many=True),
                _field("name", 7, _STRING),
                _field("double_data", 9, _DOUBLE, many=True, options=_PACKED),
                _field("int64_data", 10, _INT64, many=True, options=_PACKED),
                _field("segment", 11, "TensorProto.Segment"),
            ],
            "nested_type": [
                # Both are required, which is label 2.
                {"name": "Segment", "field": [_field(n, i, _INT64, label=2) for i, n in enumerate(("begin", "end"), 1)]}
            ],
            "enum_type": [
                {
                    "name": "DataType",
                    "value": [
                        {"name": "UNDEFINED", "number": 0},
                        *({"name": kind.name, "number": number} for number, kind in TYPES.items()),
                    ],
                }
            ],
        },
        {"name": "TensorProtos", "field": [_field("protos", 1, "TensorProto", many=True)]},
    ],
}
