"""Messages between a worker process and its parent, over a socket.

The worker waits until a message has come or gone; its parent never does, else each could wait for the other to take
what it sends, and a worker that is stopped in the middle of a message would stop its parent too.
"""

from __future__ import annotations

import errno
import pickle
import socket
import struct
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeAlias

__all__ = ["Inbox", "Message", "Outbox", "receive_descriptor", "send"]

Message: TypeAlias = tuple[Any, list[bytearray]]
"""What is said, and the buffers that go with it."""

_LENGTH = struct.Struct("<Q")
_WOULD_WAIT = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS)  # the last: too many descriptors are on their way


def _frame(content: Any, parts: Sequence[Any]) -> list[memoryview]:
    views = [memoryview(part) for part in parts]
    head = pickle.dumps((content, [view.nbytes for view in views]), protocol=5)
    return [memoryview(_LENGTH.pack(len(head)) + head), *(view for view in views if view.nbytes)]


def send(connection: socket.socket, content: Any, parts: Sequence[Any] = ()) -> None:
    """Send a message, and wait until it is gone.

    Args:
        connection: A socket that waits.
        content: Anything that can be pickled.
        parts: Buffers of bytes, which are not copied.
    """
    for view in _frame(content, parts):
        connection.sendall(view)


def receive_descriptor(connection: socket.socket) -> int:
    """Take a descriptor that `Outbox.put_descriptor` has sent, at the place where it comes."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not data:
        raise EOFError
    return descriptors[0]


class Inbox:
    """Puts messages together from however little comes at a time.

    Args:
        connection: A socket, of either sort.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = self._read()

    def take(self) -> Message | None:
        """The next message; None if the socket does not wait and not all of it is there.

        Raises:
            EOFError: The other side is gone.
            OSError: It is gone with what was sent to it.
        """
        return next(self._messages)

    def _read(self) -> Generator[Message | None]:
        while True:
            (length,) = _LENGTH.unpack((yield from self._exactly(_LENGTH.size)))
            content, sizes = pickle.loads((yield from self._exactly(length)))  # noqa: S301 - between ourselves
            parts: list[bytearray] = []
            for size in sizes:
                parts.append((yield from self._exactly(size)))  # noqa: PERF401 - no comprehension can yield
            message = content, parts
            del content, parts  # nothing of a batch stays here when its consumer lets it go
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
    """Messages that wait to be sent.

    Args:
        connection: A socket that does not wait.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: deque[tuple[memoryview, int | None]] = deque()

    def put(self, content: Any, parts: Sequence[Any] = ()) -> None:
        """Add a message; see `send`."""
        self._extend((view, None) for view in _frame(content, parts))

    def put_descriptor(self, descriptor: int) -> None:
        """Add a descriptor, which must stay open until it is sent."""
        self._extend([(memoryview(b"\0"), descriptor)])

    def _extend(self, items: Iterable[tuple[memoryview, int | None]]) -> None:
        self._waiting.extend(items)

    def flush(self) -> bool:
        """Send what can be sent; tells whether that was all. What nobody will take is dropped."""
        waiting = self._waiting
        while waiting:
            view, descriptor = waiting[0]
            try:
                if descriptor is None:
                    count = self._connection.send(view)
                else:
                    count = socket.send_fds(self._connection, [view], [descriptor])
            except OSError as error:
                if error.errno in _WOULD_WAIT:
                    return False
                waiting.clear()  # the other side is gone, which shows when it is read from
                break
            if count == view.nbytes:
                waiting.popleft()
            else:
                waiting[0] = view[count:], None
        return True
