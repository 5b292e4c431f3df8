"""Messages between a worker process and its parent, over a socket.

The worker's sends and receives block; the parent's never do. Otherwise each could wait for the other to read, and a
worker that is stopped in the middle of a message would stop its parent too.
"""

import errno
import pickle
import socket
import struct
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = tuple[Any, list[bytearray]]
"""The unpickled content and the buffers sent with it."""

_LENGTH = struct.Struct("<Q")
_WOULD_BLOCK = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS)  # the last: too many descriptors in transit


def _frame(content: Any, parts: Sequence[Any]) -> list[memoryview]:
    views = [memoryview(part) for part in parts]
    head = pickle.dumps((content, [view.nbytes for view in views]), protocol=5)
    return [memoryview(_LENGTH.pack(len(head)) + head), *(view for view in views if view.nbytes)]


def send(connection: socket.socket, content: Any, parts: Sequence[Any] = ()) -> None:
    """Send a message, and wait until all of it is sent. `parts` are buffers of bytes, which are not copied."""
    for view in _frame(content, parts):
        connection.sendall(view)


def receive_descriptor(connection: socket.socket) -> int:
    """Receive a descriptor sent by `Outbox.put_descriptor`; call it where the descriptor is next in the stream."""
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
        """Return the next message, or None if the socket does not block and the message is incomplete.

        Raises `EOFError` or `OSError` if the peer closed the connection or is gone.
        """
        return next(self._messages)

    def _read(self) -> Generator[Message | None]:
        while True:
            (length,) = _LENGTH.unpack((yield from self._exactly(_LENGTH.size)))
            content, sizes = pickle.loads((yield from self._exactly(length)))  # noqa: S301 - from our own process
            parts: list[bytearray] = []
            for size in sizes:
                parts.append((yield from self._exactly(size)))  # noqa: PERF401 - a comprehension cannot yield
            message = content, parts
            del content, parts  # keep nothing of a batch that the consumer drops
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
        """Queue a message; see `send`."""
        self._waiting.extend((view, None) for view in _frame(content, parts))

    def put_descriptor(self, descriptor: int) -> None:
        """Queue a descriptor, which must stay open until it is sent."""
        self._waiting.append((memoryview(b"\0"), descriptor))

    def flush(self) -> bool:
        """Send as much as the socket takes. Return True if nothing is left; drop everything if the peer is gone."""
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
