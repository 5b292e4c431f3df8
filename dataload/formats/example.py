"""``tf.train.Example`` without TensorFlow: the wire format, read and written by hand.

``Example{features{feature: map<string, Feature>}}``, a Feature being one of three lists. What they become:

| list | decoded | encoded from |
|---|---|---|
| float_list | (n,) float32 | float arrays (rounded to float32), floats |
| int64_list | (n,) int64 | integer and bool arrays, ints, bools |
| bytes_list of one | bytes | bytes, text (as UTF-8) |
| bytes_list of several, or none | list of bytes | lists of bytes or text |

The format has neither shapes nor scalars: a number comes back as an array of one, text as bytes, a list of
one bytes as that bytes. Arrays of more dimensions are refused, for their shape would be lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dataload._optional import load_optional
from dataload.errors import ConfigError, CorruptFileError
from dataload.formats.alike import Span, columns_of_alike
from dataload.formats.dtypes import plain_array
from dataload.formats.varints import encode_varint, encode_varints, parse_varint, parse_varints
from dataload.types import Array, Batch, BytesArray

__all__ = ["decode", "decode_batch", "encode"]

_BYTES: Final = 1  # field numbers in Feature
_FLOAT: Final = 2
_INT64: Final = 3

_LENGTH: Final = 2  # wire type of messages, bytes and packed lists
_FIRST: Final = 1 << 3 | _LENGTH  # tag of field 1: in Example, in Features, the name of an entry, in a list
_SECOND: Final = 2 << 3 | _LENGTH  # tag of field 2: the value of an entry
_KINDS: Final = {kind << 3 | _LENGTH: kind for kind in (_BYTES, _FLOAT, _INT64)}

_MAX_BYTES = 2**31 - 1  # what protobuf reads
_MAX_UINT64 = 2**64 - 1
_SHORT_BYTES = 24  # up to here a Python loop over varints beats everything with fixed costs


def decode(data: bytes | memoryview) -> dict[str, Any]:
    """The fields of a serialized Example.

    Raises:
        CorruptFileError: These bytes are no Example.
        MissingDependencyError: They are not in the layout that all usual writers produce, and protobuf, which
            reads the others, is not installed.
    """
    spans = _plain(data)
    if spans is not None:
        record = {name: _value(data, *span) for name, span in spans.items()}
        if not any(value is None for value in record.values()):
            return record
    return _decode_any(data)


def decode_batch(buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None) -> Batch | None:
    """Columns of Examples that differ only in their values; None if they differ otherwise.

    Args:
        buffers: Serialized Examples, at least one.
        fields: Names of the fields to read; None means all.
    """
    return columns_of_alike(buffers, fields, _spans)


def _spans(data: bytes | memoryview) -> dict[str, Span] | None:
    plain = _plain(data)
    if plain is None:
        return None
    out: dict[str, Span] = {}
    for name, (kind, start, stop) in plain.items():
        if kind == _BYTES:
            out[name] = Span(start, stop)
        elif kind == _FLOAT and (stop - start) % 4 == 0:
            out[name] = Span(start, stop, _floats)
        elif kind == _INT64 and start < stop and data[stop - 1] < 0x80:
            out[name] = Span(start, stop, parse_varints, mask=0x80)
        else:
            return None
    return out


def _floats(rows: BytesArray) -> Array:
    return np.array(rows, order="C").view("<f4").astype(np.float32, copy=False)


class _NotPlainError(Exception):
    pass


def _plain(data: bytes | memoryview) -> dict[str, tuple[int, int, int]] | None:
    """Where the values lie in an Example as all usual writers serialize it: name -> kind, start, stop.

    That is: each message has its fields once and in order, and each list is packed, or one bytes. Anything
    else, valid or not, gives None. Each part has to end where the part that holds it does, so no length is
    believed unchecked.
    """
    spans: dict[str, tuple[int, int, int]] = {}
    end = len(data)
    try:
        place, stop = _part(data, 0, _FIRST)
        while place < stop == end:
            entry, entry_end = _part(data, place, _FIRST)
            name, name_end = _part(data, entry, _FIRST)
            feature, feature_end = _part(data, name_end, _SECOND)
            kind = data[feature] >> 3
            values, values_end = _part(data, feature, kind << 3 | _LENGTH)
            values, last = _part(data, values, _FIRST)
            if not last == values_end == feature_end == entry_end <= end or not _BYTES <= kind <= _INT64:
                return None
            spans[str(data[name:name_end], "utf-8")] = kind, values, last
            place = entry_end
    except (_NotPlainError, IndexError, UnicodeDecodeError):
        return None
    return spans if place == stop == end else None


def _part(data: bytes | memoryview, place: int, tag: int) -> tuple[int, int]:
    """Start and stop of the payload at `place`, if it has that tag; the stop may lie behind the end."""
    length = data[place + 1]
    start = place + 2
    if length >= 0x80:
        try:
            length, start = parse_varint(data, place + 1)
        except CorruptFileError:
            raise _NotPlainError from None
    if data[place] != tag:
        raise _NotPlainError
    return start, start + length


def _value(data: bytes | memoryview, kind: int, start: int, stop: int) -> Any:
    """The value of a plain feature; None where protobuf is to decide."""
    if kind == _BYTES:
        return bytes(data[start:stop])
    if kind == _FLOAT:
        return None if (stop - start) % 4 else np.frombuffer(data[start:stop], "<f4").astype(np.float32)
    packed = bytes(data[start:stop])
    if packed.isascii():  # numbers of one byte
        return np.frombuffer(packed, np.uint8).astype(np.int64)
    if len(packed) > _SHORT_BYTES or packed[-1] >= 0x80:
        return None
    numbers: list[int] = []
    place = 0
    while place < len(packed):
        number, place = parse_varint(packed, place)
        numbers.append(number & _MAX_UINT64)
    return np.array(numbers, np.uint64).view(np.int64)


def _decode_any(data: bytes | memoryview) -> dict[str, Any]:
    """Any valid Example: parts in any order or several times, lists not packed, unknown fields."""
    parse, invalid = _parser()
    try:
        features = parse(bytes(data)).features.feature
    except invalid as error:
        raise CorruptFileError(f"no tf.train.Example ({len(data)} bytes): {error}") from error
    record: dict[str, Any] = {}
    for name in sorted(features):
        feature = features[name]
        kind = feature.WhichOneof("kind")
        if kind == "float_list":
            record[name] = np.array(feature.float_list.value, np.float32)
        elif kind == "int64_list":
            record[name] = np.array(feature.int64_list.value, np.int64)
        else:
            values = list(feature.bytes_list.value)
            record[name] = values[0] if len(values) == 1 else values
    return record


@functools.cache
def _parser() -> tuple[Callable[[bytes], Any], type[Exception]]:
    """Protobuf's parser of Example, and what it raises; the schema is built here, in a pool of its own."""

    def load(module: str) -> Any:
        name = f"google.protobuf.{module}"
        return load_optional(name, needed_by="codec 'example'", extra="codecs", package="protobuf")

    file = load("descriptor_pb2").FileDescriptorProto(**_SCHEMA)
    pool = load("descriptor_pool").DescriptorPool()
    pool.Add(file)
    example = load("message_factory").GetMessageClass(pool.FindMessageTypeByName("dataload.Example"))
    return example.FromString, load("message").DecodeError


