"""Messages, batches and rows between processes: by pipes, and by shared memory in slots."""

import errno
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from shutil import rmtree
from typing import Any, TypeAlias

import numpy as np

from dataload._util.arrays import BufferLeases
from dataload._util.system import available_bytes, reserve
from dataload.types import BytesArray, Int64Array

Message: TypeAlias = tuple[Any, list[bytearray]]
"""The unpickled content and the buffers sent with it."""

_LENGTH = struct.Struct("<Q")
_WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS)  # the last: too many descriptors in transit


def _frame(content: Any, parts: Sequence[Any]) -> list[memoryview]:
    views = [memoryview(part) for part in parts]
    head = pickle.dumps((content, [view.nbytes for view in views]), protocol=5)
    return [memoryview(_LENGTH.pack(len(head)) + head), *(view for view in views if view.nbytes)]


def send(connection: socket.socket, content: Any, parts: Sequence[Any] = ()) -> None:
    """Send a message, and wait until it is sent. `parts` are byte buffers, which are not copied."""
    for view in _frame(content, parts):
        connection.sendall(view)


def receive_descriptor(connection: socket.socket) -> int:
    """Receive a descriptor sent by `Outbox.put_descriptor`, at its place in the stream."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not data:
        raise EOFError
    return descriptors[0]


class Inbox:
    """Assembles messages from a socket, blocking or not, however few bytes arrive at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = self._read()

    def take(self) -> Message | None:
        """Return the next message; None if it is incomplete. EOFError or OSError if the peer is gone."""
        return next(self._messages)

    def _read(self) -> Generator[Message | None]:
        while True:
            (length,) = _LENGTH.unpack((yield from self._exactly(_LENGTH.size)))
            content, sizes = pickle.loads((yield from self._exactly(length)))  # noqa: S301 - from our own process
            parts: list[bytearray] = []
            for size in sizes:
                parts.append((yield from self._exactly(size)))  # noqa: PERF401 - a comprehension cannot yield
            message = content, parts
            del content, parts  # hold no reference to the batch
            yield message
            del message

    def _exactly(self, size: int) -> Generator[None, None, bytearray]:
        buffer = bytearray(size)
        left = memoryview(buffer)
        while left.nbytes:
            try:
                count = self._connection.recv_into(left)
            except BlockingIOError:
                yield None
                continue
            if not count:
                raise EOFError
            left = left[count:]
        return buffer


