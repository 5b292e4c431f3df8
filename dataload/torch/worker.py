"""The batches of a data set of one's own, made as torch makes them: in a worker process, or in the consumer's."""

from __future__ import annotations

import hashlib
import multiprocessing
import pickle
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from operator import length_hint
from os import getpid
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils import data
from torch.utils.data._utils import worker as torch_worker

from dataload._util.fingerprint import digest, identify
from dataload._util.randomness import keep_global_generators, seed_global_generators
from dataload.executors.base import WorkerStatus, worker_name
from dataload.loader.failures import StageError, StageSpan, StepTrace, is_for_consumer
from dataload.loader.pipeline import in_blocks
from dataload.loader.rescue import Rescue
from dataload.loader.state import Cursor, EpochPlanners
from dataload.loader.step import BLOCK_ROWS, StepRange, StepResult, StepsResult, StepWork, nbytes
from dataload.samplers import BatchPlan
from dataload.torch.drawn_order import KeyedPlan
from dataload.types import Int64Array

_NO_INDICES: Int64Array = np.empty(0, np.int64)


class Turn(Enum):
    """The batch of a step for which its worker has no data left."""

    ENDED = "ended"


class Start(NamedTuple):
    """The task that begins an epoch in a worker."""

    number: int  # of the worker
    epoch: int
    step: int  # the first one of all workers
    part: Mapping[str, Any] | None  # of a state, to continue from


class Report(NamedTuple):
    """Report of a worker about itself, sent with its batch."""

    number: int
    part: dict[str, Any] | None  # of a state; None if the loader does not need it
    seeds_itself: bool  # `worker_init_fn` has seeded a random generator
    first: str = ""  # digest of its first samples, if the data set did not ask which worker it is in


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The way in which a data set is read."""

    num_workers: int  # 0 for the consumer's process
    stream: bool  # whether it is iterated over
    collates: bool  # whether samples are read in batches, and not one by one
    batch_size: int  # of a stream
    drop_last: bool  # of a stream
    keeps_state: bool  # whether the data set or its iterator has a state to save, or is a stream
    every: int  # steps between two states of a stream that are sent to the loader
    in_turns: bool  # whether the workers take turns


class DataSetSource:
    """A data set of one's own as a source, for what a loader asks of one; `UserWork` reads it."""

    def __init__(self, dataset: Any, records: int) -> None:
        self.dataset = dataset
        self._records = records

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def fingerprint(self) -> str:
        try:
            return identify(self.dataset)
        except (TypeError, NotImplementedError):  # without a length
            return digest(type(self.dataset).__qualname__)

    def __repr__(self) -> str:
        return repr(self.dataset)


def state_of(holder: Any) -> Any:
    """Return the state of a data set or an iterator; None if it has none."""
    return holder.state_dict() if has_state(holder) else None


def has_state(holder: Any) -> bool:
    """Return whether a data set, iterator or sampler can save and restore its state."""
    return all(callable(getattr(holder, name, None)) for name in ("state_dict", "load_state_dict"))