def _field(name: str, number: int, kind: int | str, *, many: bool = False, **more: Any) -> dict[str, Any]:
    """A FieldDescriptorProto; `kind` is a scalar's number or a message's name."""
    typed = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".dataload.{kind}"}
    return {"name": name, "number": number, "label": 3 if many else 1, **typed, **more}


_FLOAT_TYPE, _INT64_TYPE, _STRING_TYPE, _BYTES_TYPE = 2, 3, 9, 12
_SCHEMA: Final = {
    "name": "dataload_example.proto",
    "package": "dataload",
    "syntax": "proto3",
    "message_type": [
        {"name": "BytesList", "field": [_field("value", 1, _BYTES_TYPE, many=True)]},
        {"name": "FloatList", "field": [_field("value", 1, _FLOAT_TYPE, many=True)]},
        {"name": "Int64List", "field": [_field("value", 1, _INT64_TYPE, many=True)]},
        {
            "name": "Feature",
            "oneof_decl": [{"name": "kind"}],
            "field": [
                _field("bytes_list", _BYTES, "BytesList", oneof_index=0),
                _field("float_list", _FLOAT, "FloatList", oneof_index=0),
                _field("int64_list", _INT64, "Int64List", oneof_index=0),
            ],
        },
        {
            "name": "Features",
            "field": [_field("feature", 1, "Features.FeatureEntry", many=True)],
            "nested_type": [
                {
                    "name": "FeatureEntry",
                    "options": {"map_entry": True},
                    "field": [_field("key", 1, _STRING_TYPE), _field("value", 2, "Feature")],
                }
            ],
        },
        {"name": "Example", "field": [_field("features", 1, "Features")]},
    ],
}


