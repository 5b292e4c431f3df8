"""Decoding in child processes, for files of strangers: what crashes a child is an error of the file."""

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np

from dataload import errors
from dataload._util.arrays import pooled_empty
from dataload._util.system import die_first, read_into_at
from dataload.errors import CorruptFileError
from dataload.executors.transport import Slot
from dataload.sources.video import VideoOptions
from dataload.sources.video.decoder import AudioDecoder, AudioTable, Decoder, build_audio_table
from dataload.sources.video.table import VideoTable, build_table
from dataload.storage.backend import LeasedFile
from dataload.storage.kept import INVALID, CachedTable
from dataload.types import Array, BytesArray

_MOST_ANSWER = 1 << 26  # bytes; the table of 40 hours of video
_LOOK_SECONDS = 5.0  # after which a child looks whether its parent lives
_KINDS = ("ConfigError", "UnsupportedFormatError")


class _Child:
    """A process that decodes, one request after another. What comes from it is checked, and nothing is unpickled."""

    def __init__(self) -> None:
        self._slot = Slot()
        self._connection, theirs = Pipe()
        numbers = (theirs.fileno(), self._slot.descriptor)
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve{numbers}"
        with theirs:
            self._process = subprocess.Popen(  # in a session of its own: Ctrl-C is for the parent
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=numbers, start_new_session=True
            )
        self.end: Callable[[], object] = weakref.finalize(
            self, _end, self._process, self._connection, self._slot, os.getpid()
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, path: str, name: str, *args: Any) -> Any:
        """Return what the child answers. ChildProcessError if it crashes; its other errors are about `path`."""
        try:
            self._connection.send((name, args))
            answer = json.loads(self._connection.recv_bytes(_MOST_ANSWER))
            if "error" not in answer:
                return answer["value"]
            kind, text, offset, index = (answer[each] for each in ("kind", "error", "offset", "index"))
        except (OSError, EOFError, ValueError, LookupError, TypeError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self.end()
            code = self._process.returncode
            how = signal.Signals(-code).name if -code in signal.valid_signals() else f"exit code {code}"
            raise ChildProcessError(f"ended by {how}" + (" (out of memory?)" if how == "SIGKILL" else "")) from None
        except BaseException:  # the answer would be taken for the next one
            self.end()
            raise
        error: Exception = CorruptFileError("", path=path, offset=offset, index=index)
        if kind in _KINDS:
            error = getattr(errors, kind)("")
        error.args = (text,)
        raise error

    def copy_to(self, out: Array) -> None:
        """Write the array that the child has made to `out`."""
        left = out.reshape(-1).view(np.uint8).data
        while left.nbytes:  # the child might cut what is mapped
            count = read_into_at(self._slot.descriptor, left, out.nbytes - left.nbytes)
            if not count:
                raise ChildProcessError("sent less than it says")
            left = left[count:]


def _end(process: "subprocess.Popen[bytes]", connection: Any, slot: Slot, parent: int) -> None:
    connection.close()
    slot.close()
    if os.getpid() == parent:
        process.kill()
        process.wait()


class Children:
    """The child processes of one source in this process, each used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle = list[_Child]()
        self._closed = False

    def take(self) -> _Child:
        with self._lock:
            while self._idle:
                if (child := self._idle.pop()).is_alive():
                    return child
                child.end()
        return _Child()

    def give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed and child.is_alive():
                self._idle.append(child)
                return
        child.end()

    def build(self, kind: Any, path: str, *args: Any) -> Any:
        """Return the `VideoTable` or `AudioTable` of a file, built from these arguments."""
        child, table = self.take(), None
        try:
            answer = child.call(path, kind.__name__, path, *args)
            with suppress(*INVALID, AttributeError):
                arrays = {name: np.fromiter(values, np.int64) for name, values in answer["arrays"].items()}
                table = kind.unpack(CachedTable(arrays, answer["extras"]))
            if table is None:
                raise ChildProcessError("sent an invalid table")
        except ChildProcessError as error:
            child.end()
            raise CorruptFileError(f"the process that read the file {error}", path=path) from None
        finally:
            self.give_back(child)
        return table

    def close(self) -> None:
        with self._lock:
            self._closed = True
            children, self._idle = self._idle, []
        for child in children:
            child.end()


class _Isolated:
    """A decoder in a child, which is taken when it is needed, and another one after a crash."""

    def __init__(self, children: Children, lease: LeasedFile, kind: str, path: str, *args: Any) -> None:
        self._children, self._lease, self._path = children, lease, path
        self._opening = (kind, path, lease.path, *args)
        self._child: _Child | None = None
        self.next: int = -1
        self.decoded: int = 0

    def _call(self, seconds: float, name: str, *args: Any, out: Array | None = None) -> Any:
        """Ask for what is at a time of the file, and copy the array that the child makes to `out`."""
        try:
            if self._child is None or not self._child.is_alive():
                self.close()
                self._child = self._children.take()
                self._child.call(self._path, *self._opening)
            answer = self._child.call(self._path, name, *args)
            if out is not None:
                self._child.copy_to(out)
        except ChildProcessError as error:
            self.close()
            message = f"the process that decoded the file at {seconds:.3f} s {error}"
            raise CorruptFileError(message, path=self._path) from None
        return answer

    def close(self) -> None:
        child, self._child = self._child, None
        self.next = -1
        if child is not None:
            self._children.give_back(child)


class IsolatedDecoder(_Isolated):
    """A `Decoder` in a child."""

    def __init__(
        self, children: Children, path: str, lease: LeasedFile, table: VideoTable, options: VideoOptions
    ) -> None:
        # No credentials.
        plain = VideoOptions(size=options.size, frames=options.frames, max_record_bytes=options.max_record_bytes)
        super().__init__(children, lease, "video", path, table, plain)
        self._table = table

    def decode(self, first: int, last: int) -> Iterator[tuple[int, Any]]:
        """See `Decoder.decode`; a frame is represented by its number, and decoded when it is converted."""
        return zip(range(first, last), range(first, last), strict=True)

    def convert(self, frame: int, wanted: tuple[int, ...]) -> BytesArray:
        """See `Decoder.convert`."""
        out = pooled_empty(wanted, np.uint8)
        (seconds,) = self._table.seconds(np.array([frame])).tolist()
        following, decoded = self._call(seconds, "frame", frame, wanted, out=out)
        self.next: int = following
        self.decoded: int = self.decoded + decoded
        return out


class IsolatedAudioDecoder(_Isolated):
    """An `AudioDecoder` in a child."""

    def __init__(self, children: Children, path: str, lease: LeasedFile, table: AudioTable) -> None:
        super().__init__(children, lease, "audio", path, table)
        self._channels = table.channels

    def read(self, start: int, count: int, rate: int) -> Array:
        """See `AudioDecoder.read`."""
        out = np.empty((self._channels, count), np.float32)
        self._call(start / rate, "read", start, count, rate, out=out)
        return out


def serve(connection_number: int, slot_number: int) -> None:
    """Decode in this process, a child, until its parent closes the connection or ends."""
    connection, work, parent = Connection(connection_number), _Work(slot_number), os.getppid()
    die_first()  # and not the process that trains
    with suppress(EOFError, OSError):
        while True:
            while not connection.poll(_LOOK_SECONDS):
                if os.getppid() != parent:  # a fork of the parent may hold the connection open
                    return
            name, args = connection.recv()
            try:
                answer = {"value": work.answer(name, *args)}
            except Exception as error:
                places = {key: getattr(error, key, None) for key in ("offset", "index")}
                answer = {"error": str(error), "kind": type(error).__name__} | places
            connection.send_bytes(json.dumps(answer).encode())


class _Work:
    """The decoder of a child."""

    def __init__(self, slot: int) -> None:
        self._slot = Slot(slot)
        self._decoder: Any = None

    def answer(self, name: str, *args: Any) -> Any:
        if name in ("video", "audio"):
            path, file, *others = args
            if self._decoder is not None:
                self._decoder.close()
            lease: Any = SimpleNamespace(path=file)
            self._decoder = (Decoder if name == "video" else AudioDecoder)(path, lease, *others)
        elif name == "frame":
            number, shape = args
            size = int(np.prod(shape))
            self._slot.reserve(size)
            for _, frame in self._decoder.decode(number, number + 1):
                self._slot.view(size)[:size].reshape(shape)[...] = self._decoder.convert(frame, shape)
            decoded, self._decoder.decoded = self._decoder.decoded, 0
            return self._decoder.next, decoded
        elif name == "read":
            self._slot.write([np.ascontiguousarray(self._decoder.read(*args)).reshape(-1).view(np.uint8).data])
        else:
            table = (build_table if name == "VideoTable" else build_audio_table)(*args).pack()
            return {"arrays": {name: array.tolist() for name, array in table.arrays.items()}, "extras": table.extras}
        return None
