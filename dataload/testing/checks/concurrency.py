"""Concurrency and processes: several threads and processes may read one source at the same time."""

import contextlib
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dataload.errors import ClosedSourceError, SourceNotFoundError
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
from dataload.testing.child import ReadReport, pickled, read_in_fork, read_in_new_process
from dataload.testing.compare import record_digest

_THREADS = 8
_READS = 20
_PICKLE_LIMIT = 64 * 1024


@source_check("Concurrency")
def check_threads(case: Case) -> None:
    """Eight threads that read at the same time get the records that they requested."""
    case.needs_records(1)

    def work(number: int) -> None:
        for turn in range(_READS):
            indices = case.pick(5, seed=1 + number * _READS + turn)
            case.check_record(indices[0], case.source[indices[0]])
            if turn % 4 == 0:
                case.check_request(indices)

    _in_threads(work)


@source_check("Concurrency")
def check_threads_at_one_index(case: Case) -> None:
    """Threads that request the same record each get their own copy, even from a cache."""
    for index in (case.indices[0], case.indices[-1]) if case.indices else ():
        _in_threads(lambda _, at=index: case.check_single_reads([at] * 10))


@source_check("Concurrency")
def check_threads_reading_columns(case: Case) -> None:
    """Eight threads that read batches of columns, as a loader's workers do, each get their own."""
    read_batch = case.method("read_batch")
    keys = [(number, turn) for number in range(_THREADS) for turn in range(5)]
    plans = {(number, turn): case.pick(9, seed=1 + number * 10 + turn) for number, turn in keys}
    wanted = {key: case.stacked(indices) for key, indices in plans.items()}

    def work(number: int) -> None:
        for turn in range(5):
            indices = plans[number, turn]
            expect_equal(read_batch(indices), wanted[number, turn], f"read_batch({indices}) in thread {number}")

    _in_threads(work)


@maker_check("Concurrency")
def check_close_during_reads(maker: Maker) -> None:
    """If `close` is called while other threads read, each read gives the right record or a ClosedSourceError."""
    if not maker.traits.closes:
        raise NotApplicable("the source has nothing to close")
    records = maker.records()
    path = maker.write(records)
    for _ in range(3):
        case = maker.case_of(maker.open(path), records)
        _ = case.source[0]

        def work(number: int, case: Case = case) -> None:
            if number == 0:
                case.source.close()
                return
            with contextlib.suppress(ClosedSourceError):
                case.check_single_reads(case.permuted(number))

        _in_threads(work)


@maker_check("Concurrency")
def check_first_use_by_threads(maker: Maker) -> None:
    """Several threads may make the first use, which opens the files, at the same time."""
    records = maker.records()
    path = maker.write(records)
    for _ in range(3):
        case = maker.case_of(maker.open(path), records)

        def work(number: int, case: Case = case) -> None:
            expect(len(case.source) == len(records), f"len is {len(case.source)}, expected {len(records)}")
            case.check_record(number, case.source[number])

        _in_threads(work)


@source_check("Concurrency")
def check_iterators_are_apart(case: Case) -> None:
    """Two iterators over one source do not disturb each other or a read in between."""
    case.needs_all_records()
    one, other = iter(case.source), iter(case.source)
    for index in case.indices[:10]:
        case.check_record(index, next(one))
        case.check_record(index, next(other))
        case.check_record(case.indices[-1], case.source[case.indices[-1]])


def _in_threads(work: Callable[[int], None]) -> None:
    """Call ``work(number)`` in several threads that start together, and raise the first error."""
    errors: list[BaseException] = []
    start = threading.Barrier(_THREADS)

    def run(number: int) -> None:
        try:
            start.wait(timeout=10)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # instead of 5 ms, so that races occur
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    finally:
        sys.setswitchinterval(interval)
    expect(not any(thread.is_alive() for thread in threads), "threads that read at once did not end in 30 s")
    if errors:
        raise errors[0]


@source_check("Processes")
def check_pickle(case: Case) -> None:
    """A pickled copy, as sent to worker processes, reads the same records before and after reads."""
    case.check_single_reads(case.indices[:3])
    copy = _loaded(pickled(case.source))
    try:
        expect(len(copy) == len(case.oracle), f"len of the copy is {len(copy)}, expected {len(case.oracle)}")
        for index in case.indices:
            case.check_record(index, copy[index])
            case.check_record(index, case.source[index])
    finally:
        close(copy)


