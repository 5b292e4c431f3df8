"""Codecs give back what they took, read what others wrote, and survive any bytes."""

import functools
import io

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_files import same

from dataload.codecs.codec import decode_batch, resolve_codec
from dataload.codecs.example import decode, encode
from dataload.collate import default_collate
from dataload.errors import CorruptFileError

msgpack, npz, tf_example = (resolve_codec(name) for name in ("msgpack", "npz", "example"))

# Of a Python integer that no field holds, msgpack and npz say so; the tests of each have that.
numbers = st.integers(-(2**63), 2**64 - 1)
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(sizes=(64, 128)),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
text = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.one_of(arrays, st.binary(max_size=40), text, numbers, st.floats())
records = st.dictionaries(text, values, max_size=5)


@given(records)
def test_msgpack_gives_back_what_it_took(record):
    same(msgpack.decode(msgpack.encode(record)), record)


without_nul = text.filter(lambda name: "\0" not in name)


@given(st.dictionaries(without_nul, values, max_size=5))
def test_npz_gives_back_what_it_took(record):
    """But for numbers, which become arrays of no dimensions."""
    expected = {name: np.asarray(v) if isinstance(v, (int, float)) else v for name, v in record.items()}
    same(npz.decode(npz.encode(record)), expected)


@given(st.dictionaries(without_nul.filter(lambda name: not {"/", "\\"} & {*name}), arrays, max_size=4))
def test_numpy_and_the_npz_codec_read_each_other(record):
    with np.load(io.BytesIO(npz.encode(record)), allow_pickle=False) as found:
        same({name.removesuffix(".npy"): found[name] for name in found.zip.namelist()}, record)
    arrays = {"x": np.zeros(1), **{f"_{name}": value for name, value in record.items()}}
    for save in (np.savez, np.savez_compressed):  # the second is read more slowly
        save(stream := io.BytesIO(), **arrays)
        same(npz.decode(stream.getvalue()), arrays)


