"""Categories: numbers of classes, one order over all files, unknown values, nulls."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import tables  # noqa: F401 - starts what pyarrow keeps

import dataload
from dataload import ConfigError, CorruptFileError

FIRST = {
    "kind": pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1]), ["low", "mid"]),
    "word": ["b", "a", "b", "c"],
    "n": [5, 5, 7, 5],
}
SECOND = {"kind": pa.array(["high", "low"]).dictionary_encode(), "word": ["d", "a"], "n": [3, 7]}


@pytest.fixture(params=[".parquet", ".arrow", ".feather"])
def paths(tmp_path, request):
    found = [tmp_path / f"{name}{request.param}" for name in "ab"]
    for path, columns in zip(found, (FIRST, SECOND), strict=True):
        if request.param == ".parquet":
            pq.write_table(pa.table(columns), path, row_group_size=3)
        else:
            compression = "zstd" if request.param == ".feather" else "uncompressed"
            pyarrow.feather.write_feather(pa.table(columns), path, compression=compression, chunksize=3)
    return found


def test_null_is_no_class_of_text_as_polars_writes_it(tmp_path):
    pyarrow.feather.write_feather(pa.table({"t": pa.array(["b", None, "a"], pa.string_view())}), tmp_path / "a.arrow")
    assert dataload.open(tmp_path / "a.arrow", categories=["t"]).fields["t"].classes == ("a", "b")


def test_classes_have_one_order_over_all_files(paths):
    source = dataload.open(paths, categories=["kind", "word", "n"], nulls={"kind": -1})
    assert {name: spec.classes for name, spec in source.fields.items()} == {
        "kind": ("low", "mid", "high"),  # as in the dictionaries
        "word": ("a", "b", "c", "d"),
        "n": ("3", "5", "7"),
    }
    batch = source.read_batch([4, 0, 1, 2, 5, 3])
    assert {name: column.tolist() for name, column in batch.items()} == {
        "kind": [2, 1, 0, -1, 0, 1],
        "word": [3, 1, 0, 1, 0, 2],
        "n": [0, 1, 1, 2, 2, 1],
    }
    assert batch["kind"].dtype == np.int64
    masked = dataload.open(paths, categories="auto", nulls="mask")
    assert masked.fields["word"].classes is None
    batch = masked.read_batch([2, 5])
    assert (batch["kind"].tolist(), batch["kind_is_null"].tolist(), batch["word"]) == (
        [0, 0],
        [True, False],
        ["b", "a"],
    )
    executor = "processes" if paths[0].suffix == ".parquet" else "threads"
    with dataload.Loader(source, batch_size=6, num_workers=2, executor=executor) as loader:
        (batch,) = loader
    assert batch["word"].tolist() == [1, 0, 1, 2, 3, 0]
    assert source.fingerprint() != dataload.open(paths, nulls={"kind": "?"}).fingerprint()
    assert dataload.open(paths, nulls={"kind": "?"}).read_batch([0, 2])["kind"] == ["mid", "?"]


def test_given_classes_refuse_others_where_they_are_read(paths):
    source = dataload.open(paths, categories={"word": ["c", "b", "a"]}, fields=["word"])
    assert source.read_batch([0, 1, 3])["word"].tolist() == [1, 2, 0]
    message = "record 0: field 'word' has a value that is none of its 3 classes"
    with pytest.raises(CorruptFileError, match=message) as error:
        source.read_batch([4, 5])
    assert error.value.path == str(paths[1])
    with dataload.Loader(source, batch_size=6, on_error="skip", max_bad=1) as loader:
        (batch,) = loader
        assert loader.statistics().bad == 1
    assert batch["word"].tolist() == [1, 2, 1, 0, 2]


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        (["q"], "has no field 'q'"),
        ({"word": ["a", "a"]}, "a class of 'word' is listed twice"),
        ({"n": ["x"]}, "the classes of 'n' do not fit its type, int64"),
        ("all", "categories must be 'auto', a list, a mapping or None; got 'all'"),
    ],
)
def test_wrong_categories(paths, categories, message):
    with pytest.raises(ConfigError, match=message):
        dataload.open(paths, categories=categories, nulls="mask")


def declared(path, columns, features):
    """Write what Hugging Face's library writes about columns."""
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return dataload.open(path)


def test_class_labels_of_hugging_face_name_the_classes(tmp_path):
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "n": {"dtype": "int64", "_type": "Value"}}
    fields = declared(tmp_path / "a.parquet", {"label": [0, 1, 1], "n": [5, 6, 7]}, features).fields
    assert (fields["label"].classes, fields["n"].classes) == (("cat", "dog"), None)


LISTS, PAIRS = pa.list_(pa.list_(pa.float32())), pa.list_(pa.list_(pa.float32(), 2))


@pytest.mark.parametrize("kind", [LISTS, PAIRS])
def test_arrays_of_hugging_face_have_the_shape_that_it_declares(tmp_path, kind):
    values = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    columns = {"x": pa.array(values.tolist(), kind), "n": pa.array([[1], [2]]), "text": pa.array([["a"], ["b"]])}
    lists = declared(tmp_path / "a.parquet", columns, {})
    for shape in ([2], [2, 2, 2], [0, 2], [-2, 2], [2.0, 2], [True, 2], ["2", 2], [], "22", None, {}):
        features = {"x": {"shape": shape, "_type": "Array2D"}, "n": {"shape": [1]}, "text": {"shape": [1]}}
        source = declared(tmp_path / "b.parquet", columns, features)
        assert source.fields["x"] == lists.fields["x"]
        assert str(source[1]["x"]) == str(lists[1]["x"])
        assert str(source.fields["n"]) == "int64 (1)"
        assert source.read_batch([1], ["text"]) == {"text": [["b"]]}
    source = declared(tmp_path / "b.parquet", columns, {"x": {"shape": [2, 2]}})
    assert str(source.fields["x"]) == "float32 (2, 2)"
    assert np.array_equal(source.read_batch([1, 0])["x"], values[::-1])
    with pytest.raises(CorruptFileError, match=r"record 0: field 'x' has the shape \(3, 2\), but one of its lists has"):
        declared(tmp_path / "b.parquet", columns, {"x": {"shape": [3, 2]}})[0]
