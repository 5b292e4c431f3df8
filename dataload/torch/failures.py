"""Errors of steps that are errors of the data set, too: ``except KeyError`` catches a `KeyError` of a data set."""

from __future__ import annotations

import functools
import pickle
import re
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from dataload.errors import WorkerError

_KILLED = re.compile(r"\(process (\d+)\) was killed by (\S+)")
_LATE = re.compile(r"has returned no batch for .* \(timeout=([0-9.]+)\)")


def as_original(error: WorkerError) -> WorkerError:
    """Return a step's error as an error of its cause's class, too, where both can be combined and pickled."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, StopIteration) or isinstance(error, type(cause)):
        return error
    try:
        made = _rebuilt(type(cause), str(error), {**vars(cause), **vars(error)}, cause)
        pickle.loads(pickle.dumps(made))  # noqa: S301 - our own error
    except Exception:  # the class of the cause may do anything
        return error
    return made


def with_words_of_torch(error: WorkerError) -> WorkerError:
    """Return the error of a lost worker with the sentence by which programs recognise torch's."""
    text = str(error)
    if found := _KILLED.search(text):
        error.args = (f"{text}\nDataLoader worker (pid {found[1]}) is killed by signal: {found[2]}. ",)
    elif found := _LATE.search(text):
        error.args = (f"{text}\nDataLoader timed out after {float(found[1]):g} seconds",)
    return error


def _rebuilt(kind: type[Exception], message: str, attributes: dict[str, Any], cause: BaseException | None) -> Any:
    both = _combined(kind)
    made = both.__new__(both, message)
    made.args = (message,)
    for base in kind.__mro__:  # attributes of built-in classes, such as errno
        for name, member in vars(base).items():
            is_own = isinstance(member, (MemberDescriptorType, GetSetDescriptorType)) and name != "args"
            if is_own and not name.startswith("__"):
                with suppress(AttributeError):  # not all have a value
                    setattr(made, name, getattr(cause, name))
    for name, value in attributes.items():
        setattr(made, name, value)
    made.__cause__ = cause
    return made


@functools.cache
def _combined(kind: type[Exception]) -> Any:
    def new(cls: Any, *args: Any, **_: Any) -> Any:
        return kind.__new__(cls, *args)  # the memory of an OSError, say, is not a RuntimeError's

    def init(self: Any, message: str = "", **named: Any) -> None:
        BaseException.__init__(self, message)
        vars(self).update({"step": -1, "epoch": -1, "indices": (), "worker": "main", "traceback_text": "", **named})

    def reduce(self: Any) -> Any:
        _, (_, args), (attributes, cause) = WorkerError.__reduce__(self)
        return _unpickled, (kind, args[0], attributes, cause)

    body = {"__new__": new, "__init__": init, "__reduce__": reduce, "__str__": _message, "__module__": __name__}
    return type(kind.__name__, (WorkerError, kind), {**body, "__qualname__": kind.__qualname__})


def _unpickled(kind: type[Exception], message: str, attributes: dict[str, Any], cause: bytes | None) -> Any:
    return _rebuilt(kind, message, attributes, None if cause is None else pickle.loads(cause))  # noqa: S301 - see above


def _message(error: BaseException) -> str:
    return str(error.args[0])
