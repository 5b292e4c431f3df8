"""The facade of Syrah; the classes of errors and the values were seen with Syrah 0.2.0 and py-bson 0.5.10."""

import os
import pickle
import sys

import numpy as np
import pytest
from golden_values import SYRAH, syrah_cases

import dataload
from dataload.compat import syrah
from dataload.compat.syrah import File, FileError, SyrahConcatDataset, SyrahDataset
from dataload.errors import CorruptFileError
from dataload.sources.syrah.writer import SyrahWriter


def item(index):
    return {
        "label": np.array([index]),
        "features": np.arange(4, dtype=np.float32) + index,
        "tokens": np.arange(index, dtype=np.int16),
        "text": np.array([f"item {index}"]),
    }


@pytest.fixture
def path(tmp_path):
    with File(tmp_path / "test.syr", mode="w") as syr:
        for index in range(6):
            syr.add_item(item(index))
    return tmp_path / "test.syr"


def same(array, expected):
    """What is expected of the original: one dimension, of text one element."""
    assert isinstance(array, np.ndarray)
    if expected["dtype"] == "str":
        assert (array.dtype.kind, array.shape) == ("U", (1,))
        data = array[0].encode()
    else:
        assert (array.dtype.name, list(array.shape)) == (np.dtype(expected["dtype"]).name, expected["shape"])
        data = array.tobytes()
    return data.hex() == expected["hex"]


@pytest.mark.parametrize("case", syrah_cases("ok"))
def test_golden_values(case):
    with File(str(SYRAH / case["file"]), "r") as syr:
        assert syr.num_items() == case["num_records"]
        for index, expected in enumerate(case["records"]):
            found = syr.get_item(index)
            assert list(found) == case["keys"]
            for key, value in expected.items():
                assert same(found[key], value)
                assert same(syr.get_array(index, key), value)


def read_all(path):
    with File(path, "r") as syr:
        return [syr.get_item(index) for index in range(syr.num_items())]


@pytest.mark.parametrize("case", syrah_cases("error"))
def test_golden_errors(case):
    with pytest.raises(CorruptFileError, match=case["file"]):
        read_all(SYRAH / case["file"])


def test_shapes_are_flat_but_kept_in_the_file(tmp_path):
    arrays = {"m": np.arange(6.0).reshape(2, 3), "zero": np.array(7), "text": np.array([["a", "b"], ["é", ""]])}
    arrays["big-endian"] = np.array([1, 2, -3], ">i4")
    with File(tmp_path / "a.syr", "w") as syr:
        syr.add_item(arrays)
    with File(tmp_path / "a.syr", "r") as syr:
        found = syr.get_item(0)
        assert found["m"].tolist() == [0, 1, 2, 3, 4, 5]
        assert found["zero"].tolist() == [7]
        assert found["big-endian"].tolist() == [1, 2, -3]
        assert found["text"].tolist() == ["abé"]
        assert syr.get_array(0, "zero").shape == (1,)
    with dataload.open(tmp_path / "a.syr") as source:
        assert source[0]["m"].tolist() == arrays["m"].tolist()
        assert source[0]["zero"].shape == ()


def test_a_bare_text_is_an_array_of_one(tmp_path):
    for name, text in (("a", "cat"), ("b", np.array(["cat"]))):
        with File(tmp_path / f"{name}.syr", "w") as syr:
            syr.add_item({"label": text, "x": np.ones(2)})
    assert (tmp_path / "a.syr").read_bytes() == (tmp_path / "b.syr").read_bytes()
    with File(tmp_path / "a.syr", "r") as syr:
        assert syr.get_item(0)["label"].tolist() == ["cat"]
    keys = "x"  # the original takes the letters of a text as names
    assert [len(row) for row in SyrahDataset(tmp_path / "a.syr", keys)] == [1]
    assert [x.tolist() for (x,) in SyrahDataset(tmp_path / "a.syr", keys).__getitems__([0])] == [[1, 1]]


