"""Concurrency: several threads read one source as if each had it for itself."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator

from dataload.collate import default_collate
from dataload.errors import ClosedSourceError, ConfigError
from dataload.testing.cases import Case, Maker, NotApplicable, expect, expect_equal, maker_check, source_check

_THREADS = 8
_READS = 20


@source_check("Concurrency", since="0.1")
def check_threads(case: Case) -> None:
    """Eight threads that read at once get the records they asked for.

    A seek and a read on one handle are two steps, and another thread fits between them; a buffer that is shared is
    filled by somebody else.
    """
    if not case.indices:
        raise NotApplicable("the data set is empty")
    read = getattr(case.source, "__getitems__", None)

    def work(number: int) -> None:
        for turn in range(_READS):
            indices = case.pick(5, seed=1 + number * _READS + turn)
            case.check_record(indices[0], case.source[indices[0]])
            if read is not None and turn % 4 == 0:
                case.check_records(indices, read(indices))

    _in_threads(work)


@source_check("Concurrency", since="0.1")
def check_threads_at_one_index(case: Case) -> None:
    """Threads that ask for the same record each get one of their own.

    A cache without a lock, or one that hands out the same object, shows here.
    """
    for index in (case.indices[0], case.indices[-1]) if case.indices else ():

        def work(_: int, at: int = index) -> None:
            for _turn in range(10):
                case.check_record(at, case.source[at])

        _in_threads(work)


@source_check("Concurrency", since="0.1")
def check_threads_reading_columns(case: Case) -> None:
    """Eight threads that read batches of columns at once each get their own.

    That is what a loader's worker threads do; a buffer that two of them fill shows here.
    """
    read_batch = case.method("read_batch")
    plans = {
        (number, turn): case.pick(9, seed=1 + number * 10 + turn) for number in range(_THREADS) for turn in range(5)
    }
    try:
        wanted = {place: default_collate(case.expected(indices)) for place, indices in plans.items()}
    except ConfigError:
        raise NotApplicable("these records cannot be stacked") from None

    def work(number: int) -> None:
        for turn in range(5):
            place = number, turn
            expect_equal(read_batch(plans[place]), wanted[place], f"read_batch({plans[place]}) in thread {number}")

    _in_threads(work)


@maker_check("Concurrency", since="0.1")
def check_close_during_reads(maker: Maker) -> None:
    """`close` while other threads read: each read gives the right records, or a ClosedSourceError.

    An evaluation that is broken off closes its source under the threads that prefetch.
    """
    if not maker.traits.closes:
        raise NotApplicable("there is nothing to close")
    records = maker.records()
    path = maker.write(records)
    for _ in range(3):
        case = maker.case_of(maker.open(path), records)
        _ = case.source[0]
        started = threading.Barrier(_THREADS)

        def work(number: int, case: Case = case, started: threading.Barrier = started) -> None:
            started.wait(timeout=10)
            if number == 0:
                case.source.close()
                return
            with contextlib.suppress(ClosedSourceError):
                for index in case.permuted(number):
                    case.check_record(index, case.source[index])

        _in_threads(work)


@maker_check("Concurrency", since="0.1")
def check_first_use_by_threads(maker: Maker) -> None:
    """The first use, which opens the files, may come from several threads at the same moment.

    That is how a loader starts.
    """
    records = maker.records()
    path = maker.write(records)
    for _ in range(3):
        case = maker.case_of(maker.open(path), records)
        start = threading.Barrier(_THREADS)

        def work(number: int, case: Case = case, start: threading.Barrier = start) -> None:
            start.wait(timeout=10)
            expect(len(case.source) == len(records), f"len is {len(case.source)}, expected {len(records)}")
            case.check_record(number, case.source[number])

        _in_threads(work)


@source_check("Concurrency", since="0.1")
def check_iterators_are_apart(case: Case) -> None:
    """Two iterators over one source do not disturb each other, nor a read in between."""
    if len(case.indices) != len(case.oracle):
        raise NotApplicable("only some of the records are known")
    one, other = iter(case.source), iter(case.source)
    for index in case.indices[:10]:
        case.check_record(index, next(one))
        case.check_record(index, next(other))
        case.check_record(case.indices[-1], case.source[case.indices[-1]])


def _in_threads(work: Callable[[int], None]) -> None:
    """Call ``work(number)`` in each of several threads; raise the first error of any."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
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
    """Let threads take turns every 10 us instead of every 5 ms, so that a race is met and not only possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
