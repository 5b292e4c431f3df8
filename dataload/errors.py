"""The exceptions that dataload raises.

```
DataloadError
├── ConfigError (ValueError)                 a setting is wrong
├── SourceError                              a data source cannot be read or written
│   ├── SourceNotFoundError (FileNotFoundError)  there is nothing at that path
│   ├── UnsupportedFormatError (ValueError)      the content is in no known format
│   ├── CorruptFileError (ValueError)            a file is damaged or contradicts its format
│   ├── ClosedSourceError (ValueError)           a source was used after it was closed
│   ├── StoreError                               where the data lie: missing, unreachable, forbidden
│   │   └── ChangedFileError (CorruptFileError)      a file was changed while it was in use
│   └── MachineError                             memory, disk space or descriptors run out; a disk fails
├── StateMismatchError (ValueError)          a saved state belongs to other data or another order
├── WorkerError (RuntimeError)               loading a step failed
└── MissingDependencyError (ImportError)     an optional package is not installed
```

The built-in class in brackets is a second base, so ``except ValueError`` also catches a `ConfigError`. An index that
is out of range raises the built-in `IndexError`, and an argument of the wrong type the built-in `TypeError`.

Every exception here can be pickled, with its attributes and its `__cause__`. An attribute that cannot be pickled is
replaced by its repr, and a cause that cannot be pickled by None.
"""

import difflib
import pickle
import re
import traceback
from collections.abc import Iterable
from typing import Any, cast

__all__ = [
    "ChangedFileError",
    "ClosedSourceError",
    "ConfigError",
    "CorruptFileError",
    "DataloadError",
    "MachineError",
    "MissingDependencyError",
    "SourceError",
    "SourceNotFoundError",
    "StateMismatchError",
    "StoreError",
    "UnsupportedFormatError",
    "WorkerError",
    "closest",
    "message_of",
    "printable",
    "redacted",
    "text_of",
    "traceback_of",
]

_MESSAGE_CHARACTERS = 2_000
_TRACEBACK_CHARACTERS = 20_000
_MOST_NAMES = 64
# A password may have a slash or an at sign, and pathlib leaves one slash of a URL.
_USER = re.compile(r"(\w\w:/{1,2})(?:[^\s/@'\"]*:(?!\d*/)[^\s'\"]*|[^\s/'\"]*)@")
# A question mark is also a wildcard, except on web servers.
_QUERY = re.compile(r"(\w\w:/{1,2}[^\s?#'\"]*)(?:\?[^\s'\"]*=[^\s'\"]*|#[^\s'\"]*)")
_WEB_QUERY = re.compile(r"(https?:/{1,2}[^\s?#'\"]*)\?[^\s'\"]+", re.IGNORECASE)


class DataloadError(Exception):
    """Base class of every exception that dataload raises. Messages and attributes are `redacted`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*map(redacted, args), **named)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls cls(*args), which fails for constructors with keyword-only arguments.
        attributes = {name: _or_repr(value) for name, value in self._attributes().items()}
        return _make, (type(self), self.args), (attributes, _pickled(self.__cause__))

    def __setstate__(self, state: Any) -> None:
        attributes, cause = state
        for name, value in attributes.items():
            setattr(self, name, value)
        self.__cause__: BaseException | None = None if cause is None else _unpickled(cause)

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes to pickle in addition to `args`."""
        return self.__dict__


def _make(cls: type[DataloadError], args: tuple[Any, ...]) -> DataloadError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


def _pickled(value: Any) -> bytes | None:
    """Pickle `value` separately, so that a failure does not affect the rest. Return None if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def _unpickled(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data)  # noqa: S301 - from `_pickled`, and as trusted as the pickle around it
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


def _or_repr(value: Any) -> Any:
    """Return `value` if it can be pickled and unpickled, else its repr."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - our own value
    except Exception:
        return repr(value)
    return value


