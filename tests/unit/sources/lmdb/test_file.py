"""The pages of LMDB's file, with files that lmdb itself wrote as the model."""

import contextlib
import os
import random
import struct

import lmdb
import pytest
from lmdb_files import lib_versions

from dataload.errors import CorruptFileError, SourceError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.lmdb.file import data_file, open_file, read_info
from dataload.sources.lmdb.snapshot import is_torchrecord, list_subdatabases


def check_whole(path):
    return read_info(open_file(path))


def make(path, databases, *, plain=(), **options):
    """An environment with `databases`, name -> number of records, and `plain` keys in the main one."""
    with lmdb.open(
        str(path), map_size=1 << 24, max_dbs=len(databases), lock=False, sync=False, **options
    ) as environment:
        for name, count in databases.items():
            handle = environment.open_db(name)
            with environment.begin(write=True, db=handle) as txn:
                for number in range(count):
                    txn.put(b"%06d" % number, bytes(number % 60))
        with environment.begin(write=True) as txn:
            for key in plain:
                txn.put(key, b"value of " + key)
    return path


@pytest.mark.parametrize("version", list(lib_versions()))
def test_what_lmdb_wrote(tmp_path, version):
    databases = {b"db%d" % number: number % 40 for number in range(300)}  # more than one page of them
    path = make(tmp_path / "e", databases, plain=[b"key", b"zzz" * 50], lib_version=version)
    found = list_subdatabases(str(path))
    assert {entry.name: entry.entries for entry in found} == databases
    assert [entry.name for entry in found] == sorted(databases)
    assert not any(entry.has_duplicates for entry in found)
    assert is_torchrecord(str(path))
    info = check_whole(str(path))
    assert info.main.entries == 302
    assert info.size <= (path / "data.mdb").stat().st_size
    assert info == check_whole(str(path / "data.mdb"))


def test_a_single_file(tmp_path):
    path = make(tmp_path / "single", {b"other": 3}, subdir=False)
    assert data_file(str(path)) == str(path)
    assert [entry.name for entry in list_subdatabases(str(path))] == [b"other"]
    assert not is_torchrecord(str(path))


def test_an_empty_environment(tmp_path):
    path = make(tmp_path / "e", {})
    assert list_subdatabases(str(path)) == []
    assert check_whole(str(path)).main.root is None


def test_databases_with_several_values_of_a_key(tmp_path):
    with lmdb.open(str(tmp_path / "e"), max_dbs=1) as environment:
        handle = environment.open_db(b"db0", dupsort=True)
        with environment.begin(write=True, db=handle) as txn:
            for number in range(2000):
                txn.put(b"key", b"%d" % number)
    assert [(entry.name, entry.has_duplicates) for entry in list_subdatabases(str(tmp_path / "e"))] == [(b"db0", True)]


def test_a_large_main_database_is_not_searched(tmp_path, monkeypatch):
    path = make(tmp_path / "e", {b"db0": 1}, plain=[b"%03d" % number for number in range(200)])
    monkeypatch.setattr("dataload.sources.lmdb.tree._MOST_NAMES", 200)
    assert list_subdatabases(str(path)) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = make(tmp_path_factory.mktemp("lmdb") / "e", {b"db%d" % number: 20 for number in range(100)})
    return (path / "data.mdb").read_bytes()


@pytest.fixture
def damaged(tmp_path, whole):
    def write(data):
        path = tmp_path / "data.mdb"
        path.write_bytes(bytes(data))
        return str(path)

    return write


def patch(data, place, layout, *values):
    changed = bytearray(data)
    struct.pack_into(layout, changed, place, *values)
    return changed


def newest(data):
    """Where the meta page starts that counts; both have it at the same place within."""
    return max((0, 4096), key=lambda page: struct.unpack_from("=Q", data, page + 16 + 128)[0])


