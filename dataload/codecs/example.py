"""``tf.train.Example`` without TensorFlow: the wire format, read and written directly.

An Example is ``Example{features{feature: map<string, Feature>}}``, and a Feature is one of three lists:

| list | decoded | encoded from |
|---|---|---|
| float_list | (n,) float32 | float arrays (rounded to float32), floats |
| int64_list | (n,) int64 | integer and bool arrays, ints, bools |
| bytes_list of one | bytes | bytes, text (as UTF-8) |
| bytes_list of several or none | list of bytes | lists of bytes or text |

The format has neither shapes nor scalars: a number is decoded as an array of length 1, text as bytes, and a list of
one bytes object as that object. Arrays of more dimensions are refused, because their shape would be lost.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from dataload._util.arrays import FIELD_BYTES, MAX_RECORD_BYTES, check_size
from dataload._util.lazy import load_optional
from dataload.codecs.layout import Layout, Span, columns_by_layout
from dataload.codecs.npz import plain_array
from dataload.codecs.wire import (
    LENGTH,
    build_field,
    check_packed,
    encode_varints,
    parse_packed,
    parse_varints,
    payload_span,
)
from dataload.errors import ConfigError, CorruptFileError
from dataload.types import Array, Batch

_BYTES: Final = 1  # field numbers in Feature
_FLOAT: Final = 2
_INT64: Final = 3

# Messages, bytes and packed lists share one wire type, so these are all the tags of a usual Example.
_FIRST: Final = 1 << 3 | LENGTH  # field 1: in Example, in Features, the name of an entry, in a list
_SECOND: Final = 2 << 3 | LENGTH  # field 2: the value of an entry
_KINDS: Final = {kind << 3 | LENGTH: kind for kind in (_BYTES, _FLOAT, _INT64)}

_FLOAT32: Final = np.dtype("<f4")
_INTEGER: Final = np.dtype(np.int64)
_MAX_BYTES = 2**31 - 1  # protobuf's limit


def decode(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Decode a serialized Example to its fields, of at most `limit` bytes. Unusual layouts need protobuf."""
    spans = _plain(data, limit)
    if spans is not None:
        if _INTEGER.itemsize * len(data) > limit:
            for kind, start, stop in spans.values():
                if kind == _INT64:
                    check_packed(data[start:stop], limit)
        try:
            return {name: _value(data, *span) for name, span in spans.items()}
        except CorruptFileError:  # protobuf gives the reason
            pass
    return _decode_any(data, limit)


def decode_batch(
    buffers: Sequence[bytes | memoryview], fields: Sequence[str] | None, limit: int = MAX_RECORD_BYTES
) -> Batch | None:
    """Decode serialized Examples, at least one, to columns; see `columns_by_layout`."""
    return columns_by_layout(buffers, fields, functools.partial(_layout, limit))


