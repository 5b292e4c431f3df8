"""The failures of steps: bad records and their reports, the stages of a step, and whose fault a failure is."""

import contextlib
import dataclasses
import inspect
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, Self, TypeAlias, cast

import numpy as np

from dataload._util.clock import DecodeClock
from dataload._util.failures import BUG, RAISE, Owner, owner_of
from dataload._util.indexing import distinct
from dataload.errors import ConfigError, WorkerError, message_of, printable, text_of, traceback_of
from dataload.executors.base import WorkerStatus, worker_name
from dataload.sources.shards import locate
from dataload.storage import absolute, base_name, is_url
from dataload.storage.local.files import append_text, read_text
from dataload.types import Int64Array

_FEWEST_READ = 1000  # records read before a fraction is checked
_SHOWN_ITEMS = 3
_SHOWN_SOURCE_CHARACTERS = 200
_LINE_BEGINS = '{"epoch": '


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """One record that failed at one step; a line of an error report."""

    epoch: int
    step: int
    index: int
    source: str
    # Where the record lies, as far as the source says: the file or part of the data set, and the record's number (else
    # `index`) and name there.
    shard: str | None
    record: int
    key: str | None
    stage: str  # what failed: ``"read"``, or the transform with its name
    error: str  # class of the exception
    cause: str  # message of the exception; the beginning and the end of a very long one
    replaced_by: int | None = None  # index of the record that replaced it, or None

    @classmethod
    def of(cls, source: Any, index: int, stage: str, error: BaseException, *, epoch: int, step: int) -> Self:
        """Describe the failure of a record of any source."""
        location = locate(source, index)
        path = getattr(error, "path", None)
        return cls(
            epoch=epoch,
            step=step,
            index=index,
            source=shown(source),
            shard=path if location.shard is None and isinstance(path, str) else location.shard,
            record=location.record,
            key=location.key,
            stage=stage,
            error=type(error).__name__,
            cause=text_of(error),
        )

    @property
    def text(self) -> str:
        """Stage, class and message, for messages."""
        return f"{self.stage}: {self.error}: {self.cause}"


class Budget:
    """Counts records as the consumer receives their steps, and reports bad ones; more than `most` are an error."""

    # The count goes on over all epochs, so a record that fails in each of them counts each time. The report, a JSONL
    # file, is created at once, so that an error shows before the first batch.

    def __init__(self, most: int | float, report: str | os.PathLike[str] | None) -> None:
        self._most = most
        self._report: str | None = None
        self.start()
        if report is None:
            return
        try:
            if is_url(os.fspath(report)):
                raise ValueError("nothing can be appended to a URL")
            self._report = absolute(os.fspath(report))  # the working directory may change
            append_report(self._report, [])
        except (OSError, TypeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"error_report must be the path of a file that can be written to, got {report!r}: {reason}",
                key="error_report",
                value=report,
            ) from error

    def start(self, read: int = 0, spent: int = 0) -> None:
        """Count from these numbers of records that were read, and of bad ones among them."""
        self.read: int = read
        self.spent: int = spent
        self._last = ""

    def spend(
        self, read: int, bad: Sequence[BadRecord], *, epoch: int, step: int, worker: str, where: str | None = None
    ) -> None:
        """Count the records read for a step, and the bad ones; raise if too many are bad."""
        self.read += read
        if bad:
            self.spent += len(bad)
            self._last = f"; the last is index {bad[-1].index}, in {bad[-1].text}"
        elif not self.spent:
            return
        where = where or f"step {step} of epoch {epoch}"
        if bad and self._report is not None:
            try:
                append_report(self._report, bad)
            except OSError as error:
                warnings.warn(
                    f"error_report: {len(bad)} bad records of {where} are missing from {self._report}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        is_share = isinstance(self._most, float)
        most = self._most * self.read if is_share else self._most
        if self.spent <= most or (is_share and self.read < _FEWEST_READ):
            return
        raise WorkerError(
            f"{where} failed: bad records so far: {self.spent} of {self.read} ({self.spent / self.read:.2%}), and "
            f"max_bad allows {self._most}{self._last}",
            step=step,
            epoch=epoch,
            indices=tuple(record.index for record in bad),
            worker=worker,
        )


def shown(source: Any) -> str:
    """Return the repr of a source, shortened."""
    text = f"{type(source).__name__} without a repr"
    with contextlib.suppress(Exception):
        text = repr(source)
    return printable(text, _SHOWN_SOURCE_CHARACTERS)


def append_report(path: str, bad: Iterable[BadRecord]) -> None:
    """Append records to a report, one JSON object per line, in a single write, so that ranks can share a file."""
    append_text(path, "".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in bad))


