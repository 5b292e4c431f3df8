"""The shard directory of the compiled core: places of many shards, copied at once, and many permutations."""

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from cores import CORES, _core_c, check_allocations, compiled, each, numbers, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from dataload._util.randomness import permute
from dataload.storage.core import MOST_SHARDS, PLACE_BITS, file_number

pytestmark = compiled

SIZES = [5000, 0, 1, 9000, 300]
UNMAPPED = len(SIZES)
TABLES = [
    np.array([5, 7, 7, 1000], np.int64),
    np.array([1, 2**32 - 1], np.uint32),
    np.array([3, 65535], np.uint16),
    np.arange(9, dtype=np.uint8),
    np.array([-1, 4], np.int32),
    np.array([2**60, 2**62, -(2**63)], np.int64),
    (10, 4, 8),
    (-1, 0, 3),
    np.empty(0, np.int64),
    np.arange(3000, dtype=np.uint32),  # too many to be copied
]


def place(shard, at):
    return (shard << PLACE_BITS) + at


def fill(folder, shards=100):
    maps = _core_c.Maps(shards)
    for shard, size in enumerate(SIZES):
        path = folder / f"{shard}"
        if not path.exists():
            path.write_bytes(np.random.default_rng(shard).bytes(size))
        with path.open("rb") as stream:
            time = os.fstat(stream.fileno()).st_mtime_ns
            maps.put(shard, stream.fileno(), os.fsencode(path), size, time)
    maps.put_memory(0, np.fromfile(folder / "0", np.uint8))  # plain memory is read alike
    return maps


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return folder, fill(folder)


ROWS = st.tuples(
    st.sampled_from([*range(UNMAPPED + 1), *range(UNMAPPED), 100, -1]), st.integers(0, 9100), st.integers(-1, 700)
)


def check(error, out, inside, wanted):
    """The core gives the bytes, or an error."""
    assert (error is None and out == b"".join(wanted())) if inside else error[0] in (ValueError, LookupError)


@given(st.lists(ROWS, max_size=60))
@settings(deadline=None)
def test_ranges_equal_slices(filled, rows):
    folder, maps = filled
    places = numbers(*(place(shard, at) for shard, at, _ in rows))
    lengths = numbers(*(length for _, _, length in rows))
    inside = [0 <= shard < UNMAPPED and 0 <= length <= SIZES[shard] - at for shard, at, length in rows]
    out = np.zeros(max(0, int(lengths.sum())), np.uint8)
    error = outcome(maps.gather_ranges, out, places, lengths)
    assert outcome(maps.will_need, places, lengths) == error
    check(error, out.tobytes(), all(inside), lambda: [(folder / f"{s}").read_bytes()[at : at + n] for s, at, n in rows])


@given(st.lists(ROWS, min_size=1, max_size=60), st.sampled_from([0, 1, 2, 8, 64, 100, 128, 512, 600]))
@settings(deadline=None)
def test_records_equal_slices(filled, rows, length):
    folder, maps = filled
    places = numbers(*(place(shard, at) for shard, at, _ in rows))
    out = np.zeros((len(rows), length), np.uint8)
    error = outcome(maps.gather, out, places, length)
    inside = all(0 <= shard < UNMAPPED and at + length <= SIZES[shard] for shard, at, _ in rows)
    check(error, out.tobytes(), inside, lambda: [(folder / f"{s}").read_bytes()[at : at + length] for s, at, _ in rows])


def put_all():
    tables = _core_c.Tables(len(TABLES) + 1)
    for shard, table in enumerate(TABLES):
        tables.put_line(shard, *table) if isinstance(table, tuple) else tables.put(shard, table)
    return tables


@given(
    st.lists(st.tuples(st.integers(-1, len(TABLES) + 1), st.integers(0, 9)), max_size=40),
    st.sampled_from([1, 512, 2**62]),
    st.booleans(),
)
@settings(deadline=None)
def test_numbers_equal_items(rows, scale, is_place):
    places = numbers(*(place(*row) for row in rows))
    out = np.full(len(rows), 7, np.int64)
    if outcome(put_all().take, out, places, scale, is_place) is not None:
        assert out.tolist() == [7] * len(rows)
        return
    lists = [[t[0] + i * t[1] for i in range(t[2])] if isinstance(t, tuple) else t.tolist() for t in TABLES]
    expected = [lists[shard][at] * scale for shard, at in rows]
    shards = [
        place(shard, 0) if is_place and value >= 0 else 0 for (shard, _), value in zip(rows, expected, strict=True)
    ]
    assert out.tolist() == [value + shard for value, shard in zip(expected, shards, strict=True)]


