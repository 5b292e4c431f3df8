"""Messages over a socket: whole or in pieces, with buffers and descriptors, and when the other side goes."""

import os
import socket
import threading

import numpy as np
import pytest

from dataload.executors.transport import Inbox, Outbox, receive_descriptor, send


@pytest.fixture
def ends():
    """The parent's end, which does not wait, and the worker's, which does."""
    parent, worker = socket.socketpair()
    parent.setblocking(False)
    with parent, worker:
        yield parent, worker


def test_messages_arrive_as_they_were_sent(ends):
    parent, worker = ends
    outbox, inbox = Outbox(parent), Inbox(worker)
    arrays = [np.arange(5).data.cast("B"), b"", b"abc"]
    for content, parts in [("a", []), ({"b": (1, None)}, arrays), (None, [b""])]:
        outbox.put(content, parts)
        assert outbox.flush()
        assert inbox.take() == (content, [bytearray(part) for part in parts])


def test_a_message_comes_when_its_last_byte_has(ends):
    parent, worker = ends
    received, sent = Inbox(parent), bytearray()
    collecting, other = socket.socketpair()
    with collecting, other:
        send(other, "hello", [b"world", b"!" * 10])
        sent += collecting.recv(1000)
    for byte in sent[:-1]:
        worker.send(bytes([byte]))
        assert received.take() is None
    worker.send(sent[-1:])
    assert received.take() == ("hello", [b"world", b"!" * 10])
    assert received.take() is None


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


def test_the_end_of_the_other_side_is_told(ends):
    parent, worker = ends
    inbox, outbox = Inbox(parent), Outbox(parent)
    send(worker, "last words")
    worker.close()
    assert inbox.take() == ("last words", [])
    with pytest.raises(EOFError):
        inbox.take()
    outbox.put("to nobody", [bytes(1 << 20)])
    assert outbox.flush()  # nothing is left to be sent


def test_an_end_within_a_message_or_in_place_of_a_descriptor_is_one(ends):
    parent, worker = ends
    inbox = Inbox(worker)
    parent.send(b"\x10\0\0")
    parent.close()
    with pytest.raises(EOFError):
        inbox.take()
    with pytest.raises(EOFError):
        receive_descriptor(worker)
