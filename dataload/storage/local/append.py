"""A local file that one process appends lines to."""

import os
import time

from dataload.errors import SourceError
from dataload.storage.local.atomic import write_errors
from dataload.storage.local.record_files import open_regular

_SECONDS_BETWEEN_SYNCS = 1.0


class AppendedFile:
    """An existing file that is open for appending, until another process renames one to its place.

    Data reaches the disk once a second, and when the file is closed.
    """

    def __init__(self, path: str) -> None:
        self.path: str = path
        with write_errors(path):
            self._descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        self._synced = time.monotonic()

    def write(self, data: bytes) -> None:
        """Append `data` in one write; a SourceError if the file is not at its path any more."""
        with write_errors(self.path):
            try:
                is_ours = os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
            except FileNotFoundError:
                is_ours = False
            if not is_ours:
                message = f"another process has taken over {self.path}: wait until it has ended"
                raise SourceError(message, path=self.path)
            if (written := os.write(self._descriptor, data)) < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            if time.monotonic() - self._synced > _SECONDS_BETWEEN_SYNCS:
                self._sync()

    def _sync(self) -> None:
        getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has only the latter
        self._synced = time.monotonic()

    def close(self) -> None:
        try:
            with write_errors(self.path):
                self._sync()
        finally:
            os.close(self._descriptor)
