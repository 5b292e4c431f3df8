"""The pool lends memory again only when nobody holds any view of it."""

import gc
import threading

import numpy as np
import pytest

from dataload.sources.buffers import BufferPool

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


def test_another_size_drops_what_was_kept():
    pool = BufferPool()
    held = [pool.empty(BIG, np.float32) for _ in range(100)]
    held.clear()
    assert len(pool._free) == 64
    held = [pool.empty((64, *BIG), np.float32) for _ in range(6)]
    held.clear()
    assert len(pool._free) == 4
    pool.empty((512, 1024), np.float32)
    assert all(block.nbytes == 512 * 1024 * 4 for block in pool._free)
    assert len(pool._loans) == 0


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
