from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataload
from dataload.errors import CorruptFileError
from dataload.sources.array_record import map as array_record_map
from dataload.sources.lmdb import table as lmdb_table
from dataload.sources.lmdb import torchrecord as lmdb_torchrecord
from dataload.sources.lmdb.reader import LMDBSource
from dataload.sources.syrah import table as syrah_table
from dataload.sources.tar import table as tar_table
from dataload.sources.tar.reader import TarSource
from dataload.sources.tar.writer import write_index
from dataload.sources.tokens import reader as token_reader
from dataload.storage import storage_of
from dataload.storage import table_cache as index_cache
from dataload.storage.table_cache import CachedTable, IndexKey, load_cached, store_cached
from dataload.testing.compare import difference

LONG_AGO = 1_600_000_000


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch, tmp_path):
    monkeypatch.setattr(tar_table, "_LEAST_CACHED", {True: 1, False: 1})
    for module in (lmdb_table, array_record_map, token_reader, syrah_table):
        monkeypatch.setattr(module, "_LEAST_CACHED", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def settle(*paths):
    """Files that changed only just now are not cached."""
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


def archive(path: Path, names, index: bool) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = 5 + number
            tar.addfile(info, io.BytesIO(bytes([65 + number]) * info.size))
    settle(path)
    if index:
        write_index(path, strict=False)
        settle(path.with_suffix(".idx"))
    return path


NAMES = {
    "even": [f"{i:03d}.{e}" for i in range(9) for e in ("jpg", "cls")],
    "keys of several lengths": [f"{i}.{e}" for i in range(8, 13) for e in ("jpg", "cls")],
    "uneven": ["a.jpg", "b.jpg", "b.cls", "c.cls", "c.txt"],
    "not ASCII": ["é.jpg", "日本.jpg", "x.größe"],
    "no UTF-8": ["\udcff.jpg", "b.\udcfe"],
}


@pytest.fixture(params=[False, True], ids=["scanned", "indexed"])
def indexed(request):
    return request.param


@pytest.fixture
def even(tmp_path, indexed):
    return archive(tmp_path / "x.tar", NAMES["even"], indexed)


def kept(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if "dataload-index" in path.name)


def content(path, **options):
    with TarSource(path, **options) as source:
        return list(source), source.fingerprint(), dict(source.fields), source.locate(1).key


def refuse(*_):
    raise AssertionError("the archive is read again")


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_second_opening_reads_no_archive_and_finds_the_same(tmp_path, names, indexed, monkeypatch):
    path = archive(tmp_path / "x.tar", names, indexed)
    wanted = content(path, cache=False)
    assert kept(tmp_path) == []
    assert content(path) == wanted
    assert [found.parent for found in kept(tmp_path)] == [tmp_path]
    monkeypatch.setattr(tar_table, "_make", refuse)
    assert content(path) == wanted


def test_index_without_names(tmp_path, monkeypatch):
    path = archive(tmp_path / "x.tar", NAMES["uneven"], False)
    with TarSource(path, cache=False) as source:
        members = [[(n, v) for n, v in record.items() if n != "__key__"] for record in source]
    with tarfile.open(path) as tar:
        offsets = iter([member.offset_data for member in tar])
    lines = [" ".join(f"{name} {next(offsets)} {len(value)}" for name, value in sample) for sample in members]
    (tmp_path / "x.idx").write_text(f"v1.1 {len(lines)}\n" + "".join(f"{line}\n" for line in lines))
    settle(tmp_path / "x.idx")
    wanted = content(path)
    assert wanted == content(path, cache=False)
    monkeypatch.setattr(tar_table, "_make", refuse)
    assert content(path) == wanted


def test_a_table_is_read_only(even):
    TarSource(even).__len__()
    with TarSource(even) as source:
        table = source._data_set().reader(0)._table
        assert not table.blocks.flags.writeable


def test_a_cache_that_is_truncated_while_it_is_used_does_no_harm(tmp_path):
    """It would kill the process if it were mapped."""
    x = tmp_path / "x"
    x.write_bytes(bytes(8))
    settle(x)
    key = IndexKey.of("test", (str(x),))
    wanted = np.arange(1 << 20)
    store_cached(key, CachedTable({"x": wanted}, {}))
    program = (
        "import os, sys\nfrom dataload.storage.table_cache import IndexKey, load_cached\n"
        f"key = IndexKey.of('test', ({str(x)!r},))\n"
        "found = load_cached(key).arrays['x']\n"
        "os.truncate(key.cache_paths()[0], 0)\n"
        "print(int(found.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{wanted.sum()}\n"), done.stderr


def test_a_cache_that_ends_while_it_is_read_is_not_believed(tmp_path, monkeypatch):
    key = key_of(tmp_path / "x")
    store_cached(key, CachedTable({"x": np.arange(1000)}, {}))
    real = index_cache._read_header

    def read_header(descriptor, size):
        found = real(descriptor, size)
        os.truncate(key.cache_paths()[0], 4000)
        return found

    monkeypatch.setattr(index_cache, "_read_header", read_header)
    assert load_cached(key) is None


@pytest.fixture
def forged(tmp_path, monkeypatch):
    """An archive beside a well-formed cache of wrong values, and its records."""
    path = archive(tmp_path / "x.tar", NAMES["even"], False)
    wanted = content(path, cache=False)
    pack = tar_table._pack

    def lie(table):
        packed = pack(table)
        return CachedTable({**packed.arrays, "blocks": packed.arrays["blocks"][::-1].copy()}, packed.extras)

    with monkeypatch.context() as patch:
        patch.setattr(tar_table, "_pack", lie)
        content(path)
    assert content(path) != wanted, "who may write it is believed"
    return path, wanted, kept(tmp_path)[0]


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602])
def test_a_cache_that_others_may_write_is_not_believed(forged, mode):
    path, wanted, found = forged
    found.chmod(mode)
    assert content(path) == wanted
    assert stat.S_IMODE(found.stat().st_mode) & 0o022 == 0, "it was replaced"
    assert content(path) == wanted


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(
    ("owner_of_data", "owner_of_cache", "user", "believed"),
    [
        (0, 0, 0, True),
        (1234, 1234, 0, True),
        (1234, 0, 0, True),
        (0, 1234, 0, False),
        (1234, 1235, 0, False),
        (1234, 1235, 1236, False),
        (1234, 1235, 1235, True),
        (1234, 0, 1235, True),
    ],
)
def test_whose_cache_is_believed(forged, monkeypatch, owner_of_data, owner_of_cache, user, believed):
    path, wanted, found = forged
    os.chown(path, owner_of_data, -1)
    os.chown(found, owner_of_cache, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert (content(path) != wanted) == believed


def test_a_link_to_a_cache_is_not_believed(even, tmp_path):
    wanted = content(even)
    [found] = kept(tmp_path)
    moved = tmp_path / "elsewhere"
    found.rename(moved)
    found.symlink_to(moved)
    before = moved.read_bytes()
    assert content(even) == wanted
    assert not found.is_symlink(), "it was replaced"
    assert moved.read_bytes() == before


def test_a_pipe_in_its_place_does_no_harm(even, tmp_path):
    wanted = content(even)
    [found] = kept(tmp_path)
    found.unlink()
    os.mkfifo(found)
    assert content(even) == wanted


@pytest.mark.parametrize("which", ["archive", "index"])
@pytest.mark.parametrize("what", ["time", "size"])
def test_out_of_date(tmp_path, which, what):
    path = archive(tmp_path / "x.tar", NAMES["even"], True)
    TarSource(path).__len__()
    changed = path if which == "archive" else path.with_suffix(".idx")
    if what == "size":
        changed.write_bytes(changed.read_bytes() + b"\n" * 512)
        settle(changed)
    else:
        os.utime(changed, ns=(0, LONG_AGO * 10**9 + 1))
    key = tar_table._key(storage_of(str(path)).map(str(path)), str(path.with_suffix(".idx")))
    assert load_cached(key) is None
    TarSource(path).__len__()
    assert load_cached(key) is not None
    assert len(kept(tmp_path)) == 1


def test_another_archive_of_the_same_size_is_noticed(tmp_path, indexed):
    path = archive(tmp_path / "x.tar", ["a.jpg", "b.jpg"], indexed)
    TarSource(path).__len__()
    archive(path, ["a.jpg", "c.jpg"], indexed)
    os.utime(path, ns=(0, LONG_AGO * 10**9 + 1))
    assert [record["__key__"] for record in TarSource(path)] == ["a", "c"]


def test_files_that_changed_just_now_are_not_cached(even, tmp_path):
    os.utime(even)
    TarSource(even).__len__()
    assert kept(tmp_path) == []


def test_small_archives_leave_nothing(even, tmp_path, monkeypatch):
    monkeypatch.setattr(tar_table, "_LEAST_CACHED", {True: 19, False: 19})
    TarSource(even).__len__()
    assert kept(tmp_path) == []


def test_turned_off(even, tmp_path, monkeypatch):
    TarSource(even, cache=False).__len__()
    monkeypatch.setenv("DATALOAD_CACHE", "0")
    TarSource(even).__len__()
    assert kept(tmp_path) == []


def test_archive_read_both_ways_has_two_tables(tmp_path):
    path = archive(tmp_path / "x.tar", NAMES["even"], True)
    (tmp_path / "other.idx").write_bytes(path.with_suffix(".idx").read_bytes())
    settle(tmp_path / "other.idx")
    for _ in range(2):
        for index in (None, False, tmp_path / "other.idx"):
            assert len(TarSource(path, index=index)) == 9
    assert len(kept(tmp_path)) == 3


def test_what_verifies_the_index_is_not_cached_away(tmp_path):
    """An index of another archive passes without verification, and must not with it."""
    path = archive(tmp_path / "x.tar", ["a.jpg", "b.jpg"], True)
    other = archive(tmp_path / "y.tar", ["a.jpg", "c.jpg"], False)
    index = path.with_suffix(".idx")
    assert len(TarSource(other, index=index, verify_index=False)) == 2
    with pytest.raises(ValueError, match=r"the header says 'c\.jpg'"):
        len(TarSource(other, index=index))


def test_damaged_archive_warns_every_time(tmp_path):
    path = archive(tmp_path / "x.tar", NAMES["even"], False)
    data = bytearray(path.read_bytes())
    data[4 * 1024] ^= 1
    path.write_bytes(data)
    settle(path)
    for _ in range(2):
        with pytest.warns(UserWarning, match="reading ends here"):
            assert len(TarSource(path, on_damage="stop")) == 2
    assert kept(tmp_path) == []


def test_without_a_place_beside_the_data_the_users_own_directory_serves(tmp_path, indexed, monkeypatch):
    """The hidden name would be longer than a file name can be; tests may run as root, whom no directory refuses."""
    short = archive(tmp_path / "x.tar", NAMES["even"], indexed)
    path = tmp_path / f"{'n' * 245}.tar"
    for file in tmp_path.glob("x.*"):
        file.rename(path.with_suffix(file.suffix))
    assert not short.exists()
    wanted = content(path)
    [found] = kept(tmp_path)
    assert found.parent == tmp_path / "home" / "dataload"
    assert found.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(tar_table, "_make", refuse)
    assert content(path) == wanted


@pytest.mark.parametrize("home", ["/dev/null/nowhere", "relative"])
def test_without_any_place_nothing_is_cached(tmp_path, home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", "/dev/null/nowhere")
    path = archive(tmp_path / f"{'n' * 245}.tar", NAMES["even"], False)
    assert content(path) == content(path, cache=False)
    assert kept(tmp_path) == []


def test_a_directory_in_its_place_does_no_harm(even, tmp_path):
    TarSource(even).__len__()
    [found] = kept(tmp_path)
    found.unlink()
    found.mkdir()
    (found / "x").touch()
    assert content(even) == content(even, cache=False)


def test_copies_that_keep_their_times_take_the_table_along(even, tmp_path, indexed, monkeypatch):
    wanted = content(even)[0]
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in (*tmp_path.glob("x.*"), *tmp_path.glob(".x*")):
        file.rename(moved / file.name)
    monkeypatch.setattr(tar_table, "_make", refuse)
    assert content(moved / "x.tar")[0] == wanted


def test_whoever_reads_the_data_may_read_the_table(even, tmp_path):
    even.chmod(0o664)
    TarSource(even).__len__()
    [found] = kept(tmp_path)
    assert found.stat().st_mode & 0o777 == 0o644, "and only its owner may write it"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_tables_are_never_believed(tmp_path, data):
    path = tmp_path / "x.tar"
    if not path.exists():
        archive(path, NAMES["uneven"], False)
    wanted = content(path, cache=False)
    content(path)
    [found] = kept(tmp_path)
    good = found.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "longer"]))
    place = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(1, 64))
    bad = {
        "flip": good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :],
        "cut": good[:place],
        "zero": good[:place] + bytes(min(length, len(good) - place)) + good[place + length :],
        "longer": good + bytes(length),
    }[kind]
    found.write_bytes(bad)
    assert content(path) == wanted
    found.unlink(missing_ok=True)


