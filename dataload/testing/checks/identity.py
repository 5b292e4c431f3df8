"""Identity: the fingerprint names the content, independent of location and process."""

import re
from typing import Any

from dataload.testing.cases import Case, Maker, maker_check, source_check
from dataload.testing.compare import difference
from dataload.testing.expect import NotApplicable, expect


@source_check("Identity")
def check_fingerprint(case: Case) -> None:
    """`fingerprint` returns 16 to 64 hexadecimal digits, the same before and after reads.

    It is part of every saved state; a checkpoint is refused if it differs.
    """
    if not case.traits.fingerprints:
        expect(not hasattr(case.source, "fingerprint"), "there is a fingerprint, but the traits deny it")
        raise NotApplicable("the traits have no fingerprint")
    before = _fingerprint(case.source)
    case.check_single_reads(case.indices[:5])
    expect(_fingerprint(case.source) == before, "the fingerprint changes when records are read")


@source_check("Identity")
def check_fingerprint_of_slices(case: Case) -> None:
    """Different slices have different fingerprints; the same slice has the same each time.

    The state of a run over ``source[:1000]`` does not fit a run over all records.
    """
    whole = _fingerprint(case.source)
    if not case.traits.slices or len(case.oracle) < 3:
        raise NotApplicable("there are no slices, or too few records")
    parts = [case.source[where] for where in (slice(0, 2), slice(1, 3), slice(None, None, -1))]
    found = [whole, *map(_fingerprint, parts)]
    expect(len(set(found)) == len(found), "a slice has the fingerprint of another slice or of the whole")
    expect(_fingerprint(case.source[0:2]) == found[1], "the same slice has another fingerprint the second time")


@maker_check("Identity")
def check_fingerprint_of_moved_copy(maker: Maker) -> None:
    """The same data have the same fingerprint when opened again, and when copied to another directory.

    A training job that moves to another machine must resume there.
    """
    maker.needs_files()
    path = maker.write(maker.records())
    here = _fingerprint(maker.open(path))
    expect(_fingerprint(maker.open(path)) == here, "opened again, the same files have another fingerprint")
    copy = maker.copy(path)
    expect(_fingerprint(maker.open(copy)) == here, "a copy in another directory has another fingerprint")


@maker_check("Identity")
def check_fingerprint_tells_data_apart(maker: Maker) -> None:
    """The fingerprint changes if a record is missing or changed, or if two are exchanged.

    Otherwise a checkpoint is resumed on data that it does not belong to.
    """
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