def _layout(limit: int, data: bytes | memoryview) -> Layout | None:
    plain = _plain(data, limit)
    if plain is None:
        return None
    layout: dict[str, Span] = {}
    for name, (kind, start, stop) in plain.items():
        if kind == _BYTES:
            layout[name] = Span(start, stop)
        elif kind == _FLOAT:
            layout[name] = Span(start, stop, _FLOAT32, ((stop - start) // _FLOAT32.itemsize,))
        else:
            shape = parse_packed(data[start:stop], limit).shape
            layout[name] = Span(start, stop, _INTEGER, shape, parse_varints, mask=0x80)
    return layout


def _plain(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, tuple[int, int, int]] | None:
    """Return the spans of an Example's values, name -> (kind, start, stop); None unless its layout is the usual one."""
    spans: dict[str, tuple[int, int, int]] = {}
    end, most = len(data), limit // FIELD_BYTES
    try:
        position, stop = payload_span(data, 1)
        if data[0] != _FIRST or stop != end:
            return None
        while position < end:
            entry, entry_end = payload_span(data, position + 1)
            name, name_end = payload_span(data, entry + 1)
            feature, feature_end = payload_span(data, name_end + 1)
            packed, packed_end = payload_span(data, feature + 1)
            start, stop = payload_span(data, packed + 1)
            if not stop == packed_end == feature_end == entry_end <= end:
                return None
            if not data[position] == data[entry] == data[packed] == _FIRST or data[name_end] != _SECOND:
                return None
            kind = _KINDS[data[feature]]
            if kind == _FLOAT and (stop - start) % _FLOAT32.itemsize:
                return None
            spans[str(data[name:name_end], "utf-8")] = kind, start, stop
            position = entry_end
            if len(spans) > most:
                return None
    except (CorruptFileError, IndexError, KeyError, UnicodeDecodeError):
        return None
    return spans


def _value(data: bytes | memoryview, kind: int, start: int, stop: int) -> Any:
    if kind == _BYTES:
        return bytes(data[start:stop])
    if kind == _FLOAT:
        return np.frombuffer(data[start:stop], _FLOAT32).astype(np.float32)
    return parse_packed(data[start:stop])


def _decode_any(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Decode any valid Example by protobuf: fields in any order or repeated, unpacked lists, unknown fields."""
    features = _parse_message("Example", data).features.feature
    check_size(FIELD_BYTES * len(features), limit, f"an Example of {len(features):,} features")
    return {name: _feature_value(features[name]) for name in sorted(features)}


def _feature_value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    if kind == "float_list":
        return np.array(feature.float_list.value, np.float32)
    if kind == "int64_list":
        return np.array(feature.int64_list.value, np.int64)
    values = list(feature.bytes_list.value)
    return values[0] if len(values) == 1 else values


def _parse_message(kind: str, data: bytes | memoryview) -> Any:
    parse, invalid = _parser(kind)
    try:
        return parse(bytes(data))
    except invalid as error:
        raise CorruptFileError(f"not a tf.train.{kind} ({len(data)} bytes): {error}") from error


class SequenceExample:
    """``tf.train.SequenceExample``, decoded by protobuf.

    A SequenceExample is ``SequenceExample{context{feature: map<string, Feature>}, feature_lists{feature_list:
    map<string, FeatureList>}}``, and a FeatureList is one Feature for each step. All are fields of one record:

    | field | decoded |
    |---|---|
    | a feature of the context | as in an Example |
    | a list of numbers, equally many in each step | (steps, n) float32 or int64 |
    | any other list | list of the values of its steps |
    """

    @staticmethod
    def decode(data: bytes | memoryview, limit: int = MAX_RECORD_BYTES) -> dict[str, Any]:
        """Decode a serialized SequenceExample to its fields, of at most `limit` bytes."""
        parsed = _parse_message("SequenceExample", data)
        context, lists = parsed.context.feature, parsed.feature_lists.feature_list
        count = len(context) + len(lists) + sum(len(lists[name].feature) for name in lists)
        check_size(FIELD_BYTES * count, limit, f"a SequenceExample of {count:,} features")
        record = {name: _feature_value(context[name]) for name in sorted(context)}
        for name in sorted(lists):
            if name in record:
                message = f"{name!r} is a feature of the context and a feature list"
                raise CorruptFileError(f"{message}: decode such records by a function of bytes")
            record[name] = _join([_feature_value(feature) for feature in lists[name].feature])
        return record

    @staticmethod
    def encode(record: Mapping[str, Any]) -> bytes:  # noqa: ARG004 - the signature of codecs
        """Raise a ConfigError: a record does not say which of its fields are the context."""
        raise ConfigError(
            "codec 'sequence_example' only reads: write records with example, msgpack or npz", key="codec"
        )


def _join(steps: list[Any]) -> Any:
    """Return the values of steps as one array if their dtypes and shapes agree."""
    kinds = {(step.dtype, step.shape) if isinstance(step, np.ndarray) else None for step in steps}
    return np.stack(steps) if len(kinds) == 1 and None not in kinds else steps


_CODECS: Final = {"Example": "example", "SequenceExample": "sequence_example"}


@functools.cache
def _parser(kind: str) -> tuple[Callable[[bytes], Any], type[Exception]]:
    """Return protobuf's parser of a message and its exception. The schema is built in a separate pool."""

    def load(module: str) -> Any:
        name = f"google.protobuf.{module}"
        return load_optional(name, needed_by=f"codec {_CODECS[kind]!r}", extra="codecs", package="protobuf")

    file = load("descriptor_pb2").FileDescriptorProto(
        name="dataload_example.proto", package="dataload", syntax="proto3", message_type=_messages()
    )
    pool = load("descriptor_pool").DescriptorPool()
    pool.Add(file)
    example = load("message_factory").GetMessageClass(pool.FindMessageTypeByName(f"dataload.{kind}"))
    return example.FromString, load("message").DecodeError


def _field(name: str, number: int, kind: int | str, *, many: bool = False, **more: Any) -> dict[str, Any]:
    """Return a FieldDescriptorProto; `kind` is the number of a scalar type or the name of a message."""
    typed = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".dataload.{kind}"}
    return {"name": name, "number": number, "label": 3 if many else 1, **typed, **more}


def _message(name: str, *fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "field": list(fields), **more}


_FLOAT_TYPE, _INT64_TYPE, _STRING_TYPE, _BYTES_TYPE = 2, 3, 9, 12


def _map(name: str, value: str) -> dict[str, Any]:
    """Return the entries of a map from text to a message, as a message nested in the map's owner."""
    entry = _field("key", 1, _STRING_TYPE), _field("value", 2, value)
    return _message(name, *entry, options={"map_entry": True})


def _messages() -> list[dict[str, Any]]:
    """Return the messages of tensorflow/core/example."""
    lists = [
        _field(f"{name}_list", kind, f"{name.capitalize()}List", oneof_index=0)
        for kind, name in ((_BYTES, "bytes"), (_FLOAT, "float"), (_INT64, "int64"))
    ]
    return [
        _message("BytesList", _field("value", 1, _BYTES_TYPE, many=True)),
        _message("FloatList", _field("value", 1, _FLOAT_TYPE, many=True)),
        _message("Int64List", _field("value", 1, _INT64_TYPE, many=True)),
        _message("Feature", *lists, oneof_decl=[{"name": "kind"}]),
        _message(
            "Features",
            _field("feature", 1, "Features.FeatureEntry", many=True),
            nested_type=[_map("FeatureEntry", "Feature")],
        ),
        _message("Example", _field("features", 1, "Features")),
        _message("FeatureList", _field("feature", 1, "Feature", many=True)),
        _message(
            "FeatureLists",
            _field("feature_list", 1, "FeatureLists.FeatureListEntry", many=True),
            nested_type=[_map("FeatureListEntry", "FeatureList")],
        ),
        _message("SequenceExample", _field("context", 1, "Features"), _field("feature_lists", 2, "FeatureLists")),
    ]


def encode(record: Mapping[str, Any]) -> bytes:
    """Serialize the fields of `record` as an Example."""
    entries: list[bytes] = []
    for name, value in record.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"field names must be text, got {name!r}")
        try:
            entries.append(build_field(1, build_field(1, name.encode()) + build_field(2, _feature(value))))
        except (ConfigError, UnicodeEncodeError) as error:
            raise ConfigError(f"field {name!r}: {error}", key=name) from error
    data = build_field(1, b"".join(entries))
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"an Example of {len(data)} bytes; the limit of protobuf is {_MAX_BYTES}")
    return data


