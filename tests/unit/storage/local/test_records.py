"""Records copied out of files, mapped or not: equal bytes, equal errors."""

import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import ChangedFileError, CorruptFileError, MachineError
from dataload.storage.core import core, core_name
from dataload.storage.local import files, mapped, unmapped
from dataload.storage.local.files import LocalStorage
from dataload.storage.local.mapped import MappedFile
from dataload.storage.local.unmapped import UnmappedFile

CONTENT = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8).tobytes()
KINDS = [MappedFile, UnmappedFile]
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("records") / "data"
    file.write_bytes(CONTENT)
    return str(file)


def slices(offsets, lengths):
    return [CONTENT[o : o + n] for o, n in zip(offsets.tolist(), np.broadcast_to(lengths, offsets.shape), strict=True)]


@pytest.mark.parametrize(("core_maps", "kind"), [(True, MappedFile), (False, UnmappedFile)])
def test_files_are_mapped_only_where_that_is_safe(path, monkeypatch, core_maps, kind):
    monkeypatch.setattr(files, "can_map", lambda: core_maps)
    assert type(LocalStorage().map(path)) is kind


@given(data=st.data(), length=st.one_of(st.integers(0, 40), st.sampled_from([4096, 8192, 69_990])))
def test_gather_equals_slices(path, data, length):
    offsets = np.array(data.draw(st.lists(st.integers(0, len(CONTENT) - length), max_size=12)), np.int64)
    for kind in KINDS:
        got = kind(path).gather(offsets, length)
        assert (got.shape, got.dtype, got.flags.c_contiguous) == ((len(offsets), length), np.uint8, True)
        assert [row.tobytes() for row in got] == slices(offsets, length)


@each
@pytest.mark.parametrize(("rows", "length"), [(1, 8), (40, 2000), (40, 2050), (300, 1024), (600, 1024)])
@pytest.mark.parametrize("stride", [1, 100, 3000])
def test_gather_every_equals_slices(path, kind, rows, length, stride):
    """Records at even distances, which overlap or leave gaps."""
    start = 7
    count = (len(CONTENT) - start - length) // stride + 1
    indices = np.append(np.random.default_rng(rows).integers(0, count, rows - 1), count - 1)
    got = kind(path).gather_every(start, stride, length, indices)
    assert (got.shape, got.dtype, got.flags.writeable) == ((rows, length), np.uint8, True)
    assert got.tobytes() == b"".join(slices(start + indices * stride, length))


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
def test_what_is_read_is_the_callers_own(path, kind):
    file = kind(path)
    one, two = (file.gather(np.array([5, 5]), 8) for _ in range(2))
    one[...] = 0
    assert two.tobytes() == CONTENT[5:13] * 2
    assert file.read(5, 8) == CONTENT[5:13]


@each
def test_empty_file(tmp_path, kind):
    (tmp_path / "empty").write_bytes(b"")
    file = kind(str(tmp_path / "empty"))
    assert file.size == 0
    assert file.read(0, 0) == b""
    assert file.gather(np.array([], np.int64), 5).shape == (0, 5)
    assert file.gather_ranges(np.array([0, 0]), np.array([0, 0])) == [b"", b""]


READS = {
    "gather": lambda file, offsets, lengths: file.gather(offsets, int(lengths[0])),
    "ranges": lambda file, offsets, lengths: file.gather_ranges(offsets, lengths),
    "copies": lambda file, offsets, lengths: file.copies(offsets, lengths),
}


@each
@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("bad", [-1, 69_991, 2**62])
def test_a_table_that_points_outside_is_an_error(path, kind, read, bad):
    file, offsets = kind(path), np.array([0, 5, bad])
    with pytest.raises(CorruptFileError, match=r"the table of records points outside the file: row 2: ") as caught:
        read(file, offsets, np.array([10, 10, 10]))
    assert (caught.value.path, caught.value.offset) == (path, 70_000)
    assert read(file, offsets[:2], np.array([10, 10])) is not None