class ConfigError(DataloadError, ValueError):
    """A setting is wrong.

    Attributes:
        key: Name of the setting as the user writes it, such as ``"loader.batch_size"``; None if it has no name.
        value: The value that was rejected.
    """

    def __init__(self, message: str, *, key: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.key = key
        self.value: Any = redacted(value)


class SourceError(DataloadError):
    """A data source cannot be read or written.

    Attributes:
        path: The file or directory; None if there is none.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path: str | None = redacted(path)


class SourceNotFoundError(SourceError, FileNotFoundError):
    """A path does not exist, or a pattern matches nothing."""


class UnsupportedFormatError(SourceError, ValueError):
    """The content is in none of the expected formats. The message says what was found at byte 0."""


class CorruptFileError(SourceError, ValueError):
    """A file is damaged or contradicts its format.

    Attributes:
        path: The file; None if the bytes did not come from a file.
        offset: Byte offset of the damage; None if it is unknown.
        index: Number of the damaged record within the file; None if the damage is not limited to one record.
    """

    def __init__(
        self, message: str, *, path: str | None = None, offset: int | None = None, index: int | None = None
    ) -> None:
        found = {"": path, "byte ": offset, "record ": index}
        location = ", ".join(f"{label}{value}" for label, value in found.items() if value is not None)
        super().__init__(f"{location}: {message}" if location else message, path=path)
        self.offset = offset
        self.index = index


class ClosedSourceError(SourceError, ValueError):
    """A source was used after it was closed."""


class StoreError(SourceError):
    """The store, an object store or a file system, refuses a request or does not answer it in time.

    No record is at fault, so none is skipped.
    """


class ChangedFileError(CorruptFileError, StoreError):
    """A file or object was changed, replaced or cut while it was in use. No record is at fault, so none is skipped."""


class MachineError(SourceError):
    """The machine runs out of memory, disk space or descriptors, or its disk fails.

    No record is at fault, so none is skipped.
    """


class StateMismatchError(DataloadError, ValueError):
    """A saved state belongs to other data or another order.

    Attributes:
        differences: One line for each field that differs.
    """

    def __init__(self, message: str, *, differences: Iterable[str] = ()) -> None:
        self.differences: tuple[str, ...] = tuple(differences)
        super().__init__("\n  ".join((message, *self.differences)))


class WorkerError(DataloadError, RuntimeError):
    """Loading a step failed. The original exception is the `__cause__`.

    Attributes:
        step: Number of the step within the epoch.
        epoch: Number of the epoch.
        indices: Indices of the step's records, in row order.
        worker: Name of the thread or process, or "main" for the consumer's own thread.
        traceback_text: Traceback of the original exception, as text. Pickling drops the traceback of the `__cause__`,
            so an error from another process carries this text as a note.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int = -1,
        epoch: int = -1,
        indices: tuple[int, ...] = (),
        worker: str = "main",
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.step = step
        self.epoch = epoch
        self.indices = indices
        self.worker = worker
        self.traceback_text = traceback_text

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        note = f"The original traceback, in {self.worker}:\n{self.traceback_text}"
        if self.traceback_text and note not in getattr(self, "__notes__", ()):
            self.add_note(note)


class MissingDependencyError(DataloadError, ImportError):
    """An optional package is not installed. The message says which command installs it.

    Attributes:
        name: Name of the package.
    """

    def _attributes(self) -> dict[str, Any]:
        # ImportError keeps `name` outside __dict__.
        return {**self.__dict__, "name": self.name}


def closest(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, then the known names.

    Examples:
        >>> closest("featurs", ["features", "label"])
        "did you mean 'features'? Choose from features, label"
    """
    names = sorted(map(str, known))
    matches = difflib.get_close_matches(str(name), names, n=1, cutoff=0.65)
    listed = ", ".join(names[:_MOST_NAMES]) + and_more(len(names), _MOST_NAMES)
    if matches:
        return f"did you mean {matches[0]!r}? Choose from {listed}"
    return f"choose from {listed}" if names else "there is none"


def and_more(count: int, named: int = 1) -> str:
    """Return `` (and N more)`` for a message that names only some of `count` things."""
    return f" (and {count - named} more)" if count > named else ""


def redacted(value: Any) -> Any:
    """Return text without what may be secret in its URLs: users, passwords, queries and fragments.

    Texts in a list or mapping are redacted, too; anything else stays.

    Examples:
        >>> redacted("there is no https://me:secret@host/x.tar?signature=secret")
        'there is no https://***@host/x.tar?***'
    """
    if isinstance(value, str):
        if ":/" in value:
            value = _QUERY.sub(r"\1?***", _WEB_QUERY.sub(r"\1?***", _USER.sub(r"\1***@", value)))
        return value
    if type(value) in (list, tuple):
        return type(value)(map(redacted, value))
    if type(value) is dict:
        return {key: redacted(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def printable(text: str, most: int | None = _MESSAGE_CHARACTERS, *, kept: str = "\n\t") -> str:
    r"""Return `text` in a form safe for any terminal or file: unprintable characters escaped, long text shortened.

    Args:
        text: Text that may contain control characters and lone surrogates.
        most: Approximate number of characters to keep, three quarters of them from the start and the rest from the
            end. None keeps all.
        kept: Unprintable characters to leave unescaped, by default line breaks and tabs.

    Examples:
        >>> print(printable("a\x1b[2J" + 100 * "b", most=8))
        a\x1b[2Jb ...(97 characters)... bb
    """
    if most is not None and len(text) > most + 30:  # the note takes 22 characters or more
        end = most // 4
        text = f"{text[: most - end]} ...({len(text) - most:,} characters)... {text[len(text) - end :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def text_of(error: BaseException) -> str:
    """Return the `printable` message of an exception, even if its ``__str__`` fails."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(no message: its __str__ raised {type(failure).__name__})"
    return printable(redacted(text))


def message_of(error: BaseException) -> str:
    """Return the class name and message of an exception; see `text_of`."""
    return f"{type(error).__name__}: {text_of(error)}"


def traceback_of(error: BaseException) -> str:
    """Return the `printable` traceback of an exception, even if it cannot be formatted."""
    try:
        lines = traceback.format_exception(error)
    except Exception as failure:
        lines = [f"(no traceback: formatting it raised {type(failure).__name__})\n", message_of(error)]
    return printable(redacted("".join(lines)), _TRACEBACK_CHARACTERS)
