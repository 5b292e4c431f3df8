"""The pool lends memory again only when nobody holds any view of it."""

import gc
import threading

import numpy as np
import pytest

from dataload.storage.local.buffers import BufferPool

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


def test_the_sizes_last_asked_for_are_kept_and_of_each_a_few():
    pool = BufferPool()
    megabyte = 1 << 20
    held = [pool.empty((megabyte,), np.uint8) for _ in range(100)]
    held.clear()
    assert kept(pool) == {megabyte: 32}
    held = [pool.empty((64 * megabyte,), np.uint8) for _ in range(6)]
    held.clear()
    assert kept(pool) == {megabyte: 32, 64 * megabyte: 4}
    for size in (2, 3, 4):
        pool.empty((size * megabyte,), np.uint8)
    assert kept(pool) == {64 * megabyte: 4, 2 * megabyte: 1, 3 * megabyte: 1, 4 * megabyte: 1}
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
