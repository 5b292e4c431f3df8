"""The pool lends memory again only when nobody holds any view of it; rows that are stacked."""

import gc
import platform
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dataload._util.arrays import BufferPool, split_rows, stack_alike

BIG = (256, 1024)  # a megabyte of float32
MIB = 1 << 20


@pytest.fixture
def kept():
    """A function that returns the MiB of arrays that live, which are the pool's once all others are dropped."""
    gc.collect()
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0] / MIB
    tracemalloc.stop()


def test_memory_is_lent_again_only_after_the_last_view():
    pool = BufferPool()
    small = pool.empty((3, 4), np.int16)
    assert (small.shape, small.dtype, small.base) == ((3, 4), np.int16, None)
    array = pool.empty(BIG, np.float32)
    address = array.ctypes.data
    row = array[3]
    bits = memoryview(row.view(np.uint8)[5:9])  # as a tensor holds it
    bits[:] = b"mine"
    del array, row
    other = pool.empty(BIG, np.float32)
    other[:] = 2
    assert other.ctypes.data != address
    assert bytes(bits) == b"mine"
    del bits
    gc.collect()
    blocks = [pool.empty(BIG, np.float32) for _ in range(2)]
    assert address in {block.ctypes.data for block in blocks}
    assert all(block.flags.writeable and block.flags.aligned and block.flags.c_contiguous for block in blocks)
    assert [block.ctypes.data % 64 for block in blocks] == [0, 0]
    del pool
    gc.collect()
    assert (other == 2).all(), "blocks outlive their pool"


def test_a_limited_number_of_bytes_is_kept(kept):
    pool = BufferPool()
    for size, blocks, expected in ((1, 200, 128), (32, 6, 128), (256, 3, 512), (1, 1, 1)):
        held = [pool.empty((size * MIB,), np.uint8) for _ in range(blocks)]
        held.clear()
        assert kept() == pytest.approx(expected, abs=0.5), (size, blocks)


def test_threads_never_share_a_block():
    pool = BufferPool()

    def work(number):
        for _ in range(50):
            array = pool.empty(BIG, np.float32)
            array[:] = number
            assert (array[::50] == number).all()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


FAULTS = """
import resource
import numpy as np
from dataload._util.arrays import BufferPool

pool = BufferPool()
batch = pool.empty((8 << 20,), np.uint8)
for _ in range(5):
    samples = [np.ones(1 << 18, np.uint8) for _ in range(20)]
    del samples
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    samples = [np.ones(1 << 18, np.uint8) for _ in range(20)]
    del samples
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_the_memory_of_samples_stays_with_the_process():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 5 * 20 * 64 / 10  # there are 64 pages in a sample, which would all fault each time


F32 = np.float32


@pytest.mark.parametrize(
    "values",
    [
        [np.ones(3, F32), np.zeros(3, F32)],
        [np.ones((2, 3)), np.asfortranarray(np.zeros((2, 3)))],
        [np.ones((0, 2)), np.ones((0, 2))],
        [np.array(1), np.array(2)],
        [F32(1), F32(2)],
        [np.bool_(True), np.bool_(False)],
        [np.arange(3, dtype="l"), np.arange(3, dtype="q")],
    ],
)
def test_alike(values):
    stacked = stack_alike(values)
    assert (stacked.dtype, stacked.tolist()) == (np.stack(values).dtype, np.stack(values).tolist())


NOT_ALIKE = [
    *([np.ones(3), np.zeros(3, F32)], [np.ones(3, np.int64), np.zeros(3, np.int8)]),  # numpy would convert
    *([np.ones(3), np.ones(2)], [np.ones((2, 3)), np.ones((2, 4))]),
    [np.ones((2, 3)), np.ones((3, 3)), np.ones((1, 3))],  # as many values as if they were alike
    *([np.ones(2), np.ones((2, 1))], [np.ones(1), np.array(1.0)], [np.array(1.0), np.ones(1)]),
    *([np.array(1.0), np.array(1.0, F32)], [F32(1), np.float64(1)], [F32(1), np.array(1, F32)]),
    *([np.timedelta64(1, "s"), np.timedelta64(1, "ms")], [np.ones(2, ">f4")] * 2, [np.array([None])] * 2),
    *([np.array(["a"])] * 2, [np.ma.masked_array([1, 2])] * 2, [np.asfortranarray(np.ones((2, 3)))] * 2),
    *(["a", "b"], [[1], [2]]),
]


@pytest.mark.parametrize("values", NOT_ALIKE, ids=repr)
def test_not_alike(values):
    assert stack_alike(values) is None


def test_rows_are_arrays_or_items():
    assert [type(row) for row in split_rows(np.arange(2))] == [np.ndarray] * 2
    assert split_rows(["a", "b"]) == ["a", "b"]
    column = np.arange(6).reshape(3, 2)
    split_rows(column)[1][:] = 7
    assert column.tolist() == [[0, 1], [7, 7], [4, 5]]
