"""Lifecycle: what opening costs, what closing releases, and what `repr` shows."""

import gc
import os
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

from dataload.errors import ClosedSourceError
from dataload.testing.cases import Case, Maker, maker_check, source_check
from dataload.testing.expect import close, expect, expect_raises

_REPR_LIMIT = 200


@maker_check("Lifecycle")
def check_construction_opens_nothing(maker: Maker) -> None:
    """Constructing a source opens no file and starts no thread; the first use does.

    Sources are constructed to be pickled or inspected; handles opened then would belong to the wrong process.
    """
    maker.needs_files()
    path = maker.write(maker.records())
    before = _resources()
    source = maker.open(path)
    expect(_resources() == before, f"constructing {type(source).__name__} opened {_resources() - before}")


@maker_check("Lifecycle")
def check_context_manager(maker: Maker) -> None:
    """``with source as s`` gives the source itself and closes it at the end, even after an error."""
    source = maker.case().source
    with source as entered:
        expect(entered is source, "__enter__ gives another object")
        _ = entered[0]
    _check_closed(source, maker)
    other = maker.case().source
    _ = other[0]
    expect_raises(ZeroDivisionError, lambda: _fail_inside(other), "a with block that fails")
    _check_closed(other, maker)


def _fail_inside(source: Any) -> None:
    with source:
        raise ZeroDivisionError


@maker_check("Lifecycle")
def check_close_twice(maker: Maker) -> None:
    """`close` may be called twice, and before the first read."""
    for uses in (0, 1):
        case = maker.case()
        close_it = case.method("close")
        for _ in range(uses):
            _ = case.source[0]
        close_it()
        close_it()
        _check_closed(case.source, maker)


@maker_check("Lifecycle")
def check_read_after_close(maker: Maker) -> None:
    """Every read after `close` is a ClosedSourceError, or continues if there is nothing to close.

    Reopening silently would leak what `close` was called to release.
    """
    case = maker.case()
    _ = case.source[0]
    case.method("close")()
    _check_closed(case.source, maker)
    if not maker.traits.closes:
        case.check_record(0, case.source[0])


def _check_closed(source: Any, maker: Maker) -> None:
    if not maker.traits.closes:
        return
    reads: dict[str, Callable[[], Any]] = {"source[0]": lambda: source[0], "iteration": lambda: list(source)}
    for name in ("__getitems__", "read_batch"):
        if hasattr(source, name):
            reads[f"{name}([0])"] = lambda name=name: getattr(source, name)([0])
    for call, read in reads.items():
        expect_raises(ClosedSourceError, read, f"{call} after close")


@maker_check("Lifecycle")
def check_close_releases_everything(maker: Maker) -> None:
    """`close` releases every descriptor and every thread.

    A run that reopens sources for every evaluation would otherwise hit the limit of descriptors.
    """
    maker.needs_files()
    path = maker.write(maker.records())
    before: set[str] = set()
    for turn in range(4):
        source = maker.open(path)
        _use(source)
        close(source)
        if turn == 0:
            before = _resources()  # what a library opens once and for all is open by now
    left = _left(before)
    expect(not left, f"after close these are still open: {left}")


def _use(source: Any) -> None:
    _ = source[0]
    if hasattr(source, "__getitems__"):
        source.__getitems__([1, 0])


@maker_check("Lifecycle")
def check_forgotten_source(maker: Maker) -> None:
    """A source that is dropped without `close` releases everything too, without a ResourceWarning."""
    maker.needs_files()
    path = maker.write(maker.records())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _use(maker.backend.open(path))
        before = _resources()
        _use(maker.backend.open(path))
        left = _left(before)
    complaints = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
    expect(not complaints, f"a forgotten source warns: {complaints[:1]}")
    expect(not left, f"a forgotten source leaves open: {left}")


def _left(before: set[str]) -> set[str]:
    """Return what is open and was not before, after a collection of garbage, which takes long, where that may help."""
    if _resources() <= before:
        return set()
    gc.collect()
    return _resources() - before


def _resources() -> set[str]:
    """Return the open descriptors, with what they refer to, and the running threads."""
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found.add(f"descriptor {name} ({os.readlink(f'/proc/self/fd/{name}')})")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


@source_check("Lifecycle")
def check_repr(case: Case) -> None:
    """`repr` is short and shows no records and no memory address.

    It appears in error messages and logs; an address makes equal sources look different.
    """
    text = repr(case.source)
    expect(text == repr(case.source), "repr changes from call to call")
    expect(len(text) <= _REPR_LIMIT, f"repr has {len(text)} characters, expected at most {_REPR_LIMIT}")
    expect("\n" not in text, f"repr has several lines: {text!r}")
    expect(not re.search(r"\bat 0x[0-9a-f]+", text), f"repr shows a memory address: {text!r}")
