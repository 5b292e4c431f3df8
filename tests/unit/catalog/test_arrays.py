"""Tables of formats in the cache: used again, of the same content, and never believed if they may be wrong."""

import itertools
import json
import os
import stat
import struct
import sys
import tarfile
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_files import pack
from written import written

import dataload
from dataload.catalog.arrays import IndexKey, load_cached, store_cached
from dataload.errors import CorruptFileError
from dataload.sources.array_record import reader as array_record_reader
from dataload.sources.lmdb import reader as lmdb_table
from dataload.sources.lmdb import torchrecord as lmdb_torchrecord
from dataload.sources.syrah import layout as syrah_table
from dataload.sources.tar import table as tar_table
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.writer import write_index
from dataload.sources.tokens import reader as token_reader
from dataload.storage.kept import CachedTable

LONG_AGO = 1_600_000_000
HEAD = struct.Struct("<16sII")


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch, tmp_path):
    monkeypatch.setattr(tar_table, "_LEAST_CACHED", {True: 1, False: 1})
    monkeypatch.setattr(tar_table, "open_archives", lambda *_, **__: ())  # as for long indexes
    for module in (lmdb_table, array_record_reader, token_reader, syrah_table):
        monkeypatch.setattr(module, "_LEAST_CACHED", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def settle(*paths):
    """Files that changed only just now are not cached."""
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


def kept(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if "dataload-index" in path.name)


def stored(path: Path):
    """Return the header and the arrays of a cache file, as the module describes its layout."""
    data = path.read_bytes()
    _, length, _ = HEAD.unpack_from(data)
    header, start, arrays = json.loads(data[HEAD.size :][:length]), -(-(HEAD.size + length) // 64) * 64, {}
    for name, dtype, count in header["arrays"]:
        arrays[name] = np.frombuffer(data, dtype, count, start)
        start += -(-arrays[name].nbytes // 64) * 64
    return header, arrays


def forge(path: Path, arrays=None, extras=None, declared=None, **changes):
    """Put a well-formed cache file, with the right sums, in the place of another."""
    header, before = stored(path)
    arrays = before if arrays is None else {name: array for name, array in arrays.items() if array is not None}
    body = b"".join(array.tobytes() + bytes(-array.nbytes % 64) for array in arrays.values())
    names = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    header["arrays"] = names if declared is None else declared
    header["sum"] = int(np.frombuffer(body, np.uint64).sum(dtype=np.uint64))
    header["extras"] = header["extras"] if extras is None else extras
    text = json.dumps({**header, **changes}).encode()
    start = HEAD.pack(path.read_bytes()[:16], len(text), zlib.crc32(text)) + text
    path.write_bytes(start + bytes(-len(start) % 64) + body)


# Data of each format: what makes it returns a function that opens it and tells what its table decides.


def archive(path: Path, names, index: bool) -> Path:
    pack(path, [(name, bytes([65 + n]) * (5 + n)) for n, name in enumerate(names)], tarfile.GNU_FORMAT)
    settle(path)
    if index:
        write_index(path, strict=False)
        settle(path.with_suffix(".idx"))
    return path


def content(path, **options):
    with TarSource(path, **options) as source:
        return list(source), source.fingerprint(), dict(source.fields), source.locate(1).key


def tar(names, index):
    def make(tmp_path):
        path = archive(tmp_path / "x.tar", names, index)
        return lambda **options: content(path, **options)

    return make


def index_without_names(tmp_path):
    path = archive(tmp_path / "x.tar", NAMES["uneven"], False)
    with TarSource(path, cache=False) as source:
        members = [[(n, v) for n, v in record.items() if n != "__key__"] for record in source]
    with tarfile.open(path) as tar:
        offsets = iter([member.offset_data for member in tar])
    lines = [" ".join(f"{name} {next(offsets)} {len(value)}" for name, value in sample) for sample in members]
    (tmp_path / "x.idx").write_text(f"v1.1 {len(lines)}\n" + "".join(f"{line}\n" for line in lines))
    settle(tmp_path / "x.idx")
    return lambda **options: content(path, **options)


def keyed(keys, name=None):
    def make(tmp_path):
        with lmdb.open(str(tmp_path / "x.lmdb"), max_dbs=2, map_size=1 << 20) as env:
            database = env.open_db(name) if name else None
            with env.begin(write=True) as txn:
                for key in keys:
                    txn.put(key, b"value of " + key, db=database)
        settle(tmp_path / "x.lmdb/data.mdb")
        options = {} if name is None else {"subdatabase": name.decode()}

        def read(**more):
            with dataload.open(tmp_path / "x.lmdb", **options, **more) as source:
                shuffled = source.read([1, 0, 1])
                return list(source), shuffled, source.key_order, source.fingerprint(), source.locate(1)

        return read

    return make


def torchrecord(tmp_path):
    """A record is missing, and keys have two widths."""
    path = written(tmp_path / "x.torchrecord", [{"x": np.full(n % 5, n), "s": "x" * n} for n in range(32)], db_num=3)
    with lmdb.open(str(path), max_dbs=3) as env, env.begin(write=True) as txn:
        txn.delete(b"05", db=env.open_db(b"db1", txn=txn))
    (path / "lock.mdb").unlink()
    settle(path / "data.mdb")

    def read(**options):
        with dataload.open(path, **options) as source:
            records = [dict(source[index]) for index in range(len(source)) if index != 15]
            with pytest.raises(CorruptFileError, match="record 15: key '05' of sub-database db1 is missing, which has"):
                source[15]
            return str(records), source.shard_lengths, source.fingerprint(), [str(source.locate(i)) for i in range(31)]

    return read


def array_record(sizes_differ):
    def make(tmp_path):
        with dataload.create(tmp_path / "x.array_record", options="group_size:1,uncompressed") as writer:
            for i in range(50):
                writer.write(bytes([i]) * (20 + i * sizes_differ))
        settle(tmp_path / "x.array_record")

        def read(**options):
            with dataload.open(tmp_path / "x.array_record", **options) as source:
                return list(source), source.read([0, 7, 49]), source.read_batch([3, 1])

        return read

    return make


def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", np.tile(np.array([5, 6, 7, 8, 0], np.uint16), 30))
    settle(tmp_path / "tokens.npy")

    def read(**options):
        given = {"window": 3, "end_token": 0, "ends": "drop", **options}
        with dataload.open(tmp_path / "tokens.npy", **given) as source:
            return source.read_batch(range(len(source)))["tokens"].tolist()

    return read


def syrah(record):
    def make(tmp_path):
        written(tmp_path / "a.syr", [record(i) for i in range(12)])
        settle(tmp_path / "a.syr")

        def read(**options):
            with dataload.open(tmp_path / "a.syr", **options) as source:
                return str(source.fields), source.fingerprint(), str(source.read(range(12)))

        return read

    return make


NAMES = {
    "even": [f"{i:03d}.{e}" for i in range(9) for e in ("jpg", "cls")],
    "keys of several lengths": [f"{i}.{e}" for i in range(8, 13) for e in ("jpg", "cls")],
    "uneven": ["a.jpg", "b.jpg", "b.cls", "c.cls", "c.txt"],
    "not ASCII": ["é.jpg", "日本.jpg", "x.größe"],
    "no UTF-8": ["\udcff.jpg", "b.\udcfe"],
}
KEYS = {
    "words": [b"apple", b"banana", b"cherry"],
    "words of one length": [b"aa", b"bb", b"cc"],
    "zero bytes": [b"a\0", b"b\0"],
    "long": [bytes([65 + i]) * 200 + bytes(i) for i in range(9)],
    "long of one length": [bytes([65 + i]) * 200 for i in range(9)],
    "numbers": [b"3", b"20", b"100"],
    "numbers of one width": [b"003", b"020", b"100"],
    "numbers padded to several widths": [b"03", b"3", b"0100"],
}
RECORDS = {
    "even": lambda i: {"x": np.full((2, 3), i, np.float32), "y": i},
    "scalars": lambda i: {"y": np.int16(i)},
    "empty arrays": lambda i: {"x": np.empty((0, 3), np.float32), "y": i},
    "bytes": lambda i: {"b": bytes([i] * 4), "x": np.full(3, i)},
    "sizes differ": lambda i: {"x": np.full(i + 1, i)},
    "shapes differ": lambda i: {"x": np.full((2, 3) if i % 2 else (3, 2), i)},
    "text": lambda i: {"t": "a" * (i + 1)},
}
MADE = {
    **{f"tar: {kind}": tar(names, False) for kind, names in NAMES.items()},
    **{f"tar indexed: {kind}": tar(names, True) for kind, names in NAMES.items()},
    "tar: index without names": index_without_names,
    **{f"lmdb: {kind}": keyed(keys) for kind, keys in KEYS.items()},
    **{f"lmdb sub-database: {kind}": keyed(keys, b"second") for kind, keys in KEYS.items()},
    "torchrecord:": torchrecord,
    "array_record: sizes differ": array_record(True),
    "array_record: sizes are equal": array_record(False),
    "tokens:": tokens,
    **{f"syrah: {kind}": syrah(record) for kind, record in RECORDS.items()},
}
PARSERS = {  # what makes a table
    "tar": [(tar_table, "scan"), (tar_table, "parse_index")],
    "lmdb": [(lmdb_table, "read_tree")],
    "torchrecord": [(lmdb_torchrecord, "read_tree")],
    "array_record": [(array_record_reader, "parse_chunks")],
    "tokens": [(token_reader, "find_ends")],
    "syrah": [(syrah_table, "parse_metadata")],
}


@pytest.fixture
def no_parsers(monkeypatch):
    """A function that lets nothing make tables from then on."""

    def refuse(*_, **__):
        raise AssertionError("the data are parsed again")

    def remove():
        for place, name in itertools.chain(*PARSERS.values()):
            monkeypatch.setattr(place, name, refuse)
        monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)  # it parses files, too

    return remove


@pytest.mark.parametrize("kind", MADE)
def test_a_second_opening_parses_nothing_and_finds_the_same(tmp_path, kind, no_parsers):
    read = MADE[kind](tmp_path)
    wanted = read(cache=False)
    assert kept(tmp_path) == []
    assert read() == wanted
    if kind in ("syrah: sizes differ", "syrah: shapes differ", "syrah: text"):
        assert kept(tmp_path) == [], "columns of several layouts are not kept"
        return
    assert [found.parent for found in kept(tmp_path)] == [tmp_path], "beside the data, not in a directory of LMDB's"
    no_parsers()
    assert read() == wanted
    others = [{"cache": False}, {"end_token": 7}] if kind == "tokens:" else [{"cache": False}]
    for other in others:
        with pytest.raises(AssertionError, match="parsed again"):
            read(**other)


# Tables that somebody made up: well formed, with the right checksum, and of no such data.


def numbers(*values, dtype="u4"):
    return np.array(values, dtype)


GOOD = {"codes": numbers(0, dtype="u1"), "blocks": numbers(1, 3), "sizes": numbers(5, 6)}
NAMED = {**GOOD, "keys": np.frombuffer(b"ab", np.uint8), "key_ends": numbers(1)}
PAIR = {**GOOD, "codes": numbers(0, 0, dtype="u1")}
TAR_LIES = {
    "no arrays": {},
    "beyond the archive": {**GOOD, "blocks": numbers(1, 99)},
    "longer than the archive": {**GOOD, "sizes": numbers(5, 10**6)},
    "before the archive": {**GOOD, "blocks": numbers(-1, 3, dtype="i8")},
    "beyond int64": {**GOOD, "blocks": numbers(2**62, 3, dtype="i8")},
    "ends beyond int64": {**GOOD, "sizes": numbers(5, 2**63 - 512, dtype="i8")},
    "sizes missing": {**GOOD, "sizes": numbers(5)},
    "unknown extension": {**GOOD, "codes": numbers(1, dtype="u1")},
    "signed codes": {**GOOD, "codes": numbers(0, dtype="i1")},
    "half a sample": {**GOOD, "codes": numbers(0, 0, 0, dtype="u1")},
    "no component": {**GOOD, "codes": numbers(dtype="u1")},
    "samples that overlap": {**PAIR, "ends": numbers(2, 1)},
    "more samples than components": {**PAIR, "ends": numbers(1, 3)},
    "samples of none": {**PAIR, "ends": numbers()},
    "a first sample of none": {**PAIR, "ends": numbers(0, 2)},
    "keys cut": {**NAMED, "keys": np.frombuffer(b"a", np.uint8)},
    "keys that begin before": {**NAMED, "key_ends": numbers(-1, 2, dtype="i8")},
    "keys without ends": {**NAMED, "key_ends": None},
    "keys that end before they start": {**NAMED, "key_ends": numbers(2, 1)},
    "extensions missing": GOOD,
}
RIGHT = {  # of three records
    "offsets": numbers(5000, 5010, 5020, dtype="i8"),
    "lengths": numbers(4, 4, 4),
    "leaves": numbers(2),
    "ends": numbers(3),
}
LMDB_LIES = {
    "no offsets": {"offsets": numbers(dtype="i8")},
    "too few": {"offsets": numbers(5000, 5010, dtype="i8")},
    "negative": {"offsets": numbers(5000, 5010, -1, dtype="i8")},
    "outside the file": {"offsets": numbers(5000, 5010, 1 << 40, dtype="i8")},
    "too long": {"lengths": numbers(4, 4, 1 << 31)},
    "too few lengths": {"lengths": numbers(4, 4)},
    "places outside": {"places": numbers(0, 1, 3)},
    "too few places": {"places": numbers(0, 1)},
    "unknown order": {},
    "leaves outside": {"leaves": numbers(1 << 20)},
    "too few leaves": {"leaves": numbers()},
    "ends that fall": {"leaves": numbers(2, 2, 2), "ends": numbers(3, 1, 3)},
    "another end": {"ends": numbers(4)},
}
WRONG_NUMBERS = {
    "backwards": lambda found: found[::-1],
    "backwards after the first": lambda found: np.concatenate([found[:1], found[:0:-1]]),
    "of another dtype": lambda found: found.astype(np.int32),
    "none": lambda found: found[:0],
    "beyond": lambda found: found + 2**40,
    "before": lambda found: found - 2**40,
    "a byte before": lambda found: found - found[0] - 1,
}
FLOATS = ["x", "float32", False, 22, 24, 24, [2, 3]]
SYRAH_LIES = [
    *({"records": 10**15}, {"records": 0}, {"records": "12"}, {"columns": []}, {"columns": None}),
    *({"columns": [[*FLOATS[:3], -1, *FLOATS[4:]]]}, {"columns": [["x", "object", *FLOATS[2:]]]}),
    {"columns": [[*FLOATS[:3], 100, 32, *FLOATS[5:]]]},  # the last lies inside the metadata
    *({"columns": [[7, *FLOATS[1:]]]}, {"columns": [[*FLOATS[:4], 2**47, *FLOATS[5:]]]}),
]
OTHER_FORMS = [({}, {}), ({"edges": np.arange(3)}, {"columns": [[1]], "alike": "?"})]
EDGES_ALIKE = ([63, 43], None, "?", [63.0, 43])
LIES = [
    *(
        pytest.param(
            tar(["a.jpg", "b.jpg"], False), lie, {"extensions": None if "ext" in name[:3] else ["jpg"]}, id=name
        )
        for name, lie in TAR_LIES.items()
    ),
    *(
        pytest.param(
            keyed(KEYS["words"]),
            {**RIGHT, **lie},
            {"order": "random" if name == "unknown order" else "number"},
            id=name,
        )
        for name, lie in LMDB_LIES.items()
    ),
    *(pytest.param(array_record(True), {"edges": c}, None, id=f"edges {name}") for name, c in WRONG_NUMBERS.items()),
    *((array_record(True), {"edges": lambda edges: edges + 1}, {"alike": alike}) for alike in EDGES_ALIKE),
    *(
        pytest.param(tokens, {"ends": c}, None, id=f"ends {name}")
        for name, c in WRONG_NUMBERS.items()
        if name != "none"
    ),
    *((syrah(RECORDS["even"]), None, lie) for lie in SYRAH_LIES),
    *((make, *form) for make in (array_record(True), tokens, syrah(RECORDS["even"])) for form in OTHER_FORMS),
]


@pytest.mark.parametrize(("make", "arrays", "extras"), LIES)
def test_a_table_that_somebody_made_up_gives_no_wrong_record(tmp_path, make, arrays, extras):
    read = make(tmp_path)
    wanted = read()
    [found] = kept(tmp_path)
    header, before = stored(found)
    changed = None if arrays is None else {n: a(before[n]) if callable(a) else a for n, a in arrays.items()}
    forge(found, changed, None if extras is None else {**header["extras"], **extras})
    assert read() == wanted


@pytest.mark.parametrize("arrays", [GOOD, NAMED], ids=["without keys", "with keys"])
def test_the_model_of_the_lies_about_archives_is_true(tmp_path, arrays, no_parsers):
    read = tar(["a.jpg", "b.jpg"], False)(tmp_path)
    wanted = read()
    forge(kept(tmp_path)[0], arrays, {"extensions": ["jpg"]})
    no_parsers()
    assert read()[0] == wanted[0]


def test_the_model_of_the_lies_about_databases_would_be_used(tmp_path):
    read = keyed(KEYS["words"])(tmp_path)
    read()
    forge(kept(tmp_path)[0], RIGHT, {"order": "number"})
    data = (tmp_path / "x.lmdb/data.mdb").read_bytes()
    assert read()[0] == [data[at : at + 4] for at in (5000, 5010, 5020)]


@pytest.fixture(params=[False, True], ids=["scanned", "indexed"])
def even(request, tmp_path):
    return archive(tmp_path / "x.tar", NAMES["even"], request.param)


@pytest.fixture
def forged(tmp_path):
    """An archive beside a well-formed cache of wrong values, and its records."""
    path = archive(tmp_path / "x.tar", NAMES["even"], False)
    wanted = content(path)
    [found] = kept(tmp_path)
    arrays = stored(found)[1]
    forge(found, {**arrays, "blocks": arrays["blocks"][::-1]})
    assert content(path) != wanted, "who may write it is believed"
    return path, wanted, found


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_cache_that_others_may_write_is_not_believed(forged, mode):
    path, wanted, found = forged
    found.chmod(mode)
    assert content(path) == wanted
    assert stat.S_IMODE(found.stat().st_mode) & 0o022 == 0, "it was replaced"
    assert content(path) == wanted


OWNERS = [  # of the data, of the cache, the user, whether it is believed
    *((0, 0, 0, True), (1234, 1234, 0, True), (1234, 0, 0, True), (0, 1234, 0, False), (1234, 1235, 0, False)),
    *((1234, 1235, 1236, False), (1234, 1235, 1235, True), (1234, 0, 1235, True)),
]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("owner_of_data", "owner_of_cache", "user", "believed"), OWNERS)
def test_whose_cache_is_believed(forged, monkeypatch, owner_of_data, owner_of_cache, user, believed):
    path, wanted, found = forged
    os.chown(path, owner_of_data, -1)
    os.chown(found, owner_of_cache, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert (content(path) != wanted) == believed


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_what_is_no_file_in_its_place_does_no_harm(even, tmp_path, what):
    wanted = content(even)
    [found] = kept(tmp_path)
    before = found.rename(tmp_path / "elsewhere").read_bytes()
    if what == "link":
        found.symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(found)
    else:
        (found / "x").mkdir(parents=True)
    assert content(even) == wanted
    assert found.is_file() == (what != "directory"), "it was replaced"
    assert not found.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == before


@pytest.mark.parametrize("which", ["x.tar", "x.idx"])
@pytest.mark.parametrize("what", ["time", "size"])
def test_out_of_date(tmp_path, which, what, no_parsers):
    path = archive(tmp_path / "x.tar", NAMES["even"], True)
    content(path)
    before = stored(kept(tmp_path)[0])[0]
    if what == "size":
        (tmp_path / which).write_bytes((tmp_path / which).read_bytes() + b"\n" * 512)
        settle(tmp_path / which)
    else:
        os.utime(tmp_path / which, ns=(0, LONG_AGO * 10**9 + 1))
    wanted = content(path)
    [found] = kept(tmp_path)
    assert found.name.startswith(".x.tar.")
    assert stored(found)[0]["key"] != before["key"]
    no_parsers()
    assert content(path) == wanted


@pytest.mark.parametrize("index", [False, True])
def test_another_archive_of_the_same_size_is_noticed(tmp_path, index):
    path = archive(tmp_path / "x.tar", ["a.jpg", "b.jpg"], index)
    content(path)
    archive(path, ["a.jpg", "c.jpg"], index)
    os.utime(path, ns=(0, LONG_AGO * 10**9 + 1))
    assert [record["__key__"] for record in TarSource(path)] == ["a", "c"]


def test_another_transaction_is_noticed(tmp_path):
    """The same size, the same time and the same number of keys."""
    read, data = keyed(KEYS["words"])(tmp_path), tmp_path / "x.lmdb/data.mdb"

    def write(old, new):
        with lmdb.open(str(tmp_path / "x.lmdb")) as env, env.begin(write=True) as txn:
            txn.delete(old)
            txn.put(new, b"value of " + new)
        settle(data)
        return data.stat().st_size

    for _ in range(4):  # until LMDB finds all the pages that it needs among those it has
        write(b"apple", b"zebra")
        size = write(b"zebra", b"apple")
    assert read()[0] == [b"value of apple", b"value of banana", b"value of cherry"]
    assert write(b"apple", b"zebra") == size
    assert read()[0] == [b"value of banana", b"value of cherry", b"value of zebra"]


def test_what_is_not_kept(even, tmp_path, monkeypatch):
    content(even, cache=False)
    with monkeypatch.context() as patch:
        patch.setenv("DATALOAD_CACHE", "0")
        content(even)
    with monkeypatch.context() as patch:
        patch.setattr(tar_table, "_LEAST_CACHED", {True: 19, False: 19})
        content(even)
    os.utime(even)  # it has changed only just now
    content(even)
    assert kept(tmp_path) == []


def test_what_verifies_the_index_is_not_cached_away(tmp_path):
    """An index of another archive passes without verification, and must not with it."""
    path = archive(tmp_path / "x.tar", ["a.jpg", "b.jpg"], True)
    other = archive(tmp_path / "y.tar", ["a.jpg", "c.jpg"], False)
    index = path.with_suffix(".idx")
    assert len(TarSource(other, index=index, verify_index=False)) == 2
    with pytest.raises(ValueError, match=r"the header says 'c\.jpg'"):
        len(TarSource(other, index=index))


@pytest.mark.parametrize("home", [None, "/dev/null/nowhere", "relative"])
def test_without_a_place_beside_the_data_the_users_own_directory_serves_if_there_is_one(
    tmp_path, home, monkeypatch, no_parsers
):
    """The hidden name would be longer than a file name can be; tests may run as root, whom no directory refuses."""
    path = archive(tmp_path / f"{'n' * 245}.tar", NAMES["even"], False)
    wanted = content(path, cache=False)
    if home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        monkeypatch.setenv("HOME", "/dev/null/nowhere")
        assert content(path) == wanted
        assert kept(tmp_path) == []
        return
    assert content(path) == wanted
    [found] = kept(tmp_path)
    assert found.parent == tmp_path / "home" / "dataload" / "tables"
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    no_parsers()
    assert content(path) == wanted
    found.rename(found.parents[1] / found.name)  # where version 0.2 kept it
    assert content(path) == wanted


def test_copies_that_keep_their_times_take_the_table_along(even, tmp_path, no_parsers):
    wanted = content(even)[0]
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (*tmp_path.glob("x.*"), *tmp_path.glob(".x*")):
        file.rename(moved / file.name)
    no_parsers()
    assert content(moved / "x.tar")[0] == wanted


def key_of(path: Path, **changes) -> IndexKey:
    path.write_bytes(b"data")
    settle(path)
    return IndexKey.of("test", (str(path),), **changes)


def test_a_table_that_is_stored_again_replaces_the_one_before_and_arrays_are_read_only(tmp_path):
    key = key_of(tmp_path / "x")
    store_cached(key, CachedTable({"x": numbers(1, 2)}, {}))
    [found] = kept(tmp_path)
    table = load_cached(key)
    assert (table.arrays["x"].tolist(), table.arrays["x"].flags.writeable) == ([1, 2], False)
    store_cached(key, CachedTable({"y": numbers(3)}, {}))  # of a release that needs more of it
    assert kept(tmp_path) == [found]
    assert load_cached(key).arrays["y"].tolist() == [3]
    os.truncate(found, 0)  # it would kill the process if it were mapped
    assert table.arrays["x"].tolist() == [1, 2]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_tables_are_never_believed(tmp_path, data):
    path = tmp_path / "x.tar"
    if not path.exists():
        archive(path, NAMES["uneven"], False)
    wanted = content(path)
    [found] = kept(tmp_path)
    good = found.read_bytes()
    place, length = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(1, 64))
    bad = {
        "flip": good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :],
        "cut": good[:place],
        "zero": good[:place] + bytes(min(length, len(good) - place)) + good[place + length :],
        "longer": good + bytes(length),
    }
    found.write_bytes(bad[data.draw(st.sampled_from(sorted(bad)))])
    assert content(path) == wanted
    found.unlink(missing_ok=True)