def encode(record: Mapping[str, Any]) -> bytes:
    """A serialized Example with the fields of `record`.

    Raises:
        ConfigError: A value fits none of the three lists.
    """
    entries: list[bytes] = []
    for name, value in record.items():
        try:
            entries.append(_message(1, _message(1, name.encode()) + _message(2, _feature(value))))
        except (ConfigError, UnicodeEncodeError) as error:
            raise ConfigError(f"field {name!r}: {error}", key=name) from error
    data = _message(1, b"".join(entries))
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"an Example of {len(data)} bytes: protobuf reads {_MAX_BYTES} at most")
    return data


def _message(number: int, payload: bytes) -> bytes:
    return bytes((number << 3 | _LENGTH,)) + encode_varint(len(payload)) + payload


def _feature(value: Any) -> bytes:
    texts = _texts(value)
    if texts is not None:
        return _message(_BYTES, b"".join(_message(1, text) for text in texts))
    array = plain_array(value)
    if array.ndim > 1:
        raise ConfigError(
            f"an array of shape {array.shape}; an Example holds flat lists, which would lose it: flatten it, or "
            "choose codec tensorprotos, msgpack or npz"
        )
    array = array.reshape(-1)
    if array.dtype.kind == "f":
        return _message(_FLOAT, _message(1, _as_float32(array).tobytes()))
    if array.dtype.kind not in "biu":
        raise ConfigError(f"an array of {array.dtype}; an Example holds float32, int64 and bytes")
    if array.dtype == np.uint64 and (array >> np.uint64(63)).any():
        raise ConfigError("values beyond int64, the only integer of an Example")
    return _message(_INT64, _message(1, encode_varints(array.astype(np.int64))))


def _as_float32(array: Array) -> Array:
    if array.dtype.itemsize <= 4:
        return array.astype("<f4", copy=False)
    try:
        with np.errstate(over="raise"):
            return array.astype("<f4")
    except FloatingPointError:
        raise ConfigError("values beyond float32, the only float of an Example") from None


def _texts(value: Any) -> list[bytes] | None:
    """The elements of a bytes_list; None for what is none."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return [bytes(value)]
    if isinstance(value, str):
        return [value.encode()]
    if isinstance(value, np.ndarray) and value.dtype.kind in "SU" and value.ndim <= 1:
        return _texts(value.reshape(-1).tolist())
    if isinstance(value, (list, tuple)):
        texts = [item.encode() if isinstance(item, str) else item for item in value]
        return [bytes(text) for text in texts] if all(isinstance(t, (bytes, bytearray)) for t in texts) else None
    return None