def numbers(*values, dtype="u4"):
    return np.array(values, dtype)


GOOD = {"codes": numbers(0, dtype="u1"), "blocks": numbers(1, 3), "sizes": numbers(5, 6)}
NAMED = {**GOOD, "keys": np.frombuffer(b"ab", np.uint8), "key_ends": numbers(1)}
LIES = {
    "no arrays": ({}, ["jpg"]),
    "beyond the archive": ({**GOOD, "blocks": numbers(1, 99)}, ["jpg"]),
    "longer than the archive": ({**GOOD, "sizes": numbers(5, 10**6)}, ["jpg"]),
    "before the archive": ({**GOOD, "blocks": numbers(-1, 3, dtype="i8")}, ["jpg"]),
    "beyond int64": ({**GOOD, "blocks": numbers(2**62, 3, dtype="i8")}, ["jpg"]),
    "sizes missing": ({**GOOD, "sizes": numbers(5)}, ["jpg"]),
    "unknown extension": ({**GOOD, "codes": numbers(1, dtype="u1")}, ["jpg"]),
    "signed codes": ({**GOOD, "codes": numbers(0, dtype="i1")}, ["jpg"]),
    "half a sample": ({**GOOD, "codes": numbers(0, 0, 0, dtype="u1")}, ["jpg"]),
    "no component": ({**GOOD, "codes": numbers(dtype="u1")}, ["jpg"]),
    "samples that overlap": ({**GOOD, "codes": numbers(0, 0, dtype="u1"), "ends": numbers(2, 1)}, ["jpg"]),
    "more samples than components": ({**GOOD, "codes": numbers(0, 0, dtype="u1"), "ends": numbers(1, 3)}, ["jpg"]),
    "samples of none": ({**GOOD, "codes": numbers(0, 0, dtype="u1"), "ends": numbers(dtype="u4")}, ["jpg"]),
    "keys cut": ({**NAMED, "keys": np.frombuffer(b"a", np.uint8)}, ["jpg"]),
    "keys without ends": ({name: array for name, array in NAMED.items() if name != "key_ends"}, ["jpg"]),
    "extensions missing": (GOOD, None),
    "keys that end before they start": ({**NAMED, "key_ends": numbers(2, 1)}, ["jpg"]),
}