@maker_check("Processes")
def check_pickle_size(maker: Maker) -> None:
    """A pickle holds settings, not data: its size depends neither on the number of records nor on reads."""
    maker.needs_files()
    sizes: list[int] = []
    for count in (10, 150):
        source = maker.case(maker.records(count)).source
        sizes.append(len(pickled(source)))
        expect(sizes[-1] < _PICKLE_LIMIT, f"a pickle of {count} records has {sizes[-1]} bytes")
        for index in range(10):
            _ = source[index]
        after = len(pickled(source))
        expect(after < sizes[-1] + 512, f"a pickle has {sizes[-1]} bytes before reads, {after} after")
    expect(sizes[1] < sizes[0] + 64, f"a pickle of 10 records has {sizes[0]} bytes, one of 150 has {sizes[1]}")


@maker_check("Processes")
def check_new_process(maker: Maker) -> None:
    """A new process, with another PYTHONHASHSEED, reads the same records and computes the same fingerprint."""
    new_process_reads([maker])


@maker_check("Processes")
def check_fork_after_read(maker: Maker) -> None:
    """After reads and a fork, both child and parent read correctly; or the child gets an error."""
    fork_after_read([maker])


@maker_check("Processes")
def check_fork_before_read(maker: Maker) -> None:
    """A source that was not yet read can be read in a forked child, and then in its parent."""
    fork_before_read([maker])


def new_process_reads(makers: Sequence[Maker]) -> None:
    """Check one source of each maker in one new process."""
    cases = [maker.case() for maker in makers]
    for case in cases:
        _ = case.source[0]
    readings = read_in_new_process([case.source for case in cases])
    for case, reading in zip(cases, readings, strict=True):
        _check_reading(case, reading, "a new process")
        here = case.source.fingerprint() if hasattr(case.source, "fingerprint") else ""
        there = reading.fingerprint
        expect(there == here, f"the fingerprint of {case.source!r} is {here}, in a new process {there}")


def fork_after_read(makers: Sequence[Maker]) -> None:
    """Check one source of each maker in one forked child."""
    cases = [maker.case() for maker in makers]
    for case in cases:
        _ = case.source[0]
    for case, reading in zip(cases, read_in_fork([case.source for case in cases]), strict=True):
        if case.traits.fork_safe:
            _check_reading(case, reading, "a forked child")
        else:
            refused = (
                f"reading {case.source!r} in a forked child raises no error, but the traits say that it is refused"
            )
            expect(reading.error, refused)
        case.check_single_reads(case.indices[1:] + case.indices[:1])


def fork_before_read(makers: Sequence[Maker]) -> None:
    """Check one unread source of each maker in one forked child."""
    cases = [maker.case() for maker in makers]
    for case, reading in zip(cases, read_in_fork([case.source for case in cases]), strict=True):
        if case.traits.fork_safe or not reading.error:
            _check_reading(case, reading, "a forked child")
        case.check_single_reads(case.indices)


@maker_check("Processes")
def check_moved_files(maker: Maker) -> None:
    """A pickled copy whose files are gone raises SourceNotFoundError with the path, on any machine."""
    maker.needs_files()
    path = maker.write(maker.records())
    source = maker.open(path)
    _ = source[0]
    data = pickled(source)
    close(source)
    shutil.move(path.parent, path.parent.with_name("moved"))
    error: Any = expect_raises(SourceNotFoundError, lambda: _loaded(data)[0], "a copy whose files were moved")
    expect(path.name in str(error), f"the error does not name {path.name}: {error}")


def _check_reading(case: Case, reading: ReadReport, where: str) -> None:
    expect(not reading.error, f"{case.source!r} in {where}: {reading.error}")
    wanted = tuple(record_digest(case.oracle[index]) for index in case.indices)
    expect(
        len(reading.digests) == len(wanted),
        f"{where} reads {len(reading.digests)} records of {len(wanted)} of {case.source!r}",
    )
    wrong = [index for index, pair in enumerate(zip(reading.digests, wanted, strict=True)) if pair[0] != pair[1]]
    expect(not wrong, f"{where} reads other records of {case.source!r} at {wrong[:5]}")


def _loaded(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - made a moment ago by `pickled`
