"""Files that no LMDB wrote, and all pages of those that it did; tests/fuzz has random changes."""

import struct

import lmdb
import numpy as np
import pytest
from lmdb_files import lib_versions
from typer.testing import CliRunner

from dataload.cli.app import app
from dataload.codecs.tensorprotos import encode
from dataload.errors import CorruptFileError
from dataload.sources.lmdb.file import open_file, read_info
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.tree import read_tree, subdatabases

PAGE = 4096


def small(n):
    return b"%d" % n * (n % 50)


def large(n):
    return bytes([n % 256]) * (n * 911 % 9000)


def tensors(n):
    return encode({"x": np.full(3, n), "s": "x" * n})


FILES = {
    "numbers": (LMDBSource, None, b"%d", small),
    "names": (LMDBSource, None, b"a name of %05d" + b"e" * 60, small),
    "large values": (LMDBSource, b"named", b"%06d", large),
    "TorchRecord": (TorchRecordSource, b"db0", b"%03d", tensors),
}


def make(path, name, key, value, version, count=300):
    with lmdb.open(str(path), map_size=1 << 24, max_dbs=2, lock=False, sync=False, lib_version=version) as environment:
        for start in (0, count // 2):  # in two transactions, so that there are free pages too
            database = environment.open_db(name)
            with environment.begin(write=True, db=database) as txn:
                for n in range(start, start + count // 2):
                    txn.put(key % n, value(n))
    return (path / "data.mdb").read_bytes()


def deep(levels, entries, wide=1):
    """A main database whose branch pages have `wide` children each, all of them the same next page."""
    last = levels + 1
    pages = bytearray((last + 1) * PAGE)
    for page in (0, 1):
        struct.pack_into("=QHHHH", pages, page * PAGE, page, 0, 8, 0, 0)
        at = page * PAGE + 16
        struct.pack_into("=II", pages, at, 0xBEEFC0DE, 1)
        struct.pack_into("=IHHQQQQQ", pages, at + 24, PAGE, 0, 0, 0, 0, 0, 0, 2**64 - 1)
        struct.pack_into("=IHHQQQQQ", pages, at + 72, 0, 0, levels, 0, 0, 0, entries, 2)
        struct.pack_into("=QQ", pages, at + 120, last, page)
    for level in range(levels):
        start = (2 + level) * PAGE
        leaf = level == levels - 1
        struct.pack_into("=QHHHH", pages, start, 2 + level, 0, 2 if leaf else 1, 16 + 2 * wide, PAGE - 20 * wide)
        for n in range(wide):
            node = PAGE - 20 * (n + 1)
            struct.pack_into("=H", pages, start + 16 + 2 * n, node)
            low = 4 if leaf else 3 + level
            struct.pack_into("=HHHH4s4s", pages, start + node, low, 0, 0, 4, b"%04d" % n, b"data")
    return bytes(pages)


def test_a_file_made_by_hand(tmp_path):
    (tmp_path / "data.mdb").write_bytes(deep(3, 1))
    with LMDBSource(tmp_path) as source:
        assert list(source) == [b"data"]


def cycle(data):
    struct.pack_into("=HHH", data, 3 * PAGE + PAGE - 20, 2, 0, 0)  # the second page points to the first


def shared(data):
    for n in range(100):
        node = 2 * PAGE + PAGE - 20 * (n + 1)
        struct.pack_into("=HHHH4s", data, node, 4000, 0, 1, 0, b"")  # 4000 bytes in overflow page 2
        struct.pack_into("=Q", data, node + 8, 2)


@pytest.mark.parametrize(
    ("made", "change", "message"),
    [
        (deep(32, 2**63, 100), None, "claims .* records in a tree of depth 32"),
        (deep(5, 100**2, 100), None, "a page occurs twice in the tree of the main database"),
        (deep(33, 1, 1), None, "in a tree of depth 33"),
        (deep(1, 99, 100), None, "claims 99 records; 100 of 400 bytes were found"),
        (deep(1, 101, 100), None, "claims 101 records; 100 of 400 bytes were found"),
        (deep(3, 1), cycle, "a page occurs twice in the tree of the main database"),
        (deep(1, 100, 100), shared, "claims 100 records; 100 of 400000 bytes were found"),  # and may take any memory
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pages_that_occur_again_and_again(tmp_path, made, change, message):
    data = bytearray(made)
    if change is not None:
        change(data)
    (tmp_path / "data.mdb").write_bytes(data)
    with pytest.raises(CorruptFileError, match=message):
        len(LMDBSource(tmp_path))


def test_pages_of_a_tree_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("dataload.sources.lmdb.tree._BLOCK_BYTES", 3 * PAGE)
    make(tmp_path / "e", None, b"%d", large, 0, 2000)
    file = open_file(str(tmp_path / "e"))
    info = read_info(file)
    small_blocks = read_tree(file, info, info.main)
    monkeypatch.undo()
    whole = read_tree(file, info, info.main)
    assert len(whole.leaves) > 6
    for field in whole.__slots__:
        np.testing.assert_array_equal(getattr(small_blocks, field), getattr(whole, field), strict=True)


def source_of(name, path, **options):
    kind, subdatabase, _, _ = FILES[name]
    return kind(path, **({"subdatabase": "named"} if subdatabase == b"named" else {}), **options)


@pytest.mark.parametrize("version", list(lib_versions()))
@pytest.mark.parametrize("name", FILES)
def test_all_pages_of_good_files_are_good(tmp_path, name, version):
    _, subdatabase, key, value = FILES[name]
    make(tmp_path / "e", subdatabase, key, value, version)
    assert len(source_of(name, tmp_path / "e", verify_pages=True)) == 300
    for number in range(30):  # values that are replaced by shorter ones may keep their pages
        options = {"max_dbs": 2, "lock": False, "sync": False, "lib_version": version}
        with lmdb.open(str(tmp_path / "e"), **options) as environment:
            database = environment.open_db(subdatabase)
            with environment.begin(write=True, db=database) as txn:
                for n in range(number % 7, 300, 7):
                    txn.put(key % n, value((n + number) % 300))
    assert len(source_of(name, tmp_path / "e", verify_pages=True)) == 300


@pytest.mark.parametrize("version", list(lib_versions()))
def test_pages_that_reading_does_not_look_at(tmp_path, version):
    header = 24 if version else 16
    data = make(tmp_path / "e", *FILES["large values"][1:], version)
    file = open_file(str(tmp_path / "e"))
    info = read_info(file)
    (named,) = subdatabases(file, info)
    nodes = read_tree(file, info, named)
    large = (nodes.offsets[nodes.flags & 1 != 0] // PAGE * PAGE).tolist()
    leaf = int(nodes.leaves[0]) * PAGE
    long = [n for n in np.flatnonzero(nodes.flags & 1).tolist() if nodes.lengths[n] > 4096][:2]
    first, second = (int(nodes.offsets[n]) // PAGE for n in long)
    path = tmp_path / "data.mdb"
    for offset, form, value, message in (
        (large[3], "=Q", large[4] // PAGE, f"page {large[3] // PAGE} has the number of another page"),
        (leaf, "=Q", 2**64 - 1, f"page {leaf // PAGE} has the number of another page"),
        (large[3] + header - 6, "=H", 2, f"page {large[3] // PAGE} is not the page of a value"),
        (large[3] + header - 4, "=I", 0, f"page {large[3] // PAGE} holds a value of another length"),
        (large[3] + header - 4, "=I", 2**31, f"page {large[3] // PAGE} holds a value of another length"),
        (large[3] + header - 4, "=I", 20, "page .* is used twice"),
        (data.index(struct.pack("=Q", second), leaf), "=Q", first, f"page {first} (is used twice|holds a value of an)"),
    ):
        changed = bytearray(data)
        struct.pack_into(form, changed, offset, value)
        path.write_bytes(changed)
        with source_of("large values", path) as source:
            assert len(source.read(range(300))) == 300
        with pytest.raises(CorruptFileError, match=message) as caught:
            len(source_of("large values", path, verify_pages=True))
        assert caught.value.offset % PAGE == 0
    assert CliRunner().invoke(app, ["verify", f"lmdb:{path}", "-o", "subdatabase=named"]).exit_code == 1
