"""The failures of a step: the stages it passes, what fails in which, and whose fault that is."""

import inspect
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from dataload._util.clock import DecodeClock
from dataload._util.failures import BUG, RAISE, Owner, owner_of
from dataload.errors import WorkerError, message_of, traceback_of
from dataload.executors.base import WorkerStatus, worker_name
from dataload.loader.bad_records import BadRecord
from dataload.types import Int64Array

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