def test_bytes_of_our_own_files_are_uint8(tmp_path):
    with SyrahWriter(tmp_path / "a.syr") as writer:
        writer.write({"raw": b"xyz"})
    with File(tmp_path / "a.syr", "r") as syr:
        assert syr.get_item(0)["raw"].tolist() == list(b"xyz")
        assert syr.get_array(0, "raw", dtype="str").tolist() == ["xyz"]


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("label", "int32", [3, 0]),
        ("label", "uint8", [3, 0, 0, 0, 0, 0, 0, 0]),
        ("label", "", [3]),
        ("text", "uint8", list(b"item 3")),
        ("label", "str", ["\x03"]),  # numpy drops the zeros at the end of text
    ],
)
def test_another_dtype(path, name, dtype, expected):
    with File(path, "r") as syr:
        found = syr.get_array(3, name, dtype=dtype)
        assert found.tolist() == expected
        assert found.flags.writeable


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        *(
            ((0, "label", dtype), TypeError, f"the format does not support dtype '{dtype}'; it supports bool, .*str")
            for dtype in ("int128", "S", "float")
        ),
        ((0, "text", "int32"), ValueError, "6 bytes are not a multiple of the size of"),
        ((5, "features", "str"), UnicodeDecodeError, "utf-8"),
        ((6, "label"), IndexError, "index 6 is out of range for 6 items in .*test.syr"),
        ((-1, "label"), ValueError, "index -1 is negative; there are 6 items in .*test.syr"),
        (("6", "label"), IndexError, "index 6 is out of range"),
        (("x", "label"), TypeError, "integer"),
        ((1.0, "label"), TypeError, "integer"),
        ((0, "labl"), KeyError, "has no array 'labl'; it has label, features, tokens, text"),
        ((9, "labl"), IndexError, "index 9"),  # the index is looked at first
    ],
)
def test_arrays_that_cannot_be_read(path, arguments, error, text):
    with File(path, "r") as syr:
        with pytest.raises(error, match=text):
            syr.get_array(*arguments)
        if arguments[1:] == ("label",):
            with pytest.raises(error, match=text):
                syr.get_item(arguments[0])


CLOSED = r"cannot read an item from .*: it is closed; open it with mode 'r'"
READ_ONLY = r"cannot write an item to .*test.syr: its mode is 'r'; open it with"
MODES = "opened with mode 'r' or 'w', got"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda syr, _: syr.add_item({}), OSError, READ_ONLY),
        (lambda syr, _: syr.close() or syr.get_item(0), OSError, CLOSED),
        (lambda syr, _: syr.close() or syr.get_array(0, "text"), OSError, CLOSED),
        (lambda syr, path: syr.open(f"{path}2", "w") or syr.get_item(0), OSError, "its mode is 'w'"),
        (lambda syr, path: syr.open(f"{path}2", "w") or syr.close() or syr.add_item({}), OSError, "cannot write an it"),
        (lambda _, path: File(f"{path}.none", "r"), FileNotFoundError, r"there is no .*\.none"),
        *((lambda _, path, mode=mode: File(path, mode), ValueError, MODES) for mode in ("x", "", "rb")),
        (lambda _, path: File(path / "no" / "x.syr", "w"), FileNotFoundError, "the directory .* does not exist"),
        (lambda _, path: File(path.parent, "r"), OSError, "is a directory"),
        (lambda _, path: File(path.parent, "w"), OSError, "is a directory"),
    ],
)
def test_files_in_another_mode(path, call, error, text):
    with File(path, "r") as syr, pytest.raises(error, match=text):
        call(syr, path)


def test_what_the_operating_system_refuses(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # not by the file's mode: the tests may run as root
    with pytest.raises(FileError, match=r"cannot read .*: Permission denied") as caught:
        File(path, "r")
    assert caught.value.path == str(path)


def test_opening_again(path, tmp_path):
    other = tmp_path / "other.syr"
    syr = File(path, "r")
    syr.open(other, "w")
    syr.add_item({"x": np.ones(2)})
    syr.open(other, "r")
    assert syr.num_items() == 1
    assert syr.get_item(0)["x"].tolist() == [1, 1]
    syr.open(path, "r")
    assert syr.get_array(5, "label").tolist() == [5]
    syr.open(other, "w")  # replaces it
    syr.close()
    assert read_all(other) == []


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"x": np.ones(1), "z": np.ones(1)}, KeyError, "item 1 has arrays .*'z'.*, the first had .*'y'"),
        ({"x": np.ones(1), "y": np.ones(1, np.float32)}, ValueError, "field 'y' of record 1 is float32"),
        ({"x": np.ones(1), "y": np.ones(1, complex)}, TypeError, "array 'y' has dtype complex128; the format supports"),
        ({"x": np.ones(1), "y": np.array([b"b"])}, TypeError, r"array 'y' has dtype \|S1"),
        ({"x": np.ones(1), "y": [1.0]}, ValueError, "array 'y' is a list, not a numpy array"),
        ({"x": np.ones(1), 3: np.ones(1)}, ValueError, r"names of arrays must be strings, got 3 \(int\)"),
    ],
)
def test_an_item_that_is_refused_leaves_nothing(tmp_path, wrong, error, match):
    good = {"x": np.zeros(2), "y": np.zeros(3)}
    with File(tmp_path / "a.syr", "w") as syr:
        syr.add_item(good)
        with pytest.raises(error, match=match):
            syr.add_item(wrong)
        syr.add_item(good)
    with File(tmp_path / "b.syr", "w") as syr:
        syr.add_item(good)
        syr.add_item(good)
    assert (tmp_path / "a.syr").read_bytes() == (tmp_path / "b.syr").read_bytes()


