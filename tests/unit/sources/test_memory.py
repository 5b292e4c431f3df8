"""Data in memory, and what a loader takes in place of a source."""

import pickle
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from made_files import same

import dataload
from dataload import ConfigError, CorruptFileError, Loader, MemorySource, RangeSource
from dataload.collate import default_collate
from dataload.sources.views.adapt import as_source, loadable
from dataload.testing import check_source
from dataload.types import FieldSpec, StepsAhead

RECORDS = [{"x": np.arange(3) + i, "t": f"text {i}", "b": bytes(i), "n": i, "f": i / 2} for i in range(5)]
COLUMNS = {name: [record[name] for record in RECORDS] for name in RECORDS[0]}
COLUMNS["x"] = np.stack(COLUMNS["x"])
BOTH = MemorySource(RECORDS), MemorySource(COLUMNS)


def test_columns_and_records_are_the_same_data():
    by_rows, by_columns = BOTH
    same(list(by_rows), RECORDS)
    same(list(by_columns), RECORDS)
    same(by_columns.read_batch([4, 0, 4]), by_rows.read_batch([4, 0, 4]))
    assert by_rows.fields == by_columns.fields
    assert by_rows.fields["x"] == FieldSpec("int64", (3,))
    assert by_rows.fingerprint() == by_columns.fingerprint()


