import json
import pickle
import sys
from functools import partial

import numpy as np
import pytest

import dataload
from dataload.codecs.codec import CODEC_NAMES, decode_batch, decode_records, resolve_codec
from dataload.errors import ConfigError, CorruptFileError, MissingDependencyError


class Pairs:
    """A codec of a user's: two numbers."""

    def decode(self, data):
        a, b = data
        return {"a": a, "b": b}

    def encode(self, record):
        return bytes((record["a"], record["b"]))


class NamedPairs(Pairs):
    name = "pairs"

    def __repr__(self):
        return "NamedPairs(2)"

    def decode_batch(self, buffers, fields):
        columns = np.frombuffer(b"".join(buffers), np.uint8).reshape(-1, 2)
        return {name: columns[:, "ab".index(name)].copy() for name in fields or "ab"}


def shout(data):
    return {"text": data.decode().upper()}


def test_names():
    assert CODEC_NAMES == ("example", "msgpack", "npz", "sequence_example", "tensorprotos", "raw")
    assert resolve_codec("raw") is resolve_codec(None) is None
    for name in CODEC_NAMES[:-1]:
        codec = resolve_codec(name)
        assert (codec.name, repr(codec)) == (name, repr(name))
        assert pickle.loads(pickle.dumps(codec)) == codec == resolve_codec(codec)
        if name == "sequence_example":  # which only decodes
            continue
        record = {"x": np.arange(3, dtype=np.float32), "image": b"abc"}
        np.testing.assert_equal(codec.decode(codec.encode(record)), record)
        np.testing.assert_equal(codec.decode(memoryview(codec.encode(record))), record)


THING = "a codec is a name .*, a function that decodes, or an object .*; got {}"


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (
            "msgpak",
            r"there is no codec 'msgpak': did you mean 'msgpack'. Choose from example, msgpack, npz, raw, sequence_ex",
        ),
        (5, THING.format("5")),
        (object(), THING.format("<object object")),
        (Pairs, THING.format(r"<class .*Pairs'>, a class: pass an instance of it")),
    ],
)
def test_what_is_no_codec(thing, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_codec(thing)
    assert (caught.value.key, caught.value.value) == ("codec", thing)


def test_a_function_decodes():
    codec = resolve_codec(shout)
    assert codec.decode(b"abc") == {"text": "ABC"}
    assert codec.name == repr(codec) == f"{__name__}.shout"
    assert decode_batch(codec, [b"a"] * 9, None) is None
    with pytest.raises(ConfigError, match=r"codec .*\.shout is a function, which can only decode: to write, pass"):
        codec.encode({"text": "ABC"})
    assert pickle.loads(pickle.dumps(resolve_codec(json.loads))).decode(b"[1]") == [1]
    assert resolve_codec(partial(int, base=2)).decode(b"101") == 5
    assert resolve_codec(partial(int, base=2)).name == "functools.partial"
    assert resolve_codec(bytes).decode(memoryview(b"x")) == b"x"  # a class with `decode`, but no codec


def test_an_object_decodes_and_encodes():
    plain, named = resolve_codec(Pairs()), resolve_codec(NamedPairs())
    assert plain.decode(plain.encode({"a": 1, "b": 2})) == {"a": 1, "b": 2}
    assert (plain.name, repr(plain)) == (f"{__name__}.Pairs",) * 2  # no address
    assert (named.name, repr(named)) == ("pairs", "NamedPairs(2)")
    assert decode_batch(plain, [b"ab"], None) is None
    np.testing.assert_equal(decode_batch(named, [b"\1\2", b"\3\4"], ["b"]), {"b": [2, 4]})


@pytest.mark.parametrize("name", ["example", "msgpack", "npz", "tensorprotos"])
def test_records_to_encode_have_fields(name):
    with pytest.raises(ConfigError, match="stores fields, got a record of type bytes"):
        resolve_codec(name).encode(b"ab")


@pytest.mark.parametrize("name", ["x.array_record", "x.tfrecord"])
def test_a_codec_of_ones_own_gets_bytes(tmp_path, name):
    class Kind:
        def encode(self, record):
            return record["x"]

        def decode(self, data):
            return {"x": len(data), "is_bytes": type(data) is bytes}

    with dataload.create(tmp_path / name, codec=Kind()) as writer:
        writer.extend({"x": b"ab" * i} for i in range(4))
    with dataload.open(tmp_path / name, codec=Kind()) as source:
        np.testing.assert_equal(source.read_batch([0, 3, 1]), {"x": [0, 6, 2], "is_bytes": [True] * 3})
        assert source[2] == {"x": 4, "is_bytes": True}


@pytest.mark.parametrize(("codec", "name"), [(shout, "shout"), (Pairs(), "Pairs")])
def test_what_the_users_code_raises(codec, name):
    with pytest.raises(CorruptFileError, match=rf"^codec .*\.{name} raised (UnicodeDecode|Value)Error: ") as caught:
        resolve_codec(codec).decode(b"\xff")
    assert isinstance(caught.value.__cause__, ValueError)


def test_errors_of_ours_pass_through_the_users_code():
    def failing(error):
        def decode(data):
            raise error

        return resolve_codec(decode)

    missing, elsewhere = MissingDependencyError("needs y"), CorruptFileError("bad", path="other.bin", index=1)
    with pytest.raises(MissingDependencyError) as caught:
        failing(missing).decode(b"")
    assert caught.value is missing
    with pytest.raises(CorruptFileError, match=r"^other.bin, record 1: bad$"):  # a place that is known already stays
        decode_records(failing(elsewhere), [b""], [4], "x.bin")


def test_which_record_cannot_be_decoded():
    codec = resolve_codec(Pairs())
    assert decode_records(codec, [b"ab", b"cd"], [4, 7], "x.bin") == [{"a": 97, "b": 98}, {"a": 99, "b": 100}]
    with pytest.raises(CorruptFileError, match=r"^x.bin, record 9: codec .*Pairs raised ValueError: ") as caught:
        decode_records(codec, [b"ab", b"cd", b"e", b"f"], np.array([4, 7, 9, 8]), "x.bin")
    assert (caught.value.path, caught.value.index) == ("x.bin", 9)
    assert isinstance(caught.value.__cause__, CorruptFileError)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    told = r"codec 'msgpack' needs msgpack: pip install 'dataload\[codecs\]'"
    with pytest.raises(MissingDependencyError, match=told):
        resolve_codec("msgpack").encode({"x": 1})
