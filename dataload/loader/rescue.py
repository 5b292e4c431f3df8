"""Records that cannot be read or transformed: what to do about them, and what is kept of them."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from dataload._util.checks import check_choice
from dataload._util.randomness import derive_key, hash64
from dataload.errors import ConfigError, WorkerError, printable
from dataload.types import Int64Array

__all__ = ["BadRecord", "Budget", "ErrorPolicy", "OnError", "append_report", "read_excluded", "substitute"]

OnError: TypeAlias = Literal["raise", "skip", "replace"]
"""What becomes of a record that fails."""

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """One record that failed, at one step.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step.
        index: Index in the source.
        source: The source's repr.
        shard: The file or part of the data set it is in, as far as the source tells.
        record: Its number there; the index where the source does not tell.
        key: Its own name there, as far as the source tells.
        stage: What failed: ``"read"``, or the transform with its name.
        error: Class of the exception.
        cause: Its message; of a very long one the beginning and the end.
        replaced_by: Index of the record in its place, or None.
    """

    epoch: int
    step: int
    index: int
    source: str
    shard: str | None
    record: int
    key: str | None
    stage: str
    error: str
    cause: str
    replaced_by: int | None = None

    @property
    def text(self) -> str:
        """Stage, class and message, for messages."""
        return f"{self.stage}: {self.error}: {self.cause}"

    def to_json(self) -> dict[str, Any]:
        """As a dict of numbers and text."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What to do about records that fail.

    Only reading and transforming a record can be its fault. A collate or batch transform that fails, a source that
    is closed and a package that is missing are raised whatever `action` is.

    Attributes:
        action: `raise` ends the iteration; `skip` leaves the row out, and a step without any good record gives a
            batch of no rows; `replace` puts another record of the same step in its place, and a step without any is
            an error. Packed records have their places by length, so no other record fits there: `replace` leaves a
            gap in the row, as `skip` does.
        excluded: (n,) int64, rising: records that are known to be bad, and never read. `raise` leaves them out, too.
    """

    action: OnError = "raise"
    excluded: Int64Array | None = None

    def __post_init__(self) -> None:
        check_choice("on_error", self.action, get_args(OnError))

    def excluded_among(self, indices: Int64Array) -> set[int]:
        """Those of `indices` that are not to be read."""
        if self.excluded is None or not len(self.excluded):
            return set()
        places = np.minimum(np.searchsorted(self.excluded, indices), len(self.excluded) - 1)
        return set(indices[self.excluded[places] == indices].tolist())

    def examples(self, length: int, most: int) -> list[int]:
        """Some records of a source that may be read, spread over all of it, for a shard may be damaged as a whole.

        Args:
            length: Records of the source.
            most: How many to give.
        """
        excluded = np.empty(0, np.int64) if self.excluded is None else self.excluded
        left = length - len(excluded)
        ranks = np.unique(np.linspace(0, left - 1, min(most, left)).astype(np.int64))
        # Before the r-th record that is left stand those excluded whose own rank among the left ones is r at most.
        return (ranks + np.searchsorted(excluded - np.arange(len(excluded)), ranks, side="right")).tolist()


class Budget:
    """Counts bad records as they are received, reports them, and says when they are too many.

    It counts from when it was made, over all epochs: a record that fails in each of them counts each time.

    Args:
        most: How many there may be.
        report: A JSONL file to add them to, or None. It is made at once, so that a path that cannot be written to
            shows before the first batch.

    Raises:
        ConfigError: The report cannot be written.
    """

    def __init__(self, most: int, report: str | os.PathLike[str] | None) -> None:
        self._most = most
        self._report = None if report is None else _writable(report)
        self.spent = 0

    def spend(self, bad: Sequence[BadRecord], worker: str) -> None:
        """Note the bad records of a step that was received. That they cannot be reported any more is a warning.

        Raises:
            WorkerError: They are more than there may be; its `indices` are those of the bad records.
        """
        if self._report is not None:
            try:
                append_report(self._report, bad)
            except OSError as error:
                warnings.warn(
                    f"error_report: {len(bad)} bad records of step {bad[0].step} of epoch {bad[0].epoch} are not in "
                    f"{self._report}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self.spent += len(bad)
        if self.spent > self._most:
            last = bad[-1]
            raise WorkerError(
                f"step {last.step} of epoch {last.epoch} failed: bad records so far: {self.spent}, and max_bad allows "
                f"{self._most}; the last is index {last.index}, in {last.text}",
                step=last.step,
                epoch=last.epoch,
                indices=tuple(record.index for record in bad),
                worker=worker,
            )


def substitute(seed: int, epoch: int, index: int, good: Int64Array) -> int:
    """The record to put in the place of a bad one: the same on every run, and another for each bad record.

    Args:
        seed: The loader's seed.
        epoch: Number of the epoch.
        index: The bad record.
        good: (n,) int64, at least one: the good records of the same step, so that nothing comes in that the order
            does not serve.
    """
    candidates = np.unique(good)
    key = derive_key(seed, "replace", epoch, index, words=1)[0]
    return int(candidates[np.argmin(hash64(key, candidates))])


def append_report(path: str, bad: Iterable[BadRecord]) -> None:
    """Add records to a JSONL report: one object a line, all in one write, so that ranks can share a file.

    Raises:
        OSError: They cannot be written.
    """
    lines = "".join(json.dumps(record.to_json()) + "\n" for record in bad).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, lines)
    finally:
        os.close(descriptor)
    if written < len(lines):
        raise OSError(f"only {written} of {len(lines)} bytes could be written")


def _writable(path: Any) -> str:
    """`path`, absolute, for the process may go elsewhere; refused if it cannot be appended to."""
    try:
        found = os.path.abspath(os.fspath(path))
        append_report(found, [])
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"error_report must be the path of a file that can be written to, got {path!r}: {reason}",
            key="error_report",
            value=path,
        ) from error
    return found


def read_excluded(exclude: Any, length: int, locate: Callable[[int], Any] | None = None) -> Int64Array | None:
    """The records that are never read, from indices or from a report.

    They change what becomes of some rows, not the order: no step or position is another one without them. So they
    are no part of a loader's state, and one that was saved before a record was found to be bad goes on with the
    record excluded, or the other way round.

    Args:
        exclude: None, integers in [0, length), or the path of a JSONL report.
        length: Records of the source.
        locate: Gives the `Location` of an index: a report that has a record in another place is of other data.

    Returns:
        (n,) int64, rising, each once; None if there is none.

    Raises:
        ConfigError: It is neither, the report cannot be read or is of other data, an index is none of the source's,
            or no record is left.
    """
    if exclude is None:
        return None
    if isinstance(exclude, (str, os.PathLike)):
        found = _read_report(os.fspath(cast("Any", exclude)), length, locate)
    else:
        found = _as_indices(exclude, length)
    indices = np.unique(np.array(found, np.int64))
    if length and len(indices) == length:
        raise ConfigError(f"exclude names all {length} records of the source: none is left", key="exclude")
    return indices if len(indices) else None


def _as_indices(exclude: Any, length: int) -> list[int]:
    if isinstance(exclude, Iterable) and not isinstance(exclude, (bytes, bytearray)):
        items: list[Any] = list(cast("Iterable[Any]", exclude))
        wrong = [item for item in items if not _is_index(item, length)]
        if not wrong:
            return [int(item) for item in items]
        shown = ", ".join(printable(repr(item), 80) for item in wrong[:_SHOWN]) + (", ..." if wrong[_SHOWN:] else "")
    else:
        shown = printable(repr(exclude), 80)
    raise ConfigError(
        f"exclude must be indices in [0, {length}) or the path of an error report, got {shown}",
        key="exclude",
        value=exclude,
    )


def _is_index(value: Any, length: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < length


def _read_report(path: Any, length: int, locate: Callable[[int], Any] | None) -> list[int]:
    def wrong(reason: str) -> ConfigError:
        message = f"exclude must be an error report, JSON with an 'index' in each line; {path}{reason}"
        return ConfigError(message, key="exclude", value=path)

    found: dict[int, None] = {}
    try:
        with open(path, encoding="utf-8") as stream:
            for number, line in _numbered(stream):
                try:
                    entry: Any = json.loads(line)
                except ValueError as error:
                    raise wrong(f", line {number}: {error}") from error
                index: Any = entry.get("index") if isinstance(entry, dict) else None
                if not _is_index(index, length):
                    raise wrong(f", line {number} has {index!r}, and the source has {length} records")
                if index not in found and locate is not None:
                    differs = _other_place(entry, locate(index))
                    if differs:
                        raise wrong(f", line {number} is of other data: record {index} is {differs}")
                found[index] = None
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f" cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return list(found)


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _other_place(entry: dict[str, Any], here: Any) -> str:
    """How the place of a reported record differs from where it is here; empty if it does not."""
    for name in ("record", "key"):
        there = entry.get(name)
        if there is not None and there != getattr(here, name):
            return f"{name} {there!r} there, {getattr(here, name)!r} here"
    there, shard = entry.get("shard"), here.shard
    # The data may have been moved, but not renamed.
    if there is not None and os.path.basename(str(there)) != os.path.basename(shard or ""):
        return f"in {there!r} there, in {shard!r} here"
    return ""
