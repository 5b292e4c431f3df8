"""Slots and the arrays lent from them."""

import ctypes
import gc
import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload._util.arrays import BufferLeases
from dataload.executors import transport as shared_memory
from dataload.executors.transport import Ring, Slot


@pytest.fixture
def slot():
    slot = Slot()
    yield slot
    slot.close()
    slot.close()


def test_what_one_side_writes_the_other_sees(slot):
    parts = [memoryview(b"abc"), memoryview(bytes(range(200))), memoryview(b"")[:0], memoryview(b"end")]
    other = Slot(os.dup(slot.descriptor))
    assert other.view(0).nbytes == 0
    extents = slot.write(parts[:2] + parts[3:])
    assert [offset % 64 for offset, _ in extents] == [0] * 3
    view = other.view(sum(extents[-1]))
    assert [view[o : o + n].tobytes() for o, n in extents] == [b"abc", bytes(range(200)), b"end"]
    view[0] = ord("x")
    assert slot.view(1)[0] == ord("x")
    other.close()


def test_a_slot_grows_and_keeps_what_is_mapped(slot):
    slot.write([memoryview(b"a" * 100)])
    first = slot.view(100)
    slot.write([memoryview(b"b" * 100_000)])
    assert first[:100].tobytes() == b"b" * 100  # the same memory, mapped before
    assert slot.view(100_000)[:100_000].tobytes() == b"b" * 100_000
    assert slot.view(5).nbytes >= 100_000


def test_little_growth_needs_no_other_mapping(slot):
    sizes = set()
    for size in range(1_000_000, 1_060_000, 1000):
        slot.reserve(size)
        sizes.add(os.fstat(slot.descriptor).st_size)
        assert size <= os.fstat(slot.descriptor).st_size <= size * 1.13 + 4096
    assert len(sizes) <= 2


def test_a_lack_of_memory_is_an_error_before_anything_is_written(slot, monkeypatch):
    slot.write([memoryview(b"before")])
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1000)
    with pytest.raises(OSError, match=r"1,048,576 bytes are needed, 1,000 are available|are needed, 1,000 are"):
        slot.write([memoryview(b"after!" * 200_000)])
    assert slot.view(6)[:6].tobytes() == b"before"


def test_without_memfd_a_temporary_file_serves(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    slot = Slot()
    slot.write([memoryview(b"x" * 10_000)])
    assert slot.view(10_000)[9999] == ord("x")
    slot.close()
    monkeypatch.delattr(os, "posix_fallocate")
    slot = Slot()
    slot.write([memoryview(b"x" * 10_000)])
    slot.close()


KEEPERS = {
    "itself": lambda a: a,
    "slice": lambda a: a[5:9],
    "view": lambda a: a.view(np.int8),
    "reshaped": lambda a: a.reshape(4, -1).T,
    "element of a list": lambda a: [a[1:2]],
    "memoryview": memoryview,
    "frombuffer": lambda a: np.frombuffer(a, np.uint16),
    "subclass": lambda a: a.view(np.recarray),
    "asarray": lambda a: np.asarray(a)[::2],
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (2,), (1,)),
    "ctypes": lambda a: (ctypes.c_char * 4).from_buffer(a),
    "iterator": np.nditer,
    "dlpack": np.from_dlpack,
    "pickle buffer": pickle.PickleBuffer,
}


@pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)
def test_a_loan_comes_back_when_the_last_view_goes_and_not_before(keep):
    loans, returned = BufferLeases(), []
    block = np.arange(64, dtype=np.uint8)
    lent = loans.lend(block, lambda: returned.append(True))
    assert np.shares_memory(lent, block)
    kept = keep(lent[:32])
    del lent
    gc.collect(0)  # the views are young; a whole collection takes a tenth of a second
    assert not returned
    del kept
    gc.collect(0)
    assert returned == [True]


def test_a_tensor_keeps_its_loan():
    torch = pytest.importorskip("torch")
    loans, returned = BufferLeases(), []
    tensor = torch.from_numpy(loans.lend(np.zeros(64, np.uint8), lambda: returned.append(True))).view(8, 8)[2:, 1]
    gc.collect()
    assert not returned
    del tensor
    assert returned


def test_loans_end_in_any_thread():
    loans, returned = BufferLeases(), []
    lent = [loans.lend(np.zeros(8, np.uint8), lambda n=n: returned.append(n)) for n in range(100)]
    thread = threading.Thread(target=lent.clear)
    thread.start()
    thread.join()
    assert sorted(returned) == list(range(100))


def ring_of(slots):
    ring = Ring(slots)
    return ring, lambda number, size: ring.slots[number].write([memoryview(bytes([number]) * size)])


def test_slots_are_lent_in_turn_and_none_twice():
    ring, write = ring_of(3)
    taken = [ring.take() for _ in range(4)]
    assert taken == [0, 1, 2, None]
    parts = {number: ring.lend(number, write(number, 100)) for number in (0, 1, 2)}
    del parts[1]
    assert ring.take() == 1
    assert ring.take() is None
    assert all((parts[number][0] == number).all() for number in (0, 2))
    ring.give_back(1)
    ring.close()
    assert (parts[2][0] == 2).all()  # valid after all is closed


def test_retired_slots_go_when_they_come_back():
    ring, write = ring_of(4)
    taken = [ring.take() for _ in range(3)]
    lent = [ring.lend(number, write(number, 5000)) for number in taken]
    assert ring.missing(8192) == 8192
    files = {number: os.dup(slot.descriptor) for number, slot in ring.slots.items()}
    assert ring.retire(2)
    assert not ring.retire(3)  # nothing comes back
    assert ring.take() is None
    assert sorted(ring.slots) == [0, 1, 2]  # 3 was free
    assert all((part[0] == number).all() for number, part in zip(taken, lent, strict=True))
    lent.clear()
    assert {ring.take(), ring.take()} == set(ring.slots)
    assert ring.take() is None
    assert sorted(os.fstat(file).st_size > 0 for file in files.values()) == [False, False, True, True]
    for file in files.values():
        os.close(file)
    ring.close()


@given(st.lists(st.sampled_from(["take", "drop", "look"]), max_size=60), st.integers(1, 4))
def test_what_is_lent_is_never_lent_again(operations, slots):
    ring, write = ring_of(slots)
    held: dict[int, np.ndarray] = {}
    for operation in operations:
        if operation == "take":
            number = ring.take()
            assert (number is None) == (len(held) == slots)
            if number is not None:
                assert number not in held
                held[number] = ring.lend(number, write(number, 10))[0][3:]
        elif operation == "drop" and held:
            del held[next(iter(held))]
        assert all((array == number).all() for number, array in held.items())
    held.clear()
    ring.close()
