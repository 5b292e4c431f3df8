"""The loader: step k of this rank, ahead of the consumer and in order."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import is_dataclass
from typing import Any, Generic, Literal, Self, TypeVar, cast

from dataload._util.checks import check_count, check_fields, check_seconds
from dataload._util.cpus import usable_cpus
from dataload._util.fingerprint import fingerprint, identify, shows_address
from dataload._util.randomness import check_seed
from dataload.collate import Policy
from dataload.errors import ClosedSourceError
from dataload.executors import Executor, StartMethod, TimeoutPolicy, WorkerLostError
from dataload.loader.autoscale import Scaling
from dataload.loader.bad_records import Budget, read_excluded
from dataload.loader.fetch import Fetcher, choose_collate
from dataload.loader.order import Shuffle, plan_batches
from dataload.loader.pipeline import Delivery, EpochPlanners, apply_in_consumer, lost_step
from dataload.loader.prefetch import TaskSizer
from dataload.loader.progress import Cursor, EpochIteration, Progress
from dataload.loader.recorder import Recorder
from dataload.loader.rescue import ErrorPolicy, OnError
from dataload.loader.state import LoaderState
from dataload.loader.statistics import Statistics
from dataload.loader.step import JobResult, StepRange, StepResult, StepWork
from dataload.loader.workers import ExecutorName, make_executor
from dataload.samplers import BatchPlanner, PackedBatchSampler
from dataload.samplers.batch import Tail
from dataload.sources.base import Source
from dataload.transforms import compose
from dataload.types import RandomAccessSource, Sampler, Transform

__all__ = ["Loader"]

BatchT = TypeVar("BatchT")

_ADDRESS_HINT = (
    ". This sampler's repr shows its memory address, by which dataload 0.1 identified it, so a state that 0.1 saved "
    "never matches: if the order is the same, copy 'order' from this loader's state_dict() into the state"
)


class Loader(Generic[BatchT]):
    """Batches of a source, in an order that depends on the seed and the epoch alone.

    Iterating gives one epoch; the next ``for`` gives the next epoch, also after a ``break``. Batches are the same
    for any number of workers, and together the same for any number of ranks.

    A `WorkerError` at step k comes after the batches before it; its ``__cause__`` is the original.

    A state identifies the data by the source's ``fingerprint()``. A source without that method is known by its class
    name and length only: other data of the same length are then accepted. A sampler is identified by its class and
    fields, by its repr, or where the repr shows an address by its attributes when the loader is built.

    A source that is a context manager, and not one of dataload's, is entered in this process before the first batch
    is read, and exited when the loader is closed or dropped. Worker processes get a copy of the entered source.
    dataload's own sources belong to whoever opened them.

    Args:
        source: Anything with ``__len__`` and ``__getitem__``; with more from `dataload.types` it is read faster.
        batch_size: Rows per batch of this rank.
        sampler: The order; by default all records, as `shuffle` says.
        batch_sampler: Order and batches in one, such as `BucketBatchSampler`, in the place of `batch_size`, `sampler`
            and `shuffle`. Its rank, number of ranks and tail are those of the loader.
        shuffle: Each epoch in another order. ``"global"`` mixes all records; ``"shards"`` reads shards in a random
            order, front to back, through a pool (see `PoolShuffle`), as disks and object stores like it; True leaves
            it to the source: global, unless that says `reads_in_order`. Not together with `sampler`.
        seed: Of the order and of the transforms' random numbers.
        tail: What becomes of the records behind the last full batch: see `BatchSampler`. By default ``"partial"``, on
            several ranks ``"pad"``.
        fields: Names of the fields to read; None means all.
        transform: ``f(sample)`` or ``f(sample, context)``, or a list of these; the context has the sample's index,
            epoch and a generator of its own.
        batch_transform: ``f(batch)``, for example `dataload.torch.to_tensors`.
        collate: Samples to a batch: a function, or field -> policy for shapes that differ (see `Collate`).
        num_workers: Workers that make batches ahead; 0 makes them in the consumer's thread; ``"auto"`` begins with one
            and adds others while that helps, up to the CPUs that this process may use.
        executor: ``"threads"``: reading and decoding release the GIL, and nothing is copied between processes.
            ``"processes"``: for transforms that hold the GIL. Batches come in shared memory that is used again when
            nothing refers to it.
        start_method: Of processes: ``"forkserver"``, ``"spawn"``, or ``"fork"``, which copies this one with all it has.
        prefetch: Batches ahead, per worker. Batches that take less than a millisecond are made several at a time, and
            this counts the times; and where the consumer's thread would have to wait for such a one, and the workers
            leave it a CPU, it makes the next itself.
        prefetch_bytes: Bytes of batches ahead, about, in all; one is ahead in any case, and only one until the first
            has shown how large they are.
        in_order: False gives batches as they are made, within an epoch. The state then belongs to this rank alone and,
            where it is taken before all earlier batches have come, to steps of this size.
        epochs: How many there will be: nothing is read ahead behind the last, and another ``for`` gives nothing.
        timeout: Seconds after which a batch that does not come is an error; None only warns, after a minute.
        on_error: What becomes of a record that cannot be read or transformed: ``"raise"``; ``"skip"`` leaves its row
            out; ``"replace"`` puts another record of the same step in its place. Ranks keep their number of steps.
        max_bad: Records left out or replaced, over all epochs, after which it is an error all the same.
        error_report: A JSONL file that bad records are added to.
        exclude: Records that are never read, but treated as `on_error` says (``"raise"`` leaves them out): indices, or
            such a report. They are no part of the state: one that was saved without them goes on with them.
        rank: Number of this process, in [0, world_size); with `world_size` by default from the environment variables
            RANK and WORLD_SIZE, as torchrun sets them, else 0 of 1.
        world_size: Number of processes.

    Raises:
        ConfigError: A setting is out of its range, or two contradict each other.

    Example:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(10), batch_size=4)
        >>> [batch["index"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(
        self,
        source: RandomAccessSource[Any],
        *,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        batch_sampler: BatchPlanner | None = None,
        shuffle: bool | Shuffle = False,
        seed: int = 0,
        tail: Tail | None = None,
        fields: Sequence[str] | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        batch_transform: Callable[[Any], BatchT] | None = None,
        collate: Callable[..., Any] | Mapping[str, Policy] | None = None,
        num_workers: int | Literal["auto"] = 0,
        executor: ExecutorName = "threads",
        start_method: StartMethod = "forkserver",
        prefetch: int = 2,
        prefetch_bytes: int = 1 << 30,
        in_order: bool = True,
        epochs: int | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
        max_bad: int = 1000,
        error_report: str | os.PathLike[str] | None = None,
        exclude: Sequence[int] | str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise TypeError(f"a source has __len__ and __getitem__; {type(source).__name__} has not both")
        self._source = source
        self._seed = check_seed(seed)
        self._planner = plan_batches(
            source,
            batch_size=batch_size,
            sampler=sampler,
            batch_sampler=batch_sampler,
            shuffle=shuffle,
            seed=self._seed,
            tail=tail,
            rank=rank,
            world_size=world_size,
        )
        self._scaling = Scaling() if num_workers == "auto" else None
        workers = 1 if num_workers == "auto" else check_count("num_workers", num_workers, least=0)
        # What only prepares a batch for its consumer (pinning it, say) has no place in a process of its own.
        finishes = executor == "processes" and getattr(batch_transform, "runs_in_consumer", False)
        self._finish = batch_transform if finishes and workers else None
        fetch = Fetcher(
            source=source,
            fields=check_fields(fields),
            transform=compose(transform),
            collate=choose_collate(collate, packs=isinstance(self._planner, PackedBatchSampler)),
            batch_transform=None if self._finish else batch_transform,
            seed=self._seed,
            policy=ErrorPolicy(on_error, read_excluded(exclude, source)),
        )
        self._work = StepWork(fetch, self._planner, reseeds=executor == "processes" and workers > 0)
        self._prefetch = check_count("prefetch", prefetch, least=1)
        self._executor = make_executor(
            self._work,
            executor,
            workers,
            window=self._prefetch * (usable_cpus() if self._scaling else workers),
            start_method=start_method,
            timeouts=TimeoutPolicy(check_seconds("timeout", timeout)),
        )
        self._opened = ExitStack()  # leaves the source, if the loader has entered it
        weakref.finalize(self, _close, self._executor, self._opened)
        self._workers = workers
        self._prefetch_bytes = check_count("prefetch_bytes", prefetch_bytes, least=1)
        self._in_order = bool(in_order)
        self._epochs = None if epochs is None else check_count("epochs", epochs, least=0)
        self._budget = Budget(check_count("max_bad", max_bad, least=0), error_report)
        self._recorder = Recorder(executor if workers else "serial", tuple(step.name for step in fetch.transform))
        self._delivery: Delivery | None = None
        self._pace = TaskSizer()
        self._plans = EpochPlanners(self._planner)
        self._cursor = Cursor(0, 0)
        self._upcoming: Cursor | None = None  # where the next `for` starts, if that was said
        self._pass: EpochIteration | None = None  # the `for` that is under way
        # An order that is not a value may change while it is used: fill a cache, for example.
        order = self._planner.order
        self._order = None if is_dataclass(order) else fingerprint(order)
        self._identity: str | None = None
        self._entered = isinstance(source, Source) or not isinstance(source, AbstractContextManager)
        self._closed = False

    @property
    def source(self) -> RandomAccessSource[Any]:
        """What is read."""
        return self._source

    @property
    def batch_sampler(self) -> BatchPlanner:
        """The plan: order, batch size, rank, tail."""
        return self._planner

    @property
    def epoch(self) -> int:
        """The epoch that the present ``for`` is in, or that the next one serves."""
        return self._pass.epoch if self._pass else self._start().epoch

    @property
    def step(self) -> int:
        """Steps of that epoch that the consumer has received."""
        return self._pass.step if self._pass else self._start().received

    def __len__(self) -> int:
        """Steps of that epoch, the same on every rank; of a restored one, those before the state included."""
        return self._pass.steps if self._pass else self._steps(self._start())

    def progress(self) -> Progress:
        """How far the present ``for`` is, or where the next one starts."""
        return Progress(
            epoch=self.epoch,
            epochs=self._epochs,
            step=self.step,
            steps=len(self),
            rows_per_second=self.statistics().rows_per_second,
        )

    def statistics(self) -> Statistics:
        """Where the time went since the loader was made."""
        return self._recorder.snapshot(self._workers)

    def __iter__(self) -> Iterator[BatchT]:
        """One epoch, or what is left of it after `load_state_dict`.

        It begins when its first batch is asked for. There is one iteration at a time: a new one ends the one before.

        Raises:
            ClosedSourceError: The loader is closed.
            RuntimeError: By the iterator: another iteration was begun, or a state was loaded.
            WorkerError: By the iterator: see the class.
        """
        self._check_open()
        return self._iterate()

    def _iterate(self) -> Generator[BatchT]:
        self._check_open()
        cursor = self._start()
        if cursor != self._cursor:
            self._move(cursor)
        self._upcoming = None
        if self._epochs is not None and cursor.epoch >= self._epochs:
            return
        self._pass = now = EpochIteration(cursor.epoch, cursor.received, self._steps(cursor))
        self._recorder.resume()
        try:
            if now.step == now.steps:  # an epoch without steps, or nothing that fills one is left of it
                self._move(Cursor(now.epoch + 1, 0))
            while now.step < now.steps:
                self._check_current(now)
                batch = [self._next(now)]  # in a list, for no name here may hold on to it while the consumer has it
                yield batch.pop()
            if self._pass is now:
                self._recorder.pause()
        finally:
            if self._pass is now:
                self._pass = None
                if self._upcoming is not None:
                    self._move(self._upcoming)

    def _next(self, now: EpochIteration) -> BatchT:
        """The next batch, with the cursor behind it. Where anything fails, the cursor stays before it."""
        delivery = self._delivery or self._deliver()
        loaded: StepResult | None = None
        self._recorder.begin_wait()
        try:
            loaded = next(delivery)
            self._recorder.end_wait(loaded)
            if loaded.error is not None:
                raise loaded.error
            if loaded.bad:
                self._budget.spend(loaded.bad, loaded.worker)
            batch = loaded.batch if self._finish is None else apply_in_consumer(loaded, self._finish, self._plans)
        except WorkerLostError as lost:
            self._stop_delivery()
            raise lost_step(lost, self._plans, self._cursor) from None
        except BaseException:  # Ctrl-C while waiting, too: what is in flight would be a batch short
            loaded = None  # its error's traceback refers to this frame: each, and the loader, would keep the other
            self._stop_delivery()
            raise
        now.step += 1
        self._cursor = self._cursor.after(loaded.step, now.steps)
        if self._upcoming is not None and not self._cursor.begun:  # the epoch is over
            self._move(self._upcoming)
        if self._scaling is not None:
            self._scaling.look(self._recorder, self._grow)
        return batch

    def _deliver(self) -> Delivery:
        if not self._entered:
            self._opened.enter_context(cast("Any", self._source))
            self._entered = True
        self._delivery = Delivery(
            self._executor,
            self._plans,
            self._pace,
            start=self._cursor,
            epochs=self._epochs,
            window=self._workers * self._prefetch,
            most_bytes=self._prefetch_bytes,
            in_order=self._in_order,
            together=self._work.fetch.reads_together,
        )
        return self._delivery

    def _grow(self, workers: int) -> None:
        self._workers = workers
        self._executor.grow(workers)
        if self._delivery is not None:
            self._delivery.widen(workers * self._prefetch)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedSourceError("the loader is closed: build another one to iterate")

    def _check_current(self, now: EpochIteration) -> None:
        if self._pass is not now:
            self._check_open()
            raise RuntimeError(
                "this iteration ended when another one was begun (or the loader's state was set): "
                "for two at a time build two loaders"
            )

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` serve `epoch`, from its start. Needless otherwise: epochs count on by themselves.

        The present ``for`` goes on to its end. Where `epoch` would come next anyway nothing changes: what is
        prefetched of it is used, and one that `load_state_dict` has restored keeps its position.
        """
        check_count("epoch", epoch, least=0)
        if epoch != self._start().epoch:
            self._upcoming = Cursor(epoch, 0)
            if self._pass is None:
                self._move(self._upcoming)

    def _start(self) -> Cursor:
        """Where the next ``for`` starts."""
        if self._upcoming is not None:
            return self._upcoming
        return Cursor(self._cursor.epoch + 1, 0) if self._cursor.begun else self._cursor

    def _steps(self, cursor: Cursor) -> int:
        return self._plans.of(cursor.epoch).steps(cursor.epoch)

    def _move(self, cursor: Cursor, plans: EpochPlanners | None = None) -> None:
        self._stop_delivery()
        self._cursor = cursor
        self._plans = EpochPlanners(self._planner) if plans is None else plans

    def _stop_delivery(self) -> None:
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: a small dict for JSON, the same on every rank (but with ``in_order=False``).

        It counts batches that were received, not those that were prefetched. After the last batch of an epoch it
        is the start of the next one.
        """
        return self._state(self._plans, self._cursor).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: reads no record, whatever the position.

        The number of ranks, the batch size and the workers may have changed: what is left of the epoch is dealt
        anew, and no record is lost or repeated.

        Raises:
            StateMismatchError: The state is of other data, another order or another seed; or it was taken with
                ``in_order=False`` and steps of another size.
        """
        saved = LoaderState.from_json(state)
        plans, cursor = EpochPlanners.resume(self._planner, saved)
        here = self._state(plans, cursor)
        saved.check(
            here, hint=_ADDRESS_HINT if saved.order != here.order and shows_address(self._planner.order) else ""
        )
        self._move(cursor, plans)
        self._upcoming = cursor
        self._pass = None

    def _state(self, plans: EpochPlanners, cursor: Cursor) -> LoaderState:
        if self._identity is None:
            self._identity = identify(self._source)
        if self._order is None:
            self._order = fingerprint(self._planner.order)
        return plans.state(cursor, source=self._identity, order=self._order)

    def close(self) -> None:
        """Stop the workers after their current batches. May be called twice.

        A `dataload` source stays open: it belongs to whoever opened it. For other sources see the class.
        """
        self._closed = True
        self._pass = None
        self._stop_delivery()
        _close(self._executor, self._opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        p = self._planner
        ranks = f", rank {p.rank} of {p.world_size}" if p.world_size > 1 else ""
        place = f"epoch {self.epoch}, step {self.step}"
        return f"Loader({len(self._source)} records, {p.rows_per_step} rows a step{ranks}, {place})"


def _close(executor: Executor[StepRange, JobResult], opened: ExitStack) -> None:
    executor.close()
    opened.close()
