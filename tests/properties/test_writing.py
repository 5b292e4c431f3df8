"""Records written together give the bytes of records written one by one."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dataload
from dataload.errors import ConfigError
from dataload.sources.tar.writer import write_index

SHAPES = st.sampled_from([(), (3,), (2, 2), (0, 2)])
ARRAYS = st.builds(lambda dtype, shape: np.ones(shape, dtype), st.sampled_from(["f4", ">f4", "u1", "i8"]), SHAPES)
VALUES = ARRAYS | st.binary(max_size=20) | st.text("aé", max_size=3) | st.integers(-5, 5)
NUMBER = itertools.count()


@st.composite
def alike_records(draw):
    """Records of one layout, one of which may be another."""
    record = draw(st.dictionaries(st.sampled_from(["a", "b.txt", "é"]), VALUES, min_size=1))
    records = [dict(record) for _ in range(draw(st.integers(1, 6)))]
    records[draw(st.integers(0, len(records) - 1))] |= draw(st.just({}) | st.dictionaries(st.just("a"), VALUES))
    turned = draw(st.booleans())
    return [dict(reversed(each.items())) if turned and row % 2 else each for row, each in enumerate(records)]


def written(path, options, write):
    """The bytes of all files, how many records were written, and the error if one was refused."""
    error = None
    with dataload.create(path, **options) as writer:
        try:
            write(writer)
        except ConfigError as refused:
            error = str(refused).replace(str(path), "")
        count = len(writer)
        if count < options.get("num_records", 0):  # it could not be closed
            writer.abort()
    files = path.iterdir() if path.is_dir() else path.parent.glob(f"{path.stem}.*")
    return [file.read_bytes() for file in sorted(files)], count, error


def same_both_ways(directory, suffix, options, records, split):
    def one_by_one(writer):
        for record in records:
            writer.write(record)

    def together(writer):
        writer.extend(records[:split])
        writer.extend(tuple(records[split:]))

    number = next(NUMBER)
    found = [written(directory / f"{number}{way.__name__}{suffix}", options, way) for way in (one_by_one, together)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        (".syr", {}),
        (".torchrecord", {"db_num": 2}),
        (".torchrecord", {"db_num": 3, "num_records": 4}),
        (".lmdb", {"codec": "tensorprotos"}),
        (".lmdb", {"codec": "tensorprotos", "keys": lambda number, _: f"{number % 2}{number}"}),
        (".array_record", {"codec": "tensorprotos"}),
        (".tar", {}),
    ],
)
def test_together_is_one_by_one(tmp_path_factory, monkeypatch, suffix, options):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    directory = tmp_path_factory.mktemp("written")

    @settings(max_examples=settings().max_examples // 2)
    @given(alike_records(), st.integers(0, 6))
    def check(records, split):
        same_both_ways(directory, suffix, options, records, split)

    check()


@pytest.mark.parametrize("suffix", [".lmdb", ".array_record"])
def test_bytes_and_what_is_refused(tmp_path, suffix):
    records = [b"a", bytearray(b"bc"), memoryview(b"def"), b"", 5, b"g"]
    _, count, error = same_both_ways(tmp_path, suffix, {}, records[:4], 2)
    assert (count, error) == (4, None)
    _, count, error = same_both_ways(tmp_path, suffix, {}, records, 1)
    assert count == 4
    assert "stores bytes, got a record of type int" in error


def test_more_records_than_were_announced(tmp_path):
    records = [{"x": number} for number in range(6)]
    _, count, error = same_both_ways(tmp_path, ".torchrecord", {"num_records": 4}, records, 3)
    assert count == 4
    assert error == "num_records is 4, but there are more records"


def test_transactions_are_the_same(tmp_path):
    """Their ends are seen in the file: of large values in the bytes, of small ones in the number of the last one."""
    for size, count in ((5000, 4000), (8, 70_000)):
        same_both_ways(tmp_path, ".lmdb", {}, [b"x" * size] * count, count // 3)


@given(st.lists(st.dictionaries(st.sampled_from(["jpg", "a.cls", "é"]), VALUES, min_size=1), min_size=1, max_size=4))
def test_the_index_of_a_tar_is_that_of_a_scan(tmp_path_factory, records):
    path = Path(tmp_path_factory.mktemp("tar"), "a.tar")
    long = "d.ir/" * 60
    with dataload.create(path, key=lambda number, _: f"{long if number % 2 else ''}{number}") as writer:
        writer.extend(records)
    index = path.with_suffix(".idx")
    ours = index.read_bytes()
    os.unlink(index)
    write_index(path)
    assert index.read_bytes() == ours