@pytest.mark.parametrize(("arrays", "extensions"), LIES.values(), ids=LIES)
def test_tables_that_somebody_made_up_are_ignored(tmp_path, arrays, extensions, monkeypatch):
    """Well formed, with the right checksum, and of no such archive."""
    path = archive(tmp_path / "x.tar", ["a.jpg", "b.jpg"], False)
    wanted = content(path, cache=False)
    monkeypatch.setattr(tar_table, "_pack", lambda _: CachedTable(arrays, {"extensions": extensions}))
    TarSource(path).__len__()
    assert kept(tmp_path)
    assert content(path) == wanted


@pytest.mark.parametrize("arrays", [GOOD, NAMED], ids=["without keys", "with keys"])
def test_the_model_of_the_lies_is_true(tmp_path, arrays, monkeypatch):
    path = archive(tmp_path / "x.tar", ["a.jpg", "b.jpg"], False)
    wanted = content(path, cache=False)
    monkeypatch.setattr(tar_table, "_pack", lambda _: CachedTable(arrays, {"extensions": ["jpg"]}))
    TarSource(path).__len__()
    monkeypatch.setattr(tar_table, "_make", refuse)
    assert content(path)[0] == wanted[0]


@pytest.mark.slow
def test_processes_that_open_at_once(tmp_path):
    path = archive(tmp_path / "x.tar", NAMES["even"], False)
    program = (
        "import sys\nfrom dataload.sources.tar import table as tar_table\n"
        "from dataload.sources.tar.reader import TarSource\n"
        "tar_table._LEAST_CACHED = {True: 1, False: 1}\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"for _ in range(50): print(TarSource({str(path)!r}).fingerprint())"
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for child in running:
        assert child.stdout.readline() == "ready\n"
    for child in running:
        child.stdin.write("go\n")
        child.stdin.flush()
    said = [child.communicate(timeout=40)[0].split() for child in running]
    assert said == [[TarSource(path, cache=False).fingerprint()] * 50] * 3
    assert len(kept(tmp_path)) == 1


def test_a_table_that_another_process_wrote_meanwhile_stays(even, tmp_path):
    TarSource(even).__len__()
    [found] = kept(tmp_path)
    inode = found.stat().st_ino
    key = IndexKey.of("tar", (str(even),), ("scanned",))
    index = even.with_suffix(".idx")
    if index.exists():
        key = IndexKey.of("tar", (str(even), str(index)))
    store_cached(key, load_cached(key))
    assert found.stat().st_ino == inode
    assert kept(tmp_path) == [found]


# LMDB.

KEYS = {
    "words": [b"apple", b"banana", b"cherry"],
    "words of one length": [b"aa", b"bb", b"cc\0"[:2]],
    "zero bytes": [b"a\0", b"b\0"],
    "long": [bytes([65 + i]) * 200 + bytes(i) for i in range(9)],
    "long of one length": [bytes([65 + i]) * 200 for i in range(9)],
    "numbers": [b"3", b"20", b"100"],
    "numbers of one width": [b"003", b"020", b"100"],
    "numbers padded to several widths": [b"03", b"3", b"0100"],
}


def environment(path: Path, keys, name=None) -> Path:
    with lmdb.open(str(path), max_dbs=2, map_size=1 << 20) as env:
        database = env.open_db(name) if name else None
        with env.begin(write=True) as txn:
            for key in keys:
                txn.put(key, b"value of " + key, db=database)
    settle(path / "data.mdb")
    return path


@pytest.mark.parametrize("name", [None, b"second"], ids=["main", "named"])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_keys(tmp_path, keys, name, monkeypatch):
    path = environment(tmp_path / "x.lmdb", keys, name)
    options = {} if name is None else {"subdatabase": name.decode()}

    def read(**more):
        with LMDBSource(path, **options, **more) as source:
            shuffled = source.read([1, 0, 1])
            return list(source), shuffled, source.key_order, source.fingerprint(), source.locate(1)

    wanted = read(cache=False)
    assert kept(tmp_path) == []
    assert read() == wanted
    assert [found.parent for found in kept(tmp_path)] == [tmp_path]  # the directory is LMDB's
    monkeypatch.setattr(lmdb_table.KeyedValues, "of", refuse)
    assert read() == wanted


def test_torchrecord(tmp_path, monkeypatch):
    path = tmp_path / "x.torchrecord"
    with dataload.create(path, db_num=3) as writer:
        writer.extend({"x": np.full(n % 5, n), "s": "x" * n} for n in range(32))
    with lmdb.open(str(path), max_dbs=3) as env, env.begin(write=True) as txn:
        txn.delete(b"05", db=env.open_db(b"db1", txn=txn))  # a record is missing, and two widths of keys
    (path / "lock.mdb").unlink()
    settle(path / "data.mdb")

    def read(**options):
        with dataload.open(path, **options) as source:
            records = [dict(source[index]) for index in range(len(source)) if index != 15]
            with pytest.raises(CorruptFileError, match="record 15: key '05' of sub-database db1 is missing, which has"):
                source[15]
            return str(records), source.shard_lengths, source.fingerprint(), [str(source.locate(i)) for i in range(31)]

    wanted = read(cache=False)
    assert kept(tmp_path) == []
    assert read() == wanted
    assert [found.parent for found in kept(tmp_path)] == [tmp_path]
    monkeypatch.setattr(lmdb_torchrecord, "read_tree", refuse)
    assert read() == wanted
    os.utime(path / "data.mdb", (LONG_AGO, LONG_AGO + 1))
    with pytest.raises(AssertionError):
        read()


def test_keys_out_of_date(tmp_path):
    """The same size, the same time and the same number of keys, by another transaction."""
    path = environment(tmp_path / "x.lmdb", KEYS["words"])
    data = path / "data.mdb"

    def write(old, new):
        with lmdb.open(str(path)) as env, env.begin(write=True) as txn:
            txn.delete(old)
            txn.put(new, b"value of " + new)
        settle(data)
        return data.stat().st_size

    for _ in range(4):  # until LMDB finds all the pages that it needs among those it has
        write(b"apple", b"zebra")
        size = write(b"zebra", b"apple")
    assert list(LMDBSource(path)) == [b"value of apple", b"value of banana", b"value of cherry"]
    assert write(b"apple", b"zebra") == size
    assert list(LMDBSource(path)) == [b"value of banana", b"value of cherry", b"value of zebra"]


def lmdb_table_of(offsets=(5000, 5010, 5020), lengths=(4, 4, 4), leaves=(2,), ends=(3,), order="number", **more):
    """A table that looks right for three records, with some arrays changed."""
    arrays = {
        "offsets": numbers(*offsets, dtype="i8"),
        "lengths": numbers(*lengths, dtype="u4"),
        "leaves": numbers(*leaves, dtype="u4"),
        "ends": numbers(*ends, dtype="u4"),
        **more,
    }
    return CachedTable({name: array for name, array in arrays.items() if array is not None}, {"order": order})


LMDB_LIES = {
    "no offsets": {"offsets": ()},
    "too few": {"offsets": (5000, 5010)},
    "negative": {"offsets": (5000, 5010, -1)},
    "outside the file": {"offsets": (5000, 5010, 1 << 40)},
    "too long": {"lengths": (4, 4, 1 << 31)},
    "too few lengths": {"lengths": (4, 4)},
    "places outside": {"places": numbers(0, 1, 3, dtype="u4")},
    "too few places": {"places": numbers(0, 1, dtype="u4")},
    "no such order": {"order": "random"},
    "leaves outside": {"leaves": (1 << 20,)},
    "too few leaves": {"leaves": (), "ends": (3,)},
    "ends that fall": {"leaves": (2, 2, 2), "ends": (3, 1, 3)},
    "another end": {"ends": (4,)},
}


@pytest.mark.parametrize("lie", LMDB_LIES.values(), ids=LMDB_LIES)
def test_lmdb_tables_that_somebody_made_up_are_ignored(tmp_path, lie, monkeypatch):
    path = environment(tmp_path / "x.lmdb", KEYS["words"])
    monkeypatch.setattr(lmdb_table.KeyedValues, "pack", lambda _: lmdb_table_of(**lie))
    assert len(LMDBSource(path)) == 3
    assert kept(tmp_path)
    assert list(LMDBSource(path)) == [b"value of apple", b"value of banana", b"value of cherry"]


def test_a_made_up_table_would_be_used_if_it_were_right(tmp_path, monkeypatch):
    path = environment(tmp_path / "x.lmdb", KEYS["words"])
    monkeypatch.setattr(lmdb_table.KeyedValues, "pack", lambda _: lmdb_table_of())
    assert len(LMDBSource(path)) == 3
    assert list(LMDBSource(path)) == [(path / "data.mdb").read_bytes()[at : at + 4] for at in (5000, 5010, 5020)]


# The file.


def key_of(path: Path, **changes) -> IndexKey:
    path.write_bytes(b"data")
    settle(path)
    return IndexKey.of("test", (str(path),), **changes)


ANY_ARRAYS = st.dictionaries(
    st.text(max_size=5),
    st.tuples(st.sampled_from(["u1", "<u2", "<u4", "<i8"]), st.lists(st.integers(0, 127), max_size=40)),
    max_size=4,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrays=ANY_ARRAYS, extras=st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=3))
