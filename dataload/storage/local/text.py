"""Small text files, read and appended to as a whole."""

from __future__ import annotations

import os


def append_text(path: str, text: str) -> None:
    """Append `text` to a file as UTF-8, in one write, so that several processes can share the file.

    Creates the file if there is none.

    Raises:
        OSError: The file cannot be written, or only a part of `text` was.
    """
    data = text.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if written < len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written")


def read_text(path: str) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    with open(path, encoding="utf-8") as stream:
        return stream.read()