ENDS = numbers(1, 2, 5, 1000, 1024, 1025, 70_000, 2**32 + 5, 2**47, 0, 7)  # the last two have wrong tables


KEYS = np.random.default_rng(0).integers(0, 2**63, (9, 2), np.uint64)


def permutations(one, which):
    """Return the tables of permutations, with keys for some."""
    starts = np.cumsum(np.where(ENDS <= 1024, ENDS, 0)) - ENDS
    tables = np.zeros((len(ENDS), 12), np.uint64), np.zeros(int(starts[-1]), np.int16), ENDS, starts
    one.put_keys(*tables, which, KEYS[: len(which)])
    return tables


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2**47)), max_size=40))
def test_permutations_give_each_number_once_and_no_other_pass(rows):
    which, draws = (numbers(*column) for column in (zip(*rows, strict=True) if rows else ((), ())))
    which, draws = np.append(which, [6] * 70_000), np.append(draws, np.arange(70_000))
    is_late, passes = draws >= ENDS[which], np.full(len(ENDS), 2)
    for one in CORES:
        out = np.zeros(len(which), np.int64)
        late = one.permute(*permutations(one, np.arange(9)), passes, passes, which, draws, out)
        assert ((out < 0) == is_late).all()
        assert late == is_late.sum()
        for number in range(9):
            own = (which == number) & ~is_late
            assert (out[own] == permute(draws[own], int(ENDS[number]), KEYS[number])).all()


@each
@pytest.mark.parametrize(
    ("which", "count", "passes"), [(-1, 1, 11), (11, 1, 11), (9, 1, 11), (10, 1, 11), (0, 2, 11), (0, 1, 10)]
)
def test_what_is_no_permutation_is_refused(one, which, count, passes):
    tables, out = permutations(one, np.arange(9)), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="row 0 is of no permutation"):
        one.permute(
            *tables, np.zeros(passes, np.int64), np.zeros(11, np.int64), numbers(which), np.zeros(count, np.int64), out
        )
    with pytest.raises(ValueError, match="row 0 is of no permutation"):
        one.put_keys(*tables, numbers(which), np.zeros((count + 11 - passes, 2), np.uint64))


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 6, 8]), st.integers(0, 50) | st.integers(0, 70_000)), max_size=40)
)
def test_search_counts_the_numbers_before(rows):
    places = numbers(*(place(*row) for row in rows))
    out = np.zeros(len(rows), np.int64)
    put_all().search(out, places)
    lists = [[t[0] + i * t[1] for i in range(t[2])] if isinstance(t, tuple) else t.tolist() for t in TABLES]
    assert out.tolist() == [place(shard, sum(n <= at for n in lists[shard])) for shard, at in rows]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda _: _core_c.Maps(-1), ValueError, "-1 shards: a directory has 0 to"),
        (lambda _: _core_c.Tables(MOST_SHARDS + 1), ValueError, "shards: a directory has 0 to"),
        (lambda _: _core_c.Maps(3).drop(3), ValueError, "shard 3 of 3"),
        (lambda _: _core_c.Maps(3).put(-1, 0, b"", 5, 0), ValueError, "shard -1 of 3"),
        (lambda _: _core_c.Maps(3).put(0, 0, b"", 1 << PLACE_BITS, 0), ValueError, "a file of 17592186044416 bytes"),
        (lambda _: _core_c.Maps(3).put(0, 10**6, b"", 5, 0), OSError, "Bad file descriptor"),
        (lambda _: _core_c.Tables(3).put(3, numbers()), ValueError, "shard 3 of 3"),
        (lambda _: _core_c.Tables(3).put(0, np.zeros(1)), ValueError, "a table of numbers of type d"),
        (lambda _: _core_c.Tables(3).put(0, np.zeros(1, np.uint64)), ValueError, "a table of numbers of type"),
        (lambda _: _core_c.Tables(3).put(0, np.zeros(1, ">i8")), ValueError, "a table of numbers of type"),
        (lambda _: _core_c.Tables(3).put_line(0, 0, 2**62, 2), ValueError, "stride 4611686018427387904, count 2"),
        (lambda _: _core_c.Tables(3).put_line(0, -1, -(2**62), 2), ValueError, "start -1, stride -46116860184"),
        (lambda _: _core_c.Tables(3).take(numbers(0), numbers(), 1, False), ValueError, "0 numbers do not fill 8"),
        (lambda maps: maps.gather(bytearray(9), numbers(0), 8), ValueError, "8 bytes do not fill 9 bytes"),
        (lambda maps: maps.gather_ranges(bytearray(), numbers(0), numbers()), ValueError, "1 places and 0 lengths"),
        (lambda maps: maps.gather(bytes(8), numbers(0), 8), (TypeError, BufferError, ValueError), "."),
        (lambda maps: maps.gather(bytearray(8), numbers(place(UNMAPPED, 0)), 8), LookupError, f"{UNMAPPED}"),
    ],
)
def test_arguments_are_checked(tmp_path, call, error, message):
    with pytest.raises(error, match=message):
        call(fill(tmp_path))


