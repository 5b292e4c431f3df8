"""The Example codec; tests/properties/test_codecs.py compares it with protobuf."""

import numpy as np
import pytest

from dataload.codecs import example
from dataload.codecs.example import decode, decode_batch, encode
from dataload.errors import ConfigError, CorruptFileError
from dataload.testing.compare import difference

# What TensorFlow's documentation of TFRecord prints for its first Example: four features, one value each.
DOCUMENTED = (
    b"\nR\n\x14\n\x08feature2\x12\x08\n\x06\n\x04goat\n\x11\n\x08feature1\x12\x05\x1a\x03\n\x01\x04\n\x14\n\x08feature3"
    b"\x12\x08\x12\x06\n\x04[\xd3|?\n\x11\n\x08feature0\x12\x05\x1a\x03\n\x01\x00"
)


def test_an_example_of_tensorflow():
    expected = {
        "feature2": b"goat",
        "feature1": np.array([4]),
        "feature3": np.array([0.9876], np.float32),
        "feature0": np.array([0]),
    }
    assert difference(decode(DOCUMENTED), expected, "record") is None
    assert encode(expected) == DOCUMENTED
    assert difference(decode(memoryview(DOCUMENTED)), expected, "record") is None


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (3, np.array([3])),
        (True, np.array([1])),
        (-1, np.array([-1])),
        (2**63 - 1, np.array([2**63 - 1])),
        (np.array(300, np.uint16), np.array([300])),
        (np.arange(-70, 70), np.arange(-70, 70)),
        (np.arange(0, 2**62, 2**56), np.arange(0, 2**62, 2**56)),
        (np.array([2**63 - 1], np.uint64), np.array([2**63 - 1])),
        ([1, 2], np.array([1, 2])),
        (np.zeros(0, np.int32), np.zeros(0, np.int64)),
        (0.5, np.array([0.5], np.float32)),
        (np.array([0.1, np.inf, np.nan], np.float64), np.array([0.1, np.inf, np.nan], np.float32)),
        (np.array([1, 2], ">f8"), np.array([1, 2], np.float32)),
        (np.float16(2), np.array([2], np.float32)),
        (b"", b""),
        ("ü", "ü".encode()),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
        ([b"one"], b"one"),
        (["a", b"b"], [b"a", b"b"]),
        ((), []),
        ([], []),
        (np.array(["a", "b"]), [b"a", b"b"]),
        (np.array(b"a"), b"a"),
    ],
)
def test_values_and_how_they_come_back(value, back):
    for name in ("x", "", "ü" * 100):
        assert difference(decode(encode({"first": b"1", name: value})), {"first": b"1", name: back}, "record") is None


class Tensor:
    def __array__(self):  # as torch's
        raise RuntimeError("it requires a gradient")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((2, 3)), r"an array of shape \(2, 3\); an Example holds flat lists, which lose the shape: flatten"),
        (1e300, "values beyond float32, the only float type of an Example"),
        (np.array([1, 2**63], np.uint64), "values beyond int64, the only integer type of an Example"),
        (2**64, "an array of object would have to be pickled"),
        (1j, "an array of complex128; an Example holds float32, int64 and bytes"),
        (None, "an array of object would have to be pickled"),
        ([b"a", 1], "an array of .*; an Example holds float32, int64 and bytes"),
        ([[1], [2, 3]], "list is not an array"),
        ("\ud800", "'utf-8' codec can't encode"),
        (np.ma.array([1, 2], mask=[0, 1]), "some values are masked: fill them first"),
        (Tensor(), "Tensor is not an array: it requires a gradient"),
    ],
)
def test_values_that_an_example_lacks(value, message):
    with pytest.raises(ConfigError, match=f"^field 'x': {message}") as caught:
        encode({"x": value})
    assert caught.value.key == "x"
    with pytest.raises(ConfigError, match="field names must be text, got 1"):
        encode({1: 1})


