"""Files of TensorFlow: see tfrecord/README.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload.errors import UnsupportedFormatError

GOLDEN = Path(__file__).parent / "tfrecord"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def value_of(stored):
    if isinstance(stored, list):
        return [value_of(item) for item in stored]
    if "bytes" in stored:
        return bytes.fromhex(stored["bytes"])
    return np.array(stored["values"], stored["dtype"]).reshape(stored["shape"])


def of_sequence(value):
    """Steps of numbers alike are one array."""
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray) and len({v.shape for v in value}) == 1:
        return np.stack(value)
    return value


def same(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        np.testing.assert_equal(found[name], value, name)
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None), name


def test_bytes(tmp_path):
    expected = list(map(value_of, EXPECTED["bytes"]))
    with dataload.open(GOLDEN / "bytes.tfrecord", verify_checksums=True) as source:
        assert source.read(range(len(source))) == list(source) == expected
    assert len(dataload.open(GOLDEN / "empty.tfrecord")) == 0
    with dataload.create(tmp_path / "x.tfrecord") as writer:
        writer.extend(expected)
    assert (tmp_path / "x.tfrecord").read_bytes() == (GOLDEN / "bytes.tfrecord").read_bytes()


@pytest.mark.parametrize("verify", [False, True])
def test_examples(verify):
    pattern = GOLDEN / "examples.tfrecord-{00000..00001}-of-00002"
    with dataload.open(str(pattern), codec="example", verify_checksums=verify) as source:
        assert source.shard_lengths == (5, 4)
        for found, stored in zip(source, EXPECTED["examples"], strict=True):
            expected = {name: value_of(value) for name, value in stored.items()}
            words = expected["words"]
            expected["words"] = words[0] if len(words) == 1 else words
            same(found, expected)


def test_sequence_examples():
    with dataload.open(GOLDEN / "sequences.tfrecord", codec="sequence_example") as source:
        for found, stored in zip(source, EXPECTED["sequences"], strict=True):
            same(found, {name: of_sequence(value_of(value)) for name, value in stored.items()})


@pytest.mark.parametrize(
    ("name", "what"), [("gzip", "byte 0 has the magic bytes of gzip: decompress it first"), ("zlib", "byte 0 has b'")]
)
def test_compressed_files_are_refused(name, what):
    with pytest.raises(UnsupportedFormatError, match=f"{name}.tfrecord does not begin with a TFRecord.*{what}"):
        len(dataload.open(GOLDEN / f"{name}.tfrecord"))