def test_a_map_stays_while_the_file_is_replaced_and_goes_when_it_is_dropped(tmp_path):
    maps, out, first = fill(tmp_path), bytearray(300), numbers(place(4, 0))
    content = (tmp_path / "4").read_bytes()
    (tmp_path / "new").write_bytes(bytes(10))
    (tmp_path / "new").rename(tmp_path / "4")
    maps.look(first)
    (tmp_path / "4").unlink()
    maps.look(first)
    maps.gather(out, first, 300)
    assert out == content
    maps.drop(4)
    maps.drop(4)
    with pytest.raises(LookupError, match=r"^4$"):
        maps.gather(out, first, 300)


def test_looking_finds_files_that_were_written_to(tmp_path):
    maps, first = fill(tmp_path), numbers(place(0, 0), place(3, 0))
    maps.look(first)
    status = os.stat(tmp_path / "3")
    few = fill(tmp_path, shards=8)
    os.utime(tmp_path / "3", ns=(0, 12_345))
    with pytest.raises(_core_c.MapFault, match=r"^3 0$"):  # each read of few shards looks
        few.gather(bytearray(20), first, 10)
    maps.gather(bytearray(20), first, 10)  # not a second after the last look
    with pytest.raises(_core_c.MapFault, match=r"^3 0$"):
        maps.look(first)
    os.utime(tmp_path / "3", ns=(0, status.st_mtime_ns))
    maps.look(first)
    os.truncate(tmp_path / "3", 8999)
    os.utime(tmp_path / "3", ns=(0, status.st_mtime_ns))
    with pytest.raises(_core_c.MapFault, match=r"^3 0$"):
        maps.look(first)


def test_a_file_that_shrinks_is_a_fault_of_its_shard(tmp_path):
    maps = fill(tmp_path)
    os.truncate(tmp_path / "3", 4096)
    for out, call in ((bytearray(20), maps.gather), (bytearray(20), None)):
        arguments = (out, numbers(place(0, 0), place(3, 8000)))
        with pytest.raises(_core_c.MapFault, match=r"^3 80\d\d$"):
            call(*arguments, 10) if call else maps.gather_ranges(*arguments, numbers(10, 10))


def test_maps_may_be_dropped_while_threads_copy(tmp_path):
    maps, stop = fill(tmp_path), threading.Event()
    content = (tmp_path / "3").read_bytes()
    places, wrong = np.full(1000, place(3, 0)), []

    def copy():
        out = np.empty((1000, 9000), np.uint8)
        while not stop.is_set():
            try:
                maps.gather(out, places, 9000)
            except LookupError:
                continue
            if out[0].tobytes() != content or out[-1].tobytes() != content:
                wrong.append(1)

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            maps.drop(3)
            with (tmp_path / "3").open("rb") as stream:
                maps.put(3, stream.fileno(), os.fsencode(tmp_path / "3"), 9000, 0)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    if sys.platform == "linux":  # the other 200 maps have gone
        assert Path("/proc/self/maps").read_text().count(str(tmp_path / "3")) == 1


def test_memory_whose_release_drops_other_maps():
    maps, dropped = _core_c.Maps(3), []
    for shard in range(3):
        array = np.arange(10, dtype=np.uint8)
        weakref.finalize(array, lambda shard=shard: (dropped.append(shard), maps.drop((shard + 1) % 3)))
        maps.put_memory(shard, array)
        del array
    maps.drop(0)
    assert dropped == [0, 1, 2]


