"""TensorProtos by hand: what each value is on the wire, and the text of each refusal."""

import numpy as np
import pytest

from dataload.codecs.tensorprotos import decode, decode_batch, encode
from dataload.codecs.wire import encode_varint
from dataload.errors import ConfigError, CorruptFileError


def tensor(body):
    """A record of one tensor, given as bytes on the wire."""
    return b"\x0a" + encode_varint(len(body)) + body


NAMED_X = b"\x3a\x01x"
TOO_MANY_DIMS = b"\x08\x01" * 64, b"\x08\x01" * 99, b"\x0a\x01\x01" * 64, b"\x0a\x63" + b"\x01" * 99


@pytest.mark.parametrize(
    ("value", "wire"),
    [
        pytest.param(b"ab", b"\x10\x03\x2a\x02ab" + NAMED_X, id="bytes"),
        pytest.param(b"", b"\x10\x03\x2a\x00" + NAMED_X, id="no bytes"),
        pytest.param("é", b"\x10\x04\x32\x02\xc3\xa9" + NAMED_X, id="text"),
        pytest.param(np.uint8([1, 255]), b"\x08\x02\x10\x03\x2a\x02\x01\xff" + NAMED_X, id="uint8"),
        pytest.param(np.array(200, np.uint8), b"\x10\x06\x22\x02\xc8\x01" + NAMED_X, id="uint8 without dims"),
        pytest.param(np.float32([1]), b"\x08\x01\x10\x01\x1a\x04\0\0\x80\x3f" + NAMED_X, id="float32"),
        pytest.param(np.array(1.0), b"\x10\x0d" + NAMED_X + b"\x4a\x08\0\0\0\0\0\0\xf0\x3f", id="float64"),
        pytest.param(np.array(5), b"\x10\x0a" + NAMED_X + b"\x52\x01\x05", id="int64"),
        pytest.param(np.int32([-1]), b"\x08\x01\x10\x02\x22\x0a" + b"\xff" * 9 + b"\x01" + NAMED_X, id="int32"),
        pytest.param(np.float16([1]), b"\x08\x01\x10\x0c\x22\x02\x80\x78" + NAMED_X, id="float16"),
        pytest.param(np.array([True, False]), b"\x08\x02\x10\x05\x22\x02\x01\x00" + NAMED_X, id="bool"),
        pytest.param(np.zeros((0, 2), np.int16), b"\x08\x00\x08\x02\x10\x09" + NAMED_X, id="empty"),
    ],
)
def test_on_the_wire(value, wire):
    assert encode({"x": value}) == tensor(wire)
    decoded = decode(tensor(wire))["x"]
    assert type(decoded) is type(value)
    if isinstance(value, np.ndarray):
        assert (decoded.dtype, decoded.shape, decoded.tobytes()) == (value.dtype, value.shape, value.tobytes())
    else:
        assert decoded == value


def test_values_that_are_written_alike():
    numbers = np.arange(6, dtype=np.float32)
    assert encode({"x": numbers.astype(">f4")}) == encode({"x": numbers})
    assert encode({"x": bytearray(b"ab")}) == encode({"x": memoryview(b"ab")}) == encode({"x": b"ab"})
    texts = b"\x08\x02\x10\x04\x32\x01a\x32\x00" + NAMED_X
    assert encode({"x": np.array([b"a", b""], object)}) == tensor(texts)


def test_numbers_may_be_in_chunks():
    for count in (1, 2, 3):
        chunks = b"".join(b"\x52\x02" + bytes((number, 9)) for number in range(count))
        assert decode(tensor(b"\x10\x0a" + chunks))["0"].tolist() == [each for n in range(count) for each in (n, 9)]


def test_names_that_are_missing_or_taken():
    first = tensor(b"\x10\x0a\x52\x01\x00")
    named = tensor(b"\x10\x0a" + NAMED_X + b"\x52\x01\x01")
    assert list(decode(first + named + named + first)) == ["0", "x", "2", "3"]
    one = tensor(b"\x10\x0a\x3a\x011\x52\x01\x01")
    assert list(decode(first + one)) == ["0", "1"]
    with pytest.raises(CorruptFileError, match="two tensors are called '1', one by its name and one by its position"):
        decode(one + first)


