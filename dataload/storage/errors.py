"""Errors about files, translated to dataload's."""

import difflib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import islice

from dataload.errors import CorruptFileError, SourceError, SourceNotFoundError

_MOST_NAMES = 1000  # to compare with a name that does not exist


def changed_error(path: str, was: int, now: int, *, index: int | None = None) -> CorruptFileError:
    """Return the error for a file of `now` bytes that had more, `was`, when it was opened."""
    return CorruptFileError(
        f"the file had {was} bytes when it was opened and has {now} now: it was changed while in use; open it again, "
        "and replace files by renaming new ones over them",
        path=path,
        offset=now,
        index=index,
    )


def outside_error(path: str, size: int, error: object) -> CorruptFileError:
    """Return the error for a range that is not inside a file of `size` bytes."""
    return CorruptFileError(f"the table of records points outside the file: {error}", path=path, offset=size)


def rewritten_error(path: str) -> CorruptFileError:
    """Return the error for a file that is not the one whose table was read."""
    return CorruptFileError("the file has been rewritten since it was opened: open the data set again", path=path)


@contextmanager
def file_errors(path: str) -> Generator[None]:
    """Translate the operating system's errors about `path`, and a lack of memory."""
    try:
        yield
    except FileNotFoundError as error:
        if isinstance(error, SourceNotFoundError):
            raise
        raise SourceNotFoundError(f"there is no {path}: {describe_missing(path)}", path=path) from error
    except OSError as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"cannot read {path}: {error.strerror or error}", path=path) from error
    except MemoryError as error:
        message = f"cannot read {path}: this needs more memory than this process may have; the file may be damaged"
        raise SourceError(message, path=path) from error


def describe_missing(path: str) -> str:
    """Describe the deepest directory of `path` that exists, and what in it has a similar name."""
    parent = os.path.abspath(path)
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    wanted = os.path.relpath(os.path.abspath(path), parent).split(os.sep)[0]
    with suppress(OSError), os.scandir(parent) as entries:
        names = [entry.name for entry in islice(entries, _MOST_NAMES)]
        if similar := difflib.get_close_matches(wanted, names, n=1, cutoff=0.75):
            return f"the directory {parent} exists; did you mean {similar[0]!r} in it?"
    return f"the directory {parent} exists, nothing of that name is in it"
