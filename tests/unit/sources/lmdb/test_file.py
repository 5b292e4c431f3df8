"""The pages of LMDB's file, with files that lmdb itself wrote as the model."""

import struct

import lmdb
import pytest
from lmdb_files import lib_versions

from dataload.errors import CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.lmdb.file import data_file, open_file, read_info
from dataload.sources.lmdb.snapshot import is_torchrecord, list_subdatabases


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
    info = read_info(open_file(str(path)))
    assert info.main.entries == 302
    assert info.size <= (path / "data.mdb").stat().st_size
    assert info == read_info(open_file(str(path / "data.mdb")))


def test_other_environments(tmp_path):
    path = make(tmp_path / "single", {b"other": 3}, subdir=False)
    assert data_file(str(path)) == str(path)
    assert [entry.name for entry in list_subdatabases(str(path))] == [b"other"]
    assert not is_torchrecord(str(path))
    path = make(tmp_path / "empty", {})
    assert list_subdatabases(str(path)) == []
    assert read_info(open_file(str(path))).main.root is None
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
    def write(change):
        path = tmp_path / "data.mdb"
        path.write_bytes(change(whole))
        return str(path)

    return write


def patch(data, place, layout, *values):
    changed = bytearray(data)
    struct.pack_into(layout, changed, place, *values)
    return changed


def newest(data):
    """Where the meta page that counts begins; both have it at the same place within."""
    return max((0, 4096), key=lambda page: struct.unpack_from("=Q", data, page + 16 + 128)[0]) + 16


def root_of(data):
    return struct.unpack_from("=Q", data, newest(data) + 112)[0] * 4096


def first_branch(data):
    return root_of(data) + struct.unpack_from("=H", data, root_of(data) + 16)[0]


def first_node(data):
    leaf = struct.unpack_from("=H", data, first_branch(data))[0] * 4096
    return leaf + struct.unpack_from("=H", data, leaf + 16)[0]


META = [
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
    (lambda d: patch(d, newest(d) + 120, "=Q", 2**52), r"page 4503599627370496 of 4096 bytes is the last one"),
    (lambda d: patch(d, newest(d) + 112, "=Q", 2**40), r"in a tree of depth 2 at page 1099511627776"),
    (lambda d: patch(d, newest(d) + 112, "=Q", 1), r"the main database claims .* of depth 2 at page 1;"),
    (lambda d: patch(d, newest(d) + 78, "=H", 99), r"the main database claims .* of depth 99"),
    (lambda d: patch(d, newest(d) + 104, "=Q", 2**60), r"claims 1152921504606846976 records"),
    (lambda d: patch(d, newest(d) + 112, "=Q", 2**64 - 1), "the main database has 100 records but no pages"),
]
PAGES = [
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
    (lambda d: patch(d, first_branch(d), "=HHH", root_of(d) // 4096, 0, 0), "a page occurs twice in the tree of the m"),
    (lambda d: patch(d, first_node(d) + 8 + 3 + 40, "=Q", 2**50), "the sub-database b'db0' claims 20 records"),
]
MACHINES = [
    (lambda d: patch(d, 16, ">II", 0xBEEFC0DE, 1), "another word size or byte order: export it there with mdb_dump"),
    (lambda d: d[4:], "another word size or byte order"),  # page numbers of 4 bytes
    (lambda d: patch(d, 20, "=I", 2), r"data\.mdb is an LMDB file of data version 2, expected 1"),
]


@pytest.mark.parametrize(("change", "message"), [*META, *PAGES, *MACHINES])
def test_damage(damaged, change, message):
    path = damaged(change)
    error = UnsupportedFormatError if (change, message) in MACHINES else CorruptFileError
    meta = [lambda path: read_info(open_file(path)), is_torchrecord] if (change, message) not in PAGES else []
    for function in (list_subdatabases, *meta):
        with pytest.raises(error, match=message):
            function(path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_file(str(tmp_path / "missing"))
    message = r"the directory .* has no data\.mdb, so it is not an LMDB environment"
    with pytest.raises(SourceNotFoundError, match=message):
        open_file(str(tmp_path))