def test_unknown_fields_are_skipped():
    unknown = b"\x78\x05" + b"\x7a\x01z" + b"\x7d1234" + b"\x7912345678" + b"\x7b\x7b\x08\x01\x7c\x7c"
    known = b"\x10\x0a\x52\x01\x07"
    assert decode(unknown + tensor(unknown + known + unknown) + unknown)["0"] == 7
    assert decode(tensor(b"\x12\x01\x0d" + known + b"\x28\x01"))["0"] == 7, "known, and of another wire type"


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        (b"\x0a\x02\x01\x03", (1, 3)),
        (b"\x08\x03\x0a\x02\x01\x01\x08\x01", (3, 1, 1, 1)),
        (b"\x0a\x00\x08" + encode_varint(2**64 + 3), (3,)),  # protobuf drops the 65th bit
        (b"\x08\x03" + b"\x08\x01" * 14 + b"\x0a\x02\x01\x01" * 8, (3, *[1] * 30)),
    ],
)
def test_dims_may_be_packed(dims, shape):
    assert decode(tensor(dims + b"\x10\x0a\x52\x03\x01\x02\x03"))["0"].shape == shape


@pytest.mark.parametrize(
    ("kind", "lowest", "highest"),
    [(6, 0, 255), (7, -128, 127), (8, 0, 65_535), (9, -32_768, 32_767), (12, -32_768, 65_535)],
)
def test_narrow_numbers_at_their_bounds(kind, lowest, highest):
    """Some writers store the 16 bits of a float16, data type 12, as a signed number."""

    def decoded(value):
        number = encode_varint(value % 2**64)
        return decode(tensor(bytes((0x10, kind, 0x22, len(number))) + number))["0"]

    for value in (lowest, highest):
        assert decoded(value).tobytes() == value.to_bytes(8, "little", signed=True)[: decoded(value).itemsize]
    for value in (lowest - 1, highest + 1):
        with pytest.raises(CorruptFileError, match=f"has values from {value} to {value}$"):
            decoded(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\x05\x10", "invalid TensorProtos: the field at byte 0 of the record ends after byte 3"),
        (tensor(b"\x2a\x09ab"), "invalid TensorProto: the field at byte 2 of the record ends after byte 6"),
        (b"\x0a", "invalid TensorProtos: the field at byte 0 of the record ends after byte 1"),
        (b"\x0f", "invalid TensorProtos: wire type 7 at byte 0 of the record"),
        (b"\x02\x00", "invalid TensorProtos: field 0 at byte 0 of the record"),
        (b"\xff" * 11, "a varint at byte 0 of the record has more than 10 bytes"),
        (b"\x0a" + b"\x80" * 5 + b"\x00", "the length at byte 1 of the record has more than 5 bytes"),
        (tensor(b"\x7b\x08\x01"), "invalid TensorProto: the field at byte 2 of the record ends after byte 5"),
        (tensor(b"\x7b\x08\x01\x74") + b"\x7b" * 8, "a group before byte 5 of the record does not end"),
        (b"\x7b" * 200, "invalid TensorProtos: a group before byte 101 of the record does not end"),
        (tensor(b"\x3a\x01\xff"), "the name of a tensor at byte 4 of the record is not UTF-8: invalid start byte"),
        (tensor(b"\x0a\x01\x80"), "the packed integers end in the middle of an integer"),
        (tensor(b"\x10\x0b"), "tensor '0' has data type 11; the format knows FLOAT 1, INT32 2, BYTE 3"),
        (tensor(b"\x10\x01\x1a\x03abc"), "tensor '0' has 3 bytes of FLOAT data, not a multiple of 4"),
        (tensor(b"\x10\x0a\x52\x01\x80"), "tensor '0': the packed integers end in the middle of an integer"),
        (tensor(b"\x10\x0a\x52\x0c" + b"\x80" * 11 + b"\x01"), "tensor '0': a packed integer has more than 10 bytes"),
        (tensor(b"\x10\x0a\x52\x20" + b"\x80" * 31 + b"\x01"), "tensor '0': a packed integer has more than 10 bytes"),
        (tensor(b"\x10\x06\x22\x02\xac\x02"), "tensor '0' of type UINT8 has values from 300 to 300"),
        (tensor(b"\x10\x0c\x22\x03\x80\x80\x04"), "tensor '0' of type FLOAT16 has values from 65536 to 65536"),
        (tensor(b"\x08\x02\x10\x0a\x52\x01\x07"), r"tensor '0' has dims \[2\] and 1 INT64 values"),
        (tensor(b"\x08\x01" * 9 + b"\x10\x0a"), r"tensor '0' has dims \[1, 1, 1, 1, 1, 1, 1, 1, ...\] and 0 INT64"),
        (tensor(b"\x08\x01" * 8 + b"\x10\x0a"), r"tensor '0' has dims \[1, 1, 1, 1, 1, 1, 1, 1\] and 0 INT64"),
        *((tensor(dims + b"\x10\x0a\x52\x01\x07"), r", 1, ...\] and 1 INT64 values") for dims in TOO_MANY_DIMS),
        (tensor(b"\x08" + b"\xff" * 9 + b"\x01\x10\x0a\x52\x01\x07"), r"tensor '0' has dims \[-1\] and 1 INT64 values"),
        (tensor(b"\x08\x02\x10\x03"), r"tensor '0' has dims \[2\] and 0 BYTE values"),
        (tensor(b"\x08\x02\x10\x04"), r"tensor '0' has dims \[2\] and 0 STRING values"),
    ],
)
def test_corrupt(data, message):
    with pytest.raises(CorruptFileError, match=message):
        decode(data)
    assert decode_batch([data] * 8, None) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({1: b""}, "names of fields must be non-empty strings; got 1"),
        ({"": b""}, "names of fields must be non-empty strings; got ''"),
        ({"x": "\ud800"}, "field 'x' holds text that UTF-8 cannot encode: surrogates not allowed"),
        ({"\ud800": b""}, "holds text that UTF-8 cannot encode: surrogates not allowed"),
        ({"x": 2**63}, "field 'x' is 9223372036854775808; the format's integers have 64 bits"),
        ({"x": -(2**63) - 1}, "field 'x' is -9223372036854775809; the format's integers have 64 bits"),
        ({"x": np.uint32([1])}, "field 'x' has dtype uint32; TensorProtos hold float32, int32, bool, uint8, int8, "),
        ({"x": np.uint64([1])}, "field 'x' has dtype uint64; TensorProtos hold .* float64, text, bytes, and arrays"),
        ({"x": None}, "field 'x' is NoneType None; TensorProtos hold"),
        ({"x": np.array(["a"], object)}, "field 'x' has dtype object; TensorProtos hold"),
        ({"x": np.array(b"a", object)}, "field 'x' has dtype object; TensorProtos hold"),
        ({"x": {"y": 1}}, "field 'x' is dict {'y': 1}; TensorProtos hold"),
    ],
)
def test_what_the_format_does_not_hold(record, message):
    with pytest.raises(ConfigError, match=message):
        encode(record)


