"""The base of all loaders: the iteration protocol, epochs, statistics, and closing."""

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from os import getpid
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from dataload._util.interactive import SaysInstead, html_table
from dataload._util.settings import check_count
from dataload.collate import Collate, Pack
from dataload.collate.collate import warn_of_padding
from dataload.errors import ClosedSourceError, WorkerError
from dataload.executors.base import WorkerLostError
from dataload.loader.pipeline import StepDelivery
from dataload.loader.recorder import Recorder
from dataload.loader.state import Cursor
from dataload.loader.statistics import Statistics
from dataload.loader.step import StepResult
from dataload.types import Batch

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    BatchT = TypeVar("BatchT", default=Batch)  # without `batch_transform`; a default needs Python 3.13 when it runs
else:
    BatchT = TypeVar("BatchT")


@dataclass(slots=True, eq=False)
class EpochIteration:
    """One ``for`` over a loader."""

    epoch: int
    step: int  # steps of the epoch that were received
    steps: int | None  # steps of the epoch; None if that is unknown before its end


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a loader."""

    epoch: int
    epochs: int | None  # if their number was set
    step: int  # steps of the epoch that the consumer has received
    steps: int | None  # of the epoch; None if that is unknown before its end
    rows_per_second: float  # mean since the loader was built, as the consumer saw it

    def __str__(self) -> str:
        epochs = "" if self.epochs is None else f" of {self.epochs}"
        steps = "" if self.steps is None else f" of {self.steps:,}"
        return f"epoch {self.epoch}{epochs}, step {self.step:,}{steps}, {self.rows_per_second:,.0f} rows/s"


class LoaderBase(SaysInstead, ABC, Generic[BatchT]):
    """An iterable of batches that is resumable at any step."""

    # `release` stops the workers. It is called when the loader is closed or dropped, so it must not refer to the
    # loader.

    _habits = "loader"
    _goes_on = False
    """Whether steps in flight are kept when a step fails, because the iteration may go on."""
    _around: Callable[[], AbstractContextManager[Any]] | None = None
    """Returns the context in which the consumer waits for a batch, if there is one. Read when a ``for`` begins."""

    def __init__(self, *, recorder: Recorder, workers: int, epochs: int | None, release: Callable[[], None]) -> None:
        self._recorder = recorder
        self._workers = workers  # in use
        self._workers_allowed = workers
        self._epochs = epochs
        self._release = release
        weakref.finalize(self, release)
        self._delivery: StepDelivery | Generator[StepResult] | None = None
        self._process = getpid()
        self._waits = 0  # the process of a thread that waits for a batch, if one does
        self._cursor = Cursor(0, 0)
        self._upcoming: Cursor | None = None  # where the next `for` starts, if that was set
        self._now: EpochIteration | None = None  # the `for` in progress
        self._closed = False
        self._pads: Any = None  # what collates, until its padding was looked at

    @property
    def epoch(self) -> int:
        """The epoch of the ``for`` in progress, or else of the next one."""
        return self._now.epoch if self._now else self._start().epoch

    @property
    def step(self) -> int:
        """Steps of that epoch that the consumer has received."""
        return self._now.step if self._now else self._start().received

    def progress(self) -> Progress:
        """Return the position of the ``for`` in progress, or else the start of the next one."""
        return Progress(
            epoch=self.epoch,
            epochs=self._epochs,
            step=self.step,
            steps=self._now.steps if self._now else self._steps(self._start()),
            rows_per_second=self._recorder.snapshot(self._workers).rows_per_second,  # cheaper than `statistics`
        )

    def statistics(self) -> Statistics:
        """Return where the time went since the loader was built."""
        return self._recorder.snapshot(self._workers, self._workers_allowed, self._start_method())

    @abstractmethod
    def _known_rank(self) -> int | None:
        """Return the rank; None until it is known."""

    @abstractmethod
    def _start_method(self) -> str | None:
        """Return how worker processes started; None if none has."""

    def __iter__(self) -> Iterator[BatchT]:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`.

        The iteration starts with its first batch. A new iteration ends the previous one.

        Raises:
            ClosedSourceError: The loader is closed.
            RuntimeError: By the iterator: another iteration was started, or a state was loaded.
            WorkerError: By the iterator: a step failed. The state stays before that step.
            ChangedFileError: By the iterator, after the last batch: a file was overwritten while it was read.
        """
        self._check_open()
        return self._iterate()

    def _iterate(self) -> Generator[BatchT]:
        now = self._enter()
        if now is not None:
            yield from self._serve(now)

    def _enter(self) -> EpochIteration | None:
        """Begin an iteration; None if there are no more epochs."""
        self._check_open()
        self._check_idle()
        if self._process != getpid():  # a fork: the steps in flight are the parent's
            self._process = getpid()
            self._stop_delivery()
        cursor = self._start()
        if cursor != self._cursor:
            self._move(cursor)
        self._upcoming = None
        if self._epochs is not None and cursor.epoch >= self._epochs:
            return None
        self._now = now = EpochIteration(cursor.epoch, cursor.received, self._steps(cursor))
        return now

    def _serve(self, now: EpochIteration) -> Generator[BatchT]:
        self._recorder.resume()
        take = self._next if self._around is None else partial(self._next_inside, self._around)
        try:
            if now.step == now.steps:  # the epoch has no steps, or the rest of it fills none
                self._move(Cursor(now.epoch + 1, 0))
            if now.steps == 0:
                message = f"{self!r} has no batches: it has no records, or too few for a step, which tail='drop' drops"
                warnings.warn(message, stacklevel=3)
            while now.steps is None or now.step < now.steps:
                self._check_current(now)
                batch = take(now)  # a list, because no name here may refer to the batch while the consumer has it
                if not batch:
                    break
                yield batch.pop()
            if self._now is now:
                self._recorder.pause()
            self._check_files()
        finally:
            if self._now is now:
                self._now = None
                if self._upcoming is not None:
                    self._move(self._upcoming)

    def _next_inside(self, around: Callable[[], AbstractContextManager[Any]], now: EpochIteration) -> list[BatchT]:
        with around():
            return self._next(now)

    def _next(self, now: EpochIteration) -> list[BatchT]:
        """Return the next batch in a list, empty if the epoch is over. If this fails, the cursor does not move."""
        delivery = self._delivery or self._deliver()
        step: StepResult | None = None
        self._recorder.begin_wait()
        try:
            self._waits = self._process
            try:
                step = next(delivery, None)
            finally:
                self._waits = 0
            if step is None:
                return self._end_epoch(now)
            self._recorder.end_wait(step)
            if step.error is not None:
                raise step.error
            return [self._accept(step, now)]
        except WorkerLostError as lost:
            self._stop_delivery()
            raise self._lost(lost) from None
        except WorkerError:
            step = None
            if not self._goes_on:
                self._stop_delivery()
            raise
        except BaseException:  # including Ctrl-C: the steps in flight would lack one
            step = None  # the error's traceback refers to this frame, and the two would keep each other alive
            self._stop_delivery()
            raise

    def _look_at_padding(self, batch: BatchT) -> None:
        """Warn of the padding of the first batch, which workers do not: each would."""
        if self._pads is None:
            return
        collate, self._pads = self._pads, None
        if isinstance(collate, Pack) and collate.row_length is not None:
            collate.log_fill(batch)
        if isinstance(collate, (Collate, Pack)) and collate.pad_value is None:
            warn_of_padding(collate.padded_fields(batch), stacklevel=6)

    @abstractmethod
    def _deliver(self) -> StepDelivery | Generator[StepResult]:
        """Start to work ahead from the cursor; sets and returns `_delivery`."""

    @abstractmethod
    def _accept(self, step: StepResult, now: EpochIteration) -> BatchT:
        """Move past a step, and return its batch."""

    def _check_files(self) -> None:
        """Raise ChangedFileError at the end of an epoch during which a mapped file was overwritten."""

    def _end_epoch(self, now: EpochIteration) -> list[BatchT]:
        """End an epoch whose length was unknown. Return its last batch, or nothing."""
        raise NotImplementedError

    @abstractmethod
    def _lost(self, lost: WorkerLostError) -> WorkerError:
        """Return the error for the loss of a worker."""

    @abstractmethod
    def _steps(self, cursor: Cursor) -> int | None:
        """Return the number of steps of an epoch, or None if that is unknown."""

    def _start(self) -> Cursor:
        """Return where the next ``for`` starts."""
        if self._upcoming is not None:
            return self._upcoming
        return Cursor(self._cursor.epoch + 1, 0) if self._cursor.begun else self._cursor

    def _move(self, cursor: Cursor) -> None:
        self._stop_delivery()
        self._cursor = cursor

    def _restore(self, cursor: Cursor) -> None:
        """Make the next ``for`` start at `cursor`, and end the one in progress."""
        self._upcoming = cursor
        self._now = None

    def _stop_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` serve `epoch` from its start. Not needed otherwise: epochs advance by themselves.

        A ``for`` in progress continues to its end. Nothing changes if `epoch` would come next anyway: batches
        prefetched from it are used, and an epoch restored by `load_state_dict` keeps its position.
        """
        check_count("epoch", epoch, least=0)
        if epoch != self._start().epoch:
            self._upcoming = Cursor(epoch, 0)
            if self._now is None:
                self._move(self._upcoming)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedSourceError("the loader is closed: build another one to iterate")

    def _check_idle(self) -> None:
        """Raise if a thread waits for a batch: this one, in a transform that changes the loader, or another one."""
        if self._waits == getpid():
            raise RuntimeError(
                "this loader is waiting for a batch: load a state, change weights or begin another iteration between "
                "two batches, in the thread that iterates"
            )

    def _check_current(self, now: EpochIteration) -> None:
        if self._now is not now:
            self._check_open()
            raise RuntimeError(
                "this iteration ended when another one was started (or the loader's state was set): "
                "for two at a time build two loaders"
            )

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer as a dict for JSON."""

    def close(self) -> None:
        """Stop the workers after their current work, and close streams. May be called twice."""
        self._closed = True
        self._now = None
        with suppress(ValueError):  # another thread waits for a batch, which ends with the workers
            self._stop_delivery()
        self._release()

    def __reduce__(self) -> Any:
        """Refuse copies and pickles: a copy would share the position and the workers."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: build it in the process that iterates, and pass "
            "state_dict() on to continue there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._summary()}, epoch {self.epoch}, step {self.step})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), str(self.statistics()).splitlines() if self._recorder.steps else ())

    @abstractmethod
    def _summary(self) -> str:
        """Return the data, the rows and the rank for `repr`."""