def test_pickling(path, tmp_path):
    with File(path, "r") as syr:
        again = pickle.loads(pickle.dumps(syr))
        assert again.get_item(2)["label"].tolist() == [2]
        again.close()
        dataset = SyrahDataset(path, ["label"], {"label": abs})
        assert dataset[3][0].tolist() == pickle.loads(pickle.dumps(dataset))[3][0].tolist()
    assert pickle.loads(pickle.dumps(syr)).num_items() == 6
    with File(tmp_path / "new.syr", "w") as new, pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(new)


def test_a_data_set(path):
    dataset = SyrahDataset(str(path), ["features", "label", "tokens"], process_funcs={"label": lambda x: int(x[0])})
    rows = list(dataset)  # ends with an IndexError, as a sequence does
    assert len(rows) == len(dataset) == dataset.len == 6
    for index, (features, label, tokens) in enumerate(rows):
        assert features.tolist() == item(index)["features"].tolist()
        assert label == index
        assert tokens.tolist() == item(index)["tokens"].tolist()
    for keys in (dataset.keys, ["label", "features"], ["text"], ["label", "label"], []):
        dataset.keys = keys
        rows = [[np.asarray(value).tolist() for value in dataset[index]] for index in range(6)]
        asked = [4, 0, 4]
        found = [[np.asarray(value).tolist() for value in row] for row in dataset.__getitems__(asked)]
        assert found == [rows[index] for index in asked]
        assert dataset.__getitems__([]) == []
    assert (dataset.worker_init_fn(), dataset.worker_init_fn(1)) == (None, None)
    own = type("Own", (SyrahDataset,), {"__getitem__": lambda self, index: -index})(path, ["label"])
    assert own.__getitems__([2, 1]) == [-2, -1], "a method of one's own counts"
    for keys, error, asked in ((["features"], IndexError, [6, 1]), (["features", "labl"], KeyError, [0, 1])):
        dataset.keys = keys
        for read in (lambda asked=asked: dataset[asked[0]], lambda asked=asked: dataset.__getitems__(asked[::-1])):
            with pytest.raises(error):
                read()


@pytest.fixture(params=["torch", "no torch"])
def classes(request, monkeypatch):
    """The two classes of datasets, where torch is installed and where it is not."""
    if request.param == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.delitem(sys.modules, "dataload.compat._syrah_datasets")
    return syrah.SyrahDataset, syrah.SyrahConcatDataset


def test_several_data_sets(path, tmp_path, classes):
    one, several = classes
    with File(tmp_path / "b.syr", "w") as syr:
        for index in range(6, 10):
            syr.add_item(item(index))
    first, second = one(path, ["label"]), one(tmp_path / "b.syr", ["label"])
    for both in (several([first, second]), first + second):
        assert len(both) == 10
        assert [int(label[0]) for (label,) in both] == list(range(10))
        assert int(both[-1][0][0]) == int(both[np.int64(9)][0][0]) == 9
        assert both.datasets == [first, second]
        assert both.cumulative_sizes == [6, 10]
        assert both.worker_init_fn(0) is None
        with pytest.raises(IndexError):
            both[10]
        with pytest.raises(ValueError, match=r"negative|length"):
            both[-11]
    assert [int(label[0]) for (label,) in both + first][9:] == [9, 0, 1, 2, 3, 4, 5]
    with pytest.raises((AssertionError, ValueError), match=r"empty iterable|at least one dataset"):
        several([])


def test_the_data_sets_are_those_of_torch(path):
    data = pytest.importorskip("torch.utils.data")
    both = SyrahConcatDataset([SyrahDataset(path, ["label"])] * 2)
    assert isinstance(both, data.ConcatDataset)
    again = pickle.loads(pickle.dumps(both))
    assert type(again) is SyrahConcatDataset
    assert isinstance(again.datasets[0], data.Dataset)
    (found,) = data.DataLoader(both, batch_size=12)
    assert found[0][:, 0].tolist() == [0, 1, 2, 3, 4, 5] * 2
    with pytest.raises(AttributeError, match=r"module .* has no attribute 'Dataset'"):
        syrah.Dataset  # noqa: B018
