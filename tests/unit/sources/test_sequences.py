"""Runs of records, beside itertools.groupby, and lengths of records."""

import itertools
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_files import pack

from dataload import ConcatSource, ConfigError, MemorySource, RangeSource
from dataload.sources.sequences import record_lengths, sequence_lengths
from dataload.sources.tar.reader import TarSource


def runs(values):
    return [len(list(group)) for _, group in itertools.groupby(values)]


def archive(path, keys):
    return pack(path, [(f"{key}.{extension}", b"0") for key in keys for extension in ("cls", "jpg")])


VALUES = {
    "int": lambda n: n,
    "text": lambda n: f"episode {n}",
    "bytes": lambda n: bytes([n]),
    "numbers": lambda n: np.array(n),
    "arrays": lambda n: np.array([[1.5, n], [0, 2]]),
    "arrays of different lengths": lambda n: np.zeros(n, np.int8),
    "one shape and different dtypes": lambda n: np.zeros(2, ("i4", "f4", "u4", "i8")[n]),
    "not a number": lambda n: np.array([n, np.nan]),
    "nothing": lambda n: np.zeros((n, 0)),
}


@pytest.mark.parametrize("kind", VALUES)
@given(numbers=st.lists(st.integers(0, 3), max_size=30), before=st.sampled_from([0, 0, 0, 1023, 1024]))
def test_runs_of_a_field(kind, numbers, before):
    numbers = [*[0] * before, *numbers]  # several blocks
    records = [{"episode": VALUES[kind](number), "x": index} for index, number in enumerate(numbers)]
    for source in (MemorySource(records), records, Batched(records)):
        got = sequence_lengths(source, field="episode")
        assert got.tolist() == runs(numbers)
        assert got.dtype == np.int64


