"""The pool lends memory again only when nobody holds any view of it."""

import gc
import platform
import subprocess
import sys
import threading

import numpy as np
import pytest

from dataload._util.buffers import BufferPool

BIG = (256, 1024)  # a megabyte of float32


def test_small_arrays_are_fresh_ones():
    array = BufferPool().empty((3, 4), np.int16)
    assert array.shape == (3, 4)
    assert array.dtype == np.int16
    assert array.base is None


def test_memory_is_lent_again_only_after_the_last_view():
    pool = BufferPool()
    array = pool.empty(BIG, np.float32)
    address = array.ctypes.data
    row = array[3]
    bits = row.view(np.uint8)[5:9]
    del array, row
    assert pool.empty(BIG, np.float32).ctypes.data != address
    del bits
    gc.collect()
    blocks = [pool.empty(BIG, np.float32) for _ in range(2)]
    assert address in {block.ctypes.data for block in blocks}
    assert all(block.flags.writeable and block.flags.aligned and block.flags.c_contiguous for block in blocks)


def test_a_tensor_keeps_the_memory():
    torch = pytest.importorskip("torch")
    pool = BufferPool()
    array = pool.empty(BIG, np.float32)
    array[:] = 1
    tensor = torch.from_numpy(array)[7:9]
    del array
    other = pool.empty(BIG, np.float32)
    other[:] = 2
    assert tensor.unique().tolist() == [1.0]


def kept(pool):
    """Size -> number of unused blocks."""
    return {size: len(blocks) for size, blocks in pool._free.items()}


def test_a_limited_number_of_bytes_is_kept():
    pool = BufferPool()
    megabyte = 1 << 20
    held = [pool.empty((megabyte,), np.uint8) for _ in range(200)]
    held.clear()
    assert kept(pool) == {megabyte: 128}
    held = [pool.empty((32 * megabyte,), np.uint8) for _ in range(6)]
    held.clear()
    assert kept(pool) == {32 * megabyte: 4}
    held = [pool.empty((256 * megabyte,), np.uint8) for _ in range(3)]
    held.clear()
    assert kept(pool) == {256 * megabyte: 2}
    assert len(pool._loans) == 0


def test_sizes_that_differ_little_share_blocks():
    pool = BufferPool()
    for size in range(1_000_000, 1_040_000, 1000):
        assert pool.empty((size,), np.uint8).shape == (size,)
    assert kept(pool) == {1 << 20: 1}
    for size in range(1 << 18, 1 << 22, 4099):
        pool.empty((size,), np.uint8)
    assert len(kept(pool)) <= 8 * 4 + 1


def test_blocks_outlive_their_pool():
    pool = BufferPool()
    array = pool.empty(BIG, np.float32)
    array[:] = 5
    del pool
    gc.collect()
    assert (array == 5).all()


def test_threads_never_share_a_block():
    pool = BufferPool()
    wrong = []

    def work(number):
        for _ in range(200):
            array = pool.empty(BIG, np.float32)
            array[:] = number
            if not (array[::50] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FAULTS = """
import resource
import numpy as np
from dataload._util.buffers import BufferPool

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
