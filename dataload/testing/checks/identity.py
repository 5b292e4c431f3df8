"""Identity: fingerprints identify the content, and files give the records that were written, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dataload.errors import SourceNotFoundError
from dataload.testing.cases import (
    Case,
    Maker,
    NotApplicable,
    SourceTraits,
    close,
    expect,
    expect_raises,
    maker_check,
    source_check,
)
from dataload.testing.child import ReadReport, failed_reading, read_in_fork, read_in_new_process
from dataload.testing.compare import difference, record_digest


@source_check("Identity")
def check_fingerprint(case: Case) -> None:
    """`fingerprint` returns 16 to 64 hexadecimal digits, the same before and after reads."""
    if not case.traits.fingerprints:
        expect(
            not hasattr(case.source, "fingerprint"), "the source has a fingerprint, but the traits say that it has none"
        )
        raise NotApplicable("the traits have no fingerprint")
    before = _fingerprint(case.source)
    case.check_single_reads(case.indices[:5])
    expect(_fingerprint(case.source) == before, "the fingerprint changes when records are read")


@source_check("Identity")
def check_fingerprint_of_slices(case: Case) -> None:
    """Different slices have different fingerprints; equal slices have equal fingerprints."""
    whole = _fingerprint(case.source)
    if not case.traits.slices or len(case.oracle) < 3:
        raise NotApplicable("the source has no slices, or too few records")
    parts = [case.source[where] for where in (slice(0, 2), slice(1, 3), slice(None, None, -1))]
    found = [whole, *map(_fingerprint, parts)]
    expect(len(set(found)) == len(found), "a slice has the fingerprint of another slice or of the whole")
    expect(_fingerprint(case.source[0:2]) == found[1], "two equal slices have different fingerprints")


@maker_check("Identity")
def check_fingerprint_of_moved_copy(maker: Maker) -> None:
    """Data opened again, or copied to another directory, keep their fingerprint, so that jobs resume there."""
    maker.needs_files()
    path = maker.write(maker.records())
    here = _fingerprint(maker.open(path))
    expect(_fingerprint(maker.open(path)) == here, "opened again, the same files have another fingerprint")
    copy = maker.copy(path)
    expect(_fingerprint(maker.open(copy)) == here, "a copy in another directory has another fingerprint")


@maker_check("Identity")
def check_fingerprint_tells_data_apart(maker: Maker) -> None:
    """The fingerprint changes if a record is missing or changed, or if two are exchanged."""
    records = maker.records(8)
    others = {
        "without the last record": records[:-1],
        "with another last record": [*records[:-1], *maker.records(8, seed=1)[-1:]],
        "with the first two records exchanged": [records[1], records[0], *records[2:]],
    }
    here = _fingerprint(maker.case(records).source)
    for what, other in others.items():
        if difference(list(maker.oracle(records)), list(maker.oracle(other)), "") is None:
            continue  # a source whose records the author cannot choose
        expect(_fingerprint(maker.case(other).source) != here, f"the data {what} have the same fingerprint")


def _fingerprint(source: Any) -> str:
    if not hasattr(source, "fingerprint"):
        raise NotApplicable(f"{type(source).__name__} has no fingerprint")
    text = source.fingerprint()
    expect(isinstance(text, str) and re.fullmatch("[0-9a-f]{16,64}", text), f"fingerprint() gives {text!r}")
    return text


_EXAMPLES = 12
_MOST_FILES = 16  # maximum number of files of a directory that are damaged in one way each
_TEXT = b"not what you expected\n"
_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "cut to half": lambda data: data[: len(data) // 2],
    "cut by its last byte": lambda data: data[:-1],
    "cut to its first 100 bytes": lambda data: data[:100],
    "filled with zeros": lambda data: bytes(len(data)),
    "filled with text": lambda data: (_TEXT * (len(data) // len(_TEXT) + 1))[: len(data)],
    "changed in its first 64 bytes": lambda data: b"\xff" * min(64, len(data)) + data[64:],
    "changed in its last 64 bytes": lambda data: data[:-64] + b"\xff" * min(64, len(data)),
}


@maker_check("Errors")
def check_missing_path(maker: Maker) -> None:
    """A missing path raises SourceNotFoundError that names it, on first use at the latest, and is not created."""
    maker.needs_files()
    for path in (maker.path(), maker.path() / "no" / "such" / f"data{maker.traits.suffix}"):
        uses: dict[str, Callable[[Any], Any]] = {"len": len, "source[0]": lambda source: source[0]}
        for what, use in uses.items():
            call = f"{what} of a source of a missing path"
            error = expect_raises(SourceNotFoundError, lambda use=use, path=path: use(maker.open(path)), call)
            expect(path.name in str(error), f"the error does not name {path}: {error}")
            expect(not path.exists(), f"reading the missing path {path} created it")


@maker_check("Errors")
def check_damaged_files(maker: Maker) -> None:
    """A file that is cut, emptied or overwritten reads as before, or raises a SourceError that names it.

    It never reads as other or fewer records, raises another exception, crashes or hangs. The reads happen in a separate
    process. Each file of a directory is damaged in one way (of many files, a sample); the first, the last and one of
    each suffix in all ways.
    """
    maker.needs_files()
    records = maker.records(12)
    path = maker.write(records)
    wanted = tuple(record_digest(record) for record in maker.oracle(records))
    damaged = list(_damaged_copies(path, maker))
    readings = _read(maker, [copy for _, copy in damaged])
    for (what, copy), reading in zip(damaged, readings, strict=True):
        if reading.error or not _is_allowed(reading.digests, wanted, what, maker.traits):
            _check_refused(reading, f"a data set with {what}", copy)


def _is_allowed(found: tuple[str, ...], wanted: tuple[str, ...], what: str, traits: SourceTraits) -> bool:
    """Return whether a format with these traits may read a damaged file as `found`."""
    if (" cut to " in what or " zeros" in what) and not traits.notices_cuts:
        return len(found) <= len(wanted) and found[:-1] == wanted[: max(0, len(found) - 1)]
    if " changed in " in what and not traits.has_checksums:
        return len(found) == len(wanted)
    return found == wanted


def _damaged_copies(path: Path, maker: Maker) -> Iterator[tuple[str, Path]]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    damages = list(_DAMAGES.items())
    damaged_in_all_ways = {*files[:1], *files[-1:], *{file.suffix: file for file in files}.values()}
    some = {*files[:: 1 + len(files) // _MOST_FILES], *damaged_in_all_ways}
    for number, file in enumerate(files):
        if file not in some:
            continue
        data = file.read_bytes()
        turn = (number + number // len(damages)) % len(damages)  # directories often alternate between fields
        for what, damage in damages if file in damaged_in_all_ways else [damages[turn]]:
            copy = maker.copy(path)
            target = copy if path.is_file() else copy / file.relative_to(path)
            target.write_bytes(damage(data))
            yield f"{file.name} {what}", copy


@maker_check("Errors")
def check_corruptions(maker: Maker) -> None:
    """The author's `corrupt`, which knows what the format can detect, leads to a SourceError that names the file."""
    if not maker.traits.corruptions:
        raise NotApplicable("the traits name no corruptions")
    copies: list[Path] = []
    for kind in maker.traits.corruptions:
        copies.append(maker.write(maker.records(12)))
        maker.backend.corrupt(copies[-1], kind)
    readings = _read(maker, copies)
    for kind, copy, reading in zip(maker.traits.corruptions, copies, readings, strict=True):
        _check_refused(reading, f"a data set after corrupt(path, {kind!r})", copy)


