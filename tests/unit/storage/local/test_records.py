"""Records copied out of files, mapped or not: equal bytes, equal errors."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import ChangedFileError, CorruptFileError, MachineError
from dataload.storage.core import core, core_name
from dataload.storage.local import record_files as mapped
from dataload.storage.local.record_files import MappedFile, UnmappedFile
from dataload.storage.record_file import RowLayout, merge_ranges, reading_tables

CONTENT = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8).tobytes()
KINDS = [MappedFile, UnmappedFile]
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("records") / "data"
    file.write_bytes(CONTENT)
    return str(file)


@pytest.fixture
def own(tmp_path):
    """A file that a test may change, last changed in 2001."""
    (tmp_path / "data").write_bytes(CONTENT)
    os.utime(tmp_path / "data", ns=(0, 10**18))
    return tmp_path / "data"


def only_if_it_is_mapped(kind):
    if kind is MappedFile and core_name() == "numpy":
        pytest.skip("without the compiled core, files are not mapped")


def slices(offsets, lengths):
    return [CONTENT[o : o + n] for o, n in zip(offsets.tolist(), np.broadcast_to(lengths, offsets.shape), strict=True)]


@given(data=st.data(), length=st.one_of(st.integers(0, 40), st.sampled_from([4096, 8192, 69_990])))
def test_gather_equals_slices(path, data, length):
    offsets = np.array(data.draw(st.lists(st.integers(0, len(CONTENT) - length), max_size=12)), np.int64)
    for kind in KINDS:
        got = kind(path).gather(offsets, length)
        assert (got.shape, got.dtype, got.flags.c_contiguous) == ((len(offsets), length), np.uint8, True)
        assert [row.tobytes() for row in got] == slices(offsets, length)
        if len(offsets) and length >= 7:
            cut = kind(path).cut(offsets, RowLayout(length, {"x": (3, np.dtype("<u2"), (2,))}))
            assert cut["x"].tobytes() == b"".join(slices(offsets + 3, 4))


@given(ranges=st.lists(st.tuples(st.integers(0, 65_000), st.integers(0, 5000)), max_size=30))
def test_ranges_equal_slices(path, ranges):
    offsets, lengths = np.array(ranges, np.int64).reshape(-1, 2).T.copy()
    for kind in KINDS:
        file = kind(path)
        assert file.copies(offsets, lengths) == slices(offsets, lengths)
        column = file.gather_ranges(offsets, lengths)
        assert column == slices(offsets, lengths)
        assert column.nbytes == lengths.sum()


@each
def test_an_open_file_belongs_to_its_process_and_what_is_read_to_the_caller(path, tmp_path, kind):
    before = len(os.listdir("/proc/self/fd"))
    file = kind(path)
    one, two = (file.gather(np.array([5, 5]), 8) for _ in range(2))
    one[...] = 0
    with pytest.raises(TypeError, match="an open file belongs to its process and cannot be pickled"):
        pickle.dumps(file)
    del file
    assert len(os.listdir("/proc/self/fd")) == before, "forgetting it closes it"
    assert two.tobytes() == CONTENT[5:13] * 2
    (tmp_path / "empty").write_bytes(b"")
    file = kind(str(tmp_path / "empty"))
    assert (file.size, file.read(0, 0), file.gather(np.array([], np.int64), 5).shape) == (0, b"", (0, 5))
    assert file.gather_ranges(np.array([0, 0]), np.array([0, 0])) == [b"", b""]


READS = {
    "gather": lambda file, offsets, lengths: file.gather(offsets, int(lengths[0])),
    "ranges": lambda file, offsets, lengths: file.gather_ranges(offsets, lengths),
    "copies": lambda file, offsets, lengths: file.copies(offsets, lengths),
}


@each
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_table_that_points_outside_is_an_error(path, kind, read):
    for bad in (-1, 69_991, 2**62):
        file, offsets = kind(path), np.array([0, 5, bad])
        with pytest.raises(CorruptFileError, match=r"the table of records points outside the file: row 2: ") as caught:
            read(file, offsets, np.array([10, 10, 10]))
        assert (caught.value.path, caught.value.offset) == (path, 70_000)
    assert read(file, np.array([0, 69_990]), np.array([10, 10])) is not None


@each
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_file_that_has_shrunk_is_an_error(own, kind, read):
    only_if_it_is_mapped(kind)
    file, rows = kind(str(own)), (np.array([100, 68_000]), np.array([10, 10]))
    read(file, *rows)
    os.truncate(own, 1000)
    expected = r"had 70000 bytes when it was opened and has 1000 now: it was changed while in use"
    with pytest.raises(CorruptFileError, match=expected) as caught:
        read(file, *rows)
    assert (caught.value.path, caught.value.offset) == (str(own), 1000)


def write(path, data, offset=0):
    """Write in place, a second after the last change: coarse clocks need not tell what is within milliseconds."""
    before = os.stat(path).st_mtime_ns
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)
    os.utime(path, ns=(before, before + 10**9))


@each
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(("data", "offset"), [(b"", 0), (CONTENT[::-1], 0), (b"x", 200), (b"more", len(CONTENT))])
def test_a_file_that_is_written_to_is_an_error(own, kind, read, data, offset):
    only_if_it_is_mapped(kind)
    file, rows = kind(str(own)), (np.array([100, 68_000]), np.array([10, 10]))
    read(file, *rows)
    assert not file.is_written()
    write(own, data, offset)
    with pytest.raises(ChangedFileError) as caught:
        read(file, *rows)
    assert str(caught.value) == (
        f"{own}: the file was overwritten while it was in use: it was last changed at 2001-09-09 01:46:40 UTC when it "
        "was opened, and changed again at 2001-09-09 01:46:41 UTC. Earlier reads returned its old content; later ones "
        "may mix old and new. Open the data set again, and replace files by renaming new ones over them"
    )
    assert file.is_written()
    file.may_be_written = True  # as LMDB's
    read(file, *rows)


@pytest.mark.parametrize("grown", [False, True])
def test_a_fault_in_a_file_that_has_not_shrunk(own, monkeypatch, grown):
    """The disk has failed, or the file is of its old size again."""

    class Core:
        MapFault = core().MapFault

        @staticmethod
        def copies(*_):
            raise Core.MapFault("4096")

    file = MappedFile(str(own))
    if grown:
        write(own, CONTENT)
    monkeypatch.setattr(mapped, "core", lambda: Core)
    with pytest.raises(ChangedFileError if grown else MachineError) as caught:
        file.copies(np.array([5000]), np.array([9]))
    if not grown:
        assert str(caught.value) == (
            f"the disk failed to read {own} at byte 4096: the file has its full size and was not changed. See the "
            "kernel's log (dmesg) and the disk's health (smartctl -a), or the server's if it is a network file system, "
            "and read another copy of the data"
        )


@each
def test_a_released_file_is_opened_again(own, kind):
    file = kind(str(own))
    before = len(os.listdir("/proc/self/fd"))
    file.release()
    assert len(os.listdir("/proc/self/fd")) < before
    assert file.read(5, 9) == CONTENT[5:14]
    for content, message in ((CONTENT[::-1], "has been rewritten"), (b"short", "has 5 now")):
        file.release()
        own.unlink()
        own.write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            file.read(0, 1)


@each
def test_a_small_file_is_loaded_while_its_whole_is_read(kind, tmp_path):
    (tmp_path / "data").write_bytes(CONTENT[:1000])
    file = kind(str(tmp_path / "data"))
    with reading_tables(whole=True):
        assert file.read(3, 5) == CONTENT[3:8]
        os.truncate(tmp_path / "data", 10)
        with reading_tables():  # of an inner block
            assert file.read(900, 100) == CONTENT[900:1000]
        with pytest.raises(CorruptFileError, match="points outside the file"):
            file.read(900, 101)
    with pytest.raises(ChangedFileError, match="had 1000 bytes"):  # what was loaded is forgotten
        file.read(900, 100)


DATA = np.random.default_rng(0).integers(0, 256, 3000, np.uint8)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 900)), min_size=1, max_size=40), st.integers(0, 300))
def test_ranges_are_where_the_positions_say(pairs, gap):
    offsets, lengths = np.array(pairs).T
    runs = merge_ranges(offsets, lengths, gap)
    buffer = np.concatenate([DATA[a:b] for a, b in zip(runs.starts, runs.stops, strict=True)])
    for offset, length, position in zip(offsets, lengths, runs.positions, strict=True):
        assert buffer[position : position + length].tolist() == DATA[offset : offset + length].tolist()
    assert (runs.starts[1:] > runs.stops[:-1] + gap).all()
    asked = np.zeros(len(DATA) + 1, bool)
    for offset, length in pairs:
        asked[offset : offset + length] = True
    for start, stop in zip(runs.starts, runs.stops, strict=True):
        # no run of bytes that nobody asked for is longer than the gap
        unasked = np.diff(np.flatnonzero(np.concatenate(([True], asked[start:stop], [True])))) - 1
        assert unasked.max() <= gap