def test_a_record_beyond_what_protobuf_reads(monkeypatch):
    monkeypatch.setattr("dataload.codecs.tensorprotos._MAX_BYTES", 109)
    assert len(encode({"x": bytes(100)})) == 109
    with pytest.raises(ConfigError, match="a record of 110 bytes; the limit of protobuf is 109"):
        encode({"x": bytes(101)})


# The fast path: where it is taken, and where not.


@pytest.mark.parametrize(
    "buffers",
    [
        [encode({"x": number >> np.arange(5) & 1}) for number in range(32)],  # integers of one byte
        *([tensor(NAMED_X + head)] * 8 for head in (b"\x10\x01", b"\x10\x03", b"\x10\x09")),  # without values
        [tensor(NAMED_X + b"\x08\x00\x08\x02\x10\x09")] * 8,
    ],
)
def test_what_is_decoded_together(buffers):
    wanted = [decode(buffer)["x"] for buffer in buffers]
    found = decode_batch(buffers, None)["x"]
    assert np.array_equal(found, wanted)
    assert np.shape(found) == np.shape(wanted)


def test_integers_of_other_lengths_are_not_confused():
    rows = [[300, 1], [1, 300]] * 4  # of three bytes each
    batch = decode_batch([encode({"x": np.array(row)}) for row in rows], None)
    assert batch is None or batch["x"].tolist() == rows


@pytest.mark.parametrize(
    "buffers",
    [
        [encode({"x": 1})] * 3,  # few
        [encode({"x": bytes(n)}) for n in range(30)],  # many layouts
        [encode({"x": np.array([b"a", b"b"], object)})] * 8,
        *(
            [*[encode({"x": np.zeros(4, np.float32), "n": 1})] * 8, *[encode(other)] * 8]
            for other in (
                {"x": np.zeros((2, 2), np.float32), "n": 1},
                {"x": np.zeros(2, np.float64), "n": 1},
                {"x": np.zeros(4, np.float32)},
                {"y": np.zeros(4, np.float32), "n": 1},
                {"x": bytes(16), "n": 1},
            )
        ),
    ],
)
def test_what_is_decoded_one_by_one(buffers):
    assert decode_batch(buffers, None) is None
    assert decode_batch([encode({"x": 1})] * 4, None)["x"].tolist() == [1] * 4
    assert decode_batch([tensor(b"\x10\x04\x32\x01\xff")] * 4, None) == {"0": [b"\xff"] * 4}, "STRING, but no text"


def test_values_of_one_dtype_that_are_written_in_two_ways():
    """BYTE stands as it is, UINT8 as numbers: long values of the former are cut out of the records."""
    for count in (3, 600):
        byte = encode({"x": np.ones(count, np.uint8)})
        number = byte.replace(b"\x10\x03\x2a", b"\x10\x06\x22")
        assert np.array_equal(decode(number)["x"], decode(byte)["x"])
        batch = decode_batch([byte, number] * 8, None)
        assert (batch is None) == (count == 600)
        assert batch is None or batch["x"].tolist() == [[1] * count] * 16
