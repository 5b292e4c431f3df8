"""The data of a benchmark: the same in every format, written once, and only where there is room."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from written import written

import dataload
from benchmarks.workloads import made_data
from dataload.api import open_source
from dataload.bench.data import Choices, advice, loader, own_data, plan_loaders, write
from dataload.bench.runner import FileFacts
from dataload.errors import ConfigError


@pytest.fixture
def data():
    return made_data("floats-64", 20)


@pytest.mark.parametrize("name", ["syrah", "torchrecord", "lmdb", "tar", "array_record"])
def test_every_format_gives_the_records_back(tmp_path, data, name):
    one = write(data, name, tmp_path)
    with open_source(one.path, format=name, **one.options) as source:
        assert len(source) == 20
        for found, record in zip(source, data.records, strict=True):
            np.testing.assert_array_equal(found["x"], record["x"])
    assert (one.facts.workload, one.facts.format, one.facts.records) == ("floats-64", name, 20)
    assert one.facts.nbytes > 20 * 64
    assert one.facts.write_seconds > 0


def test_what_was_not_finished_is_written_anew(tmp_path, data, monkeypatch):
    def interrupted(records, target, **_):
        target.write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dataload.bench.data.convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(data, "syrah", tmp_path)
    (left,) = tmp_path.rglob("data.syr")
    assert left.read_bytes() == b"half of it"
    with open_source(write(data, "syrah", tmp_path).path) as source:
        assert len(source) == 20


def test_too_little_room(tmp_path, data, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    needed = 20 * 64 + (1 << 30)
    message = f"floats-64 needs about {needed:,} bytes in .*, and 1,000 are free: set --cache"
    with pytest.raises(ConfigError, match=message):
        write(data, "syrah", tmp_path)
    assert not list(tmp_path.rglob("data.syr"))


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({("as it is", "folder", "global", 0): 100}, "As it is, num_workers=0 is best: 100 records/s. No format"),
        (
            {
                ("as it is", "folder", "sequential", 0): 10,
                ("as it is", "folder", "global", 0): 100,
                ("as it is", "folder", "global", 2): 180,
            },
            "As it is, num_workers=2 is best: 180 records/s, 1.8 times as many as without workers. No format that",
        ),
        (
            {("as it is", "folder", "global", 0): 100, ("as it is", "folder", "pool", 0): 300},
            "100 records/s; shuffle='shards' gives 3.0 times as many. No format that was compared",
        ),
        (
            {("as it is", "folder", "global", 0): 100, ("dataload", "tar", "global", 2): 250},
            "100 records/s. As tar, it is 2.5 times as fast and 4.0 times as large: see `dataload convert`.",
        ),
        ({("dataload", "tar", "global", 2): 250}, ""),
    ],
)
def test_advice(made, rates, said):
    measurements = [
        made.ours(rate, name=name, format=form, order=order, workers=workers)
        for (name, form, order, workers), rate in rates.items()
    ]
    files = [FileFacts("x", "folder", 5, 1000, None), FileFacts("x", "tar", 5, 4000, 1.0)]
    assert said in advice(measurements, files)
    assert advice([replace(m, answers=(), error="failed") for m in measurements], files) == ""


@pytest.fixture
def own(tmp_path):
    path = str(tmp_path / "own.syr")
    return written(path, [{"x": np.full(4, i, np.float32), "y": i, "png": b"file"} for i in range(10)])


def test_data_of_the_users_own_in_another_format(tmp_path, own):
    with open_source(own) as source:
        data = own_data(own, source, 6)
        assert (data.name, data.fields, len(data.records)) == (own, ("x", "y", "png"), 6)
        one = write(data, "tar", tmp_path / "cache")
    with open_source(one.path, format="tar", **one.options) as source:
        assert [int(record["y"]) for record in source] == list(range(6))
        assert [record["x"].tolist() for record in source] == [[i] * 4 for i in range(6)]
        assert source[0]["png"] == b"file"  # which is not decoded in the user's data


def test_records_that_cannot_be_read_are_left_out(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(b"no image")
    with open_source(tmp_path, format="folder", pattern="{key}.png") as source:
        with pytest.raises(ConfigError, match="has no records that can be read: see `dataload verify`"):
            own_data(str(tmp_path), source, None)
        Image.new("L", (4, 4)).save(tmp_path / "b.png")
    with open_source(tmp_path, format="folder", pattern="{key}.png") as source:
        data = own_data(str(tmp_path), source, None, format_name="folder", options={"pattern": "{key}.png"})
        assert (data.unread, data.kept, [record["__key__"] for record in data.records]) == (2, (1,), ["b"])
    (task,) = plan_loaders(data, {"own": data.own}, Choices(orders=("sequential",), workers=(0,), batch_size=4))
    reading = loader(task)
    assert [len(batch["image"]) for batch in reading.batches(0)] == [1]
    reading.held.close()


def test_own_data_are_known_by_their_content(tmp_path, own):
    def content(path, records):
        with open_source(path) as source:
            return own_data(path, source, records).content

    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(own, tmp_path / "elsewhere")
    assert content(own, None) == content(own, 99) == content(copy, None)
    assert content(own, None) != content(own, 9)


def test_data_that_cannot_be_measured(tmp_path):
    dataload.create(tmp_path / "empty.syr").close()
    written(tmp_path / "raw.lmdb", [b"bytes"])
    for path, message, options in (
        (tmp_path / "empty.syr", r"empty\.syr has no records to measure", {}),
        (tmp_path / "raw.lmdb", r"the records of .*raw\.lmdb are bytes without fields.*--codec", {"codec": None}),
    ):
        with open_source(path, **options) as source, pytest.raises(ConfigError, match=message):
            own_data(str(path), source, None)