def test_whatever_is_stored_is_loaded(tmp_path, arrays, extras):
    for old in kept(tmp_path):
        old.unlink()
    key = key_of(tmp_path / "x")
    table = CachedTable({name: np.array(values, dtype) for name, (dtype, values) in arrays.items()}, extras)
    store_cached(key, table)
    found = load_cached(key)
    assert found.extras == extras
    assert {name: (array.dtype.str, array.tolist()) for name, array in found.arrays.items()} == {
        name: (np.dtype(dtype).str, values) for name, (dtype, values) in arrays.items()
    }


@pytest.mark.parametrize(
    "declared", [[["x", "O", 1]], [["x", "u8", -1]], [["x", "u8", 10**18]], [["x", "u8", "1"]], []]
)
def test_headers_that_lie_are_not_believed(tmp_path, declared, monkeypatch):
    key = key_of(tmp_path / "x")
    real = index_cache.json.dumps
    monkeypatch.setattr(index_cache.json, "dumps", lambda head: real({**head, "arrays": declared}))
    store_cached(key, CachedTable({"x": numbers(1, 2)}, {}))
    assert kept(tmp_path)
    assert load_cached(key) is None


def test_state_and_version_belong_to_the_key(tmp_path, monkeypatch):
    key = key_of(tmp_path / "x", state=1)
    store_cached(key, CachedTable({}, {}))
    assert load_cached(key) is not None
    assert load_cached(key_of(tmp_path / "x", state=2)) is None
    monkeypatch.setattr(index_cache, "_VERSION", index_cache._VERSION + 1)
    assert load_cached(key) is None


