"""Files and directories that appear at their destination complete or not at all."""

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Generator
from typing import IO

from dataload.errors import ConfigError, SourceError, SourceNotFoundError

_BUFFER_BYTES = 1 << 20


class Part:
    """A file or directory being written, under a hidden and unpredictable name in the directory of its destination.

    `publish` makes it durable and renames it to its destination; `abort` deletes it. A killed process leaves a hidden
    file that no source opens, and does not affect what was at the destination.

    Args:
        path: Destination.
        overwrite: Replace an existing destination, which is otherwise an error.

    Attributes:
        path: Destination.
        temporary: Path of the part until it is published. It does not exist at first: `create` creates a file, and
            libraries that create files or directories themselves are given this path.

    Raises:
        ConfigError: The destination exists and `overwrite` is false.
        SourceNotFoundError: The directory of the destination does not exist.
        SourceError: The directory cannot be written to.
    """

    def __init__(self, path: str, *, overwrite: bool = False) -> None:
        self.path = os.path.normpath(path)
        self._overwrite = overwrite
        self._check_destination()
        directory, name = os.path.split(self.path)
        self.directory = directory or "."
        if not os.path.isdir(self.directory):
            raise SourceNotFoundError(f"there is no directory {self.directory} to write {name} to", path=self.path)
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise SourceError(f"the directory {self.directory} cannot be written to", path=self.path)
        self.temporary = os.path.join(self.directory, f".{name}.{uuid.uuid4().hex[:12]}.tmp")

    def _check_destination(self) -> None:
        if os.path.exists(self.path) and not self._overwrite:
            raise ConfigError(
                f"{self.path} exists: choose another name, or pass overwrite=True to replace it",
                key="path",
                value=self.path,
            )

    def create(self) -> IO[bytes]:
        """Create the temporary as a file and return a buffered stream to write it."""
        return open(self.temporary, "xb", buffering=_BUFFER_BYTES)

    def spool(self, memory_bytes: int) -> IO[bytes]:
        """Return a stream that is in memory up to `memory_bytes`, then in an unnamed file beside the destination."""
        return tempfile.SpooledTemporaryFile(memory_bytes, dir=self.directory)  # pyright: ignore[reportReturnType]

    def publish(self) -> None:
        """Flush the temporary to the disk and rename it to the destination.

        Raises:
            ConfigError: The destination has come into existence since the part was created.
            OSError: The operating system refused.
        """
        _sync(self.temporary)
        self._check_destination()
        _replace(self.temporary, self.path)
        _sync(self.directory)  # otherwise a power failure may lose the new name

    def abort(self) -> None:
        """Delete the temporary, without touching the destination."""
        remove(self.temporary)


@contextlib.contextmanager
def write_errors(path: str) -> Generator[None]:
    """Translate the operating system's errors, such as a full disk, to `SourceError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"cannot write {path}: {error.strerror or error}", path=path) from error


def remove(path: str) -> None:
    """Delete a file or directory, if it exists."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _replace(temporary: str, destination: str) -> None:
    if os.path.isdir(temporary) and os.path.isdir(destination):
        # A directory cannot be renamed over another, so the old one is moved aside, and back if the rename fails.
        aside = f"{temporary}.old"
        os.rename(destination, aside)
        try:
            os.rename(temporary, destination)
        except BaseException:
            os.rename(aside, destination)
            raise
        shutil.rmtree(aside)
    else:
        os.replace(temporary, destination)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