def read_excluded(exclude: Any, source: Any) -> Int64Array | None:
    """Return the records that are never read, (n,) int64, ascending and unique; None if there are none."""
    # Excluding records changes rows, but no step and no position of the order, so it is not part of a loader's state: a
    # state saved before a record was excluded stays valid, and so does one saved after.
    if exclude is None:
        return None
    length = len(source)
    if isinstance(exclude, (str, os.PathLike)):
        found = _read_report(os.fspath(cast("Any", exclude)), source, length)
    else:
        found = _as_indices(exclude, length)
    indices = distinct(np.array(found, np.int64))
    if length and len(indices) == length:
        raise ConfigError(f"exclude names all {length} records of the source: none is left", key="exclude")
    return indices if len(indices) else None


def _as_indices(exclude: Any, length: int) -> Sequence[Any] | Int64Array:
    if isinstance(exclude, np.ndarray) and exclude.ndim == 1 and exclude.dtype.kind in "iu":  # it may have millions
        array = cast("Int64Array", exclude)
        if ((array >= 0) & (array < length)).all():
            return array
    listed = isinstance(exclude, Iterable) and not isinstance(exclude, (bytes, bytearray))
    items: list[Any] = list(cast("Iterable[Any]", exclude)) if listed else [exclude]
    wrong = [item for item in items if not listed or not _is_index(item, length)]
    if not wrong:
        return items
    shown = ", ".join(printable(repr(item), 80) for item in wrong[:_SHOWN_ITEMS])
    raise ConfigError(
        f"exclude must be indices in [0, {length}) or the path of an error report, got {shown}"
        f"{', ...' if len(wrong) > _SHOWN_ITEMS else ''}",
        key="exclude",
        value=exclude,
    )


