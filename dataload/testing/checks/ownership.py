"""Ownership: what a read returns belongs to the caller."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from dataload.collate import default_collate
from dataload.errors import ConfigError
from dataload.testing.cases import Case, Maker, maker_check, source_check
from dataload.testing.compare import arrays_in, overwrite, snapshot
from dataload.testing.expect import NotApplicable, close, expect, expect_equal


@source_check("Ownership")
def check_records_belong_to_caller(case: Case) -> None:
    """Arrays of a record are writable, and writing to them changes no later read.

    Transforms work in place; torch warns about read-only arrays and writes to them anyway.
    """
    for index in case.indices[:8]:
        _overwrite(case.source[index], f"record {index}")
        case.check_record(index, case.source[index])
    if hasattr(case.source, "__getitems__"):
        indices = case.pick(8)
        _overwrite(case.source.__getitems__(indices), "a list of records")
        case.check_request(indices)


@source_check("Ownership")
def check_rows_do_not_share_memory(case: Case) -> None:
    """Records of one request share no memory, even for the same index.

    Augmenting one row in place must not augment another.
    """
    read = case.method("__getitems__")
    case.needs_records(1)
    indices = [case.indices[0], case.indices[-1], case.indices[0]]
    for victim in range(len(indices)):
        records = read(indices)
        _overwrite(records[victim], f"row {victim}")
        for row, index in enumerate(indices):
            if row != victim:
                expect_equal(records[row], case.oracle[index], f"row {row}, after row {victim} was overwritten,")


@source_check("Ownership")
def check_columns_belong_to_caller(case: Case) -> None:
    """Columns of a batch are writable, and writing to them changes no later batch and no record.

    Batches are normalised, masked and moved in place.
    """
    read_batch = case.method("read_batch")
    for indices in (case.pick(8), list(case.indices)):
        batch = _read_batch(case, indices)
        before = snapshot(batch)
        _overwrite(batch, "a batch")
        expect_equal(read_batch(indices), before, "a batch that was read after an earlier one was overwritten")
        case.check_record(indices[0], case.source[indices[0]])


def _overwrite(value: Any, what: str) -> None:
    for array in arrays_in(value):
        expect(array.flags.writeable, f"an array of {what} is read-only ({array.dtype} {array.shape})")
    overwrite(value)


@source_check("Ownership")
def check_values_survive_reads(case: Case) -> None:
    """A value keeps its content while other records are read.

    A reused buffer makes all rows of a batch the last one.
    """
    case.needs_records(2)
    held = [case.source[index] for index in case.indices[:8]]
    before = snapshot(held)
    # Compare with the expected records, not with the copy: the buffer may be overwritten already.
    case.check_records(case.indices[:8], held)
    for index in case.indices:
        _ = case.source[index]
    with contextlib.suppress(NotApplicable):
        _read_batch(case, case.indices)
    expect_equal(held, before, "a list of records that was read before others")


@source_check("Ownership")
def check_batches_survive_reads(case: Case) -> None:
    """A batch keeps its content while other batches are read.

    Prefetching reads several batches before the first is consumed.
    """
    batch = _read_batch(case, case.indices[:3])
    before = snapshot(batch)
    _read_batch(case, case.indices[-3:])
    expect_equal(batch, before, "a batch that was read before another")


@maker_check("Ownership")
def check_parts_of_large_batches_survive(maker: Maker) -> None:
    """One row, or a view of a column, stays valid after the rest of a large batch is dropped and others are read.

    Memory may only be reused if it is free, and a part of an array keeps the whole alive.
    """
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
    """Records and batches stay valid after `close`, and after the source is gone.

    A view of a closed memory map reads as zeros or other data, or kills the process.
    """
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
    """Reading leaves every file of the data set unchanged.

    Data sets are shared, and often stored where nobody may write.
    """
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
