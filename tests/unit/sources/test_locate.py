"""Where a record lies: of every source, without reading it."""

import lmdb
import numpy as np
import pytest
from made_files import pack
from written import written

import dataload
from dataload import CorruptFileError
from dataload.sources.base import Source
from dataload.sources.shards import Location, locate

LENGTHS = (3, 0, 2)


class Sharded(Source):
    """Says how long its shards are, and no more."""

    shard_lengths = LENGTHS

    def __len__(self):
        return sum(LENGTHS)

    def _read(self, indices):
        raise AssertionError("a record was read")

    def fingerprint(self):
        return "0" * 32


def write(path, count, **options):
    return written(path, [{"x": np.full(3, number, np.float32)} for number in range(count)], **options)


def places(source):
    """Return the locations of all records, without their offsets."""
    return [source.locate(index)[:3] for index in range(len(source))]


@pytest.mark.parametrize(
    ("options", "keys"), [({}, "abc"), ({"fields": ["cls"]}, "abc"), ({"fields": ["txt"], "missing": "skip"}, "ac")]
)
def test_tar_gives_the_samples_key(tmp_path, options, keys):
    paths = [tmp_path / f"{shard}.tar" for shard in range(2)]
    for shard, path in enumerate(paths):
        names = [f"dir{shard}/sämple{key}.{suffix}" for key in "abc" for suffix in ("cls", "txt")]
        pack(path, [(name, b"") for name in names if not name.endswith("b.txt")])
    assert places(dataload.open(paths, **options)) == [
        (str(path), n, f"dir{shard}/sämple{key}") for shard, path in enumerate(paths) for n, key in enumerate(keys)
    ]


@pytest.mark.parametrize("names", [["7", "10", "9"], ["b", "a", "c\udc80"], ["0001", "0000"]])
def test_lmdb_gives_the_key(tmp_path, names):
    path = str(tmp_path / "a.lmdb")
    with lmdb.open(path) as environment, environment.begin(write=True) as txn:
        for name in names:
            key = name.encode("utf-8", "surrogateescape")
            txn.put(key, b"value of " + key)
    source = dataload.open(path)
    texts = [record.decode(errors="backslashreplace").removeprefix("value of ") for record in source]
    assert len(texts) == len(names)
    assert places(source) == [(path, index, text) for index, text in enumerate(texts)]


def found_by(function):
    return locate(type("Own", (), {"locate": lambda self, index: function(index)})(), 5)


def test_places_of_any_source(tmp_path):
    def fail(index):
        raise CorruptFileError("no place")

    assert found_by(lambda index: Location("part", index // 2, f"k{index}")) == Location("part", 2, "k5")
    assert locate(Sharded(), 3) == Location("shard 2", 0, None)
    nowhere = found_by(lambda index: (index, "elsewhere")), found_by(fail), locate([1, 2, 3], 5)
    assert nowhere == (Location(None, 5, None),) * 3
    for place, text in (
        (Location("a.tar", 3, "x/y"), "a.tar, record 3, key 'x/y'"),
        (Location(None, 0, None), "record 0"),
        (Location("a", 0, None), "a, record 0"),
    ):
        assert str(place) == text
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    assert dataload.open(tmp_path / "a.npy", window=10).locate(3).offset == 128 + 3 * 9 * 2
    for name, options in (("a.array_record", {"options": "group_size:1,brotli:1"}), ("a.parquet", {})):
        path = write(tmp_path / name, 5, **options)
        assert dataload.open(path).locate(3) == Location(str(path), 3, None, None)  # compressed


@pytest.mark.parametrize("name", ["a.syr", "a.tar", "a.tfrecord", "a.jsonl", "a.lmdb", "a.torchrecord"])
def test_offsets_lead_to_the_bytes_of_the_record(tmp_path, name):
    """Searches the file for the bytes themselves."""
    marks = [number.to_bytes(3, "big").hex() for number in range(0x9A1, 0x9A7)]
    written(tmp_path / name, [{"x": mark} for mark in marks])
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    [data] = [data for data in files if marks[0].encode() in data]
    source = dataload.open(tmp_path / name)[1:]
    heads = {data.index(mark.encode()) - source.locate(index).offset for index, mark in enumerate(marks[1:])}
    assert len(heads) == 1  # what some codecs have before a value
    assert 0 <= heads.pop() < 60
