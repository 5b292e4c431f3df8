"""Messages over a socket, whole or in pieces; slots and the arrays lent from them; rows that another process reads."""

import ctypes
import gc
import os
import pickle
import socket
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock
from weakref import WeakMethod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataload._util.arrays import BufferLeases
from dataload.executors import transport as shared_memory
from dataload.executors.transport import Inbox, Outbox, Ring, RowClient, RowServer, Slot, receive_descriptor, send


@pytest.fixture
def ends():
    """The parent's end, which does not wait, and the worker's, which does."""
    parent, worker = socket.socketpair()
    parent.setblocking(False)
    with parent, worker:
        yield parent, worker


def test_neither_side_waits_for_the_other_for_ever(ends):
    parent, worker = ends
    outbox, inbox = Outbox(parent), Inbox(parent)
    size, count = 1 << 22, 5  # more than any socket holds

    def serve():
        requests = Inbox(worker)
        for _ in range(count):
            send(worker, "large", [bytes(size)])
        for _ in range(count):
            assert requests.take() == ("also large", [bytearray(size)])
        send(worker, "done")

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(count):
        outbox.put("also large", [bytes(size)])
    found = []
    while not found or found[-1] != "done":
        outbox.flush()
        if (message := inbox.take()) is not None:
            found.append(message[0])
    thread.join(10)
    assert found == ["large"] * count + ["done"]


def test_descriptors_arrive_between_messages(ends):
    parent, worker = ends
    outbox, inbox = Outbox(parent), Inbox(worker)
    read, write = os.pipe()
    for number in range(3):
        outbox.put(number)
        outbox.put_descriptor(write)
    outbox.put("last")
    assert outbox.flush()
    os.close(write)
    for number in range(3):
        assert inbox.take() == (number, [])
        with open(receive_descriptor(worker), "wb") as stream:
            stream.write(b"%d" % number)
    assert inbox.take() == ("last", [])
    with open(read, "rb") as stream:
        assert stream.read() == b"012"


@pytest.fixture
def slot():
    slot = Slot()
    yield slot
    slot.close()
    slot.close()


def test_a_lack_of_memory_is_an_error_before_anything_is_written(slot, monkeypatch):
    slot.write([memoryview(b"before")])
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1000)
    with pytest.raises(OSError, match=r"1,048,576 bytes are needed, 1,000 are available|are needed, 1,000 are"):
        slot.write([memoryview(b"after!" * 200_000)])
    assert slot.view(6)[:6].tobytes() == b"before"


def test_without_memfd_a_temporary_file_serves(monkeypatch):
    for missing in ("memfd_create", "posix_fallocate"):
        monkeypatch.delattr(os, missing)
        slot = Slot()
        slot.write([memoryview(b"x" * 10_000)])
        assert slot.view(10_000)[9999] == ord("x")
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


def ring_of(slots):
    ring = Ring(slots)
    return ring, lambda number, size: ring.slots[number].write([memoryview(bytes([number]) * size)])


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


def test_slots_that_are_large_enough_miss_nothing():
    ring, write = ring_of(3)
    write(0, 5000)
    assert (ring.missing(0), ring.missing(1)) == (0, 2)
    ring.close()


class Rows:
    fail = False

    def read(self, indices, out):
        if self.fail:
            raise ValueError(indices)
        out[...] = (indices % 251)[:, None, None] + np.arange(6).reshape(2, 3)


def read(client, indices):
    out = np.zeros((len(indices), 2, 3), np.uint8)
    assert client.read(np.array(indices, np.int64), out) is bool(out.any())
    return out[:, 0, 0].tolist() if (out == out[:, :1, :1] + np.arange(6).reshape(2, 3)).all() else None


def test_rows_are_served_until_the_server_or_its_reader_ends(tmp_path, monkeypatch):
    (folder := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # whose path is too long for a socket
    rows, before = Rows(), {*threading.enumerate()}
    server = RowServer(WeakMethod(rows.read), (2, 3))
    first, second = RowClient(server.address), RowClient(server.address)
    for indices in ([4], [5, 250, 252 + 2**40], range(1000), [7]):  # the shared memory grows once
        expected = [index % 251 for index in indices]
        assert read(first, indices) == expected
    assert all(thread.daemon for thread in {*threading.enumerate()} - before), "no process waits for them at its end"
    rows.fail = True
    assert read(first, [4]) is None, "the caller has to make them"
    rows.fail = False
    assert read(second, [8]) == [8], "the server has accepted both"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError))
        late = RowClient(server.address)
        assert read(late, [4]) is None, "no thread serves it"
        late.close()
    server.close()
    assert not Path(server.address).parent.exists()
    late = RowClient(server.address)
    assert read(late, [4]) is None
    assert read(second, [9]) == read(first, [9]) == [9], "those that are connected stay"
    first.close()
    assert read(first, [4]) is None
    del rows
    assert read(second, [4]) is None
    for client in (first, second, late):
        client.close()
