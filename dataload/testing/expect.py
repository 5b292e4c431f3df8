"""Expectations of checks: each raises AssertionError unless it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from dataload.testing.compare import difference, show


class NotApplicable(Exception):
    """Raised by a check that has nothing to check; the message says why."""


def expect(condition: object, message: str) -> None:
    """Fail with `message` unless the condition holds. Unlike `assert`, this works under ``python -O``."""
    if not condition:
        raise AssertionError(message)


def expect_equal(got: Any, want: Any, label: str) -> None:
    """Fail unless two values are bitwise equal; see `difference`."""
    found = difference(got, want, label)
    expect(found is None, found or "")


def expect_raises(
    expected: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], what: str
) -> BaseException:
    """Fail unless `call` raises one of the `expected` exceptions; return it. `what` is the call in words."""
    kinds = expected if isinstance(expected, tuple) else (expected,)
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        got = call()
    except kinds as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__} ({error}), expected {names}") from error
    raise AssertionError(f"{what} gives {show(got)}, expected {names}")


def expect_each_raises(
    expected: type[BaseException], call: Callable[[Any], Any], arguments: Iterable[Any], what: str
) -> None:
    """Fail unless `call` raises `expected` for each of `arguments`; `what` has ``{}`` for the argument."""
    for argument in arguments:
        expect_raises(expected, partial(call, argument), what.format(repr(argument)))


def close(source: Any) -> None:
    """Close a source if it has `close`."""
    method = getattr(source, "close", None)
    if method is not None:
        method()