def test_an_example_that_is_too_large(monkeypatch):
    monkeypatch.setattr(example, "_MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="an Example of 18 bytes; the limit of protobuf is 10"):
        encode({"x": b"12345"})


@pytest.mark.parametrize("floats", [0, 5, 127, 128, 129, 5000])
def test_columns_of_records_that_are_alike(floats):
    """What training data are like: one shape, labels of one byte and of two, in any mixture."""
    rng = np.random.default_rng(floats)
    records = [
        {
            "x": rng.random(floats, np.float32),
            "label": np.array([index * 7]),
            "image": rng.bytes(floats % 1000 + 4),
            "other": rng.integers(300, size=1),
            "ids": np.array([1, 200, index, -1]),
            "few": rng.integers(128, size=8),
            "none": np.zeros(0, np.int64),
        }
        for index in range(300)
    ]
    data = [encode(record) for record in records]
    for fields in (None, ["label", "x"], ["image"]):
        batch = decode_batch(data, fields)
        assert batch is not None
        assert list(batch) == list(fields or records[0])
        for name, column in batch.items():
            assert difference(list(column), [record[name] for record in records], name) is None
            assert isinstance(column, list) or (column.flags.writeable and column.flags.aligned)


def differ(**values):
    """Records of one length of which the last has other values."""
    return [encode({"x": np.zeros(2, np.float32), "n": 1})] * 8 + [encode(values)]


@pytest.mark.parametrize(
    "buffers",
    [
        [encode({"x": b"1" * index}) for index in range(9)],  # a length each
        differ(x=np.zeros(2, np.float32), m=1),
        differ(x=b"12345678", n=1),
        differ(x=np.zeros(1, np.float32), nmnmn=1),
        [encode({"x": np.array([200])})] * 8 + [encode({"x": np.array([2, 1])})],
        [encode({"x": [b"a", b"b"]})] * 9,
        [b"\x0a\x02\x0a\x00"] * 9,
        [b""] * 9,
        [b"\x0a\xff"] * 9,
        [encode({"a": 1})] * 5 + [encode({"b": 300})] * 5,
        [encode({"a": 1})] * 5 + [encode({"a": b"four"})] * 5,
        [encode({"a": 1})] * 5 + [encode({"a": np.array([1, 2])})] * 5,
    ],
)
def test_records_that_are_not_alike_are_left_to_the_other_way(buffers):
    assert decode_batch(buffers, None) in (None, {})


def feature(payload):
    entry = b"\x0a\x01a\x12" + bytes((len(payload),)) + payload
    return b"\x0a" + bytes((len(entry) + 2,)) + b"\x0a" + bytes((len(entry),)) + entry


@pytest.mark.parametrize(
    ("data", "record"),
    [
        (b"", {}),
        (b"\x0a\x00", {}),
        (b"\x10\x05" + feature(b"\x1a\x03\x0a\x01\x05"), {"a": np.array([5])}),  # an unknown field first
        (feature(b"\x1a\x02\x08\x05"), {"a": np.array([5])}),  # not packed
        (feature(b"\x1a\x05\x08\x05\x0a\x01\x07"), {"a": np.array([5, 7])}),
        (feature(b"\x12\x05\x0d\0\0\x80\x3f"), {"a": np.array([1], np.float32)}),
        (feature(b"\x1a\x03\x0a\x01\x05\x12\x00"), {"a": np.zeros(0, np.float32)}),  # the last of a oneof
        (feature(b"\x0a\x00"), {"a": []}),
        (feature(b""), {"a": []}),
        (feature(b"\x0a\x05\x0a\x01x\x0a\x00"), {"a": [b"x", b""]}),
        (feature(b"\x0a\x03\x0a\x01x") * 2, {"a": b"x"}),
        (feature(b"\x0a\x03\x12\x01x"), {"a": []}),  # unknown fields in the places of those that are known
        (b"\x0a\x03\x12\x01x", {}),
        (feature(b"\x1a\x0c\x0a\x0a" + b"\xff" * 9 + b"\x01"), {"a": np.array([-1])}),
        (feature(b"\x1a\x20\x0a\x1e" + b"\xff" * 9 + b"\x01" + b"\x01" * 20), {"a": np.array([-1] + [1] * 20)}),
        (feature(b"\x1a\x20\x0a\x1e" + (b"\xff" * 9 + b"\x7f") * 3), {"a": np.array([-1] * 3)}),  # more than 64 bits
        (b"\x0a\x80\x80\x80\x80\x00", {}),  # a length of 5 bytes
    ],
)
def test_other_ways_to_say_the_same(data, record):
    assert difference(decode(data), record, "record") is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\x05",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"hello world",
        DOCUMENTED[:-1],
        DOCUMENTED + b"\x0a",
        b"\x0a\x0c\x0a\x0b\x0a\x01a\x12\x06\x0a\x04\x0a\x02x",  # each part ends a byte behind the record
        feature(b"\x12\x05\x0a\x03abc"),  # floats of 3 bytes
        feature(b"\x1a\x03\x0a\x01\xff"),  # a number without its end
        feature(b"\x1a\x22\x0a\x20" + b"\xff" * 32),
        feature(b"\x1a\x0d\x0a\x0b" + b"\xff" * 10 + b"\x01"),  # and one of 11 bytes
        feature(b"\x1a\x22\x0a\x20" + b"\xff" * 10 + b"\x01" * 22),
        b"\x0a\x80\x80\x80\x80\x80\x01",  # a length of 6 bytes
        feature(b"\x12\x09\x0a\x03abc").replace(b"\x01a", b"\x01\xff"),
    ],
)
def test_bytes_that_are_no_example(data):
    with pytest.raises(CorruptFileError, match=rf"^not a tf.train.Example \({len(data)} bytes\): "):
        decode(data)
    assert decode_batch([data] * 8, None) is None