@pytest.mark.parametrize("dtype", ["u1", "f4", ">f4", "M8[s]", [("a", "i4", (30,)), ("b", ">f8", (20,))]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_rows_are_those_of_numpy(dtype, order):
    random, shape = np.random.default_rng(0), (7, 300)
    size = int(np.prod((20, *shape))) * np.dtype(dtype).itemsize
    values = np.asarray(np.frombuffer(random.bytes(size), dtype).reshape(20, *shape), order=order)
    rows = random.integers(0, 20, 50)
    found = MemorySource({"x": values}).read_batch(rows)["x"]
    assert (found.dtype, found.shape) == (values.dtype.newbyteorder("="), (50, *shape))
    assert found.tobytes() == values[rows].astype(found.dtype).tobytes()


def test_fields_are_chosen_in_order():
    for source in (MemorySource(data, fields=["n", "t"]) for data in (RECORDS, COLUMNS)):
        assert list(source[0]) == list(source.fields) == list(source.read_batch([0, 1])) == ["n", "t"]
        assert list(source.read_batch([0, 1], fields=["t"])) == ["t"]
        assert source.read_batch([0, 1], fields=[]) == {}
        with pytest.raises(ConfigError):
            source.read_batch([0], fields=["x"])
    assert MemorySource([b"a", b"b"]).read_batch([1, 0]) == [b"b", b"a"]
    source = MemorySource(records := [{"x": 1}])
    records.append({"x": 2})
    assert (len(source), repr(source)) == (1, "MemorySource(1 records)")


@pytest.mark.parametrize("view", [lambda source: source, lambda source: dataload.windows(source, [3], 2)])
def test_fields_are_not_searched_in_lists(view):
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    source = view(MemorySource({Name(f"c{number}"): np.arange(3) for number in range(200)}))
    compared.clear()
    assert len(source.read_batch([0])) >= 200
    assert len(compared) < 2000  # not half the square


def test_what_is_read_may_be_modified():
    messages = [[{"role": "user", "words": ["a"]}] for _ in range(2)]
    mapped = np.memmap(__file__, mode="r")  # read-only, and read where it is used
    assert MemorySource([{"x": mapped}])[0]["x"] is mapped
    for source in (MemorySource({"chat": messages}), MemorySource([{"chat": chat} for chat in messages])):
        for chat in (source[0]["chat"], source.read([0])[0]["chat"], source.read_batch([0])["chat"][0]):
            assert chat == [{"role": "user", "words": ["a"]}]
            chat[0]["words"].append("b")
            chat[0]["role"] = "system"
            chat.append({})


def test_transforms_may_modify_the_records_of_a_list():
    def change(sample):
        sample["a"] *= 2
        sample["t"][0]["k"] += 1
        return sample

    for made in (list, lambda records: dataload.concat([records]), MemorySource):
        source = made([{"a": np.full(2, i), "t": ({"k": i},)} for i in range(4)])
        loader = dataload.Loader(source, batch_size=4, transform=change)
        same(next(iter(loader)), next(iter(loader)))


def test_lists_of_lists_need_not_be_arrays(tmp_path):
    records = [{"x": [[1, 2], [3]]}, {"x": [[4], []]}]
    with dataload.create(tmp_path / "a.lmdb", codec="msgpack") as writer:
        writer.extend(records)
    with dataload.open(tmp_path / "a.lmdb") as written:
        for source in (MemorySource(records), written):
            assert source.fields == {"x": FieldSpec("unknown", None)}
            assert [*source] == records
            assert source.read_batch([1, 0]) == {"x": [[[4], []], [[1, 2], [3]]]}


UNKNOWN = r"there is no field 'tt': did you mean 't'\? Choose from b, f, n, t, x"


@pytest.mark.parametrize(
    ("data", "fields", "chosen", "message"),
    [
        (RECORDS, ["tt"], None, UNKNOWN),
        (COLUMNS, ["tt"], None, UNKNOWN),
        (RECORDS, None, ["tt"], "there is no field 'tt'"),
        (COLUMNS, None, ["tt"], "there is no field 'tt'"),
        ([b"a"], None, ["x"], "there is no field 'x'"),
        ({"x": np.zeros(3), "y": [1, 2]}, None, None, r"columns differ in length: \{'x': 3, 'y': 2\}"),
        (pa.table([[1], [2]], names=["x", "x"]), None, None, "the table has several columns 'x'"),
    ],
)
def test_what_is_refused(data, fields, chosen, message):
    with pytest.raises(ConfigError, match=message) as caught:
        MemorySource(data, fields=fields).read_batch([0], fields=chosen)
    assert not fields or caught.value.key == "fields"


def test_fingerprints_tell_data_apart():
    zeros = np.zeros(2), np.zeros(2, np.float32), np.zeros((2, 1)), np.zeros((0, 2)), np.zeros((0, 3)), -np.zeros(2)
    data = [
        *([b""], [b"\0"], [b"\0\0"], [b"", b""], [""], ["a", "b"], ["ab", ""], ["", "ab"], [{"y": b"a"}]),
        *(
            [{"x": x}]
            for x in (b"a", 1, 2, 1.0, "1", "\ud800", 2**70, 2**70 + 1, *zeros, np.zeros(4)[::2] + 1, np.array(1))
        ),
    ]
    fingerprints = [MemorySource(records).fingerprint() for records in data]
    assert len(set(fingerprints)) == len(data)
    assert fingerprints == [MemorySource(records).fingerprint() for records in data]
    long = [np.zeros(2000), np.zeros(2000)]
    long[1][1000] = 1
    ends = [{"x": value} for one in long for value in (np.array([*one], object), [one], {"a": (one,)})]
    assert len({MemorySource([record]).fingerprint() for record in ends}) == len(ends), "repr shows the ends of arrays"
    assert MemorySource([{"x": ["and so on..."]}]).fingerprint() == "5380b29bc89538ac95f763c7697fbce8"
    opaque = object(), object()  # their addresses are not content
    assert len({MemorySource([{"x": x}]).fingerprint() for x in opaque}) == 1
    square = np.arange(9).reshape(3, 3).T
    assert MemorySource([{"x": square}]).fingerprint() == MemorySource([{"x": square.copy()}]).fingerprint()


def test_columns_have_the_fingerprint_of_their_records(tmp_path):
    count, types = 5_000, ("?", ">i4", "<f8", "M8[s]", "V3", [("a", "i4"), ("b", "f8")])
    rng = np.random.default_rng(0)
    columns = {"F": np.asfortranarray(rng.random((count, 4))), "back": rng.random(2 * count)[::-2]}
    columns |= {"one": np.broadcast_to(np.arange(3), (count, 3)), "none": np.empty((count, 0))}
    columns |= {
        f"{each}\n": rng.integers(2, size=count * np.dtype(each).itemsize, dtype="u1").view(each) for each in types
    }
    columns["map"] = np.memmap(tmp_path / "a", "f4", "w+", shape=(count, 2))
    columns["text"] = [f"{row}" * (row % 3) for row in range(count)]
    columns["nested"] = [{"a": [row]} for row in range(count)]
    for names in (list(columns)[:-2], list(columns), ["none"], ["text"]):
        some = {name: columns[name] for name in names}
        records = [
            {name: each[row, ...] if isinstance(each, np.ndarray) else each[row] for name, each in some.items()}
            for row in range(count)
        ]
        assert MemorySource(some).fingerprint() == MemorySource(records).fingerprint()


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_of_another_library(library):
    module = pytest.importorskip(library)
    table_of = module.table if library == "pyarrow" else module.DataFrame
    columns = {"n": [3, 4, 5], "f": [0.5, None, 2.0], "t": ["a", "é", ""], "b": [b"x", b"", b"yz"], "l": [[1], [], [2]]}
    table = table_of(columns)
    source = loadable(table)
    assert len(source) == 3
    assert list(source.fields) == ["n", "f", "t", "b", "l"]
    same(source[0], {"n": np.array(3), "f": np.array(0.5), "t": "a", "b": b"x", "l": np.array([1])})
    assert np.isnan(source[1]["f"])
    same(source.read_batch([2, 0], ["n", "t", "l"]), {"n": np.array([5, 3]), "t": ["", "a"], "l": np.array([[2], [1]])})
    source[0]["n"][...] = 7
    assert source[0]["n"] == 3
    assert list(MemorySource(table, fields=["t", "n"])[2]) == ["t", "n"]
    with pytest.raises(ConfigError, match=r"there is no field 'm': choose from b, f, l, n, t"):
        MemorySource(table, fields=["m"])
    holes = table_of({"t": ["a", None], "n": module.array([1, None], "Int64") if library == "pandas" else [1, None]})
    with pytest.warns(UserWarning, match=r"the table has nulls \(1 of 't', 1 of 'n'\), and reading one is an error"):
        source = MemorySource(holes)
    same(source[0], {"t": "a", "n": np.array(1)})
    with pytest.raises(CorruptFileError, match="record 1: field 't' is null, and not a float or a time: pass nulls="):
        source.read_batch([0, 1], ["t"])
    source = MemorySource(holes, nulls={"t": "?", "n": "mask"}, fields=["n", "t"])
    assert [*source.fields] == ["n", "n_is_null", "t"]
    same(source[1], {"n": np.array(0), "n_is_null": np.array(True), "t": "?"})
    assert source.fingerprint() != MemorySource(holes, nulls="error").fingerprint()
    for settings, message in (
        ({"nulls": {"t": 1}}, "nulls replaces nulls of 't' by 1, which does not fit its type"),
        ({"nulls": {"m": 1}}, "nulls names 'm', which the table does not have"),
    ):
        with pytest.raises(ConfigError, match=message):
            MemorySource(holes, **settings)
    if library == "pandas":  # its index is no field
        assert MemorySource(module.DataFrame({"x": [1, 2]}, index=[7, 9])).fields.keys() == {"x"}


class OneByOne:
    def __len__(self):
        return len(RECORDS)

    def __getitem__(self, index):
        return dict(RECORDS[index])

    def __repr__(self):
        return "OneByOne()"


class Many(OneByOne):
    shard_lengths = 2, 3
    reads_in_order = True
    closed = False

    def __getitems__(self, indices):
        return [dict(RECORDS[index]) for index in indices]

    def read_batch(self, indices, fields=None):
        return BOTH[0].read_batch(indices, fields)

    def read_ahead(self, steps, fields, *, here, share=1.0):
        return [*steps], fields, here, share

    def fingerprint(self):
        return "7" * 32

    def close(self):
        self.closed = True


IterableDataset = type("IterableDataset", (OneByOne,), {})


@pytest.mark.parametrize("kind", [OneByOne, Many])
def test_any_source_becomes_one_of_dataload(kind):
    source = as_source(data := kind())
    assert [each for each in check_source(source, RECORDS) if each.status == "failed"] == []
    assert list(source.fields) == ["x", "t", "b", "n", "f"]
    assert repr(source) == "WrappedSource(OneByOne())"
    assert source.shard_lengths == getattr(kind, "shard_lengths", (5,))
    assert source.reads_in_order == (kind is Many)
    assert source.fingerprint() == ("7" * 32 if kind is Many else as_source(OneByOne()).fingerprint())
    steps = [StepsAhead(0, np.arange(3), np.array([3]), 1)]
    assert source.read_ahead(steps, None, here=True) == ((steps, None, True, 1.0) if kind is Many else None)
    source.close()
    assert getattr(data, "closed", True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((path, "a path is not a source: pass dataload.open('a.syr')") for path in ("a.syr", Path("a.syr"))),
        (["a.tar", "b.tar"], "a list of paths is not a source: pass dataload.open(['a.tar', ...])"),
        ([Path("a")], "a list of paths is not a source: pass dataload.open(['a', ...])"),
        *(
            (sources, "a list of sources is not a source: pass dataload.concat([...])")
            for sources in ([RangeSource(1), RangeSource(2)], (OneByOne(), OneByOne()))
        ),
        ({RangeSource(1): 0.5}, "sources with weights are not a source: pass dataload.mix({...})"),
        ({"train": RangeSource(2)}, "'dict' holds data sets: pass one of them, as in data['train'], or join them"),
        ({"x": 3}, "a dict is read as columns, arrays or lists of one value per record, and 'x' is of type int"),
        ({"x": "abc"}, "and 'x' is of type str: pass a list of records"),
        ({"x": {}}, "and 'x' is 'dict': pass a list of records"),
        (iter(RECORDS), "list_iterator gives its records one after another, and a loader reads them by index"),
        ((row for row in RECORDS), "generator gives its records one after another"),
        (IterableDataset(), "IterableDataset gives its records one after another"),
        (type("Mine", (IterableDataset,), {})(), "Mine gives its records one after another"),
        (type("IterableDataset", (), {"__module__": "datasets.iterable"})(), "by index: load the data set without str"),
        (OneByOne, "OneByOne is a class: pass an object of it, OneByOne(...)"),
        (None, "NoneType has no __len__ and no __getitem__; a source needs __len__ and __getitem__"),
    ],
)
def test_what_is_no_source(data, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Loader(data, batch_size=1)


def test_nulls_are_those_of_tables():
    with pytest.raises(ConfigError, match="nulls is for tables, and the data are 'dict'"):
        MemorySource({"x": [1, None]}, nulls="mask")


@pytest.mark.parametrize("order", ["<f8", ">f8"])
def test_many_sources_of_the_same_columns_are_read_at_once_and_keep_their_records(order):
    def part(n):
        first = 100 * n
        names = [f"r{i}" for i in range(first, first + n)]
        return {"x": (np.arange(first, first + n)[:, None] * [1.0, 2.0]).astype(order), "name": names}

    parts = [dataload.MemorySource(part(n)) for n in (3, 0, 5, 1)]
    alone = [dataload.MemorySource(part(n)) for n in (3, 0, 5, 1)]
    both = dataload.concat(parts)
    rows = np.random.default_rng(0).integers(0, 9, 40)
    expected = [record for source in alone for record in source]
    for _ in range(2):
        batch = both.read_batch(rows)
        assert [*batch["name"]] == [expected[row]["name"] for row in rows]
        same(batch["x"], np.stack([expected[row]["x"] for row in rows]))
        assert [record["name"] for record in both.read(rows)] == [expected[row]["name"] for row in rows]
    assert both.read_batch(rows, fields=("name",)).keys() == {"name"}
    for source, other in zip(parts, alone, strict=True):
        assert source.fingerprint() == other.fingerprint()
        assert [record["name"] for record in source] == [record["name"] for record in other]
    again = pickle.loads(pickle.dumps(both))
    assert [*again.read_batch(rows)["name"]] == [expected[row]["name"] for row in rows]


class Pair(NamedTuple):
    x: object
    y: object


@pytest.mark.parametrize("join", [dataload.concat, lambda sources: dataload.mix([(source, 1) for source in sources])])
@pytest.mark.parametrize(
    "record",
    [
        lambda n: n,
        lambda n: np.arange(3) + n,
        lambda n: b"b" * n,
        lambda n: f"text {n}",
        lambda n: (np.arange(2) * n, f"text {n}"),
        lambda n: Pair(n, {"z": (n / 2, b"b" * n)}),
        lambda n: {"pair": (n, f"text {n}"), "both": [n, -n]},
        lambda n: {"number": n if n < 2 else n / 2},
    ],
)
def test_sources_of_any_records_are_joined(record, join):
    records = [record(n) for n in range(6)]
    source = join([records[:2], records[2:5], records[5:]])
    same(source.read([5, 0, 3]), [records[5], records[0], records[3]])
    same(source.read_batch([5, 0, 3, 1]), default_collate([records[n] for n in (5, 0, 3, 1)]))
    same(source.read_batch([4]), default_collate([records[4]]))
