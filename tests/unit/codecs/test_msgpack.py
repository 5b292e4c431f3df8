"""The msgpack codec against msgpack itself, and against bytes that msgpack-numpy 0.4.8 wrote."""

from itertools import count

import msgpack
import numpy as np
import pytest

from dataload.codecs.msgpack import decode, encode
from dataload.errors import ConfigError, CorruptFileError
from dataload.testing.compare import difference

# msgpack.packb(record, default=msgpack_numpy.encode, use_bin_type=True)
FOREIGN = bytes.fromhex(
    "8da16685c4026e64c3c40474797065a33c6634c4046b696e64c400c4057368617065920203c40464617461c418000000000000803e0000003f"
    "0000403f0000803f0000a03fa16985c4026e64c3c40474797065a33c6938c4046b696e64c400c40573686170659102c40464617461c410ffff"
    "ffffffffffff0200000000000000a47a65726f85c4026e64c3c40474797065a33c7532c4046b696e64c400c405736861706590c40464617461"
    "c4020700a5656d70747985c4026e64c3c40474797065a33c6638c4046b696e64c400c4057368617065920003c40464617461c400a362696785"
    "c4026e64c3c40474797065a33e6934c4046b696e64c400c40573686170659102c40464617461c4080000000100000102a16285c4026e64c3c4"
    "0474797065a37c6231c4046b696e64c400c40573686170659102c40464617461c4020100a16385c4026e64c3c40474797065a43c633136c404"
    "6b696e64c400c40573686170659101c40464617461c410000000000000f03f0000000000000040a15585c4026e64c3c40474797065a33c5532"
    "c4046b696e64c400c40573686170659102c40464617461c41061000000620000006300000000000000a17383c4026e64c2c40474797065a33c"
    "6634c40464617461c4040000c03fa3726177c40200ffa474657874a374c3a4a3696e74fba5666c6f6174cb3fe0000000000000"
)
VALUES = {
    "f": np.arange(6, dtype="<f4").reshape(2, 3) / 4,
    "i": np.array([-1, 2], "<i8"),
    "zero": np.array(7, "<u2"),
    "empty": np.zeros((0, 3), "<f8"),
    "big": np.array([1, 258], ">i4"),
    "b": np.array([True, False]),
    "c": np.array([1 + 2j]),
    "U": np.array(["ab", "c"]),
    "s": np.array(1.5, "<f4"),
    "raw": b"\x00\xff",
    "text": "tä",
    "int": -5,
    "float": 0.5,
}
OBJECTS = bytes.fromhex(
    "81a16f85c4026e64c3c404747970659192a0a27c4fc4046b696e64c4014fc40573686170659101c40464617461c4d88002636e756d70792e5f"
    "636f72652e6d756c746961727261790a5f7265636f6e7374727563740a7100636e756d70790a6e6461727261790a71014b00857102635f636f"
    "646563730a656e636f64650a7103580100000062710458060000006c6174696e317105867106527107877108527109284b014b0185710a636e"
    "756d70790a64747970650a710b58020000004f38710c898887710d52710e284b0358010000007c710f4e4e4e4affffffff4affffffff4b3f74"
    "711062895d7111635f5f6275696c74696e5f5f0a6f626a6563740a711261747113622e"
)
STRUCTURE = bytes.fromhex(
    "81a17685c4026e64c3c404747970659192a161a33c6634c4046b696e64c40156c40573686170659101c40464617461c40400000000"
)
OLD = bytes.fromhex(  # use_bin_type=False
    "81a17885a26e64c3a474797065a33c6938a46b696e64a0a573686170659103a464617461b8"
    "000000000000000001000000000000000200000000000000"
)


def array(dtype="<f4", shape=(1,), data=b"1234", **more):
    found = {b"nd": True, b"type": dtype, b"kind": b"", b"shape": shape, b"data": data}
    return msgpack.packb({"a": found | {name.encode(): value for name, value in more.items()}})