def _is_index(value: Any, length: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 <= int(value) < length


def _read_report(path: str, source: Any, length: int) -> list[int]:
    def wrong(reason: object) -> ConfigError:
        message = f"exclude must be an error report, JSON with an 'index' in each line; {path}{reason}"
        return ConfigError(message, key="exclude", value=path)

    if is_url(path):
        raise wrong(" is a URL: copy it to this machine first")
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(f" cannot be read: {getattr(error, 'strerror', None) or error}") from error
    found: set[int] = set()
    torn: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry: Any = json.loads(line)
        except ValueError as error:
            if line.startswith(_LINE_BEGINS) or _LINE_BEGINS.startswith(line):
                torn.append(number)
                continue
            raise wrong(f", line {number}: {error}") from error
        index: Any = entry.get("index") if isinstance(entry, dict) else None
        if not _is_index(index, length):
            raise wrong(f", line {number} has index {index!r}, and the source has {length} records")
        if index not in found:
            differs = _location_difference(entry, locate(source, index))
            if differs:
                raise wrong(f", line {number} is about other data: record {index} is {differs}")
            found.add(index)
    if torn:
        warnings.warn(
            f"exclude: {path} has incomplete lines, as a full disk leaves them, and their records are not excluded: "
            f"{', '.join(map(str, torn[:_SHOWN_ITEMS]))}{', ...' if len(torn) > _SHOWN_ITEMS else ''}",
            RuntimeWarning,
            stacklevel=2,
        )
    return list(found)


def _location_difference(entry: dict[str, Any], here: Any) -> str:
    """Describe how the location in a report differs from the one in the source; "" if it does not."""
    for name in ("record", "key"):
        there = entry.get(name)
        if there is not None and there != getattr(here, name):
            return f"{name} {there!r} there, {getattr(here, name)!r} here"
    there, shard = entry.get("shard"), here.shard
    # The data may have been moved, but not renamed.
    if there is not None and base_name(str(there)) != base_name(shard or ""):
        return f"in {there!r} there, in {shard!r} here"
    return ""


OnError: TypeAlias = Literal["raise", "skip", "replace"]
"""Treatment of a record that fails; see `ErrorPolicy`."""

_NONE = np.empty(0, np.int64)
_SPREAD_EXAMPLES = 16

StageSpan: TypeAlias = tuple[str, float, float]
"""A stage, and its begin and end in seconds of `time.perf_counter`, which all processes of a machine share."""


class StageError(Exception):
    """A failure and its stage, and the record at fault if it is a single one; becomes a `WorkerError`."""

    def __init__(self, stage: str, error: BaseException, index: int | None = None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error
        self.index = index

    @property
    def record_may_be_at_fault(self) -> bool:
        """True if the record may be at fault, so that another one might succeed."""
        return self._owner == "record"

    @property
    def advice(self) -> str:
        """Advice that the error itself does not give; may be empty."""
        return f"\n  {BUG}" if self._owner == "dataload" else ""

    @property
    def _owner(self) -> Owner | None:
        about_records = self.stage.startswith(("read", "transform")) and isinstance(self.error, Exception)
        return owner_of(self.error) if about_records else None


class StepTrace:
    """The progress of one step: its stages, how long each took, and its bad records."""

    # `clock` counts the parts of a stage that are spent decoding and waiting for downloads. They become spans of their
    # own at the ends of the stage, because a read may switch between them often.

    __slots__ = ("_begun", "bad", "clock", "index", "spans", "stage", "status", "transform")

    def __init__(self, status: WorkerStatus | None = None, reader: int = 0) -> None:
        self.status: WorkerStatus = WorkerStatus() if status is None else status
        self.stage: str = ""  # the one in progress; "" between stages
        self.transform: str = ""  # the one that failed, if any
        self.index: int | None = None  # the record that the stage works on, if it is a single one
        self.spans: list[StageSpan] = []
        self.bad: list[BadRecord] = []
        self.clock: DecodeClock = DecodeClock(reader)
        self._begun = 0.0

    def enter(self, stage: str, index: int | None = None) -> None:
        """End the stage in progress, and begin another one."""
        now = perf_counter()
        if self.stage:
            decoded, begun = self.clock.take_seconds(), self._begun
            if waited := self.clock.take_wait():
                self.spans.append(("download", begun, begun + waited))
                begun += waited
            self.spans.append((self.stage, begun, now - decoded))
            if decoded:
                self.spans.append(("decode", now - decoded, now))
        self.stage, self.index, self.transform, self._begun = stage, index, "", now

    def leave(self) -> None:
        """End the stage in progress."""
        self.enter("")

    def failure(self, error: BaseException) -> StageError:
        """End the stage that raised `error`, and return the error with that stage."""
        if isinstance(error, StageError):
            return error
        stage = f"transform {self.transform!r}" if self.transform else self.stage
        index = self.index
        self.leave()
        return StageError(stage, error, index)


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """The treatment of records that fail.

    Only reading and transforming are a record's own fault, and only if `owner_of` the failure says so. A failing
    collate or batch transform, a store, the machine and bugs of dataload are raised for every `action`.

    The action `raise` ends the iteration. `skip` leaves the row out; a step without a good record gives a batch without
    rows. `replace` puts another record of the same step in the row; a step without a good record is an error. Packed
    records have room for their own length, so `replace` leaves a gap, as `skip` does.

    `excluded`, (n,) int64, ascending, are records known to be bad, which are never read. `raise` leaves them out, too.
    """

    action: OnError = "raise"
    excluded: Int64Array | None = None

    def excluded_among(self, indices: Int64Array) -> Int64Array:
        """Return the `indices` that must not be read."""
        if self.excluded is None or not len(self.excluded):
            return _NONE
        positions = np.minimum(np.searchsorted(self.excluded, indices), len(self.excluded) - 1)
        return indices[self.excluded[positions] == indices]

    def examples(self, near: int, length: int) -> list[int]:
        """Return some records that may be read, out of `length`, those closest to the record `near` first."""
        # Their distances double, so the first are in a shard that the step has read, which need not be waited for. Some
        # are spread over the whole source, because many records in a row may be damaged.
        excluded = _NONE if self.excluded is None else self.excluded
        left = length - len(excluded)
        rank = near - int(np.searchsorted(excluded, near))
        away = 1 << np.arange(left.bit_length())
        spread = np.linspace(0, left - 1, min(_SPREAD_EXAMPLES, left)).astype(np.int64)
        ranks = np.unique(np.concatenate([[rank], rank - away, rank + away, spread]))
        ranks = ranks[(ranks >= 0) & (ranks < left)]
        ranks = ranks[np.argsort(np.abs(ranks - rank), kind="stable")]
        # The r-th remaining record follows those excluded records that have at most r remaining ones before them.
        return (ranks + np.searchsorted(excluded - np.arange(len(excluded)), ranks, side="right")).tolist()


def step_error(
    step: int, epoch: int, where: str, error: BaseException, indices: tuple[int, ...] = (), details: str = ""
) -> WorkerError:
    """Return the error of a step, such as "step 3 of epoch 0 failed in collate: no memory", with details at its end."""
    return WorkerError(
        f"step {step} of epoch {epoch} failed{where}: {message_of(error)}{details}",
        step=step,
        epoch=epoch,
        indices=indices,
        worker=worker_name(),
        traceback_text=traceback_of(error),
    )


def is_for_consumer(error: BaseException) -> bool:
    """Return whether `error` is meant to end the consumer's thread: Ctrl-C, or what a signal handler raises."""
    # Workers never receive these. Other exceptions like them were raised by, say, a transform that calls `sys.exit`,
    # and are failures of the step, in every kind of worker.
    entry = error.__traceback__
    if isinstance(error, Exception) or worker_name().startswith("dataload-") or entry is None:
        return False
    while (called := entry.tb_next) is not None:
        # A handler gets the frame that it interrupts, and is called by it.
        code, interrupted = called.tb_frame.f_code, entry.tb_frame
        if code.co_flags & inspect.CO_OPTIMIZED:
            for value in called.tb_frame.f_locals.values():
                several = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)  # of *args
                if any(item is interrupted for item in several):
                    return True
        entry = called
    # Python's own handler of Ctrl-C has no frame. What Python code raises ends with its `raise`.
    return isinstance(error, KeyboardInterrupt) and entry.tb_frame.f_code.co_code[entry.tb_lasti] != RAISE
