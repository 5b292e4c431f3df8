"""The loader of a data set of one's own: its workers, which take turns, their states, and their failures."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Generic, cast

from dataload.errors import ConfigError, StateMismatchError, WorkerError
from dataload.executors.base import WorkerLostError
from dataload.loader.base import BatchT, EpochIteration
from dataload.loader.loader import Loader
from dataload.loader.order import rank_and_world_size
from dataload.loader.pipeline import StepDelivery, StepGroups, one_by_one
from dataload.loader.scaling import WorkerSettings
from dataload.loader.state import Cursor
from dataload.loader.step import StepResult, StepWork
from dataload.samplers import BatchPlanner
from dataload.torch.worker import Reading, Report, Start, Turn, UserWork

_KILLED = re.compile(r"\(process (\d+)\) was killed by (\S+)")
_LATE = re.compile(r"has returned no batch for .* \(timeout=([0-9.]+)\)")


def as_original(error: WorkerError) -> WorkerError:
    """Return a step's error as an error of its cause's class, too, where both can be combined and pickled."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, StopIteration) or isinstance(error, type(cause)):
        return error
    try:
        made = _rebuilt(type(cause), str(error), {**vars(cause), **vars(error)}, cause)
        pickle.loads(pickle.dumps(made))  # noqa: S301 - our own error
    except Exception:  # the class of the cause may do anything
        return error
    return made


def with_words_of_torch(error: WorkerError) -> WorkerError:
    """Return the error of a lost worker with the sentence by which programs recognise torch's."""
    text = str(error)
    if found := _KILLED.search(text):
        error.args = (f"{text}\nDataLoader worker (pid {found[1]}) is killed by signal: {found[2]}. ",)
    elif found := _LATE.search(text):
        error.args = (f"{text}\nDataLoader timed out after {float(found[1]):g} seconds",)
    return error


def _rebuilt(kind: type[Exception], message: str, attributes: dict[str, Any], cause: BaseException | None) -> Any:
    both = _combined(kind)
    made = both.__new__(both, message)
    made.args = (message,)
    for base in kind.__mro__:  # attributes of built-in classes, such as errno
        for name, member in vars(base).items():
            is_own = isinstance(member, (MemberDescriptorType, GetSetDescriptorType)) and name != "args"
            if is_own and not name.startswith("__"):
                with suppress(AttributeError):  # not all have a value
                    setattr(made, name, getattr(cause, name))
    for name, value in attributes.items():
        setattr(made, name, value)
    made.__cause__ = cause
    return made


@functools.cache
def _combined(kind: type[Exception]) -> Any:
    def new(cls: Any, *args: Any, **_: Any) -> Any:
        return kind.__new__(cls, *args)  # the memory of an OSError, say, is not a RuntimeError's

    def init(self: Any, message: str = "", **named: Any) -> None:
        BaseException.__init__(self, message)
        vars(self).update({"step": -1, "epoch": -1, "indices": (), "worker": "main", "traceback_text": "", **named})

    def reduce(self: Any) -> Any:
        _, (_, args), (attributes, cause) = WorkerError.__reduce__(self)
        return _unpickled, (kind, args[0], attributes, cause)

    body = {"__new__": new, "__init__": init, "__reduce__": reduce, "__str__": _message, "__module__": __name__}
    return type(kind.__name__, (WorkerError, kind), {**body, "__qualname__": kind.__qualname__})


def _unpickled(kind: type[Exception], message: str, attributes: dict[str, Any], cause: bytes | None) -> Any:
    return _rebuilt(kind, message, attributes, None if cause is None else pickle.loads(cause))  # noqa: S301 - see above


def _message(error: BaseException) -> str:
    return str(error.args[0])


_REPEATS = (
    "the first samples of two workers are equal, and the IterableDataset did not ask which worker it is in: each "
    "worker gives all of the data. In __iter__, give each worker its part: info = torch.utils.data.get_worker_info(); "
    "itertools.islice(samples, info.id, None, info.num_workers) (or use num_workers=1)"
)
_SEEDS = (
    "worker_init_fn seeds a random generator, so the loader does not seed it for each step: random items differ after "
    "this state is loaded"
)
_OF_PARTS = "fetcher_state", "dataset_state", "batches"


