"""Checks that every sampler makes of its settings."""

from __future__ import annotations

from typing import Any

from dataload._util.checks import check_count
from dataload.errors import ConfigError
from dataload.samplers.permutation import MAX_LENGTH
from dataload.types import Sampler

__all__ = ["MAX_LENGTH", "check_count", "check_length", "check_lengths", "check_sampler", "records_of"]


def check_length(length: Any) -> int:
    """A number of records: 0 ... 2^48."""
    return check_count("length", length, least=0, below=MAX_LENGTH + 1)


def check_lengths(name: str, lengths: Any) -> tuple[int, ...]:
    """Numbers of records, one for each shard or source.

    Raises:
        ConfigError: There is none, one of them is no number of records, or all together are more than 2^48.
    """
    try:
        given = tuple(lengths)
    except TypeError:
        given = ()
    if not given:
        raise ConfigError(f"{name} must be one number of records or more, got {lengths!r}", key=name, value=lengths)
    checked = given
    if not all(type(length) is int and length >= 0 for length in given):  # there may be a million, most often good
        checked = tuple(check_count(f"{name}[{i}]", length, least=0) for i, length in enumerate(given))
    if sum(checked) > MAX_LENGTH:
        raise ConfigError(
            f"{name} must have a sum of at most {MAX_LENGTH}, got {sum(checked)}", key=name, value=lengths
        )
    return checked


def check_sampler(name: str, sampler: Any) -> None:
    """An order to build upon.

    Raises:
        ConfigError: It is no sampler.
    """
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):  # a class has the methods, too
        raise ConfigError(
            f"{name} must be a sampler, with __len__ and indices(positions, epoch=), got {sampler!r}",
            key=name,
            value=sampler,
        )


def records_of(sampler: Sampler) -> int:
    """The number of records that a sampler chooses from: its indices are below it.

    One that does not say it (`records`) is taken to serve each record once.
    """
    records = getattr(sampler, "records", None)
    return len(sampler) if records is None else int(records)
