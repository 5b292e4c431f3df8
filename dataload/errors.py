"""Every error that dataload raises on purpose.

```
DataloadError
├── ConfigError (ValueError)
├── SourceError
│   ├── SourceNotFoundError (FileNotFoundError)
│   ├── UnsupportedFormatError (ValueError)
│   ├── CorruptFileError (ValueError)
│   └── ClosedSourceError (ValueError)
├── StateMismatchError (ValueError)
├── WorkerError (RuntimeError)
└── MissingDependencyError (ImportError)
```

An index out of range stays the built-in `IndexError`, a wrong type the built-in `TypeError`.
All of them pickle with their attributes and their `__cause__`, whatever their constructors take: an attribute that
cannot be pickled arrives as its repr, a cause that cannot as None.
"""

from __future__ import annotations

import difflib
import pickle
import traceback
from collections.abc import Iterable
from typing import Any

__all__ = [
    "ClosedSourceError",
    "ConfigError",
    "CorruptFileError",
    "DataloadError",
    "MissingDependencyError",
    "SourceError",
    "SourceNotFoundError",
    "StateMismatchError",
    "UnsupportedFormatError",
    "WorkerError",
    "closest",
    "message_of",
    "printable",
    "text_of",
    "traceback_of",
]

_MESSAGE_CHARACTERS = 2_000
_TRACEBACK_CHARACTERS = 20_000


class DataloadError(Exception):
    """Base of all errors below."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls cls(*args), which keyword-only constructors refuse.
        attributes = {name: _or_repr(value) for name, value in self._attributes().items()}
        return _make, (type(self), self.args), (attributes, _pickled(self.__cause__))

    def __setstate__(self, state: Any) -> None:
        attributes, cause = state
        for name, value in attributes.items():
            setattr(self, name, value)
        self.__cause__ = None if cause is None else _unpickled(cause)

    def _attributes(self) -> dict[str, Any]:
        """What is to be pickled beside `args`."""
        return self.__dict__


def _make(cls: type[DataloadError], args: tuple[Any, ...]) -> DataloadError:
    error = cls.__new__(cls, *args)
    error.args = args
    return error


def _pickled(value: Any) -> bytes | None:
    """A pickle within the pickle, so that a value which fails takes nothing else with it; None if it cannot be."""
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def _unpickled(data: bytes) -> BaseException | None:
    try:
        found = pickle.loads(data)  # noqa: S301 - made by `_pickled`, and as trusted as the pickle around it
    except Exception:
        return None
    return found if isinstance(found, BaseException) else None


def _or_repr(value: Any) -> Any:
    """`value` if it can be pickled and unpickled, else its repr."""
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - our own value
    except Exception:
        return repr(value)
    return value


class ConfigError(DataloadError, ValueError):
    """A setting is wrong.

    Attributes:
        key: Name of the setting, as the user writes it (``"loader.batch_size"``), if it has one.
        value: What was found there.
    """

    def __init__(self, message: str, *, key: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class SourceError(DataloadError):
    """Something is wrong with a data source.

    Attributes:
        path: The file or directory, where there is one.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class SourceNotFoundError(SourceError, FileNotFoundError):
    """There is nothing at that path, or nothing matches that pattern."""


class UnsupportedFormatError(SourceError, ValueError):
    """The content is in no format that was expected; the message says what was found at byte 0."""


class CorruptFileError(SourceError, ValueError):
    """A file contradicts its format.

    Attributes:
        path: The file.
        offset: Byte offset of what disagrees, where it is known.
        index: The record within the file, where only one is concerned.
    """

    def __init__(
        self, message: str, *, path: str | None = None, offset: int | None = None, index: int | None = None
    ) -> None:
        places = [
            f"{path}" if path is not None else "",
            f"byte {offset}" if offset is not None else "",
            f"record {index}" if index is not None else "",
        ]
        place = ", ".join(p for p in places if p)
        super().__init__(f"{place}: {message}" if place else message, path=path)
        self.offset = offset
        self.index = index


class ClosedSourceError(SourceError, ValueError):
    """A source was read after it was closed."""


class StateMismatchError(DataloadError, ValueError):
    """A saved state belongs to other data or another order.

    Attributes:
        differences: One line per field that differs.
    """

    def __init__(self, message: str, *, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n  ".join((message, *self.differences)))


class WorkerError(DataloadError, RuntimeError):
    """Loading a step failed; the original error is the `__cause__`, its traceback is in `traceback_text`.

    Attributes:
        step: Number of the step within the epoch.
        epoch: Number of the epoch.
        indices: Indices of the rows of that step, in order.
        worker: Name of the thread or process, or "main" for the consumer's own thread.
        traceback_text: The original traceback, which also survives pickling: an error that has come from another
            process shows it as a note, for its `__cause__` has no traceback any more.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        epoch: int,
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
    """An optional package is not installed; the message says which command installs it.

    Attributes:
        name: Name of the package.
    """

    def _attributes(self) -> dict[str, Any]:
        # ImportError keeps `name` outside of __dict__.
        return {**self.__dict__, "name": self.name}


def closest(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, and all of them.

    Example:
        >>> closest("featurs", ["features", "label"])
        "did you mean 'features'? Known: features, label"
    """
    names = sorted(known)
    matches = difflib.get_close_matches(str(name), names, n=1)
    listed = f"Known: {', '.join(names) or '(none)'}"
    return f"did you mean {matches[0]!r}? {listed}" if matches else listed


def printable(text: str, most: int | None = _MESSAGE_CHARACTERS, *, kept: str = "\n\t") -> str:
    r"""Text that any terminal and any file takes: what is not printable is escaped, and what is too long is cut.

    Args:
        text: May hold control characters and lone surrogates.
        most: Characters to keep, about: three quarters of them from the beginning, the others from the end. None
            keeps all.
        kept: Characters that stay as they are: line breaks and tabs.

    Example:
        >>> print(printable("a\x1b[2J" + 100 * "b", most=8))
        a\x1b[2Jb ...(97 characters)... bb
    """
    if most is not None and len(text) > most:
        end = most // 4
        text = f"{text[: most - end]} ...({len(text) - most:,} characters)... {text[len(text) - end :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def text_of(error: BaseException) -> str:
    """The message of any exception, also of one whose message cannot be made: see `printable`."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its message cannot be made: {type(failure).__name__})"
    return printable(text)


def message_of(error: BaseException) -> str:
    """Class and message of any exception: see `text_of`."""
    return f"{type(error).__name__}: {text_of(error)}"


def traceback_of(error: BaseException) -> str:
    """The traceback of any exception as text: see `printable`."""
    try:
        lines = traceback.format_exception(error)
    except Exception as failure:
        lines = [f"(the traceback cannot be made: {type(failure).__name__})\n", message_of(error)]
    return printable("".join(lines), _TRACEBACK_CHARACTERS)
