"""TensorProtos against protobuf itself, and the fast path against the slow one."""

from functools import cache

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from wire import varint

from dataload.codecs.layout import RecordTable
from dataload.codecs.tensorprotos import decode, decode_batch, encode
from dataload.collate import default_collate
from dataload.errors import CorruptFileError
from dataload.testing.compare import difference

_REPEATED, _OPTIONAL = 3, 1
_INT32, _INT64, _FLOAT, _DOUBLE, _BYTES, _STRING, _MESSAGE = 5, 3, 2, 1, 12, 9, 11

_FIELDS = {
    "dims": (1, _REPEATED, _INT64, False),
    "data_type": (2, _OPTIONAL, _INT32, False),
    "float_data": (3, _REPEATED, _FLOAT, True),
    "int32_data": (4, _REPEATED, _INT32, True),
    "byte_data": (5, _OPTIONAL, _BYTES, False),
    "string_data": (6, _REPEATED, _BYTES, False),
    "name": (7, _OPTIONAL, _STRING, False),
    "double_data": (9, _REPEATED, _DOUBLE, True),
    "int64_data": (10, _REPEATED, _INT64, True),
}


@cache
def oracle(*, packed=True):
    """protobuf's own class for TensorProtos; unpacked, another class with the same bytes' meaning."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{packed}.proto", package="test", syntax="proto2")
    tensor = file.message_type.add(name="TensorProto")
    for name, (number, label, kind, is_packed) in _FIELDS.items():
        field = tensor.field.add(name=name, number=number, label=label, type=kind)
        field.options.packed = is_packed and packed
    tensors = file.message_type.add(name="TensorProtos")
    tensors.field.add(name="protos", number=1, label=_REPEATED, type=_MESSAGE, type_name=".test.TensorProto")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.TensorProtos"))


DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
VALUES = ARRAYS | st.binary(max_size=50) | TEXT
RECORDS = st.dictionaries(NAMES, VALUES, max_size=4)


def same(one, other):
    return difference(one, other, "record") is None


@given(RECORDS)
def test_round_trip(record):
    decoded = decode(encode(record))
    assert list(decoded) == list(record)
    assert same(decoded, record)
    assert all(value.flags.writeable for value in decoded.values() if isinstance(value, np.ndarray))


@given(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans())
def test_round_trip_of_numbers(integer, number, truth):
    decoded = decode(encode({"i": integer, "f": number, "b": truth}))
    assert same(decoded, {"i": np.array(integer, np.int64), "f": np.array(number), "b": np.array(truth)})


@given(RECORDS)
def test_what_we_write_is_what_protobuf_writes(record):
    data = encode(record)
    assert oracle().FromString(data).SerializeToString() == data


@given(RECORDS, st.integers(-(2**63), 2**63 - 1))
def test_fast_encoding_equals_slow_encoding(record, integer):
    """Frames of arrays and bytes are remembered; nothing is of values of a subclass, or that are not contiguous."""

    class Slow(np.ndarray):
        pass

    slow = {name: value.view(Slow) if isinstance(value, np.ndarray) else value for name, value in record.items()}
    slow = {name: bytearray(value) if isinstance(value, bytes) else value for name, value in slow.items()}
    turned = {n: np.asarray(v.T, order="C").T if isinstance(v, np.ndarray) else v for n, v in record.items()}
    assert encode(record) == encode(turned) == encode(slow)
    assert encode({"i": integer}) == encode({"i": np.array(integer)})


# What others may write: any fields, in any order of the repeated ones, packed or not.

INT64S = st.integers(-(2**63), 2**63 - 1)
INT32S = st.integers(-(2**31), 2**31 - 1)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": NAMES,
        "data_type": st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13]),
        "dims": st.lists(st.integers(0, 4) | INT64S, max_size=3),
        "float_data": st.lists(st.floats(width=32), max_size=12),
        "int32_data": st.lists(st.integers(0, 100) | INT32S, max_size=40),
        "byte_data": st.binary(max_size=12),
        "string_data": st.lists(st.binary(max_size=5), max_size=4),
        "double_data": st.lists(st.floats(), max_size=12),
        "int64_data": st.lists(INT64S, max_size=12),
    },
)
_FIELD_OF_TYPE = {1: "float_data", 2: "int32_data", 10: "int64_data", 13: "double_data"}
_DTYPE_OF_TYPE = {1: np.float32, 2: np.int32, 10: np.int64, 13: np.float64}
_NARROW = {5: "bool", 6: "uint8", 7: "int8", 8: "uint16", 9: "int16"}


def meant(tensor):
    """What a message of protobuf means, slowly and with its own accessors."""
    kind, dims = tensor.data_type if tensor.HasField("data_type") else 1, list(tensor.dims)
    if kind == 3:
        flat = np.frombuffer(tensor.byte_data, np.uint8)
        if not dims:
            return tensor.byte_data
        return shaped(flat, dims) if fits(dims, flat.size) or not flat.size else flat
    if kind == 4:
        texts = list(tensor.string_data)
        if not dims and len(texts) == 1:
            try:
                return texts[0].decode()
            except UnicodeDecodeError:
                return texts[0]
        flat = np.empty(len(texts), object)
        flat[:] = texts
        return shaped(flat, dims)
    if kind in _FIELD_OF_TYPE:
        return shaped(np.array(list(getattr(tensor, _FIELD_OF_TYPE[kind])), _DTYPE_OF_TYPE[kind]), dims)
    numbers = list(tensor.int32_data)
    if kind == 12:
        if any(not -(2**15) <= number < 2**16 for number in numbers):
            raise ValueError("no bits of a float16")
        return shaped(np.array([n & 0xFFFF for n in numbers], np.uint16).view(np.float16), dims)
    if kind == 5:
        return shaped(np.array([bool(number) for number in numbers], bool), dims)
    limits = np.iinfo(_NARROW[kind])
    if any(not limits.min <= number <= limits.max for number in numbers):
        raise ValueError("out of range")
    return shaped(np.array(numbers, _NARROW[kind]), dims)


def fits(dims, size):
    product = 1
    for dim in dims:
        product *= dim
    return all(dim >= 0 for dim in dims) and product == size


def shaped(flat, dims):
    if not dims:
        return flat.reshape(()) if flat.size == 1 else flat
    if not fits(dims, flat.size):
        raise ValueError("dims do not fit")
    return flat.reshape(dims)  # a ValueError for dims beyond what numpy can address


def meant_record(message):
    record = {}
    for place, tensor in enumerate(message.protos):
        name = tensor.name if tensor.name and tensor.name not in record else str(place)
        if name in record:
            raise ValueError("two of one name")
        record[name] = meant(tensor)
    return record


@given(st.lists(TENSORS, max_size=3), st.booleans())
@example([{"name": "1"}, {}], True)
@example([{"data_type": 3, "dims": [0, 2**62, 4]}], True)
def test_what_protobuf_writes_is_what_we_read(tensors, packed):
    data = oracle(packed=packed)(protos=tensors).SerializeToString()
    try:
        expected = meant_record(oracle().FromString(data))
    except ValueError:
        with pytest.raises(CorruptFileError):
            decode(data)
    else:
        assert same(decode(data), expected)
        assert same(decode(memoryview(data)), expected)


@given(st.lists(TENSORS, min_size=1, max_size=2), st.lists(TENSORS, max_size=2))
def test_pieces_of_repeated_fields_are_joined(first, second):
    """Two serialized messages back to back are one message with the fields of both."""
    data = oracle()(protos=first).SerializeToString() + oracle(packed=False)(protos=second).SerializeToString()
    merged = oracle()(protos=first[:1])
    inner = b"".join(
        oracle(packed=p)(protos=[t]).protos[0].SerializeToString() for p, t in ((True, first[0]), (False, first[-1]))
    )
    for record in (data, b"\x0a" + varint(len(inner)) + inner):
        merged.ParseFromString(record)
        try:
            expected = meant_record(merged)
        except ValueError:
            with pytest.raises(CorruptFileError):
                decode(record)
        else:
            assert same(decode(record), expected)


@st.composite
def alike_records(draw):
    """Records of a few layouts: values of the same shapes, and of the same lengths mostly."""
    templates = draw(st.lists(RECORDS.filter(bool), min_size=1, max_size=2))
    rows = draw(st.lists(st.sampled_from(templates), min_size=1, max_size=16))
    records = []
    for template in rows:
        record = {}
        for name, value in template.items():
            if isinstance(value, np.ndarray) and draw(st.booleans()):
                value = draw(hnp.arrays(value.dtype, value.shape))
            elif isinstance(value, bytes) and draw(st.booleans()):
                value = draw(st.binary(min_size=len(value), max_size=len(value)))
            record[name] = value
        records.append(record)
    return records


@given(alike_records(), st.integers(0, 3), st.data())
def test_fast_path_equals_slow_path(records, unnamed, data):
    if unnamed == 0:  # as others write: fields that are called by their places
        buffers = [
            oracle()(protos=[{"data_type": 10, "int64_data": [len(record)]} for _ in record]).SerializeToString()
            for record in records
        ]
    else:
        buffers = list(map(encode, records))
    known = list(decode(buffers[0]))
    fields = data.draw(st.none() | st.lists(st.sampled_from(known), unique=True))
    batch = decode_batch([memoryview(buffer) for buffer in buffers], fields)
    if len({len(buffer) for buffer in buffers}) == 1:  # then they may lie in one array, with something before each
        rows = np.frombuffer(b"".join(b"abc" + buffer for buffer in buffers), np.uint8).reshape(len(buffers), -1)
        table = RecordTable(rows[:, 3:])
        assert [bytes(record) for record in table] == buffers
        of_table = decode_batch(table, fields)
        assert (of_table is None) == (batch is None)
        assert batch is None or same(batch, of_table)
        assert all(isinstance(column, list) or column.flags.writeable for column in (of_table or {}).values())
    if batch is None:
        return
    chosen = [{name: decode(buffer)[name] for name in known if fields is None or name in fields} for buffer in buffers]
    slow = default_collate(chosen)
    assert list(batch) == (list(slow) if fields is None else fields)
    assert same(batch, {name: slow[name] for name in batch})
    for column in batch.values():
        assert isinstance(column, list) or column.flags.writeable


@pytest.mark.parametrize("floats", [1, 3, 127, 128, 129, 5000])
def test_the_fast_path_is_taken(floats):
    """For what training data are like: one shape, labels of one byte and of two, in any mixture."""
    rng = np.random.default_rng(floats)
    records = [
        {
            "x": rng.random((floats, 2), np.float32),
            "n": b"12345"[: i % 2 + 3],
            "s": "é" * 2,
            "y": int(rng.integers(300)),
            "z": rng.integers(128, size=8),
        }
        for i in range(64)
    ]
    buffers = list(map(encode, records))
    batch = decode_batch(buffers, None)
    assert batch is not None
    assert same(batch, default_collate(list(map(decode, buffers))))
    assert same(decode_batch(buffers, ["y"]), {"y": batch["y"]})
    assert decode_batch(buffers, ["y", "w"]) is None


@given(RECORDS, st.data())
def test_damaged_records_end_in_an_error_or_a_value(record, data):
    damaged = bytearray(encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for hostile in (bytes(damaged), cut):
        check_hostile(hostile)


@given(st.binary(max_size=200))
@example(b"\x0a\x0c\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x10\x01")
def test_any_bytes_end_in_an_error_or_a_value(data):
    check_hostile(data)


def check_hostile(data):
    try:
        ours = decode(data)
    except CorruptFileError:
        ours = None
    assert ours is None or sum(
        np.asarray(v).nbytes if isinstance(v, np.ndarray) else len(v) for v in ours.values()
    ) <= 8 * len(data)
    try:
        theirs = meant_record(oracle().FromString(data))
    except (DecodeError, ValueError, KeyError):
        theirs = None
    if theirs is not None and ours is not None:
        assert same(ours, theirs)
    batch = decode_batch([data] * 4, None)
    if ours is None:
        assert batch is None
    elif batch is not None:
        assert same(batch, default_collate([ours] * 4))
