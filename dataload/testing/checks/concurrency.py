"""Concurrency: several threads may read one source at once."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator

from dataload.errors import ClosedSourceError
from dataload.testing.cases import Case, Maker, NotApplicable, expect, expect_equal, maker_check, source_check

_THREADS = 8
_READS = 20


@source_check("Concurrency")
def check_threads(case: Case) -> None:
    """Eight threads that read at once get the records they asked for.

    Another thread may run between a seek and a read on one handle, or fill a shared buffer.
    """
    case.needs_records(1)
    read = getattr(case.source, "__getitems__", None)

    def work(number: int) -> None:
        for turn in range(_READS):
            indices = case.pick(5, seed=1 + number * _READS + turn)
            case.check_record(indices[0], case.source[indices[0]])
            if read is not None and turn % 4 == 0:
                case.check_request(indices)

    _in_threads(work)


@source_check("Concurrency")
def check_threads_at_one_index(case: Case) -> None:
    """Threads that ask for the same record each get their own.

    A cache without a lock fails here, and so does one that returns the same object twice.
    """
    for index in (case.indices[0], case.indices[-1]) if case.indices else ():
        _in_threads(lambda _, at=index: case.check_single_reads([at] * 10))


@source_check("Concurrency")
def check_threads_reading_columns(case: Case) -> None:
    """Eight threads that read batches of columns at once each get their own.

    A loader's worker threads do that; a buffer that two of them fill fails here.
    """
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
    """If `close` is called while other threads read, each read gives the right record or a ClosedSourceError.

    An evaluation that is interrupted closes its source while threads still prefetch.
    """
    if not maker.traits.closes:
        raise NotApplicable("there is nothing to close")
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
    """The first use, which opens the files, may come from several threads at once.

    That is how a loader starts.
    """
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
    with _switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    expect(not any(thread.is_alive() for thread in threads), "threads that read at once did not end in 30 s")
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _switching_often() -> Generator[None]:
    """Let threads take turns every 10 us instead of every 5 ms, so that races occur."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
