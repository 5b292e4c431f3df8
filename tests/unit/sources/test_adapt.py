"""What a loader is given in place of a source."""

import re
from pathlib import Path

import numpy as np
import pytest

from dataload import ConfigError, Loader, MemorySource, RangeSource
from dataload.sources.adapt import as_source, loadable
from dataload.testing import check_source
from dataload.types import StepsAhead

ROWS = [{"x": np.array([i, i]), "name": f"r{i}"} for i in range(9)]


class OneByOne:
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return dict(ROWS[index])

    def __repr__(self):
        return "OneByOne()"


class Many(OneByOne):
    shard_lengths = 4, 5
    reads_in_order = True
    closed = False

    def __getitems__(self, indices):
        return [dict(ROWS[index]) for index in indices]

    def read_batch(self, indices, fields=None):
        return MemorySource(ROWS).read_batch(indices, fields)

    def read_ahead(self, steps, fields, *, here, share=1.0):
        return [*steps], fields, here, share

    def fingerprint(self):
        return "7" * 32

    def close(self):
        self.closed = True


class IterableDataset:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise NotImplementedError

    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("kind", [OneByOne, Many])
def test_any_source_becomes_one_of_dataload(kind):
    source = as_source(data := kind())
    failed = [each for each in check_source(source, ROWS) if each.status == "failed"]
    assert failed == []
    assert list(source.fields) == ["x", "name"]
    assert repr(source) == "WrappedSource(OneByOne())"
    assert source.shard_lengths == getattr(kind, "shard_lengths", (9,))
    assert source.reads_in_order == (kind is Many)
    assert source.fingerprint() == ("7" * 32 if kind is Many else as_source(OneByOne()).fingerprint())
    steps = [StepsAhead(0, np.arange(3), np.array([3]), 1)]
    assert source.read_ahead(steps, None, here=True) == ((steps, None, True, 1.0) if kind is Many else None)
    source.close()
    assert getattr(data, "closed", True)


def test_columns_and_tables_are_taken():
    with Loader({"x": np.arange(6), "y": list("abcdef")}, batch_size=4) as loader:
        assert [batch["y"] for batch in loader] == [list("abcd"), list("ef")]
    for name, make in (
        ("torch", lambda torch: {"x": torch.arange(3)}),
        ("pandas", lambda pandas: pandas.DataFrame({"x": range(3)})),
        ("polars", lambda polars: polars.DataFrame({"x": range(3)})),
        ("pyarrow", lambda pa: pa.table({"x": range(3)})),
        ("pyarrow", lambda pa: pa.record_batch({"x": range(3)})),
    ):
        assert loadable(make(pytest.importorskip(name))).read_batch([2])["x"].tolist() == [2]
    with pytest.raises(ConfigError, match="columns differ in length"):
        Loader({"x": [1], "y": [1, 2]}, batch_size=1)


@pytest.mark.parametrize("data", [ROWS, ["a text", "another"], np.arange(3), {0: "a", 1: "b"}, RangeSource(3), ()])
def test_what_has_records_by_index_is_left_alone(data):
    assert loadable(data) is data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train.syr", "a path is no source: pass dataload.open('train.syr')"),
        (Path("train.syr"), "a path is no source: pass dataload.open('train.syr')"),
        (["a.tar", "b.tar"], "a list of paths is no source: pass dataload.open(['a.tar', ...])"),
        ([Path("a")], "a list of paths is no source: pass dataload.open(['a', ...])"),
        ([RangeSource(1), RangeSource(2)], "a list of sources is no source: pass dataload.concat([...])"),
        ((OneByOne(), OneByOne()), "a list of sources is no source: pass dataload.concat([...])"),
        ({RangeSource(1): 0.5}, "sources with weights are no source: pass dataload.mix({...})"),
        ({"train": RangeSource(2)}, "'dict' holds data sets: pass one of them, as in data['train'], or join them"),
        ({"x": 3}, "a dict is read as columns, arrays or lists of one value per record, and 'x' is of type int"),
        ({"x": "abc"}, "and 'x' is of type str: pass a list of records"),
        ({"x": {}}, "and 'x' is 'dict': pass a list of records"),
        (iter(ROWS), "list_iterator gives its records one after another, and a loader reads them by index"),
        ((row for row in ROWS), "generator gives its records one after another"),
        (IterableDataset(), "IterableDataset gives its records one after another"),
        (type("IterableDataset", (), {"__module__": "datasets.iterable"})(), "by index: load the data set without str"),
        (OneByOne, "OneByOne is a class: pass an object of it, OneByOne(...)"),
        (None, "NoneType has no __len__ and no __getitem__; a source needs __len__ and __getitem__"),
    ],
)
def test_what_is_no_source(data, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Loader(data, batch_size=1)