class Batched:
    """A source of someone's own, as torch's fetcher reads it."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitems__(self, indices):
        assert all(type(index) is int for index in indices)
        return [self.records[index] for index in indices]


def test_columns_are_read_where_there_are_some():
    class Columns(MemorySource):
        def _read(self, indices):
            raise AssertionError("records are read one by one")

    numbers = np.random.default_rng(0).integers(0, 3, 5000)
    source = Columns({"episode": numbers, "words": [str(n) for n in numbers], "rows": numbers[:, None] + [0, 1]})
    for field in ("episode", "words", "rows"):
        assert sequence_lengths(source, field=field).tolist() == runs(numbers.tolist())
    assert sequence_lengths(ConcatSource([source[:10], source[10:]]), field="rows").tolist() == runs(numbers.tolist())


KEYS = ["ep_1/f-0001", "ep_1/f-0002", "ep_1/g-0003", "ep_2/g-0001", "ep_2/g-0007", "ep_10/g-0008"]


@pytest.fixture(params=[True, False], ids=["keys as a field", "keys of places"])
def keyed(request, tmp_path):
    """With ``fields=`` that leaves the key out, only `locate` tells it."""
    with TarSource(archive(tmp_path / "a.tar", KEYS), fields=None if request.param else ["jpg"]) as source:
        yield source


@pytest.mark.parametrize(
    ("key", "lengths"),
    [
        (True, [2, 1, 2, 1]),
        *((key, [3, 2, 1]) for key in (r"[^/]+", r"ep_(\d)")),
        (re.compile(r"/(.)-"), [2, 4]),
    ],
)
def test_keys(keyed, key, lengths):
    assert sequence_lengths(keyed, key=key).tolist() == lengths
    with pytest.raises(ConfigError, match=r"key 'ep_2/g-0001' of record 3 does not match 'ep_\(1\)\?"):
        sequence_lengths(keyed, key=r"ep_(1)?\d*")


@pytest.mark.parametrize(
    ("keys", "lengths"),
    [("a.1 a.2 a-3", [3]), ("a/1 b/1", [1, 1]), ("a_b_01 a_c_01", [1, 1]), ("/1 _2", [2])],
)
def test_numbered_keys(keys, lengths):
    assert sequence_lengths([{"__key__": key} for key in keys.split()], key=True).tolist() == lengths


def test_keys_cost_no_data(tmp_path):
    source = TarSource(archive(tmp_path / "a.tar", [f"{i // 7}/{i}" for i in range(3000)]))
    assert len(source) == 3000
    os.truncate(tmp_path / "a.tar", 600)
    assert sequence_lengths(source, key=True).tolist() == [7] * 428 + [4]


def test_shards(tmp_path):
    paths = [archive(tmp_path / f"{n}.tar", [f"k{i}" for i in range(n)]) for n in (3, 1)]
    assert sequence_lengths(TarSource(paths), shards=True).tolist() == [3, 1]
    assert sequence_lengths(RangeSource(5)[1:3], shards=True).tolist() == [2]
    assert sequence_lengths(RangeSource(5), shards=True).dtype == np.int64


def test_lengths_of_arrays_bytes_and_text():
    texts = ["", "a", "äöü"] * 200  # several blocks
    source = MemorySource(
        [{"x": np.zeros((i % 7, 2)), "text": text, "data": text.encode()} for i, text in enumerate(texts)]
    )
    for name, lengths in (("x", [i % 7 for i in range(600)]), ("text", [0, 1, 3] * 200), ("data", [0, 1, 6] * 200)):
        assert record_lengths(source, name).tolist() == lengths
        assert record_lengths(source, name).dtype == np.int64
    parts = [MemorySource([{"x": np.zeros(n)} for n in lengths]) for lengths in ([3, 1], [], [4])]
    assert record_lengths(ConcatSource(parts), "x").tolist() == [3, 1, 4]
    assert record_lengths(parts[1], "x").shape == (0,)


def lengths_of_x(records):
    return record_lengths(MemorySource(records), "x")


@pytest.mark.parametrize(
    ("lengths", "records", "options", "match"),
    [
        *(
            (sequence_lengths, *row)
            for row in [
                ([], {}, r"pass exactly one of field=, key= and shards=True, got none"),
                ([], {"field": "x", "key": True}, r"got field and key"),
                ([], {"key": "x", "shards": True}, r"got key and shards"),
                ([{"x": 1}], {"field": "y"}, r"a record has no field 'y': Known: x"),
                ([b"x"], {"field": "y"}, r"records are bytes, not fields"),
                ([{"x": 1}], {"key": True}, r"a record has no field '__key__': Known: x"),
                (
                    [{"__key__": "0001"}],
                    {"key": True},
                    r"key '0001' of record 0 does not end in / _ - or \. and digits",
                ),
                ([{"__key__": "a"}], {"key": "b+"}, r"key 'a' of record 0 does not match 'b\+'"),
                ([{"__key__": "a"}], {"key": "("}, r"key '\(' is not a regular expression: missing \)"),
                ([{"__key__": "a"}], {"key": False}, r"key must be a regular expression or True, got False"),
                (RangeSource(3), {"key": True}, r"record 0 has no key: pass field= instead"),
                ([{"x": 1}], {"shards": True}, r"list has no shards: shard_lengths is missing"),
            ]
        ),
        (lengths_of_x, [{"y": b"1"}], {}, "a record has no field 'x': Known: y"),
        (lengths_of_x, [b"abc"], {}, "records are bytes, not fields: choose a codec"),
        (
            lengths_of_x,
            [{"x": b""}, {"x": 3}],
            {},
            "'x' of record 1 has no length: expected an array, bytes or text, got",
        ),
        (lengths_of_x, [{"x": np.array(3.5)}], {}, r"field 'x' of record 0 has no length: .*, got array\(3\.5\)"),
    ],
)
def test_what_is_refused(lengths, records, options, match):
    with pytest.raises(ConfigError, match=match):
        lengths(records, **options)