@functools.cache
def messages():
    """TensorFlow's example.proto and feature.proto, as protobuf classes."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="oracle.proto", package="oracle", syntax="proto3")

    def message(name, into=file.message_type):
        added = into.add()
        added.name = name
        return added

    kinds = {"BytesList": field.TYPE_BYTES, "FloatList": field.TYPE_FLOAT, "Int64List": field.TYPE_INT64}
    for name, kind in kinds.items():
        message(name).field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = message("Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate({"bytes_list": "BytesList", "float_list": "FloatList"}.items(), 1):
        feature.field.add(name=name, number=number, type=11, type_name=f".oracle.{kind}", label=1, oneof_index=0)
    feature.field.add(name="int64_list", number=3, type=11, type_name=".oracle.Int64List", label=1, oneof_index=0)
    features = message("Features")
    entry = message("FeatureEntry", features.nested_type)
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=11, type_name=".oracle.Feature", label=1)
    features.field.add(name="feature", number=1, type=11, type_name=".oracle.Features.FeatureEntry", label=3)
    message("Example").field.add(name="features", number=1, type=11, type_name=".oracle.Features", label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oracle.Example"))


def by_protobuf(data):
    try:
        found = messages().FromString(data).features.feature
    except DecodeError:
        return None
    out = {}
    for name, feature in found.items():
        kind = feature.WhichOneof("kind")
        values = list(getattr(feature, kind).value) if kind else []
        if kind in ("float_list", "int64_list"):
            out[name] = np.array(values, np.float32 if kind == "float_list" else np.int64)
        else:
            out[name] = values[0] if len(values) == 1 else values
    return out


int64s = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False)  # which NaN it is may change on the way through Python
lists = st.one_of(
    st.lists(int64s | st.integers(0, 300), max_size=20).map(lambda v: np.array(v, np.int64)),
    st.lists(floats, max_size=20).map(lambda v: np.array(v, np.float32)),
    st.binary(max_size=300),
    st.lists(st.binary(max_size=20), min_size=2, max_size=4),
)
examples = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), lists, max_size=5)


def serialize(record):
    message = messages()()
    for name, value in record.items():
        feature = message.features.feature[name]
        if isinstance(value, np.ndarray):
            kind = feature.float_list if value.dtype == np.float32 else feature.int64_list
            kind.SetInParent()
            kind.value.extend(value.tolist())
        else:
            feature.bytes_list.value.extend([value] if isinstance(value, bytes) else value)
    return message.SerializeToString()


@given(examples)
def test_protobuf_and_the_example_codec_read_each_other(record):
    same(decode(serialize(record)), record)
    same(by_protobuf(encode(record)), record)
    same(decode(encode(record)), record)
    same(decode(encode(record) + b"\x78\x01"), record)  # an unknown field: not what the fast path reads


def mutations(data):
    """`data` with bytes replaced, removed, repeated or put in."""
    place = st.integers(0, len(data))
    bytes_ = st.binary(max_size=4) | st.sampled_from([b"\xff" * 9, b"\xff\xff\xff\xff\x0f", b"\0" * 4, b"\x80" * 11])
    edit = st.tuples(place, st.integers(0, 6), bytes_)
    return st.lists(edit, min_size=1, max_size=3).map(lambda edits: functools.reduce(_edit, edits, data))


def _edit(data, edit):
    place, removed, put = edit
    return data[:place] + put + data[place + removed :]


@given(examples.flatmap(lambda record: mutations(serialize(record))))
@example(b"\x0b\x0c")  # a group
@example(b"\x0b" * 200)
@example(b"\x0a\x0c\x0a\x0a\x0a\x01a\x1a\x05\x0a\x03\x0a\x01x")  # unknown fields for the value of an entry
@example(b"\x0a\x0c\x0a\x0a\x1a\x01a\x12\x05\x0a\x03\x0a\x01x")  # and for its name
@example(b"\x0a\x0c\x12\x0a\x0a\x01a\x12\x05\x0a\x03\x0a\x01x")  # and for the entry
def test_damaged_examples_are_read_as_protobuf_reads_them(data):
    expected = by_protobuf(data)
    if expected is None:
        with pytest.raises(CorruptFileError, match=r"not a tf.train.Example"):
            decode(data)
    else:
        found = decode(data)
        # Any NaN is as good as another: protobuf's Python floats do not keep its bits.
        same({k: _any_nan(v) for k, v in found.items()}, {k: _any_nan(v) for k, v in expected.items()})


def _any_nan(value):
    return np.where(np.isnan(value), np.float32(np.nan), value) if isinstance(value, np.ndarray) else value


@given(st.data())
def test_columns_are_the_collated_records(data):
    """Records of few layouts, as real ones are, two of which may have one length; sometimes one is different."""
    shape = data.draw(st.integers(0, 5) | st.just(140))
    size = data.draw(st.sampled_from([0, 3, 600]))
    # Mostly of one length: records of many layouts are not read as columns at all.
    labels = data.draw(st.sampled_from([[0, 1, 127], [128, 400], [0, 1, 127, 128, 400, -1]]))
    label = st.sampled_from(labels).map(lambda n: np.array([n]))
    seeds = st.integers(0, 99).map(np.random.default_rng)
    alike = st.fixed_dictionaries(
        {
            "x": seeds.map(lambda rng: rng.random(shape, np.float32)),
            "label": label,
            "image": seeds.map(lambda rng: rng.bytes(size)),
            "other": label,
        }
    ).map(lambda row: {name: row[name] for name in ("x", "label", "image", "other")})  # one order: one layout
    rows = data.draw(st.lists(alike, min_size=1, max_size=30))
    has_odd_row = data.draw(st.booleans())
    if has_odd_row:
        rows.insert(data.draw(st.integers(0, len(rows))), data.draw(examples))
    fields = data.draw(st.sampled_from([None, ["label"], ["image", "x"], ["y"]]))
    serialized = [serialize(row) for row in rows]
    batch = decode_batch(tf_example, serialized, fields)
    usual = shape > 0 and not has_odd_row  # an empty list has no packed values
    if len(rows) >= 8 and len({len(buffer) for buffer in serialized}) == 1 and usual and fields != ["y"]:
        assert batch is not None
    if batch is not None:
        decoded = [decode(buffer) for buffer in serialized]
        chosen = decoded if fields is None else [{name: row[name] for name in fields} for row in decoded]
        same(batch, default_collate(chosen))
        assert decode_batch(tf_example, [memoryview(b) for b in serialized], fields) is not None
