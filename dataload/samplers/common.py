"""Shared by samplers: checks, equality by content, and groups of rows. Pure (no I/O)."""

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dataload._util.fingerprint import fingerprint
from dataload._util.settings import Least, as_tuple, check_count, setting_error
from dataload.errors import ConfigError
from dataload.types import Int64Array, Sampler

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float64Array: TypeAlias = npt.NDArray[np.float64]

MAX_LENGTH = 2**48
Length: TypeAlias = Annotated[int, Least(0, below=MAX_LENGTH + 1)]

FEW_GROUPS = 16


class ArrayValue:
    """Equality and hash by content, for a frozen dataclass that has arrays among its fields."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and fingerprint(other) == fingerprint(self)

    def __hash__(self) -> int:
        return hash(fingerprint(self))


class PerRecord:
    """An order with a value for each record, which therefore fits only a source of exactly `records` records."""

    __slots__ = ()
    source_lengths: Any = property(lambda self: (self.records,))
    """See `source_lengths_of`."""


class OverParent:
    """The length and the range of indices of an order over a `parent`."""

    __slots__ = ()
    parent: Sampler

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return records_of(self.parent)


def set_fields(value: Any, **fields: Any) -> None:
    """Set fields of a frozen dataclass that is still under construction."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def check_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    """Return `lengths`, at least one number of records per shard or source, as a tuple of ints."""
    checked = as_tuple(lengths)
    if not checked:
        raise setting_error(name, lengths, "must hold at least one number of records")
    if not all(type(length) is int and length >= 0 for length in checked):  # quick: there may be a million
        checked = tuple(check_count(f"{name}[{i}]", length, least=0) for i, length in enumerate(checked))
    check_sum(name, sum(checked))
    return checked


def check_sum(name: str, total: int) -> None:
    """Raise ConfigError if the lengths of the setting `name` add up to more than 2^48."""
    if total > MAX_LENGTH:
        raise ConfigError(f"{name} must have a sum of at most {MAX_LENGTH}, got {total}", key=name, value=total)


def check_record_lengths(lengths: Any, *, name: str = "lengths", of: str = "record") -> Int64Array:
    """Return `lengths` as a read-only int64 array with one entry per record, or per `of`."""
    try:
        given = np.asarray(lengths)
        checked = given.astype(np.int64) if given.dtype.kind in "iu" or not given.size else None
    except (TypeError, ValueError, OverflowError):
        checked = None
    if checked is None or checked.ndim != 1:
        raise ConfigError(f"{name} must be integers, one per {of}", key=name, value=lengths)
    if checked.size and checked.min() < 0:
        at = int(np.argmin(checked))
        raise ConfigError(f"{name} must be 0 or more, got {checked[at]} for {of} {at}", key=name, value=checked[at])
    checked.setflags(write=False)
    return checked


def check_sampler(name: str, sampler: Any) -> None:
    """Raise ConfigError unless `sampler` is a sampler."""
    has_methods = hasattr(sampler, "__len__") and hasattr(sampler, "indices")  # as `Sampler`, which is slow to ask
    if isinstance(sampler, type) or not has_methods:  # a class has the methods, too
        raise setting_error(name, sampler, "must be a sampler, with __len__ and indices(positions, epoch=)")


def records_of(sampler: Sampler) -> int:
    """Return the upper bound (exclusive) of a sampler's indices, by default its length."""
    records = getattr(sampler, "records", None)
    return len(sampler) if records is None else int(records)


def indices_of(sampler: Sampler, positions: Int64Array, epoch: int) -> Int64Array:
    """Return the indices at positions, (n,) int64, after a check: the sampler may be the user's."""
    found: Any = sampler.indices(positions, epoch=epoch)
    indices = np.asarray(found)
    if indices.size != positions.size or (indices.size and indices.dtype.kind not in "iu"):
        message = f"{type(sampler).__name__}.indices must return an integer for each of {positions.size} positions"
        raise ConfigError(f"{message}, got {found!r:.80}", key="sampler")
    return indices.reshape(positions.shape)


def source_lengths_of(order: Any) -> tuple[int, ...] | None:
    """Return the records of the source that an order was made for, by parts if it mixes several; None if any fit."""
    while order is not None and getattr(order, "source_lengths", None) is None:
        order = getattr(order, "parent", getattr(order, "sampler", None))
    return None if order is None else order.source_lengths


def split_by_group(groups: Int64Array) -> Iterator[tuple[int, Int64Array]]:
    """Yield each number in `groups`, (n,) int64 of 0 or more, with its rows, (k,) int64; both ascend."""
    if not groups.size:
        return
    last = int(groups.max())
    if last < FEW_GROUPS:  # searching for each group is faster than sorting
        narrow = groups.astype(np.uint8)
        for group in range(last + 1):
            rows = np.flatnonzero(narrow == group)
            if rows.size:
                yield group, rows
        return
    # numpy sorts 16-bit integers with a radix sort, several times as fast as wider ones.
    order = np.argsort(groups.astype(np.uint16) if last < 2**16 else groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        yield int(groups[rows[0]]), rows


def divide(values: Int64Array, divisor: int) -> tuple[Int64Array, Int64Array]:
    """Return quotients and remainders of non-negative `values`: `np.divmod` in a fifth of its time."""
    quotients = values // divisor
    remainders = quotients * divisor
    return quotients, np.subtract(values, remainders, out=remainders)
