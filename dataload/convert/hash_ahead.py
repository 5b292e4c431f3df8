"""The hash of a file that is still being written."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from threading import Event, Thread
from typing import Self

from dataload._util.system import open_file, read_into_at

UNSETTLED_BYTES = 1 << 17
"""The end of a file that its writer may still change: more than a block of ArrayRecord."""

_CHUNK_BYTES = 1 << 20
_SECONDS = 0.005  # between checks of the file's size


class HashAhead:
    """Computes the SHA-256 of a file in a thread that follows its writer, `UNSETTLED_BYTES` behind the end."""

    def __init__(self, path: str) -> None:
        self._file = open_file(path)  # stays open if the file is renamed
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._ended, self._dropped = Event(), Event()
        self._thread = Thread(target=self._follow, name="dataload-hash", daemon=True)
        self._thread.start()

    def finish(self) -> tuple[int, str] | None:
        """Return size and hash of the complete file; None if it could not be read."""
        self._ended.set()
        self._thread.join()
        return None if self._dropped.is_set() else (self._hashed, self._digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._dropped.set()
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            os.close(self._file)

    def _follow(self) -> None:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        try:
            while not self._dropped.is_set():
                ended = self._ended.is_set()
                left = os.fstat(self._file).st_size - self._hashed - (0 if ended else UNSETTLED_BYTES)
                if left >= len(buffer) or (ended and left > 0):
                    count = read_into_at(self._file, buffer[:left], self._hashed)
                    self._digest.update(buffer[:count])
                    self._hashed += count
                elif ended:
                    return
                else:
                    self._ended.wait(_SECONDS)
        except OSError:
            self._dropped.set()