def _read(maker: Maker, paths: list[Path]) -> list[ReadReport]:
    """Read each data set, or return the constructor's error."""
    opened: list[Any] = []
    readings: list[ReadReport | None] = []
    for path in paths:
        try:
            opened.append(maker.open(path))
            readings.append(None)
        except Exception as error:
            readings.append(failed_reading(error))
    # A file may kill its reader. A fork takes a tenth of the time of a new process, but breaks some libraries.
    later = iter(read_in_fork(opened) if maker.traits.fork_safe else read_in_new_process(opened))
    return [reading or next(later) for reading in readings]


def _check_refused(reading: ReadReport, what: str, path: Path) -> None:
    count = len(reading.digests)
    expect(reading.error, f"{what} reads as {count} records, without an error but not as written")
    expect("SourceError" in reading.error_classes, f"{what} raises {reading.error}, expected a SourceError")
    names = {path.name, *(entry.name for entry in path.parent.rglob("*"))}
    named = any(name in reading.error or name in reading.error_path for name in names)
    expect(named, f"{what}: the error does not name the file: {reading.error}")


@maker_check("Round trip")
def check_round_trip(maker: Maker) -> None:
    """Any records that the format can hold, read by any request, equal the records written."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    from dataload.testing.strategies import records_for, requests_for

    @settings(max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(records=records_for(maker.traits), data=st.data())
    def holds(records: list[Any], data: Any) -> None:
        case = maker.case(records)
        indices = data.draw(requests_for(len(records), negative=maker.traits.negative_index), label="request")
        wanted = [index % len(records) for index in indices]
        case.check_single_reads(case.indices)
        case.check_request(wanted, indices)
        if hasattr(case.source, "read_batch"):
            case.check_batch(wanted, indices)
        close(case.source)

    holds()
