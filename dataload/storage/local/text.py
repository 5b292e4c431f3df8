"""Small text files."""

import os


def append_text(path: str, text: str) -> None:
    """Append `text` as UTF-8 to a file, which is created if needed, in one write, so that processes can share the file.

    Raises:
        OSError: The file cannot be written, or `text` was only written in part.
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
        UnicodeDecodeError: The file is not UTF-8.
    """
    with open(path, encoding="utf-8") as stream:
        return stream.read()