# ArrayRecord and tokens


@pytest.fixture(params=["sizes differ", "sizes are equal"])
def array_record(request, tmp_path):
    records = [bytes([i]) * (20 + i * (request.param == "sizes differ")) for i in range(50)]
    path = tmp_path / "x.array_record"
    with dataload.create(path, options="group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    settle(path)
    return str(path), records


def test_chunks_are_parsed_once(array_record, monkeypatch):
    path, records = array_record
    assert list(dataload.open(path)) == records
    monkeypatch.setattr(array_record_map, "parse_chunks", lambda *_: pytest.fail("parsed again"))
    assert list(dataload.open(path)) == records
    with pytest.raises(pytest.fail.Exception):
        dataload.open(path, cache=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda edges: edges[::-1],
        lambda edges: edges.astype(np.int32),
        lambda edges: edges[:0],
        lambda edges: edges + 2**40,
        lambda edges: edges - 2**40,
    ],
)
def test_an_invalid_table_of_chunks_is_not_used(array_record, change):
    path, records = array_record
    len(dataload.open(path))
    key = IndexKey.of("array_record", (path,))
    found = load_cached(key)
    os.unlink(key.cache_paths()[0])
    store_cached(key, CachedTable({"edges": change(found.arrays["edges"])}, found.extras))
    assert list(dataload.open(path)) == records


