"""Conversions between all formats, and conversions that are killed."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload.convert import convert
from dataload.testing.compare import difference

# format -> (suffix, how to open it so that the records come back as they were)
FORMATS = {
    "syrah": (".syr", {}),
    "torchrecord": (".torchrecord", {}),
    "lmdb": (".lmdb", {"codec": "tensorprotos"}),
    "tar": (".tar", {"decode": "auto"}),
    "array_record": (".array_record", {"codec": "tensorprotos"}),
}
COUNT = 23


def make_records():
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.integers(0, 256, (4, 5, 3), np.uint8),
            "features": rng.normal(size=7),
            "curve": rng.normal(size=(index % 4, 2)).astype(np.float32),  # of another shape in each record
            "label": np.array(index),
            "name": f"sämple {index}",
            "blob": bytes(range(index)),
        }
        for index in range(COUNT)
    ]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The same records in each format, written without the converter."""
    directory = tmp_path_factory.mktemp("originals")
    for name, (suffix, options) in FORMATS.items():
        codec = {"codec": options["codec"]} if "codec" in options else {}
        with dataload.create(directory / f"a{suffix}", format=name, **codec) as writer:
            writer.extend(make_records())
    return directory


def open_format(path, name):
    return dataload.open(path, format=name, **FORMATS[name][1])


# Each format to the next two, and from the two before.
NEXT = [(name, [*FORMATS, *FORMATS][number + step]) for number, name in enumerate(FORMATS) for step in (1, 2)]


@pytest.mark.parametrize(("origin", "target"), NEXT)
def test_any_format_to_any_format(originals, tmp_path, origin, target):
    with open_format(originals / f"a{FORMATS[origin][0]}", origin) as source:
        report = convert(source, tmp_path / f"b{FORMATS[target][0]}", format=target, shards=3)
    assert report.records == COUNT
    found = open_format(report.pattern, target)
    assert found.shard_lengths == (7, 8, 8)
    but_keys = [{name: value for name, value in record.items() if name != "__key__"} for record in found]
    assert difference(but_keys, make_records(), "records") is None
    assert {os.path.basename(path) for path in report.paths} <= {*os.listdir(tmp_path)}


@pytest.mark.parametrize("target", ["syrah", "torchrecord", "tar"])
def test_plain_bytes_become_a_field_where_there_are_only_fields(originals, tmp_path, target):
    source = dataload.open(originals / "a.lmdb", codec="raw")
    report = convert(source, tmp_path / f"b{FORMATS[target][0]}")
    assert report.notes == ("records have no fields: each is stored as the field 'data'",)
    found = [{k: v for k, v in record.items() if k != "__key__"} for record in open_format(report.pattern, target)]
    assert found == [{"data": record} for record in source]


class Large:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return {"x": np.full(1 << 18, index % 256, np.uint8)}


def peak_memory():
    """Return kilobytes."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_memory_does_not_grow_with_the_number_of_records(tmp_path):
    """A conversion holds a few blocks, of 100 MB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_memory()
    convert(Large(), tmp_path / "large.syr")
    assert peak_memory() - before < 50_000
