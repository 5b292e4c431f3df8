"""Lifetime: who owns values, what opening costs, what closing releases, and what `repr` shows."""

import contextlib
import gc
import hashlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from dataload.collate import default_collate
from dataload.errors import ClosedSourceError, ConfigError
from dataload.testing.cases import (
    Case,
    Maker,
    NotApplicable,
    close,
    expect,
    expect_equal,
    expect_raises,
    maker_check,
    source_check,
)
from dataload.testing.compare import arrays_in, overwrite, snapshot


@source_check("Ownership")
def check_records_belong_to_caller(case: Case) -> None:
    """Arrays of a record are writable, and writing to them changes no later read."""
    for index in case.indices[:8]:
        with _overwritten(case.source[index], f"record {index}"):
            case.check_record(index, case.source[index])
    if hasattr(case.source, "__getitems__"):
        indices = case.pick(8)
        with _overwritten(case.source.__getitems__(indices), "a list of records"):
            case.check_request(indices)


@source_check("Ownership")
def check_rows_do_not_share_memory(case: Case) -> None:
    """Records of one request share no memory, even for the same index."""
    read = case.method("__getitems__")
    case.needs_records(1)
    indices = [case.indices[0], case.indices[-1], case.indices[0]]
    for victim in range(len(indices)):
        records = read(indices)
        with _overwritten(records[victim], f"row {victim}"):
            for row, index in enumerate(indices):
                if row != victim:
                    expect_equal(records[row], case.oracle[index], f"row {row}, after row {victim} was overwritten,")


@source_check("Ownership")
def check_columns_belong_to_caller(case: Case) -> None:
    """Columns of a batch are writable, and writing to them changes no later batch or record."""
    read_batch = case.method("read_batch")
    for indices in (case.pick(8), list(case.indices)):
        batch = _read_batch(case, indices)
        before = snapshot(batch)
        with _overwritten(batch, "a batch"):
            expect_equal(read_batch(indices), before, "a batch that was read after an earlier one was overwritten")
            case.check_record(indices[0], case.source[indices[0]])


@contextlib.contextmanager
def _overwritten(value: Any, what: str) -> Generator[None]:
    """Overwrite the arrays of a value in the meantime: they may be all that a user has of the data."""
    arrays = [*arrays_in(value)]
    for array in arrays:
        expect(array.flags.writeable, f"an array of {what} is read-only ({array.dtype} {array.shape})")
        expect(not _is_in_file(array), f"an array of {what} is mapped memory, so that writing to it changes a file")
    before = [array.copy() for array in arrays]
    try:
        overwrite(value)
        yield
    finally:
        for array, old in zip(arrays, before, strict=True):
            array[...] = old


def _is_in_file(array: Any) -> bool:
    while array is not None and not (isinstance(array, np.memmap) and array.mode in ("r+", "w+")):
        array = getattr(array, "base", None)
    return array is not None


@source_check("Ownership")
def check_values_survive_reads(case: Case) -> None:
    """A value keeps its content while other records are read."""
    case.needs_records(2)
    held = [case.source[index] for index in case.indices[:8]]
    before = snapshot(held)
    # Compare with the expected records, not with a copy: the buffer may already be overwritten.
    case.check_records(case.indices[:8], held)
    for index in case.indices:
        _ = case.source[index]
    with contextlib.suppress(NotApplicable):
        _read_batch(case, case.indices)
    expect_equal(held, before, "a list of records that was read before others")


@source_check("Ownership")
def check_batches_survive_reads(case: Case) -> None:
    """A batch keeps its content while other batches are read, as when prefetching."""
    batch = _read_batch(case, case.indices[:3])
    before = snapshot(batch)
    _read_batch(case, case.indices[-3:])
    expect_equal(batch, before, "a batch that was read before another")