@each
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_file_that_has_shrunk_is_an_error(tmp_path, kind, read):
    if kind is MappedFile and core_name() == "numpy":
        pytest.skip("without the compiled core, files are not mapped")
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    file, offsets = kind(str(path)), np.array([100, 68_000])
    read(file, offsets, np.array([10, 10]))
    os.truncate(path, 1000)
    expected = r"had 70000 bytes when it was opened and has 1000 now: it was changed while in use"
    with pytest.raises(CorruptFileError, match=expected) as caught:
        read(file, offsets, np.array([10, 10]))
    assert (caught.value.path, caught.value.offset) == (str(path), 1000)


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
def test_a_file_that_is_written_to_is_an_error(tmp_path, kind, read, data, offset):
    if kind is MappedFile and core_name() == "numpy":
        pytest.skip("without the compiled core, files are not mapped")
    path, rows = tmp_path / "data", (np.array([100, 68_000]), np.array([10, 10]))
    path.write_bytes(CONTENT)
    os.utime(path, ns=(0, 10**18))
    file = kind(str(path))
    read(file, *rows)
    assert not file.is_written()
    write(path, data, offset)
    with pytest.raises(ChangedFileError) as caught:
        read(file, *rows)
    assert str(caught.value) == (
        f"{path}: the file was overwritten while it was in use: it was last changed at 2001-09-09 01:46:40 UTC when it "
        "was opened, and was changed again at 2001-09-09 01:46:41 UTC. What was read of it before is what it held when "
        "it was opened; what would be read since may be torn (part old, part new). Open the data set again, and "
        "replace files by renaming new ones over them"
    )
    assert file.is_written()
    file.may_be_written = True  # as LMDB's
    read(file, *rows)


@each
def test_a_file_that_is_replaced_or_deleted_is_no_concern(tmp_path, kind):
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    file = kind(str(path))
    (tmp_path / "new").write_bytes(CONTENT[::-1])
    os.chmod(path, 0o600)
    os.link(path, tmp_path / "link")
    os.replace(tmp_path / "new", path)
    assert file.read(0, 9) == CONTENT[:9]
    path.unlink()
    assert file.read(0, 9) == CONTENT[:9]


@pytest.mark.parametrize("grown", [False, True])
def test_a_fault_in_a_file_that_has_not_shrunk(tmp_path, monkeypatch, grown):
    """The disk has failed, or the file is of its old size again."""

    class Core:
        MapFault = core().MapFault

        @staticmethod
        def copies(*_):
            raise Core.MapFault("4096")

    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    file = MappedFile(str(path))
    if grown:
        write(path, CONTENT)
    monkeypatch.setattr(mapped, "core", lambda: Core)
    with pytest.raises(ChangedFileError if grown else MachineError) as caught:
        file.read(5000, 9)
    if not grown:
        assert str(caught.value) == (
            f"the disk failed to read {path} at byte 4096: the file has its full size and was not changed. See the "
            "kernel's log (dmesg) and the disk's health (smartctl -a), or the server's if it is a network file system, "
            "and read another copy of the data"
        )


@each
def test_a_released_file_is_opened_again(tmp_path, kind):
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    file = kind(str(path))
    before = len(os.listdir("/proc/self/fd"))
    file.release()
    assert len(os.listdir("/proc/self/fd")) < before
    assert file.read(5, 9) == CONTENT[5:14]
    for content, message in ((CONTENT[::-1], "has been rewritten"), (b"short", "has 5 now")):
        file.release()
        path.unlink()
        path.write_bytes(content)
        with pytest.raises(CorruptFileError, match=message):
            file.read(0, 1)


@each
def test_an_open_file_is_not_pickled(path, kind):
    with pytest.raises(TypeError, match="an open file belongs to its process and cannot be pickled"):
        pickle.dumps(kind(path))


@each
def test_forgetting_it_closes_it(path, kind):
    before = len(os.listdir("/proc/self/fd"))
    file = kind(path)
    rows = file.gather(np.array([1, 2]), 4)
    del file
    assert len(os.listdir("/proc/self/fd")) == before
    assert rows.tobytes() == CONTENT[1:5] + CONTENT[2:6]


def test_short_reads_are_continued(path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(
        unmapped.os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:100]], offset), raising=True
    )
    assert UnmappedFile(path).read(10, 5000) == CONTENT[10:5010]


def test_neighbours_are_read_together(path, monkeypatch):
    preadv, calls = os.preadv, []
    monkeypatch.setattr(unmapped.os, "preadv", lambda *arguments: calls.append(0) or preadv(*arguments))
    file = UnmappedFile(path)
    file.gather(np.arange(200) * 300, 300)
    assert len(calls) == 1
    file.gather(np.array([0, 30_000, 60_000]), 300)
    assert len(calls) == 4
