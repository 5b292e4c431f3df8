import json
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from made_files import image as png

import dataload
from dataload.codecs import example
from dataload.errors import ConfigError, CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.array_record.tfds import TfdsSource

CLASSES = "tensorflow_datasets.core.features."


def tensor(dtype, shape=(), *, sort="tensor_feature.Tensor", encoding="none", **more):
    dimensions = {"dimensions": [str(extent) for extent in shape]} if shape else {}
    content = {"shape": dimensions, "dtype": dtype, "encoding": encoding, **more}
    return {"pythonClassName": CLASSES + sort, "tensor": content}


def image(shape, dtype="uint8"):
    content = {"shape": {"dimensions": [str(extent) for extent in shape]} if shape else {}, "dtype": dtype}
    return {"pythonClassName": CLASSES + "image_feature.Image", "image": content}


TEXT = {"pythonClassName": CLASSES + "text_feature.Text", "text": {}}
LABEL = {"pythonClassName": CLASSES + "class_label_feature.ClassLabel", "classLabel": {"numClasses": "3"}}


def features_dict(features):
    return {"pythonClassName": CLASSES + "features_dict.FeaturesDict", "featuresDict": {"features": features}}


@pytest.fixture
def write(tmp_path):
    """Writes a data set of one split and one shard, as TensorFlow Datasets lays it out."""

    def write(features, records, **info):
        split = {"name": "train", "numBytes": "1", "shardLengths": [str(len(records))]}
        (tmp_path / "dataset_info.json").write_text(
            json.dumps({"fileFormat": "array_record", "name": "demo", "splits": [split], "version": "1.0.0", **info})
        )
        (tmp_path / "features.json").write_text(json.dumps(features_dict(features)))
        path = tmp_path / "demo-train.array_record-00000-of-00001"
        with dataload.create(path, format="array_record", overwrite=True) as writer:
            for record in records:
                writer.write(record if isinstance(record, bytes) else example.encode(record))
        return tmp_path

    return write


def read(directory, **options):
    with TfdsSource(directory, split="train", **options) as source:
        return list(source)


SEQUENCE = {"pythonClassName": CLASSES + "sequence_feature.Sequence", "sequence": {"feature": TEXT, "length": "-1"}}


def test_records_of_the_documented_layout(write):
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    box = np.arange(4, dtype=np.float32)
    features = {
        "image": image((2, 2, 3)),
        "any": image(()),
        "label": LABEL,
        "caption": TEXT,
        "box": tensor("float32", (2, 2)),
    }
    stored = {"image": png(pixels), "any": png(pixels), "label": 2, "caption": "a cat", "box": box, "words": [b"a"]}
    directory = write({**features, "words": SEQUENCE}, [stored])
    # Features that are not read may be of any sort.
    (record,) = read(directory, fields=list(features))
    assert list(record) == list(features)
    np.testing.assert_array_equal([record["image"], record["any"]], [pixels] * 2)
    assert (record["label"], record["caption"], record["box"].tolist()) == (2, b"a cat", [[0, 1], [2, 3]])
    nothing = bytes.fromhex("0a090a070a017812020a00")  # a bytes_list without values, as of an empty tensor
    (record,) = read(write({"x": tensor("int32", (-1, 2))}, [nothing]))
    assert (record["x"].dtype, record["x"].shape) == (np.int32, (0, 2))
    (record,) = read(
        write({"outer": features_dict({"n": tensor("int64")}), "label": LABEL}, [{"outer/n": 5, "label": 1}])
    )
    assert record == {"outer": {"n": 5}, "label": 1}
    directory = write({"x": tensor("int32", (-1, 2))}, [nothing])
    long = f"{directory}{'/.' * 40}"
    source = TfdsSource(long, split="train[:100%]", fields=["x"])
    assert repr(source) == f"TfdsSource('...{long[-77:]}', split='train[:100%]', 1 fields)"
    with pytest.raises(ConfigError, match="only reads TensorFlow Datasets; write records with codec='example'"):
        source.options.codec.encode({"x": 1})


NOT_SIMPLE = [
    *(tensor(dtype) for dtype in ("bfloat16", "complex64", "variant")),
    *(tensor("int32", (-1, -1), encoding="zlib"), tensor("int32", encoding="gzip"), tensor("int32", optional=True)),
    tensor("string", encoding="bytes"),
    *(image((2, 2, 4)), image((2, 2, 1), "uint16"), image((3, 2, 2, 3))),
    {**TEXT, "text": {"use_encoder": True}},
    SEQUENCE,
    {"pythonClassName": CLASSES + "audio_feature.Audio", "audio": {}},
    {"pythonClassName": CLASSES + "bounding_boxes.BBoxFeature", "boundingBox": {}},
    {"pythonClassName": "my_module.MyFeature", "tensor": {"shape": {}, "dtype": "int64"}},
]


