"""Files of TensorFlow: see tfrecord/README.md."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden_values import assert_same, value_of

import dataload
from dataload.errors import UnsupportedFormatError

GOLDEN = Path(__file__).parent / "tfrecord"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def of_sequence(value):
    """Steps of numbers alike are one array."""
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray) and len({v.shape for v in value}) == 1:
        return np.stack(value)
    return value


def test_bytes(tmp_path):
    expected = value_of(EXPECTED["bytes"])
    with dataload.open(GOLDEN / "bytes.tfrecord", verify=True) as source:
        assert source.read(range(len(source))) == list(source) == expected
    assert len(dataload.open(GOLDEN / "empty.tfrecord")) == 0
    with dataload.create(tmp_path / "x.tfrecord") as writer:
        writer.extend(expected)
    assert (tmp_path / "x.tfrecord").read_bytes() == (GOLDEN / "bytes.tfrecord").read_bytes()


@pytest.mark.parametrize("verify", [False, True])
def test_examples(verify):
    pattern = GOLDEN / "examples.tfrecord-{00000..00001}-of-00002"
    with dataload.open(str(pattern), codec="example", verify=verify) as source:
        assert source.shard_lengths == (5, 4)
        expected = value_of(EXPECTED["examples"])
        for record in expected:
            record["words"] = record["words"][0] if len(record["words"]) == 1 else record["words"]
        assert_same([dict(sorted(record.items())) for record in source], [dict(sorted(e.items())) for e in expected])


def test_sequence_examples():
    with dataload.open(GOLDEN / "sequences.tfrecord", codec="sequence_example") as source:
        for found, stored in zip(source, EXPECTED["sequences"], strict=True):
            wanted = {name: of_sequence(value_of(value)) for name, value in stored.items()}
            assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))


@pytest.mark.parametrize(
    ("name", "what"), [("gzip", "byte 0 has the magic bytes of gzip: decompress it first"), ("zlib", "byte 0 has b'")]
)
def test_compressed_files_are_refused(name, what):
    with pytest.raises(UnsupportedFormatError, match=f"{name}.tfrecord does not begin with a TFRecord.*{what}"):
        len(dataload.open(GOLDEN / f"{name}.tfrecord"))