ANY_ARRAYS = st.dictionaries(
    st.text(max_size=5),
    st.tuples(st.sampled_from(["u1", "<u2", "<u4", "<i8"]), st.lists(st.integers(0, 127), max_size=40)),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=ANY_ARRAYS, extras=st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=3))
def test_whatever_is_stored_is_loaded(tmp_path, arrays, extras):
    for old in kept(tmp_path):
        old.unlink()
    key = key_of(tmp_path / "x")
    given = {name: np.array(values, dtype) for name, (dtype, values) in arrays.items()}
    store_cached(key, CachedTable(given, extras))
    found = load_cached(key)
    assert found.extras == extras
    described = [
        {name: (array.dtype.str, array.tolist()) for name, array in each.items()}
        for each in (given, found.arrays, stored(kept(tmp_path)[0])[1])
    ]
    assert described[0] == described[1] == described[2]


def test_state_belongs_to_the_key(tmp_path):
    key = key_of(tmp_path / "x", state=1)
    store_cached(key, CachedTable({}, {}))
    assert load_cached(key) is not None
    assert load_cached(key_of(tmp_path / "x", state=2)) is None
    forge(kept(tmp_path)[0], key=key.text.replace("(1, ", "(2, ", 1))  # of another version
    assert load_cached(key) is None