@pytest.mark.parametrize("feature", NOT_SIMPLE)
def test_what_is_not_simple_is_refused_by_name(write, feature):
    directory = write({"outer": features_dict({"x": feature})}, [b"never read"])
    sort = feature["pythonClassName"].rpartition(".")[2]
    with pytest.raises(UnsupportedFormatError, match=rf"feature 'outer/x' is {sort} .*tfds\.data_source"):
        TfdsSource(directory, split="train")


def info_of(split):
    split = {"name": "train", "shardLengths": ["1"], **split}
    return json.dumps({"fileFormat": "array_record", "name": "demo", "splits": [split]})


INFO, FEATURES = "dataset_info.json", "features.json"
EXPECTED = "expected featuresDict with features"
FILES = [  # file, its text (None: it is missing), error, message
    (INFO, None, SourceNotFoundError, r"there is no .*dataset_info\.json"),
    (INFO, "{", CorruptFileError, "invalid JSON"),
    (INFO, "[" * 100_000, CorruptFileError, "invalid JSON: maximum recursion"),
    (INFO, "[]", CorruptFileError, r"expected a JSON object, found '\[\]'"),
    (INFO, '{"name": "x"}', UnsupportedFormatError, "in files of format 'tfrecord'.*file_format=\"array_record\""),
    (INFO, '{"fileFormat": "array_record", "name": "x"}', CorruptFileError, "expected a name, and splits.*'splits'"),
    (INFO, info_of({"shardLengths": ["-1"]}), CorruptFileError, r"ValueError shardLengths \(-1,\)"),
    (INFO, info_of({"filepathTemplate": "{S}"}), CorruptFileError, "KeyError 'S'"),
    (INFO, info_of({"shardLengths": []}), ConfigError, "split 'train' of .* selects no records"),
    (INFO, info_of({"shardLengths": ["2"]}), ConfigError, "selects records 0 to 2; the file has 1"),
    (FEATURES, None, SourceNotFoundError, r"there is no .*features\.json"),
    (FEATURES, "{}", CorruptFileError, rf"{FEATURES}: {EXPECTED}.*KeyError 'featuresDict'"),
    (FEATURES, '{"featuresDict": {"features": {"x": 1}}}', CorruptFileError, f"{EXPECTED}.*TypeError"),
    (FEATURES, '{"featuresDict": {"features": {"x": {}}}}', CorruptFileError, f"{EXPECTED}.*KeyError 'pythonClassName"),
    (FEATURES, json.dumps(features_dict({"x": tensor("int64", ["many"])})), CorruptFileError, f"{EXPECTED}.*ValueErro"),
    *(
        (
            INFO, info_of(split),
            CorruptFileError, f"{INFO}: it must not name this file: '{re.escape(shown)}' is not the name of a fil",
        )
        for split, shown in (
            ({"filepathTemplate": "/etc/{SPLIT}"}, "/etc/train"),
            ({"filepathTemplate": "../{SPLIT}"}, "../train"),
            ({"filepathTemplate": "a/../../{SPLIT}"}, "a/../../train"),
            ({"filepathTemplate": "a//{SPLIT}"}, "a//train"),
            ({"filepathTemplate": "{SPLIT}/"}, "train/"),
            ({"filepathTemplate": "."}, "."),
            ({"filepathTemplate": "{SPLIT}\0"}, "train\\x00"),
            ({"filepathTemplate": "x y" * 5000}, ("x y" * 80)[:80]),
            ({"name": "/../train"}, "demo-/../train.array_record-00000-of-00001"),
            ({"name": "..", "filepathTemplate": "{SPLIT}/x"}, "../x"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "error", "message"), FILES)
def test_files_that_do_not_fit(write, name, text, error, message):
    directory = write({"x": LABEL}, [{"x": 1}])
    (directory / name).unlink()
    if text is not None:
        (directory / name).write_text(text)
    with pytest.raises(error, match=message):
        read(directory)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("train test", {}, "'train test' is not the name of a split, with or without a slice"),
        ("train[::2]", {}, r"the slice \[::2\] is not like"),
        ("train[1.5:]", {}, r"the slice \[1\.5:\] needs integers"),
        ("train[1.5.2%:]", {}, r"the slice \[1\.5\.2%:\] needs numbers"),
        ("train[5]", {}, r"\[5\] is a single number, which can only select a shard: \[5shard\]"),
        ("train[:101%]", {}, r"\[:101%\] is outside of -100% to 100%"),
        ("train[:2]", {}, r"\[:2\] reaches beyond the 1 records of 'train'"),
        ("all[:1]", {}, "'all' takes no slice: slice each split"),
        ("trian", {}, "there is no split 'trian': .*train"),
        ("train", {"fields": ["lable"]}, r"features\.json has no feature 'lable': .*label"),
    ],
)
def test_settings_that_do_not_fit(write, spec, options, message):
    directory = write({"label": LABEL}, [{"label": 1}])
    with pytest.raises(ConfigError, match=message) as caught:
        TfdsSource(directory, split=spec, **options)
    assert options or (caught.value.key, caught.value.value) == ("split", spec)
    with pytest.raises(ConfigError, match="one directory, got 2: open each of them, and join them with ConcatSource"):
        TfdsSource([directory, directory], split="train")


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [
        (tensor("int64"), [1, 2], "expected one value, found 2"),
        (tensor("int64", (3,)), [1, 2], r"2 values do not fill the shape \(3,\)"),
        (tensor("int64"), 1.5, "expected numbers stored as int64, found 1 of float32"),
        (tensor("float64"), 1, "expected numbers stored as float32, found 1 of int64"),
        (tensor("float32"), b"x", "expected numbers stored as float32, found bytes"),
        (tensor("uint8"), [b"x", b"y"], "expected numbers stored as int64, found a list of 2 bytes"),
        (TEXT, 1, r"expected bytes, found numbers \(int64\)"),
        (tensor("int16", (2,), encoding="bytes"), 1, "expected the bytes of an array, found 1 of int64"),
        (tensor("int16", (2,), encoding="bytes"), b"123", "the bytes are not an array of int16: buffer size"),
        (tensor("int16", (2,), encoding="zlib"), b"1234", "the bytes are not an array of int16: Error -3"),
        (tensor("int16", (3,), encoding="zlib"), zlib.compress(bytes(4)), "2 values do not fill"),
        (image((2, 2, 3)), 1, "expected an image as bytes, found 1 of int64"),
        (image((2, 2, 3)), b"x", "an image cannot be decoded"),
        (image((2, 3, 3)), png(np.zeros((2, 2, 3), np.uint8)), r"shape \(2, 3, 3\), found \(2, 2, 3\)"),
        (image((-1, -1, 1)), png(np.eye(3, dtype=np.uint8)[None]), "expected a grey image, found one with colours"),
    ],
)
def test_records_that_contradict_their_features(write, feature, value, message):
    value = np.array(value) if isinstance(value, list) and not isinstance(value[0], bytes) else value
    directory = write({"a": LABEL, "b": features_dict({"x": feature})}, [{"a": 0, "b/x": value}])
    with pytest.raises(CorruptFileError, match=rf"record 0: feature 'b/x': .*{message}") as caught:
        read(directory)
    assert caught.value.index == 0
    with pytest.raises(CorruptFileError, match=r"record 0: the record has no feature 'a': .*labels"):
        read(write({"a": LABEL}, [{"labels": 1}]))