def test_a_table_of_other_chunks_gives_no_wrong_record(array_record):
    path, records = array_record
    len(dataload.open(path))
    key = IndexKey.of("array_record", (path,))
    edges = load_cached(key).arrays["edges"]
    for extras in ({"alike": [63, 43]}, {"alike": None}, {"alike": "?"}, {"alike": [63.0, 43]}):
        os.unlink(key.cache_paths()[0])
        store_cached(key, CachedTable({"edges": edges + 1}, extras))
        with dataload.open(path) as source:
            assert source.read([0, 7, len(records) - 1]) == [records[0], records[7], records[-1]]
            assert source.read_batch([3, 1]) == [records[3], records[1]]


def test_ends_of_documents_are_searched_once(tmp_path, monkeypatch):
    path = tmp_path / "tokens.npy"
    np.save(path, np.tile(np.array([5, 6, 7, 8, 0], np.uint16), 30))
    settle(path)
    options = {"window": 3, "end_token": 0, "ends": "drop"}
    first = dataload.open(path, **options).read_batch(range(30))["tokens"].tolist()
    monkeypatch.setattr(token_reader, "find_ends", lambda *_: pytest.fail("searched again"))
    assert dataload.open(path, **options).read_batch(range(30))["tokens"].tolist() == first
    for other in ({"cache": False}, {"end_token": 7}):
        with pytest.raises(pytest.fail.Exception):
            len(dataload.open(path, **{**options, **other}))


