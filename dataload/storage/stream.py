"""An open file of storage as a file object of Python, for libraries that take one."""

import io
from typing import Any


class FileStream(io.RawIOBase):
    """A file object over an open file; see `ReadableFile`. It does not close the file."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = self._file.read_into(self._position, buffer) if len(buffer) else 0
        self._position += count
        return count

    def read(self, size: int = -1, /) -> bytes:
        """See `io.RawIOBase`; reads all that is asked for."""
        data = self._file.read(self._position, self._file.size - self._position if size < 0 else size)
        self._position += len(data)
        return data
