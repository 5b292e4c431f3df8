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
All of them pickle with their attributes, whatever their constructors take.
"""

from __future__ import annotations

import difflib
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
]


class DataloadError(Exception):
    """Base of all errors below."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls cls(*args), which keyword-only constructors refuse.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[DataloadError], args: tuple[Any, ...], attributes: dict[str, Any]) -> DataloadError:
    error = cls.__new__(cls, *args)
    error.args = args
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


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
        traceback_text: The original traceback, which also survives pickling.
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


class MissingDependencyError(DataloadError, ImportError):
    """An optional package is not installed; the message says which command installs it.

    Attributes:
        name: Name of the package.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # ImportError keeps `name` outside of __dict__.
        return _restore, (type(self), self.args, {**self.__dict__, "name": self.name})


def closest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, and all of them.

    Example:
        >>> closest("featurs", ["features", "label"])
        "did you mean 'features'? Known: features, label"
    """
    names = sorted(known)
    matches = difflib.get_close_matches(name, names, n=1)
    listed = f"Known: {', '.join(names) or '(none)'}"
    return f"did you mean {matches[0]!r}? {listed}" if matches else listed