def test_invalid_ends_of_documents_are_not_used(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.tile(np.array([5, 6, 7, 8, 0], np.uint16), 30))
    settle(path)
    options = {"window": 3, "end_token": 0, "ends": "drop"}
    first = dataload.open(path, **options).read_batch(range(30))["tokens"].tolist()
    key = IndexKey.of("tokens", (str(path),), (128, "<u2", 0))
    ends = load_cached(key).arrays["ends"]
    for wrong in (ends[::-1], ends + 1000, ends - 1000, ends.astype(np.int32)):
        os.unlink(key.cache_paths()[0])
        store_cached(key, CachedTable({"ends": wrong}, {}))
        assert dataload.open(path, **options).read_batch(range(30))["tokens"].tolist() == first


# Syrah


RECORDS = {
    "even": lambda i: {"x": np.full((2, 3), i, np.float32), "y": i},
    "scalars": lambda i: {"y": np.int16(i)},
    "empty arrays": lambda i: {"x": np.empty((0, 3), np.float32), "y": i},
    "bytes": lambda i: {"b": bytes([i] * 4), "x": np.full(3, i)},
    "sizes differ": lambda i: {"x": np.full(i + 1, i)},
    "shapes differ": lambda i: {"x": np.full((2, 3) if i % 2 else (3, 2), i)},
    "text": lambda i: {"t": "a" * (i + 1)},
}


