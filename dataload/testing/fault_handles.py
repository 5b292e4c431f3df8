"""Sources that are wrong on purpose in how they handle files: offsets, descriptors, and the moment of opening."""

from __future__ import annotations

import io
import os
import threading
import time
from typing import Any, ClassVar

import numpy as np

from dataload._util.indexing import check_index
from dataload.errors import ClosedSourceError
from dataload.sources.files import ShardReader
from dataload.testing.lines import LineFile, LineSource, line_record

__all__ = [
    "LeaksDescriptors",
    "LeavesFileOpen",
    "OpensAtOnce",
    "OpensWithoutLock",
    "RemembersOffset",
    "SharesOneOffset",
]


class SharesOneOffset:
    """Seeks, then reads, on one handle that is opened on first use; reads go on from where the last one ended.

    Not built on `LineSource`, whose base class prevents this.

    Args:
        path: One file of lines.
    """

    def __init__(self, path: Any) -> None:
        self._path = os.fspath(path)
        self._stream: io.FileIO | None = None
        self._spans: list[tuple[int, int]] = []
        self._closed = False
        self._opening = threading.Lock()

    def _open(self) -> io.FileIO:
        with self._opening:
            if self._closed:
                raise ClosedSourceError("closed")
            if self._stream is None:
                with open(self._path, "rb") as stream:
                    lines = stream.read().split(b"\n")[:-1]
                ends = np.cumsum([len(line) + 1 for line in lines], dtype=np.int64).tolist()
                self._spans = [(e - len(s) - 1, len(s)) for e, s in zip(ends, lines, strict=True)]
                self._stream = io.FileIO(self._path)
            return self._stream

    def __len__(self) -> int:
        self._open()
        return len(self._spans)

    def __getitem__(self, index: Any) -> Any:
        stream = self._open()
        offset, size = self._spans[check_index(index, len(self))]
        self._go_to(stream, offset)
        return line_record(bytes.fromhex(stream.read(size).decode()))

    def _go_to(self, stream: io.FileIO, offset: int) -> None:
        stream.seek(offset)
        time.sleep(0)  # lets another thread in, as a slow disk would

    def close(self) -> None:
        """Close the handle."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.path.basename(self._path)!r})"


class RemembersOffset(SharesOneOffset):
    """Seeks only if it is not there already: it does not know that a forked child moved the offset."""

    _place = -1

    def __getitem__(self, index: Any) -> Any:
        stream = self._open()
        number = check_index(index, len(self))
        if self._place != number:
            stream.seek(self._spans[number][0])
        self._place = number + 1
        return line_record(bytes.fromhex(stream.read(self._spans[number][1] + 1).decode()))


class OpensAtOnce(LineSource):
    """Opens a handle when it is constructed, keeps it in its pickle by number, and reads by that number."""

    def __init__(self, paths: Any) -> None:
        super().__init__(paths)
        self._handle = os.open(self.paths[0], os.O_RDONLY) if os.path.exists(self.paths[0]) else -1

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        os.fstat(self._handle)
        return LineFile(path)

    def close(self) -> None:
        """Close the handle, of whichever process."""
        super().close()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class LeaksDescriptors(LineSource):
    """Opens a descriptor with every shard, and forgets it; `leaked` is for the test to clean up."""

    leaked: ClassVar[list[int]] = []

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        self.leaked.append(os.open(path, os.O_RDONLY))
        return LineFile(path)


class LeavesFileOpen(LineSource):
    """Leaves a file for the garbage collector to close."""

    def _open_shard(self, path: str) -> ShardReader[dict[str, Any]]:
        open(path, "rb").read(1)  # noqa: SIM115 - the fault
        return LineFile(path)


class OpensWithoutLock(LineSource):
    """Says that it is open before it is."""

    def __init__(self, paths: Any) -> None:
        super().__init__(paths)
        self._ready = False
        self._lines: list[bytes] = []

    def __getitem__(self, index: Any, /) -> Any:
        if not self._ready:
            self._ready = True
            with open(self.paths[0], "rb") as stream:
                lines = stream.read().split(b"\n")[:-1]
            for line in lines:
                time.sleep(0)
                self._lines.append(bytes.fromhex(line.decode()))
        return super().__getitem__(index) if isinstance(index, slice) else line_record(self._lines[index])
