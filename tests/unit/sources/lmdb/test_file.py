"""The pages of LMDB's file, with files that lmdb itself wrote as the model, and with files that no LMDB wrote."""

import struct

import numpy as np
import pytest
from command_line import fail
from lmdb_files import lib_versions, make

from dataload.codecs.tensorprotos import encode
from dataload.errors import CorruptFileError, SourceNotFoundError, UnsupportedFormatError
from dataload.sources.lmdb.file import open_file, read_info
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.lmdb.torchrecord import TorchRecordSource
from dataload.sources.lmdb.tree import is_torchrecord, list_subdatabases, read_tree, subdatabases

PAGE = 4096


def zeros(count):
    return [(b"%06d" % number, bytes(number % 60)) for number in range(count)]


@pytest.mark.parametrize("version", list(lib_versions()))
def test_what_lmdb_wrote(tmp_path, version):
    counts = {b"db%d" % number: number % 40 for number in range(300)}  # more than one page of them
    databases = {**{name: zeros(count) for name, count in counts.items()}, None: [(b"key", b"?"), (b"zzz" * 50, b"?")]}
    path = make(tmp_path / "e", databases, lib_version=version)
    found = list_subdatabases(str(path))
    assert [(entry.name, entry.entries) for entry in found] == sorted(counts.items())
    assert not any(entry.has_duplicates for entry in found)
    assert is_torchrecord(str(path))
    info = read_info(open_file(str(path)))
    assert info.main.entries == 302
    assert info.size <= (path / "data.mdb").stat().st_size
    assert info == read_info(open_file(str(path / "data.mdb")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = make(tmp_path_factory.mktemp("lmdb") / "e", {b"db%d" % number: zeros(20) for number in range(100)})
    return (path / "data.mdb").read_bytes()


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
def test_damage(tmp_path, whole, change, message):
    path = str(tmp_path / "data.mdb")
    (tmp_path / "data.mdb").write_bytes(change(whole))
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


def small(n):
    return b"%d" % n * (n % 50)


def large(n):
    return bytes([n % 256]) * (n * 911 % 9000)


FILES = {
    "numbers": (LMDBSource, None, b"%d", small),
    "names": (LMDBSource, None, b"a name of %05d" + b"e" * 60, small),
    "large values": (LMDBSource, b"named", b"%06d", large),
    "TorchRecord": (TorchRecordSource, b"db0", b"%03d", lambda n: encode({"x": np.full(3, n), "s": "x" * n})),
}


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


def source_of(name, path, **options):
    kind, subdatabase, _, _ = FILES[name]
    return kind(path, **({"subdatabase": "named"} if subdatabase == b"named" else {}), **options)


@pytest.mark.parametrize("version", list(lib_versions()))
@pytest.mark.parametrize("name", FILES)
def test_all_pages_of_good_files_are_good(tmp_path, name, version):
    _, subdatabase, key, value = FILES[name]
    for shift in (0, *range(30)):  # values that are replaced by shorter ones may keep their pages
        rows = range(shift % 7, 300, 7) if shift else range(300)
        items = [(key % n, value((n + shift) % 300)) for n in rows]
        make(tmp_path / "e", {subdatabase: items}, lib_version=version)
    assert len(source_of(name, tmp_path / "e", verify=True)) == 300


@pytest.mark.parametrize("version", list(lib_versions()))
def test_pages_that_reading_does_not_look_at(tmp_path, version):
    header = 24 if version else 16
    items = [(b"%06d" % n, large(n)) for n in range(300)]
    for half in (items[:150], items[150:]):  # two transactions, so that there are free pages too
        make(tmp_path / "e", {b"named": half}, lib_version=version)
    data = (tmp_path / "e" / "data.mdb").read_bytes()
    file = open_file(str(tmp_path / "e"))
    info = read_info(file)
    (named,) = subdatabases(file, info)
    nodes = read_tree(file, info, named)
    larges = (nodes.offsets[nodes.flags & 1 != 0] // PAGE * PAGE).tolist()
    leaf = int(nodes.leaves[0]) * PAGE
    long = [n for n in np.flatnonzero(nodes.flags & 1).tolist() if nodes.lengths[n] > 4096][:2]
    first, second = (int(nodes.offsets[n]) // PAGE for n in long)
    path = tmp_path / "data.mdb"
    for offset, form, value, message in (
        (larges[3], "=Q", larges[4] // PAGE, f"page {larges[3] // PAGE} has the number of another page"),
        (leaf, "=Q", 2**64 - 1, f"page {leaf // PAGE} has the number of another page"),
        (larges[3] + header - 6, "=H", 2, f"page {larges[3] // PAGE} is not the page of a value"),
        (larges[3] + header - 4, "=I", 0, f"page {larges[3] // PAGE} holds a value of another length"),
        (larges[3] + header - 4, "=I", 2**31, f"page {larges[3] // PAGE} holds a value of another length"),
        (larges[3] + header - 4, "=I", 20, "page .* is used twice"),
        (data.index(struct.pack("=Q", second), leaf), "=Q", first, f"page {first} (is used twice|holds a value of an)"),
    ):
        changed = bytearray(data)
        struct.pack_into(form, changed, offset, value)
        path.write_bytes(changed)
        with source_of("large values", path) as source:
            assert len(source.read(range(300))) == 300
        with pytest.raises(CorruptFileError, match=message) as caught:
            len(source_of("large values", path, verify=True))
        assert caught.value.offset % PAGE == 0
    fail(1, "verify", f"lmdb:{path}", "-o", "subdatabase=named")
