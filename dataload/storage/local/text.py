"""Small text files."""

import contextlib
import fcntl
import os

from dataload.storage.local.regular import open_regular


def append_text(path: str, text: str) -> None:
    """Append lines as UTF-8 to a file, which is created if needed, in one write, so that processes can share the file.

    They begin on a fresh line even if an earlier one was written in part, on a full disk for example.
    """
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.lockf(descriptor, fcntl.LOCK_EX)  # a write under way in another process looks like a torn line
        size = os.fstat(descriptor).st_size
        is_torn = bool(text) and size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = ("\n" * is_torn + text).encode()
        written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if written < len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written")


def read_text(path: str, characters: int = -1) -> str:
    """Return the text of a UTF-8 file, or only so many characters of it."""
    with open(path, encoding="utf-8", opener=open_regular) as stream:
        return stream.read(characters)
