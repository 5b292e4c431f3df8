"""Processes: a source can be pickled to another process, and survives a fork."""

from __future__ import annotations

import pickle
import shutil
from typing import Any

from dataload.errors import SourceNotFoundError
from dataload.testing.cases import Case, Maker, close, expect, expect_raises, maker_check, source_check
from dataload.testing.child import Reading, pickled, read_in_fork, read_in_new_process
from dataload.testing.compare import record_digest

_PICKLE_LIMIT = 64 * 1024


@source_check("Processes")
def check_pickle(case: Case) -> None:
    """A pickled copy reads the same records, whether the source was read before or not.

    Worker processes get their source that way.
    """
    for index in case.indices[:3]:
        _ = case.source[index]
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
    """A pickle is small, and its size depends neither on the number of records nor on what was read.

    It holds settings, not data, because it is sent to every worker.
    """
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
    """A new process reads the same records from a pickle, and computes the same fingerprint.

    It inherits no handle, no cache and no module state, and its PYTHONHASHSEED differs, so the hash of strings and the
    order of sets do too.
    """
    case = maker.case()
    _ = case.source[0]
    [reading] = read_in_new_process([case.source])
    _check_reading(case, reading, "a new process")
    identify = getattr(case.source, "fingerprint", None)
    here = identify() if identify is not None else ""
    expect(reading.fingerprint == here, f"the fingerprint is {here}, in a new process {reading.fingerprint}")


@maker_check("Processes")
def check_fork_after_read(maker: Maker) -> None:
    """After reads and a fork, both child and parent read correctly; or the child gets an error.

    They share descriptors, and therefore file offsets; locks and library state are copied as they were.
    """
    case = maker.case()
    _ = case.source[0]
    [reading] = read_in_fork([case.source])
    if maker.traits.fork_safe:
        _check_reading(case, reading, "a forked child")
    else:
        expect(reading.error, "reading in a forked child raises nothing, but the traits say that it is refused")
    case.check_single_reads(case.indices[1:] + case.indices[:1])


@maker_check("Processes")
def check_fork_before_read(maker: Maker) -> None:
    """A source that was not yet read can be read in a forked child, and then in its parent."""
    case = maker.case()
    [reading] = read_in_fork([case.source])
    if maker.traits.fork_safe or not reading.error:
        _check_reading(case, reading, "a forked child")
    case.check_single_reads(case.indices)


@maker_check("Processes")
def check_moved_files(maker: Maker) -> None:
    """A pickled copy whose files are gone raises SourceNotFoundError with the path.

    A worker on a machine without the mount must not see an empty data set.
    """
    maker.needs_files()
    path = maker.write(maker.records())
    source = maker.open(path)
    _ = source[0]
    data = pickled(source)
    close(source)
    shutil.move(path.parent, path.parent.with_name("moved"))
    error: Any = expect_raises(SourceNotFoundError, lambda: _loaded(data)[0], "a copy whose files were moved")
    expect(path.name in str(error), f"the error does not name {path.name}: {error}")


def _check_reading(case: Case, reading: Reading, where: str) -> None:
    expect(not reading.error, f"in {where}: {reading.error}")
    wanted = tuple(record_digest(case.oracle[index]) for index in case.indices)
    expect(len(reading.digests) == len(wanted), f"{where} reads {len(reading.digests)} records of {len(wanted)}")
    wrong = [index for index, pair in enumerate(zip(reading.digests, wanted, strict=True)) if pair[0] != pair[1]]
    expect(not wrong, f"{where} reads other records at {wrong[:5]}")


def _loaded(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 - made a moment ago by `pickled`