class Outbox:
    """Messages that wait to be sent through a non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: deque[tuple[memoryview, int | None]] = deque()

    def put(self, content: Any, parts: Sequence[Any] = ()) -> None:
        self._waiting.extend((view, None) for view in _frame(content, parts))

    def put_descriptor(self, descriptor: int) -> None:
        """Queue a descriptor, which must stay open until it is sent."""
        self._waiting.append((memoryview(b"\0"), descriptor))

    def flush(self) -> bool:
        """Send as much as the socket takes; return True if nothing is left. Drops everything if the peer is gone."""
        waiting = self._waiting
        while waiting:
            view, descriptor = waiting[0]
            try:
                if descriptor is None:
                    count = self._connection.send(view)
                else:
                    count = socket.send_fds(self._connection, [view], [descriptor])
            except OSError as error:
                if error.errno in _WOULD_BLOCK:
                    return False
                waiting.clear()  # reading will show that the peer is gone
                break
            if count == view.nbytes:
                waiting.popleft()
            else:
                waiting[0] = view[count:], None
        return True


Extent = tuple[int, int]
"""Offset and size in bytes of a buffer in a slot."""

_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
_MAP_FLAGS = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class Slot:
    """Shared memory as seen by one process, which owns the unnamed file `descriptor`; None creates one."""

    DESCRIPTORS = 2  # one of them for the mapping

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _unnamed_file() if descriptor is None else descriptor
        self._end = weakref.finalize(self, os.close, self.descriptor)  # also if whoever makes it fails
        self._end.atexit = False
        self._view: BytesArray = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        """Bytes that the memory has now."""
        return os.fstat(self.descriptor).st_size

    def reserve(self, size: int) -> None:
        present = self.size
        if present >= size:
            return
        # Round up by at most an eighth, so that slowly growing batches do not need a new mapping each time.
        step = max(_PAGE, 1 << max(0, size.bit_length() - 4))
        wanted = -(-size // step) * step
        # The system overcommits memory, and kills processes that use it.
        if wanted - present > (available := available_bytes()):
            raise OSError(errno.ENOMEM, f"{wanted:,} bytes are needed, {available:,} are available")
        reserve(self.descriptor, wanted)  # writing to a hole in the file would raise SIGBUS

    def view(self, size: int) -> BytesArray:
        """Return (n,) uint8, n >= `size`: the first bytes of the slot, which must be allocated."""
        if self._view.nbytes < size:
            mapped = mmap.mmap(self.descriptor, self.size, flags=_MAP_FLAGS)
            self._view = np.frombuffer(mapped, np.uint8)
        return self._view

    def write(self, parts: Sequence[memoryview]) -> list[Extent]:
        """Write buffers one after another; OSError, with nothing written, for lack of memory."""
        extents: list[Extent] = []
        size = 0
        for part in parts:
            extents.append((size, part.nbytes))
            size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.reserve(size)
        target = self.view(size)
        for part, (offset, length) in zip(parts, extents, strict=True):
            target[offset : offset + length] = np.frombuffer(part, np.uint8)
        return extents

    def close(self) -> None:
        """Close the descriptor. The mapping lives until nothing refers to it."""
        self._end()
        self.descriptor: int = -1
        self._view = np.empty(0, np.uint8)


def _unnamed_file() -> int:
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create("dataload")  # not limited by the size of /dev/shm
    with tempfile.TemporaryFile(prefix="dataload-") as stream:
        return os.dup(stream.fileno())


class Ring:
    """The slots of one executor, used in turn."""

    def __init__(self, slots: int) -> None:
        self.slots: dict[int, Slot] = {number: Slot() for number in range(slots)}
        self._free: deque[int] = deque(self.slots)
        self._most = slots
        self._leases = BufferLeases()

    def take(self) -> int | None:
        while self._free:
            number = self._free.popleft()
            if len(self.slots) <= self._most:
                return number
            slot = self.slots.pop(number)
            with suppress(OSError):
                os.ftruncate(slot.descriptor, 0)  # workers have it open too
            slot.close()
        return None

    def give_back(self, number: int) -> None:
        """Mark a slot as free; called by the thread that drops the last reference."""
        self._free.append(number)

    def lend(self, number: int, extents: Sequence[Extent]) -> list[Any]:
        """Return the buffers written to a slot, which becomes free when the last of them is dropped."""
        offset, length = extents[-1]
        try:
            block = self.slots[number].view(offset + length)
        except OSError:  # out of descriptors for the mapping
            self.give_back(number)
            raise
        lent = self._leases.lend(block, lambda: self.give_back(number))
        return [lent[start : start + size] for start, size in extents]

    def missing(self, size: int) -> int:
        return sum(max(0, size - slot.size) for slot in self.slots.values())

    def retire(self, most: int) -> bool:
        """Use at most `most` slots from now on (lent ones are removed later); return True if there were more."""
        before, self._most = self._most, min(self._most, most)
        return self._most < before

    def close(self) -> None:
        """Close all descriptors; batches that are still held stay valid."""
        self._free.clear()
        for slot in self.slots.values():
            slot.close()


Read: TypeAlias = Callable[[Int64Array, BytesArray], None]
"""Writes what belongs to indices, (rows,) int64, to the rows of an array."""


_LONGEST_FOLDER = 80  # bytes; of the path of a socket, the system takes about 104


class RowServer:
    """Answers `RowClient`s of worker processes from threads of this process, until it is closed or dropped.

    Attributes:
        address: For `RowClient`; the folder is this user's alone.
    """

    def __init__(self, read: "weakref.WeakMethod[Read]", shape: tuple[int, ...]) -> None:
        is_long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
        folder = tempfile.mkdtemp(prefix="dataload-", dir="/tmp" if is_long else None)
        self.address: str = os.path.join(folder, "rows")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(socket.SOMAXCONN)
        self._end = weakref.finalize(self, _end, listener, folder, os.getpid())
        threading.Thread(target=_accept, args=(listener, read, shape), name="dataload-rows", daemon=True).start()

    def close(self) -> None:
        """Accept no more clients; those that are connected stay until they end."""
        self._end()


def _end(listener: socket.socket, folder: str, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`, unlike `close`
        rmtree(folder, ignore_errors=True)
    listener.close()


def _accept(listener: socket.socket, read: "weakref.WeakMethod[Read]", shape: tuple[int, ...]) -> None:
    with suppress(OSError):  # it was closed
        while True:
            connection, _ = listener.accept()
            try:
                threading.Thread(target=_serve, args=(connection, read, shape), daemon=True).start()
            except RuntimeError:  # the machine starts no more threads, so this client reads by itself
                connection.close()


def _serve(connection: socket.socket, read: "weakref.WeakMethod[Read]", shape: tuple[int, ...]) -> None:
    with connection, suppress(EOFError, OSError):
        inbox, slot = Inbox(connection), Slot(receive_descriptor(connection))
        try:
            while (message := inbox.take()) is not None:
                indices, size = np.frombuffer(message[0], np.int64), len(message[0]) // 8 * int(np.prod(shape))
                is_read, reading = False, read()
                with suppress(Exception):  # raised again in the worker, which then reads by itself
                    if reading is not None:
                        reading(indices, slot.view(size)[:size].reshape(-1, *shape))
                        is_read = True
                del reading
                send(connection, is_read)
        finally:
            slot.close()


class RowClient:
    """Reads rows that the process at an address makes."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._slot = Slot()
        self._connection: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._connection.connect(address)
            socket.send_fds(self._connection, [b"\0"], [self._slot.descriptor])
            self._inbox = Inbox(self._connection)
        except OSError:
            self.close()

    def read(self, indices: Int64Array, out: BytesArray) -> bool:
        """Write rows to `out`; return whether that succeeded. Otherwise this process has to make them."""
        with self._lock, suppress(OSError, EOFError):
            if self._connection is not None:
                self._slot.reserve(out.nbytes)
                send(self._connection, indices.tobytes())
                message = self._inbox.take()
                if message is not None and message[0]:
                    out[...] = self._slot.view(out.nbytes)[: out.nbytes].reshape(out.shape)
                    return True
        return False

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._slot.close()
