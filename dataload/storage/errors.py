"""Errors about files, translated to dataload's exceptions."""

import difflib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any

from dataload._util.failures import MACHINE_ERRNOS, STORE_ERRNOS
from dataload._util.system import open_files_limit
from dataload.errors import (
    ChangedFileError,
    CorruptFileError,
    MachineError,
    SourceError,
    SourceNotFoundError,
    StoreError,
)

_MOST_NAMES = 1000  # to compare with a name that does not exist


def changed_error(path: str, was: int, now: int, *, index: int | None = None) -> ChangedFileError:
    """Return the error for a file that shrank from `was` to `now` bytes since it was opened."""
    return ChangedFileError(
        f"the file had {was} bytes when it was opened and has {now} now: it was changed while in use; open it again, "
        "and replace files by renaming new ones over them",
        path=path,
        offset=now,
        index=index,
    )


def outside_error(path: str, size: int, error: object) -> CorruptFileError:
    return CorruptFileError(f"the table of records points outside the file: {error}", path=path, offset=size)


def rewritten_error(path: str) -> ChangedFileError:
    """Return the error for a file that has been replaced since its table was read."""
    return ChangedFileError("the file has been rewritten since it was opened: open the data set again", path=path)


def overwritten_error(path: str, was: int, now: int) -> ChangedFileError:
    """Return the error for a file overwritten in place; `was` and `now` are its change times, ns since 1970."""
    before, after = (time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at // 10**9)) for at in (was, now))
    return ChangedFileError(
        f"the file was overwritten while it was in use: it was last changed at {before} when it was opened, and "
        f"changed again at {after}. Earlier reads returned its old content; later ones may mix old and new. Open the "
        "data set again, and replace files by renaming new ones over them",
        path=path,
    )


def disk_error(path: str, offset: int) -> MachineError:
    return MachineError(
        f"the disk failed to read {path} at byte {offset}: the file has its full size and was not changed. See the "
        "kernel's log (dmesg) and the disk's health (smartctl -a), or the server's if it is a network file system, and "
        "read another copy of the data",
        path=path,
    )


def memory_error(source: Any, path: str, rows: int) -> MachineError:
    """Return the error for a read that needs too much memory; `path` is a file of the source."""
    return MachineError(
        f"{source!r}: reading {rows} records at once needs more memory than this process may have: read fewer at once "
        "(batch_size), or lower max_record_bytes, so that larger ones are refused",
        path=path,
    )


class file_errors:  # a context manager; a class enters in a third of a generator's time
    """Translate the operating system's errors about `path`, and a lack of memory."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        path = self._path
        if isinstance(error, FileNotFoundError) and not isinstance(error, SourceNotFoundError):
            raise SourceNotFoundError(f"there is no {path}: {describe_missing(path)}", path=path) from error
        if isinstance(error, OSError) and not isinstance(error, SourceError):
            raise system_error("read", path, error) from error
        if isinstance(error, MemoryError):
            message = f"cannot read {path}: this needs more memory than the process may use; the file may be damaged"
            raise MachineError(message, path=path) from error


@contextmanager
def system_errors(verb: str, path: str) -> Generator[None]:
    """Translate the operating system's errors while `verb` is done to `path`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise system_error(verb, path, error) from error


cache_errors: Callable[[str], AbstractContextManager[None]] = partial(system_errors, "use the cache")
write_errors: Callable[[str], AbstractContextManager[None]] = partial(system_errors, "write")


def system_error(verb: str, path: str, error: OSError) -> SourceError:
    """Return the error for an operating system's error about `path`, with a remedy."""
    number = error.errno or 0
    kind = MachineError if number in MACHINE_ERRNOS else StoreError
    return kind(f"cannot {verb} {path}: {error.strerror or error}{_remedy(number, path)}", path=path)


def _remedy(number: int, path: str) -> str:
    if number == errno.EMFILE:
        return f"; this process may open {open_files_limit()} files: raise the limit (ulimit -n), or use fewer workers"
    if number in (errno.ENOSPC, errno.EDQUOT):
        if "://" in path:
            return "; free space on the disk of the cache, or set remote.cache to another disk"
        return f"; {free_space(path)}: delete something, or choose another disk"
    if number == errno.ENOMEM:
        return "; use fewer workers, or smaller batches"
    if number in STORE_ERRNOS:
        return "; the disk or the file server is failing: see the system's log, and continue from the last state"
    return ""


def free_space(path: str) -> str:
    folder = _existing(path)
    return f"{shutil.disk_usage(folder).free:,} bytes are free in {folder}"


def _existing(path: str) -> str:
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _letters(name: str) -> list[str]:
    return re.split(r"\d+", name)


def describe_missing(path: str) -> str:
    """Describe the deepest existing directory of `path`, and the shards or a similar name in it."""
    parent = _existing(path)
    wanted = os.path.relpath(os.path.abspath(path), parent).split(os.sep)[0]
    stem, suffix = os.path.splitext(wanted)
    shard = re.compile(rf"{re.escape(stem)}-\d+(-of-\d+)?{re.escape(suffix)}")
    with suppress(OSError), os.scandir(parent) as entries:
        listed = [entry.name for entry in islice(entries, _MOST_NAMES)]
        if any(map(shard.fullmatch, listed)):
            pattern = os.path.join(parent, f"{stem}-*{suffix}")
            return f"the directory {parent} has shards that begin with this name: pass {pattern!r}, or the directory"
        names = [name for name in listed if _letters(name) != _letters(wanted)]  # another number is another shard
        if similar := difflib.get_close_matches(wanted, names, n=1, cutoff=0.75):
            return f"the directory {parent} exists; did you mean {similar[0]!r} in it?"
    return f"the directory {parent} exists, but has no entry of that name"