SCRIPT = """
import os, sys
from dataload.storage import _core_c
before = len(os.listdir("/proc/self/fd"))
maps = _core_c.Maps(2000)
with open(sys.argv[1], "rb") as stream:
    for shard in range(2000):
        maps.put(shard, stream.fileno(), b"x", 300, 0)
count = sum(sys.argv[1] in line for line in open("/proc/self/maps"))
del maps
print(count, len(os.listdir("/proc/self/fd")) - before, sum(sys.argv[1] in line for line in open("/proc/self/maps")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_maps_need_no_descriptors_and_are_unmapped(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(bytes(300))
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, check=True)
    assert done.stdout == "2000 0 0\n"


def test_each_failing_allocation_is_a_memory_error(tmp_path):
    maps, tables = fill(tmp_path), put_all()
    places, lengths, out = numbers(0, place(3, 5)), numbers(10, 10), bytearray(20)
    calls = [
        (maps.gather, (out, places, 10), 2),
        (maps.gather_ranges, (out, places, lengths), 3),
        (maps.look, (places,), 2),
        (tables.take, (numbers(0, 0), places, 1, False), 1),
        (tables.put, (0, numbers(3, 4, 5, 6, 7, 8)), 1),
        (tables.put_line, (6, 10, 4, 8), 1),
        (_core_c.Maps, (5,), 2),
        (_core_c.Tables, (5,), 2),
    ]
    for call in calls:
        check_allocations(*call)


ALIKE = [
    (4, 8, 2),
    (4, 8, 3),
    (4, 9, 2),
    (5, 8, 2),
    (0, 0, 0),
    numbers(4, 12),
    numbers(4, 13),
    np.array([4, 12], np.uint32),
    np.array([4, 0], np.uint16),
    np.array([4], np.uint32),
    np.arange(1000),  # too many to be copied
]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(range(len(ALIKE)))), max_size=12))
@settings(deadline=None)
def test_shards_with_equal_numbers_are_independent(puts):
    """The compiled core keeps equal tables once."""
    tables = _core_c.Tables(4)
    for shard, number in puts:
        table = ALIKE[number]
        tables.put_line(shard, *table) if isinstance(table, tuple) else tables.put(shard, table.copy())
    for shard, number in dict(puts).items():
        table = ALIKE[number]
        expected = [table[0] + i * table[1] for i in range(table[2])] if isinstance(table, tuple) else table.tolist()
        places = numbers(*(place(shard, at) for at in range(len(expected))))
        out = np.empty(len(expected), np.int64)
        tables.take(out, places, 1, False)
        assert out.tolist() == expected
        with pytest.raises(IndexError):
            tables.take(np.empty(1, np.int64), numbers(place(shard, len(expected))), 1, False)


FOREIGN = os.fsdecode("ä".encode())  # a name in any locale
NAMES = st.lists(st.sampled_from(["0", "1", "linked", "missing", "0/inside", FOREIGN, "pipe"]), min_size=1, max_size=6)


@given(NAMES, st.integers(0, 6))
@settings(deadline=None)
def test_versions_of_files_equal_what_stat_says(filled, names, rows):
    folder, _ = filled
    if not (folder / "linked").exists():
        os.utime(folder / "1", ns=(0, -1))
        (folder / "linked").symlink_to("1")
        (folder / FOREIGN).mkdir()
        os.mkfifo(folder / "pipe")
    paths = [os.fsencode(folder / name) for name in names]
    results = []
    for one in CORES:
        out = np.full((rows, 3), 7, np.int64)
        results.append((outcome(one.file_versions, out, b"\0".join(paths)), out.tolist()))
    assert all(result == results[0] for result in results)
    error, found = results[0]
    if len(names) != rows:
        assert error == (ValueError, f"versions of {len(names)} files do not fill {rows * 24} bytes")
        return
    for path, (size, changed, number) in zip(paths, found, strict=True):
        if not os.path.exists(path):
            assert (size, changed, number) == (0, 0, 0)
        else:
            status = os.stat(path)
            assert (size, changed) == (status.st_size, status.st_mtime_ns)
            assert number == np.int64(file_number(status.st_dev, status.st_ino))


@given(NAMES, st.lists(st.sampled_from([0, 1, 2, 3, 3, 4, 5, -1]), min_size=1, max_size=6), st.integers(0, 6))
@settings(deadline=None)
def test_files_are_opened_together(filled, names, shards, rows):
    folder, _ = filled
    paths = b"\0".join(os.fsencode(folder / name) for name in names)
    out, maps = np.full((rows, 5), 7, np.int64), _core_c.Maps(5)
    error = outcome(maps.open, out, numbers(*shards), paths)
    if not len(names) == len(shards) == rows or {5, -1} & {*shards}:
        assert error == (ValueError, "the shards, the paths and the numbers do not fit")
        return
    for name, row in zip(names, out.tolist(), strict=True):
        path = folder / name
        status = path.stat() if path.is_file() else None
        assert row[1:2] + row[3:] == ([0] * 3 if status is None else [status.st_mtime_ns, status.st_dev, status.st_ino])
