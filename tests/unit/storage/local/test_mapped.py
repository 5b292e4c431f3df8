from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload.errors import CorruptFileError
from dataload.storage.local.mapped import MappedFile

CONTENT = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("mapped") / "data"
    file.write_bytes(CONTENT)
    return str(file)


@given(data=st.data(), length=st.one_of(st.integers(1, 40), st.sampled_from([4096, 8192, 69_990])))
def test_gather_equals_slices(path, data, length):
    offsets = data.draw(st.lists(st.integers(0, len(CONTENT) - length), max_size=12))
    file = MappedFile(path)
    got = file.gather(np.array(offsets, np.int64), length)
    assert (got.shape, got.dtype, got.flags.c_contiguous) == ((len(offsets), length), np.uint8, True)
    assert [row.tobytes() for row in got] == [CONTENT[offset : offset + length] for offset in offsets]


@pytest.mark.parametrize("length", [1, 16, 255, 256, 4096, 4104, 6000])
@pytest.mark.parametrize("rows", [1, 31, 63, 249, 250, 256, 499, 500, 1000])
def test_gather_in_pieces_equals_slices(path, length, rows):
    """Rows are cut in two to sixteen pieces where that lets other threads run; nobody may see that."""
    offsets = np.random.default_rng(rows).integers(0, len(CONTENT) - length + 1, rows)
    before = offsets.copy()
    got = MappedFile(path).gather(offsets, length)
    assert got.tobytes() == b"".join(CONTENT[offset : offset + length] for offset in offsets.tolist())
    assert (offsets == before).all()


@pytest.mark.parametrize(("rows", "length"), [(1, 8), (40, 2000), (40, 2050), (300, 1024), (600, 1024)])
@pytest.mark.parametrize("stride", [1, 100, 3000])
def test_gather_every_equals_slices(path, rows, length, stride):
    """Records at even distances, which overlap or leave gaps, in pieces and whole."""
    start = 7
    count = (len(CONTENT) - start - length) // stride + 1
    indices = np.append(np.random.default_rng(rows).integers(0, count, rows - 1), count - 1)
    got = MappedFile(path).gather_every(start, stride, length, indices)
    assert (got.shape, got.dtype, got.flags.writeable) == ((rows, length), np.uint8, True)
    places = [start + index * stride for index in indices.tolist()]
    assert got.tobytes() == b"".join(CONTENT[place : place + length] for place in places)


def test_gather_gives_the_callers_own(path):
    file = MappedFile(path)
    one, two = (file.gather(np.array([5, 5]), 8) for _ in range(2))
    one[...] = 0
    assert two.tobytes() == CONTENT[5:13] * 2
    assert file.copy(5, 8) == CONTENT[5:13]


@pytest.mark.parametrize("rows", [3, 600])
def test_take_equals_slices(path, rows):
    file = MappedFile(path)
    indices = np.random.default_rng(1).integers(0, 100, rows)
    got = file.take(7, 500, indices)
    assert got.tobytes() == b"".join(CONTENT[7 + i * 500 : 7 + (i + 1) * 500] for i in indices.tolist())
    assert got.flags.writeable


def test_copies_equal_slices(path):
    offsets, lengths = np.array([5, 0, 69_990, 3]), np.array([3, 0, 10, 70])
    expected = [CONTENT[o : o + n] for o, n in zip(offsets, lengths, strict=True)]
    assert MappedFile(path).copies(offsets, lengths) == expected


def test_view_is_read_only_and_keeps_the_map(path):
    view = MappedFile(path).view(10, 20)
    assert bytes(view) == CONTENT[10:30]
    with pytest.raises(TypeError):
        view[0] = 1


def test_records_of_many_lengths_keep_no_window_each(path):
    file = MappedFile(path)
    for length in range(1, 200):
        assert file.gather(np.array([3]), length).tobytes() == CONTENT[3 : 3 + length]
    assert len(file._mapping.windows) <= 65


def test_empty_file(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    file = MappedFile(str(tmp_path / "empty"))
    file.check()
    assert file.size == len(file.data) == 0
    assert file.copy(0, 0) == b""
    assert file.copies(np.array([0]), np.array([0])) == [b""]


def test_a_file_that_shrinks_is_noticed_before_it_is_touched(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    file = MappedFile(str(path))
    file.check()
    os.truncate(path, 1000)
    with pytest.raises(
        CorruptFileError, match=r"had 70000 bytes when it was opened and has 1000 now: it was changed while in use"
    ) as e:
        file.check()
    assert (e.value.path, e.value.offset) == (str(path), 1000)


def test_a_file_that_grows_or_is_replaced_is_no_concern(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    file = MappedFile(str(path))
    with path.open("ab") as stream:
        stream.write(b"more")
    file.check()
    path.unlink()
    file.check()
    assert file.copy(0, 9) == CONTENT[:9]


def test_a_map_is_not_pickled(path):
    with pytest.raises(TypeError, match="a memory map belongs to its process and cannot be pickled"):
        pickle.dumps(MappedFile(path))


def test_forgetting_it_closes_it(path):
    before = len(os.listdir("/proc/self/fd"))
    file = MappedFile(path)
    rows = file.gather(np.array([1, 2]), 4)
    del file
    assert len(os.listdir("/proc/self/fd")) == before
    assert rows.tobytes() == CONTENT[1:5] + CONTENT[2:6]