def _feature(value: Any) -> bytes:
    texts = _texts(value)
    if texts is not None:
        return build_field(_BYTES, b"".join(build_field(1, text) for text in texts))
    array = plain_array(value)
    if array.ndim > 1:
        raise ConfigError(
            f"an array of shape {array.shape}; an Example holds flat lists, which lose the shape: flatten it, or use "
            "codec tensorprotos, msgpack or npz"
        )
    array = array.reshape(-1)
    if array.dtype.kind == "f":
        return build_field(_FLOAT, build_field(1, _as_float32(array).tobytes()))
    if array.dtype.kind not in "biu":
        raise ConfigError(f"an array of {array.dtype}; an Example holds float32, int64 and bytes")
    if array.dtype == np.uint64 and (array >> np.uint64(63)).any():
        raise ConfigError("values beyond int64, the only integer type of an Example")
    return build_field(_INT64, build_field(1, encode_varints(array.astype(np.int64))))


def _as_float32(array: Array) -> Array:
    if array.dtype.itemsize <= 4:
        return np.asarray(array, "<f4")
    try:
        with np.errstate(over="raise"):
            return array.astype("<f4")
    except FloatingPointError:
        raise ConfigError("values beyond float32, the only float type of an Example") from None


def _texts(value: Any) -> list[bytes] | None:
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
