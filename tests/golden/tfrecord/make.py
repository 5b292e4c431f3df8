"""Write the files of this folder: python make.py, with tensorflow-cpu 2.21.0."""

import json
import os

import numpy as np
import tensorflow as tf

HERE = os.path.dirname(os.path.abspath(__file__))
RNG = np.random.default_rng(17)


def feature(value):
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return tf.train.Feature(float_list=tf.train.FloatList(value=value))
    if isinstance(value, np.ndarray):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value))
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=value if isinstance(value, list) else [value]))


def features(record):
    return tf.train.Features(feature={name: feature(value) for name, value in record.items()})


def as_json(value):
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return list(map(as_json, value))
    return {"dtype": str(value.dtype), "shape": value.shape, "values": value.ravel().tolist()}


def write(name, records, options=None):
    with tf.io.TFRecordWriter(os.path.join(HERE, name), options) as writer:
        for record in records:
            writer.write(record)


def example(number):
    return {
        "image": RNG.bytes(int(RNG.integers(0, 400))),
        "label": np.array([number - 3]),
        "scores": RNG.random(5, np.float32),
        "words": [b"a", b"", b"longer"][: number % 4],
        "none": np.zeros(0, np.int64),
        "large": np.array([2**63 - 1, -(2**63), 300, 0]),
    }


def sequence(number):
    steps = number + 1
    lists = {
        "frames": [RNG.bytes(7) for _ in range(steps)],
        "positions": [RNG.random(3, np.float32) for _ in range(steps)],
        "ragged": [np.arange(step) for step in range(steps)],
        "empty": [],
    }
    return {"length": np.array([steps]), "name": b"s%d" % number}, lists


def main():
    plain = [RNG.bytes(size) for size in (0, 1, 12, 300, 2000, 0, 5000)]
    write("bytes.tfrecord", plain)
    write("empty.tfrecord", [])
    write("gzip.tfrecord", plain[:3], tf.io.TFRecordOptions(compression_type="GZIP"))
    write("zlib.tfrecord", plain[:3], tf.io.TFRecordOptions(compression_type="ZLIB"))
    examples = [example(number) for number in range(9)]
    serialized = [tf.train.Example(features=features(record)).SerializeToString() for record in examples]
    for shard in range(2):
        write(f"examples.tfrecord-{shard:05d}-of-00002", serialized[shard * 5 : shard * 5 + 5])
    sequences = [sequence(number) for number in range(4)]
    messages = []
    for context, lists in sequences:
        found = {
            name: tf.train.FeatureList(
                feature=[feature(np.asarray(v) if not isinstance(v, bytes) else v) for v in steps]
            )
            for name, steps in lists.items()
        }
        messages.append(
            tf.train.SequenceExample(
                context=features(context), feature_lists=tf.train.FeatureLists(feature_list=found)
            ).SerializeToString()
        )
    write("sequences.tfrecord", messages)
    # What TensorFlow itself reads again.
    assert [record.numpy() for record in tf.data.TFRecordDataset(os.path.join(HERE, "bytes.tfrecord"))] == plain
    expected = {
        "bytes": list(map(as_json, plain)),
        "examples": [{name: as_json(value) for name, value in record.items()} for record in examples],
        "sequences": [
            {name: as_json(value) for name, value in context.items()}
            | {name: list(map(as_json, steps)) for name, steps in lists.items()}
            for context, lists in sequences
        ],
    }
    with open(os.path.join(HERE, "expected.json"), "w") as stream:
        json.dump(expected, stream)


main()