class UserWork(StepWork):
    """Makes the batches of a data set of one's own, with torch's worker info in worker processes.

    Each step seeds the global random generators from the loader's seed, the epoch and the step. In the consumer's
    process they are restored afterwards. `worker_init_fn` has the last word: if it seeds a generator, no step does.
    """

    def __init__(self, work: StepWork, dataset: Any, reading: Reading) -> None:
        super().__init__(work.fetch, work.planner)
        self.worker_init_fn: Callable[[int], object] | None = None
        self._dataset = dataset
        self._reading = reading
        self._set_up_in = 0  # the process
        self._failed: StepResult | None = None  # what went wrong when this worker was set up
        self._seeds_itself = False
        self._info: _WatchedInfo | None = None
        self._number = 0
        self._stage = ""  # of the step in progress
        self._iterator: Any = None
        self._ended = False
        self._given = 0  # batches of this epoch
        self._first = ""

    def assign(self, task: Any) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride] - as a method
        """Return the number of the worker for a task; None for any."""
        if isinstance(task, Start):
            return task.number
        turns = self._reading.stream or self._reading.in_turns
        return task.start % self._reading.num_workers if turns else None

    def __call__(self, job: StepRange | Start, status: WorkerStatus) -> StepsResult:
        """Return the batch of a task, which is one step; see `StepWork`."""
        begun = perf_counter()
        if isinstance(job, Start):
            return StepsResult([self.begin(job)], perf_counter() - begun)
        status.at(job.epoch, job.start)
        plan = BatchPlan(job.start, _NO_INDICES) if self._reading.stream else self.plan_of(job, job.start)
        return StepsResult([self._tried(job.epoch, plan, self._loaded)], perf_counter() - begun)

    def here(self, planners: EpochPlanners, start: Cursor, epochs: int | None) -> Generator[StepResult]:
        """Yield the steps from `start`, up to epoch `epochs` or for ever, each made in this process on request."""
        for epoch, planner, missing, steps in planners.epochs_from(start, epochs):
            size = 1 if self._reading.stream else max(1, BLOCK_ROWS // planner.rows_per_step)
            for block in in_blocks(missing, steps, size):
                for plan in planner.plans(block, epoch=epoch):
                    made = [self._tried(epoch, plan, self._loaded)]  # no name here may refer to the batch
                    is_end = made[0].batch is Turn.ENDED
                    yield made.pop()
                    if is_end:
                        return

    def begin(self, start: Start) -> StepResult:
        """Begin an epoch: set up a new worker, load its part of a state, and create the iterator of a stream."""

        def enter(epoch: int, plan: BatchPlan) -> StepResult:
            self._seed(epoch, plan.step + start.number)
            self._enter(start)
            name = worker_name()
            return StepResult(epoch, plan.step, Turn.ENDED, None, 0, 0, [], [], name, report=self._tell(due=True))

        self._failed = None
        result = self._tried(start.epoch, BatchPlan(start.step, _NO_INDICES), enter)
        self._failed = None if result.error is None else result
        return result

    def part(self) -> dict[str, Any]:
        """Return what a state says of this worker, in the layout of torchdata's states."""
        if not self._reading.stream:
            return {"fetcher_state": None, "dataset_state": state_of(self._dataset)}
        own = None if self._iterator is self._dataset else state_of(self._dataset)
        iterator = {"dataset_iter_state": state_of(self._iterator), "fetcher_ended": self._ended}
        return {"fetcher_state": iterator, "dataset_state": own, "batches": self._given}

    def _set_up(self, epoch: int) -> None:
        """Set up a new worker process."""
        if self._set_up_in == getpid():
            return
        self._set_up_in, self._failed = getpid(), None
        name = multiprocessing.current_process().name
        if not name.startswith("dataload-"):
            return
        self._number = number = int(name.rpartition("-")[2])
        seed_global_generators(self.fetch.seed, epoch, number)
        self._info = _WatchedInfo(
            id=number, num_workers=self._reading.num_workers, seed=torch.initial_seed(), dataset=self._dataset
        )
        torch_worker._worker_info = self._info  # pyright: ignore[reportPrivateUsage] - torch has no other way
        if self.worker_init_fn is not None:
            before = _generators()
            self.worker_init_fn(number)
            self._seeds_itself = before != _generators()

    def _enter(self, start: Start) -> None:
        part, reading = start.part or {}, self._reading
        if part.get("dataset_state") is not None:
            self._dataset.load_state_dict(part["dataset_state"])
        if not reading.stream:
            return
        self._iterator, self._ended, self._given, self._first = iter(self._dataset), False, 0, ""
        saved = part.get("fetcher_state") or {}
        if not start.step and saved.get("fetcher_ended"):  # the state is of the end of an epoch
            return
        if has_state(self._iterator) and saved.get("dataset_iter_state") is not None:
            self._iterator.load_state_dict(saved["dataset_iter_state"])
        if has_state(self._iterator) or has_state(self._dataset):
            self._ended, self._given = bool(saved.get("fetcher_ended")), part.get("batches", 0)
            return
        for turn in range(part.get("batches", 0)):  # without a state, what was given is read again
            self._seed(start.epoch, turn * max(1, reading.num_workers) + self._number)
            self._samples()

    def _tried(self, epoch: int, plan: BatchPlan, make: Callable[[int, BatchPlan], StepResult]) -> StepResult:
        """Return the result of `make`, whether it fails or not."""
        self._stage = ""
        restore = None if self._reading.num_workers else keep_global_generators()
        try:
            if restore is None:
                self._set_up(epoch)
            return self._failed or make(epoch, plan)
        except BaseException as error:
            if is_for_consumer(error):
                raise
            return self._failure(epoch, plan, error)
        finally:
            if restore is not None:
                restore()

    def _seed(self, epoch: int, step: int) -> None:
        if not self._seeds_itself:
            seed_global_generators(self.fetch.seed, epoch, step)

    def _loaded(self, epoch: int, plan: BatchPlan) -> StepResult:
        reading, step, transform = self._reading, plan.step, self.fetch.batch_transform
        self._seed(epoch, step)
        self._stage, begun = "read", perf_counter()
        samples = self._samples() if reading.stream else self._records(plan)
        now = perf_counter()
        spans: list[StageSpan] = [("read", begun, now)]
        rows, batch = 0, samples
        if samples is not Turn.ENDED:
            rows = len(samples) if reading.collates else 1
            self._stage, begun = "collate", now
            batch = self._collated(samples)
            now = perf_counter()
            spans.append(("collate", begun, now))
            if transform is not None:
                self._stage, begun = "batch_transform", now
                batch = transform(batch)
                spans.append(("batch_transform", begun, perf_counter()))
        report = None
        if workers := reading.num_workers:
            report = self._tell(due=samples is Turn.ENDED or step % reading.every >= reading.every - workers)
        return StepResult(
            epoch, step, batch, None, rows, nbytes(batch), spans, [], worker_name(), records=rows, report=report
        )

    def _tell(self, *, due: bool) -> Report:
        part = self.part() if due and self._reading.keeps_state else None
        first, self._first = self._first, ""
        return Report(self._number, part, self._seeds_itself, first)

    def _records(self, plan: BatchPlan) -> Any:
        """Return the records of a plan in a list, or a single one."""
        dataset: Any = self._dataset
        keys = plan.keys if isinstance(plan, KeyedPlan) else plan.indices.tolist()
        if self._reading.collates and (many := getattr(dataset, "__getitems__", None)) is not None:
            return many(keys)
        upcoming = iter(keys)
        try:
            return [dataset[key] for key in upcoming] if self._reading.collates else dataset[next(upcoming)]
        except BaseException as error:
            failing = keys[len(keys) - length_hint(upcoming) - 1]
            if is_for_consumer(error):
                raise
            raise StageError("read", error, failing if isinstance(failing, int) else None) from error

    def _samples(self) -> Any:
        """Return the next samples of a stream in a list, or a single one; `Turn.ENDED` if there are none."""
        if self._iterator is None:
            raise RuntimeError("this worker was started in the middle of an epoch, and does not know where to continue")
        if self._ended:
            return Turn.ENDED
        reading = self._reading
        size = reading.batch_size if reading.collates else 1
        samples: list[Any] = [*map(next, repeat(self._iterator, size))]  # `iter` of an iterator may begin it again
        self._ended = len(samples) < size
        if not samples or (self._ended and reading.drop_last):
            return Turn.ENDED
        self._given += 1
        if self._given == 1 and self._info is not None and not self._info.asked:
            self._first = _digest_of(samples)
        return samples if reading.collates else samples[0]

    def _collated(self, samples: Any) -> Any:
        collate = self.fetch.collate
        if self._info is None or collate is not data.default_collate:
            return collate(samples)
        # It would allocate shared memory for each tensor, and batches are copied to a slot anyway.
        torch_worker._worker_info = None  # pyright: ignore[reportPrivateUsage] - as above
        try:
            return collate(samples)
        finally:
            torch_worker._worker_info = self._info  # pyright: ignore[reportPrivateUsage]

    def _failure(self, epoch: int, plan: BatchPlan, error: BaseException) -> StepResult:
        failure = error if isinstance(error, StageError) else StageError(self._stage, error)
        try:
            Rescue(self.fetch, plan, epoch, StepTrace()).fail(failure)
        except Exception as raised:  # a `WorkerError`
            return StepResult(epoch, plan.step, None, cast("Any", raised), plan.rows, 0, [], [], worker_name())
        finally:
            del failure, error  # their tracebacks refer to this frame


class _WatchedInfo(torch_worker.WorkerInfo):
    """torch's information about a worker, which knows whether it was asked."""

    asked: bool = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers", "seed"):
            object.__setattr__(self, "asked", True)
        return super().__getattribute__(name)


def _generators() -> Any:
    """Return the states of the global random generators."""
    name, keys, *rest = cast("Any", np.random.get_state())  # noqa: NPY002 - compared, not used
    return random.getstate(), name, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def _digest_of(samples: Any) -> str:
    try:
        return hashlib.blake2b(pickle.dumps(samples), digest_size=16).hexdigest()
    except Exception:
        return ""