@maker_check("Ownership")
def check_parts_of_large_batches_survive(maker: Maker) -> None:
    """A row or a view of a large batch stays valid after the rest is dropped and other batches are read."""
    data = [np.random.default_rng(seed).bytes(40_000) for seed in range(16)]
    records = data if maker.traits.record_type is bytes else [_large_record(maker, value) for value in data]
    case = maker.case(records)
    read_batch = case.method("read_batch")
    held = [_one_part_of(read_batch(case.pick(8, seed))) for seed in range(6)]
    for seed, part in enumerate(held):
        want = _one_part_of(default_collate(case.expected(case.pick(8, seed))))
        expect_equal(part, want, "a part of a batch, after others were read,")


def _large_record(maker: Maker, data: bytes) -> dict[str, Any]:
    if np.ndarray in maker.traits.value_types:
        return {"x": np.frombuffer(data, np.uint8).astype(maker.traits.dtypes[0])}
    if bytes in maker.traits.value_types:
        return {"x": data}
    raise NotApplicable("all values have a fixed size")


def _one_part_of(batch: Any) -> Any:
    column = batch["x"] if isinstance(batch, dict) else batch
    return column[3:5] if isinstance(column, np.ndarray) else column[3]


@maker_check("Ownership")
def check_values_survive_close(maker: Maker) -> None:
    """Records and batches stay valid after `close`, and after the source is gone."""
    case = maker.case()
    held = [case.source[index] for index in case.indices]
    read_batch = getattr(case.source, "read_batch", None)
    batch = read_batch(list(case.indices)) if read_batch is not None else None
    before = snapshot(batch)
    close(case.source)
    case.check_records(case.indices, held)
    expect_equal(batch, before, "a batch, after close,")


@maker_check("Ownership")
def check_reading_changes_no_file(maker: Maker) -> None:
    """Reading leaves every file of the data set unchanged."""
    maker.needs_files()
    records = maker.records()
    path = maker.write(records)
    before = _digests(path)
    case = maker.case_of(maker.open(path), records)
    for index in case.indices:
        overwrite(case.source[index])
    with contextlib.suppress(NotApplicable):
        overwrite(_read_batch(case, case.indices))
    after = _digests(path)
    for name, digest in before.items():
        expect(name in after, f"reading removed {name}")
        expect(after[name] == digest, f"reading changed {name}")


def _digests(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _read_batch(case: Case, indices: Any) -> Any:
    try:
        return case.method("read_batch")(np.array(indices, np.int64))
    except ConfigError:
        raise NotApplicable("these records cannot be stacked") from None


_REPR_LIMIT = 200


@maker_check("Lifecycle")
def check_construction_opens_nothing(maker: Maker) -> None:
    """Constructing a source opens no file and starts no thread; the first use does."""
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
    """Every read after `close` raises ClosedSourceError instead of reopening, or works if nothing was closed."""
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
    """`close` releases every descriptor and every thread."""
    maker.needs_files()
    path = maker.write(maker.records())
    before: set[str] = set()
    for turn in range(4):
        source = maker.open(path)
        _use(source)
        close(source)
        if turn == 0:
            before = _resources()  # a library may keep its own descriptors open from the first use on
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
    """Return the resources opened since `before`; collect garbage, which is slow, only if there are some."""
    if _resources() <= before:
        return set()
    gc.collect()
    return _resources() - before


def _resources() -> set[str]:
    """Return the open descriptors with their targets, and the running threads."""
    found = {f"thread {thread.name}" for thread in threading.enumerate()}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found.add(f"descriptor {name} ({os.readlink(f'/proc/self/fd/{name}')})")
        except OSError:
            continue  # the descriptor used to list them
    return found


@source_check("Lifecycle")
def check_repr(case: Case) -> None:
    """`repr` is short, the same for equal sources, and shows no records and no memory address."""
    text = repr(case.source)
    expect(text == repr(case.source), "repr changes from call to call")
    expect(len(text) <= _REPR_LIMIT, f"repr has {len(text)} characters, expected at most {_REPR_LIMIT}")
    expect("\n" not in text, f"repr has several lines: {text!r}")
    expect(not re.search(r"\bat 0x[0-9a-f]+", text), f"repr shows a memory address: {text!r}")
