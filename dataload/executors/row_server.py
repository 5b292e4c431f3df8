"""Rows that one process makes and others read, through shared memory: its worker processes."""

import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from shutil import rmtree
from typing import TypeAlias

import numpy as np

from dataload.executors.transport import Inbox, Slot, receive_descriptor, send
from dataload.types import BytesArray, Int64Array

Read: TypeAlias = Callable[[Int64Array, BytesArray], None]
"""Writes what belongs to indices, (rows,) int64, to the rows of an array."""


class RowServer:
    """Answers `RowClient`s of worker processes from threads of this process, until it is closed or dropped.

    Attributes:
        address: For `RowClient`; the folder is this user's alone.
    """

    def __init__(self, read: "weakref.WeakMethod[Read]", shape: tuple[int, ...]) -> None:
        folder = tempfile.mkdtemp(prefix="dataload-")
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
            threading.Thread(target=_serve, args=(connection, read, shape), daemon=True).start()


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