def syrah(path, record, count=12):
    with dataload.create(path) as writer:
        for i in range(count):
            writer.write(record(i))
    settle(path)
    return str(path)


@pytest.mark.parametrize("kind", RECORDS)
def test_columns_of_one_layout_are_parsed_once(tmp_path, monkeypatch, kind):
    path = syrah(tmp_path / "a.syr", RECORDS[kind])
    first = dataload.open(path)
    specs, records, fingerprint = first.fields, first.read(range(12)), first.fingerprint()
    again = dataload.open(path)
    assert (again.fields, again.fingerprint()) == (specs, fingerprint)
    for one, other in zip(again.read(range(12)), records, strict=True):
        assert difference(one, other, "") is None
    monkeypatch.setattr(syrah_table, "parse_metadata", lambda *_: pytest.fail("parsed again"))
    if "differ" in kind or kind == "text":
        with pytest.raises(pytest.fail.Exception):
            dataload.open(path)
    else:
        dataload.open(path)
    with pytest.raises(pytest.fail.Exception):
        dataload.open(path, cache=False)


@pytest.mark.parametrize(
    "change",
    [
        {"records": 10**15},
        {"records": 0},
        {"records": "12"},
        {"columns": []},
        {"columns": None},
        {"columns": [["x", "float32", False, -1, 24, 24, [2, 3]]]},
        {"columns": [["x", "object", False, 22, 24, 24, [2, 3]]]},
        {"columns": [[7, "float32", False, 22, 24, 24, [2, 3]]]},
        {"columns": [["x", "float32", False, 22, 2**47, 24, [2, 3]]]},
    ],
)
def test_an_invalid_layout_is_not_used(tmp_path, change):
    path = syrah(tmp_path / "a.syr", RECORDS["even"])
    first = dataload.open(path).read_batch(range(12))
    key = IndexKey.of("syrah", (path,))
    found = load_cached(key)
    os.unlink(key.cache_paths()[0])
    store_cached(key, CachedTable({}, {**found.extras, **change}))
    assert difference(dataload.open(path).read_batch(range(12)), first, "") is None


@pytest.mark.parametrize("table", [CachedTable({}, {}), CachedTable({"edges": np.arange(3)}, {"columns": [[1]]})])
def test_a_table_of_another_form_is_not_used(array_record, tmp_path, table):
    path, records = array_record
    syr = syrah(tmp_path / "a.syr", RECORDS["even"])
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.tile(np.array([5, 6, 7, 8, 0], np.uint16), 30))
    settle(tokens)
    options = {"window": 3, "end_token": 0, "ends": "drop"}
    first = dataload.open(syr, cache=False).read_batch([3])
    for kind, file, extra in (("array_record", path, ()), ("syrah", syr, ()), ("tokens", str(tokens), (128, "<u2", 0))):
        store_cached(IndexKey.of(kind, (file,), extra), table)
    assert list(dataload.open(path)) == records
    assert difference(dataload.open(syr).read_batch([3]), first, "") is None
    assert len(dataload.open(tokens, **options)) == len(dataload.open(tokens, cache=False, **options)) == 60
