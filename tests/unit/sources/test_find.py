"""Formats by their first bytes, on files of the original tools."""

from pathlib import Path

import pytest

from dataload.errors import ConfigError
from dataload.sources.find import HEAD_BYTES, detect, find_shards
from dataload.sources.head import describe_head

GOLDEN = Path(__file__).parents[2] / "golden"


def head(path):
    return path.read_bytes()[:HEAD_BYTES]


@pytest.mark.parametrize(
    ("folder", "pattern", "name"),
    [
        ("syrah", "[!cn]*.syr", "syrah"),
        ("arrayrecord", "[!c]*.array_record", "array_record"),
        ("torchrecord", "[!c]*/data.mdb", "lmdb"),
        ("tar/tars", "[pgu]*.tar", "tar"),
    ],
)
def test_files_of_the_original_tools(folder, pattern, name):
    paths = [path for path in sorted((GOLDEN / folder).glob(pattern)) if head(path).strip(b"\0")]
    assert len(paths) >= 5
    assert {path: getattr(detect(head(path)), "name", None) for path in paths} == dict.fromkeys(paths, name)


@pytest.mark.parametrize(
    "data",
    [b"", b"GS", b"hello", bytes(512), bytes(20), b"x" * 512, b"\x1f\x8b", b"0" * 148 + b"zzzzzzzz" + b"0" * 356],
)
def test_other_bytes_are_nothing(data):
    assert detect(data) is None


def test_what_is_said_of_them():
    assert describe_head(b"") == "the file is empty"
    assert describe_head(b"BZh9") == (
        "byte 0 has the magic bytes of bzip2: decompress it first, to allow random access"
    )
    assert describe_head(b"\x00\x01abc") == r"byte 0 has b'\x00\x01abc'"


def test_formats_without_files():
    with pytest.raises(ConfigError, match="format 'range' has no files, which are needed here"):
        find_shards("range:3")