def test_a_compressed_array_is_inflated_up_to_the_limit(write):
    directory = write({"x": tensor("uint8", (5000,), encoding="zlib")}, [{"x": zlib.compress(bytes(5000))}])
    assert not TfdsSource(directory, split="train", max_record_bytes=5000)[0]["x"].any()
    with pytest.raises(CorruptFileError, match="the first part of a compressed array takes 4,001 bytes of memory"):
        TfdsSource(directory, split="train", max_record_bytes=4000).read([0])


def test_a_data_set_opens_by_its_directory_or_by_name_and_version(tmp_path):
    demo = Path(__file__).parents[3] / "golden" / "tfds" / "demo"
    for version in ("1.0.0", "1.2.0", "1.10.0"):
        shutil.copytree(demo / "1.0.0", tmp_path / "demo" / version)
    for path in ("demo/1.10.0", "tfds:demo", "tfds:demo:1.10.0"):
        prefix, colon, rest = path.rpartition("tfds:")
        source = dataload.open(f"{prefix}{colon}{tmp_path}/{rest}", split="train")
        assert type(source).__name__ == "TfdsSource"
        assert {os.path.dirname(file) for file in source.paths} == {f"{tmp_path}/demo/1.10.0"}
    with pytest.raises(ConfigError, match="format 'tfds' needs the option 'split': pass split="):
        dataload.open(tmp_path / "demo" / "1.2.0")
    with pytest.raises(SourceNotFoundError, match=r"demo:3\.0\.0"):
        dataload.open(f"tfds:{tmp_path}/demo:3.0.0", split="train")