def test_what_msgpack_numpy_wrote_and_would_write():
    assert difference(decode(FOREIGN), VALUES, "record") is None
    assert all(value.flags.writeable for value in decode(FOREIGN).values() if isinstance(value, np.ndarray))
    scalar = {"s": VALUES["s"]}  # which it writes shorter
    rest = {name: value for name, value in VALUES.items() if name != "s"}
    assert msgpack.unpackb(encode(rest), strict_map_key=False) == {
        name: value for name, value in msgpack.unpackb(FOREIGN, strict_map_key=False).items() if name != "s"
    }
    assert difference(decode(encode(scalar)), scalar, "record") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "an array of object would have to be pickled; store its parts in separate fields"),
        (np.zeros(2, "f4,i4"), "an array of .* is not supported; store its parts in separate fields"),
        (object(), "object is not supported by msgpack, which holds arrays, bytes, text and numbers"),
        (2**64, "18446744073709551616 has more than 64 bits, the limit of msgpack"),
        ([[-(2**63) - 1]], "-9223372036854775809 has more than 64 bits"),
        ("\ud800", "msgpack cannot hold it: 'utf-8' codec can't encode"),
    ],
)
def test_values_that_msgpack_lacks(value, message):
    with pytest.raises(ConfigError, match=f"^field 'x': {message}") as caught:
        encode({"good": 1, "x": value})
    assert caught.value.key == "x"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"invalid msgpack \(0 bytes\): ValueError"),
        (b"\xc1", r"invalid msgpack \(1 bytes\): FormatError"),
        (b"\x91" * 5000, r"invalid msgpack \(5000 bytes\): StackError"),
        (b"\x81\xa1a\xa1\xff", "invalid msgpack .*can't decode byte 0xff"),
        (b"\x81\x91\x01\x02", "invalid msgpack .*unhashable"),
        (encode({"a": 1}) + b"\x01", "invalid msgpack .*ExtraData"),
        (encode({"a": np.arange(9)})[:-1], "invalid msgpack .*incomplete"),
        ((b"\xdd" + (10**5).to_bytes(4, "big")) * 30_000, "invalid msgpack"),
        (msgpack.packb([1]), "a record must be a msgpack map of fields; found list"),
        (msgpack.packb({1: 2}), "names of fields must be strings; found 1"),
        (OBJECTS, "an array of dtype .*: objects would have to be unpickled"),
        (STRUCTURE, "an array of dtype .*: not a plain dtype"),
        (array(dtype="|O"), r"an array of dtype '\|O': objects would have to be unpickled"),
        (array(dtype=None), "an array of dtype 'None': not a plain dtype"),
        (array(dtype="f4"), "an array of dtype 'f4': not a plain dtype"),
        (array(dtype="<f5"), "an array of dtype '<f5': data type '<f5' not understood"),
        (array(dtype="<U0", shape=[2**40], data=b""), "an array of dtype '<U0': items of zero bytes"),
        (array(dtype="(" * 3000), r"an array of dtype '\(*': not a plain dtype"),
        (array(shape=[2]), r"invalid array of msgpack-numpy: 4 bytes for float32 \(2,\)"),
        (array(shape=[-1]), r"invalid array of msgpack-numpy: 4 bytes for float32 \(-1,\)"),
        (array(shape=[-1, -1]), r"invalid array of msgpack-numpy: 4 bytes for float32 \(-1, -1\)"),
        (array(shape=[1.0]), "invalid array of msgpack-numpy: 'float' object cannot"),
        (array(shape=["x"]), "invalid array of msgpack-numpy"),
        (array(shape=3), "invalid array of msgpack-numpy: 'int' object is not iterable"),
        (array(shape=[0, 2**62], data=b""), r"invalid array of msgpack-numpy: 0 bytes for float32 \(0, "),
        (array(shape=[1] * 70), r"invalid array of msgpack-numpy: 4 bytes for float32 \(1, 1, "),
        (array(data=5), "invalid array of msgpack-numpy: int for float32"),
        (msgpack.packb({"a": {b"nd": True}}), "an array of dtype 'None': not a plain dtype"),
        (msgpack.packb({"a": {"nd": True, "type": "<i8", "data": ""}}), "was written with use_bin_type=False"),
        (OLD, r"an array was written with use_bin_type=False, so its bytes cannot be told from text"),
    ],
    ids=count(),
)
def test_bytes_that_are_no_record(data, message):
    with pytest.raises(CorruptFileError, match=message):
        decode(data)