def test_every_length_is_noticed(damaged, whole):
    used = check_whole(damaged(whole)).size
    path = damaged(whole[:used])
    check_whole(path)
    for length in [used - 1, *range(used - 2, 200, -509), *range(200, -1, -1)]:
        os.truncate(path, length)
        with pytest.raises(CorruptFileError) as caught:
            check_whole(path)
        assert caught.value.path == path
    check_whole(damaged(whole + b"more"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d[:0], "byte 0: the file is empty, but an LMDB file has at least two pages"),
        (lambda d: b"no LMDB file at all, but long enough" * 20, "expected the magic 0xbeefc0de at byte 16, found"),
        (lambda d: d[:30], "not an LMDB file: expected the magic 0xbeefc0de at byte 16, found de c0 ef be"),
        (lambda d: d[:10], "not an LMDB file: .* found the end"),
        (lambda d: d[:5000], "byte 5000: the file has 5000 bytes, but its two meta pages need 8192: it is truncated"),
        (lambda d: patch(d, 40, "=I", 3000), "byte 40: the first meta page gives an invalid page size of 3000 bytes"),
        (lambda d: patch(d, 40, "=I", 64), "the first meta page gives an invalid page size of 64 bytes"),
        (lambda d: patch(d, 4096 + 16, "=I", 0), "byte 4096: expected a meta page, found something else"),
        (lambda d: patch(d, 4096 + 10, "=H", 2), "byte 4096: expected a meta page, found something else"),
        (lambda d: patch(d, 0 + 10, "=H", 0), "byte 0: expected a meta page, found something else"),
        (lambda d: d[:-4096], r"page \d+ of 4096 bytes is the last one in use; the file has .* bytes instead of"),
        (lambda d: patch(d, newest(d) + 16 + 120, "=Q", 2**52), r"page 4503599627370496 of 4096 bytes is the last one"),
        (lambda d: patch(d, newest(d) + 16 + 112, "=Q", 2**40), r"in a tree of depth 2 at page 1099511627776"),
        (lambda d: patch(d, newest(d) + 16 + 112, "=Q", 1), r"the main database claims .* of depth 2 at page 1;"),
        (lambda d: patch(d, newest(d) + 16 + 78, "=H", 99), r"the main database claims .* of depth 99"),
        (lambda d: patch(d, newest(d) + 16 + 104, "=Q", 2**60), r"claims 1152921504606846976 records"),
        (lambda d: patch(d, newest(d) + 16 + 112, "=Q", 2**64 - 1), "the main database has 100 records but no pages"),
    ],
)
def test_damaged_meta_pages(damaged, whole, change, message):
    path = damaged(change(whole))
    for function in (check_whole, list_subdatabases, is_torchrecord):
        with pytest.raises(CorruptFileError, match=message):
            function(path)


def root_of(data):
    return struct.unpack_from("=Q", data, newest(data) + 16 + 112)[0] * 4096


def leaf_of(data):
    root = root_of(data)
    node = root + struct.unpack_from("=H", data, root + 16)[0]
    return struct.unpack_from("=H", data, node)[0] * 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: patch(d, root_of(d) + 10, "=H", 4), "is not a page of a tree"),
        (lambda d: patch(d, root_of(d) + 10, "=H", 3), "is not a page of a tree"),
        (lambda d: patch(d, root_of(d) + 12, "=H", 60000), "has wrong bounds"),
        (lambda d: patch(d, root_of(d) + 16, "=H", 4095), "points outside itself"),
        (lambda d: patch(d, root_of(d) + 16, "=H", 3), "points outside itself"),
        (lambda d: patch(d, first_node(d), "=I", 7), "the entry b'db0' of the main database claims to be a sub-"),
        (lambda d: patch(d, first_node(d) + 4, "=H", 3), "claims to be a sub-database but is not|outside the file"),
        (lambda d: patch(d, first_node(d) + 6, "=H", 60000), r"page \d+ has an entry that exceeds it"),
        (lambda d: patch(d, first_branch(d), "=HHH", 0, 0, 0), "points outside the file"),
        (lambda d: patch(d, first_branch(d), "=HHH", 1, 2, 3), "points outside the file"),
        (lambda d: patch(d, first_branch(d), "=HHH", root_of(d) // 4096, 0, 0), "a page occurs twice in the tree of t"),
        (lambda d: patch(d, first_node(d) + 8 + 3 + 40, "=Q", 2**50), "the sub-database b'db0' claims 20 records"),
    ],
)
def test_damaged_pages(damaged, whole, change, message):
    with pytest.raises(CorruptFileError, match=message):
        list_subdatabases(damaged(change(whole)))


def first_branch(data):
    root = root_of(data)
    return root + struct.unpack_from("=H", data, root + 16)[0]


def first_node(data):
    leaf = leaf_of(data)
    return leaf + struct.unpack_from("=H", data, leaf + 16)[0]


def test_files_of_other_machines(damaged, whole):
    big = patch(whole, 16, ">II", 0xBEEFC0DE, 1)
    narrow = whole[4:]  # page numbers of 4 bytes
    for data in (big, narrow):
        with pytest.raises(UnsupportedFormatError, match="another word size or byte order: export it there with mdb_d"):
            check_whole(damaged(data))
    with pytest.raises(UnsupportedFormatError, match=r"data\.mdb is an LMDB file of data version 2, expected 1"):
        check_whole(damaged(patch(whole, 20, "=I", 2)))


def test_any_damage_ends_in_an_error_or_an_answer(damaged, whole):
    """Bytes flipped where this module looks: meta pages and the pages of the main database."""
    rng = random.Random(0)
    pages = [0, 4096, root_of(whole), leaf_of(whole)]
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.choice(pages) + rng.randrange(rng.choice([160, 4096]))] = rng.randrange(256)
        with contextlib.suppress(SourceError):
            assert len(list_subdatabases(damaged(data))) < 1000


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_whole(str(tmp_path / "missing"))
    with pytest.raises(SourceNotFoundError, match=r"the directory .* has no data\.mdb, so it is not an LMDB environme"):
        check_whole(str(tmp_path))