class UserLoader(Loader[BatchT]):
    """A `Loader` whose batches are made by `UserWork` if `reading` is given. `dataset` is what that reads.

    After an error, an iteration goes on: `_next` returns a `StepFailure`, because the generator behind an iteration
    cannot raise and go on. Start the workers after `_enter`, by `_start_workers`.
    """

    def _set_up(self, dataset: Any, reading: Reading | None, settings: Mapping[str, Any]) -> None:
        """Build the loader, at its start."""
        self._read_here, self._reading = dataset, reading
        super().__init__(**settings)
        self._parts: dict[int, Any] = {}  # of the workers' states, when the last batch was received
        self._restored = False  # whether the next iteration continues from them
        self._snapshot: tuple[Cursor, dict[int, Any]] = self._cursor, {}  # a position, and the parts at it
        self._repeated = 0  # step up to which batches are dropped, since a snapshot was loaded
        self._ended: set[int] = set()  # workers without data left in this epoch
        self._taken: Counter[int] = Counter()  # tasks in flight by worker
        self._firsts: dict[str, int] = {}  # workers by the digest of their first samples
        self._seeds_itself = False
        self._failed: int | None = None  # the step that failed, until the iteration goes on
        if reading is not None:
            self._scaling = None  # use exactly num_workers processes, as torch does
            self._prefetch_bytes = math.inf
            self._goes_on = True

    @property
    def _keeps_state(self) -> bool:
        return self._reading is not None and self._reading.keeps_state

    @property
    def _is_stream(self) -> bool:
        return self._reading is not None and self._reading.stream

    def _begin(self, plan: BatchPlanner, work: StepWork, workers: WorkerSettings, epochs: int | None) -> None:
        if self._reading is not None:
            work = UserWork(work, self._read_here, self._reading)
        super()._begin(plan, work, workers, epochs)

    def _start_workers(self, worker_init_fn: Callable[[int], object] | None) -> None:
        """Start the workers, unless they run; with their parts of a state, if there is one."""
        reading, work, cursor = cast("Reading", self._reading), cast("UserWork", self._work), self._cursor
        work.worker_init_fn = worker_init_fn
        parts = self._parts if self._restored else {}
        self._repeated = self._repeated if self._restored else 0
        self._restored, self._failed, self._ended, self._firsts = False, None, set(), {}
        starts = [
            Start(number, cursor.epoch, cursor.step, parts.get(number)) for number in range(max(1, reading.num_workers))
        ]
        if reading.keeps_state or (reading.num_workers and not self._executor.processes()):
            try:
                self._submit(starts, reading)
            except WorkerLostError as lost:
                self._executor.restart()
                raise self._lost(lost) from None
        self._snapshot = cursor, dict(self._parts)

    def _submit(self, starts: list[Start], reading: Reading) -> None:
        results = [self._executor.submit(cast("Any", start)) for start in starts]
        if len(self._executor.processes()) < reading.num_workers and reading.stream:
            raise ConfigError("some workers of an IterableDataset could not be started", key="num_workers")
        for result in results if reading.keeps_state else ():
            started = result.result().loaded[0]
            if started.error is not None:
                self._executor.restart()
                raise as_original(started.error)
            self._take(started)

    def _deliver(self) -> StepDelivery | Generator[StepResult]:
        self._taken.clear()
        if self._reading is None or self._reading.num_workers:
            return super()._deliver()
        self._delivery = delivery = cast("UserWork", self._work).here(self._plans, self._cursor, self._read_until())
        return delivery

    def _window(self) -> int:
        window = super()._window()
        return window if self._in_order or self._reading is None else max(0, window - 1)

    def _groups(self) -> StepGroups | None:
        if self._reading is None:
            return None
        return self._turns if self._reading.stream else one_by_one

    def _turns(self, steps: range, _: Callable[[], int]) -> Iterator[range]:
        """Yield the steps of a stream: in turns, or with ``in_order=False`` those of workers with the fewest tasks."""
        workers = cast("Reading", self._reading).num_workers
        upcoming = {number: steps.start + (number - steps.start) % workers for number in range(workers)}
        while active := [number for number in upcoming if number not in self._ended]:
            number = min(active, key=lambda number: (not self._in_order and self._taken[number], upcoming[number]))
            step, upcoming[number] = upcoming[number], upcoming[number] + workers
            self._taken[number] += 1
            yield range(step, step + 1)

    def _steps(self, cursor: Cursor) -> int | None:
        return None if self._is_stream else super()._steps(cursor)

    def _end_epoch(self, now: EpochIteration) -> list[Any]:
        self._move(Cursor(now.epoch + 1, 0))
        return []

    def _next(self, now: EpochIteration) -> list[Any]:
        """Return the next batch in a list, or a `StepFailure`."""
        if self._failed is not None:
            if self._is_stream and self._delivery is None:
                return []  # a worker is lost, and with it the position in the data
            self._cursor = self._cursor.after(self._failed, now.steps or 1 << 62)
            self._failed, now.step = None, now.step + 1
            if now.step == now.steps:
                return []
        while True:
            try:
                batch = super()._next(now)
            except WorkerError as error:
                if self._reading is None:
                    raise
                self._failed = error.step
                return [StepFailure([as_original(error)])]
            is_repeated = self._cursor.epoch == now.epoch and self._cursor.step <= self._repeated
            if not batch or (batch[0] is not Turn.ENDED and not is_repeated):
                return batch

    def _accept(self, step: StepResult, now: EpochIteration) -> Any:
        if step.batch is Turn.ENDED:
            now.step -= 1
        reading = self._reading
        if reading is None or not reading.num_workers:
            return super()._accept(step, now)
        worker = step.step % reading.num_workers
        self._taken[worker] -= 1
        if step.batch is Turn.ENDED:
            self._ended.add(worker)
        self._take(step)
        batch = super()._accept(step, now)
        if not self._cursor.step % reading.every:
            self._snapshot = self._cursor, dict(self._parts)
        return batch

    def _take(self, step: StepResult) -> None:
        """Take what the worker of a step reports."""
        report: Report | None = step.report
        if report is None:
            return
        if report.part is not None:
            self._parts[report.number] = report.part
        self._seeds_itself |= report.seeds_itself
        if report.first and self._firsts.setdefault(report.first, report.number) != report.number:
            self._firsts = dict.fromkeys(self._firsts, report.number)
            warnings.warn(_REPEATS, UserWarning, stacklevel=8)

    def _lost(self, lost: WorkerLostError) -> WorkerError:
        return with_words_of_torch(super()._lost(lost))

    def _stateful(self) -> tuple[Cursor, dict[str, Any]]:
        """Return the position of a state, and what it says of the workers, in the layout of torchdata's states."""
        if self._seeds_itself:
            warnings.warn(_SEEDS, UserWarning, stacklevel=3)
        reading, cursor, parts = self._reading, self._cursor, self._parts
        if reading is None or not reading.keeps_state:
            return cursor, {}
        named: dict[str, Any] = {
            "kind": "stateful",
            "rank": [*rank_and_world_size(rank_later=True)],
            "num_workers": reading.num_workers,
        }
        if not reading.num_workers:
            own = parts.get(0) if self._restored else copy.deepcopy(cast("UserWork", self._work).part())
            return cursor, {**named, **(own or {})}
        if reading.every > 1 and self._snapshot[0].epoch == cursor.epoch:
            named["_steps_since_snapshot"] = cursor.step - self._snapshot[0].step
            cursor, parts = self._snapshot
        kept = {f"worker_{number}": parts.get(number) for number in range(reading.num_workers)}
        return cursor, {**named, "_snapshot": {"_worker_snapshots": kept}}

    def _split(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, Any], int]:
        """Return a state without the parts of workers, the parts, and the steps to repeat; refuse those of others."""
        plain = dict(state)
        if plain.pop("kind", None) != "stateful":
            return plain, {}, 0
        here: Any = [*rank_and_world_size(rank_later=True)]
        differences = [] if (rank := plain.pop("rank", None)) == here else [f"rank: {rank} in the state, {here} here"]
        parts: dict[int, Any] = {}
        since = plain.pop("_steps_since_snapshot", 0)
        if (workers := plain.pop("num_workers", None)) is not None:
            here = cast("Reading", self._reading).num_workers if self._keeps_state else "no data set with a state"
            differences += [] if workers == here else [f"num_workers: {workers} in the state, {here} here"]
            parts = {0: {name: plain.pop(name) for name in _OF_PARTS if name in plain}}
            with suppress(KeyError):
                parts = dict(enumerate(plain.pop("_snapshot")["_worker_snapshots"].values()))
        if differences:
            raise StateMismatchError(
                "the state has states of data sets or samplers in it, which belong to one rank and number of workers",
                differences=differences,
            )
        return plain, parts, since

    def _continue(self, parts: dict[int, Any], since: int) -> None:
        """Make the next iteration continue with the parts of a state, after `since` steps that are repeated."""
        self._parts, self._restored = parts, True
        self._repeated = self._cursor.step + since if since else 0
        self._snapshot = self._cursor, dict(parts)
        if self._reading is not None:
            self._executor.restart()


class StepFailure(list[WorkerError]):
    """The error of a step in a list, in place of its batch."""


class EpochIterator(Generic[BatchT]):
    """The iterator of one epoch, which goes on after an error; with the length and the processes that torch's has."""

    def __init__(self, loader: Any, batches: Iterator[Any], length: int | None = None) -> None:
        self._batches = batches
        self._loader = loader
        self._workers: list[Any] = loader._executor.processes()
        self._length = length  # of an `IterableDataset`, if it was asked for
        self._yielded = 0

    def __iter__(self) -> Iterator[BatchT]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> BatchT:
        batch = next(self._batches)
        if type(batch) is StepFailure:
            raise batch.pop()
        self._yielded += 1
        if self._length is not None and self._yielded > self._length:
            message = f"the IterableDataset has length {self._length}, but {self._yielded} samples have been fetched."
            where = " For multiprocessing data-loading, this happens if workers do not share the data."
            warnings.warn(message + where * bool(self._workers), UserWarning, stacklevel=2)
        return batch

    def close(self) -> None:
        """End the iteration."""
        cast("Generator[Any]", self._batches).close()
