"""Files that stay locked while their process lives, and other uses of such locks."""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress

from dataload.storage.local.atomic import write_errors


class LivingFile:
    """A file locked while this process lives, and deleted with this object, or by others after a kill."""

    def __init__(self, directory: str, prefix: str, content: bytes) -> None:
        living(directory)
        while True:
            with write_errors(directory):
                descriptor, path = tempfile.mkstemp(dir=directory, prefix=prefix)
            with ExitStack() as stack:
                stack.callback(os.close, descriptor)
                with write_errors(path):
                    os.write(descriptor, content)
                # Before it is locked, another process may take its owner for dead, and delete it.
                if lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB) and is_at(descriptor, path):
                    stack.pop_all()
                    break
        self.path: str = path
        self.descriptor: int = descriptor
        weakref.finalize(self, _delete, path, os.getpid())
        weakref.finalize(self, os.close, descriptor).atexit = False  # threads use it to the end of the process


def living(directory: str) -> list[str]:
    """Return the paths of the living files in a directory, and delete files of dead processes."""
    found: list[str] = []
    with suppress(FileNotFoundError), os.scandir(directory) as files:
        for file in files:
            with opened(file.path) as descriptor, suppress(FileNotFoundError):
                if descriptor is not None and lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    os.unlink(file.path)
                elif descriptor is not None:
                    found.append(file.path)
    return found


def _delete(path: str, pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError):
            os.unlink(path)


@contextmanager
def opened(path: str) -> Generator[int | None]:
    """Open a file in order to lock it; None if it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def lock(descriptor: int, kind: int) -> bool:
    """Lock a file; return False if `kind` does not wait and the lock is taken."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, kind)
        return True
    return False


def is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
