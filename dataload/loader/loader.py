"""The loader of sources with random access."""

import functools
import operator
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Literal

from dataload._util.lazy import renamed
from dataload._util.randomness import keep_global_generators
from dataload._util.settings import Least, MaxBad, Seconds, check_count, check_fields, checked
from dataload.collate import PadValue, Policy
from dataload.errors import WorkerError
from dataload.executors import ExecutorName
from dataload.executors.base import Fleet, WorkerLostError
from dataload.loader.base import BatchT, EpochIteration
from dataload.loader.failures import Budget, ErrorPolicy, OnError, read_excluded
from dataload.loader.fetch import BatchLoader, check_batch_transform, check_names, choose_collate, without_warning
from dataload.loader.growth import OnGrowth, States
from dataload.loader.order import Shuffle, explains_arguments, plan_batches, rank_and_world_size, tail_of
from dataload.loader.pipeline import Prefetch, StepDelivery, StepGroups, TaskSizer, apply_in_consumer, lost_step
from dataload.loader.recorder import Recorder
from dataload.loader.scaling import Setting, WorkerSettings
from dataload.loader.state import Cursor, EpochPlanners
from dataload.loader.step import StepResult, StepWork
from dataload.loader.weights import WeightChanges
from dataload.samplers import BatchPlanner, PackedBatchSampler
from dataload.samplers.batch import Tail
from dataload.sources.base import check_files, traffics_of
from dataload.sources.views.adapt import loadable
from dataload.sources.views.mapped import with_kept
from dataload.types import RandomAccessSource, Sampler, Transform


class Loader(WeightChanges[BatchT]):
    """Batches of a source, in an order that depends only on the seed and the epoch.

    A ``for`` over the loader is one epoch; the next ``for`` is the next epoch, also after a ``break``. Batches are
    the same for any number of workers, and taken together the same for any number of ranks.

    A `WorkerError` at step k is raised after the batches before it; its ``__cause__`` is the original error.

    A state identifies the data by the source's ``fingerprint()``. A source without that method is identified by its
    class name and length only, so other data of the same length are accepted. A sampler is identified by its class
    and fields, by its repr, or if the repr shows an address by its attributes when the loader is built.

    A loader neither enters nor closes its source. A source that must be entered is entered by your ``with``, before the
    loader is iterated: worker processes get a copy of it. Only a loader from `dataload.from_config` closes its source,
    because it has opened it.

    Args: Records, order and batches
        source: Anything with ``__len__`` and ``__getitem__``; other methods of `dataload.types` make it faster. Also
            columns: a dict of arrays or lists of equal length, or a table of pandas, polars or pyarrow.
        batch_size: Rows per batch of this rank.
        global_batch_size: Rows per step of all ranks together, instead of `batch_size`: a multiple of `world_size`. A
            job that continues on another number of ranks then keeps its batches; with `batch_size` they change size.
        sampler: The order; by default all records, as set by `shuffle`. Or order and batches in one, such as
            `BucketBatchSampler`, without a batch size; the loader sets its rank, number of ranks and tail.
        shuffle: Use another order in each epoch. ``"global"`` mixes all records. ``"shards"`` reads shards in random
            order, each front to back, through a pool (see `PoolShuffle`), which suits disks and object stores. True
            chooses ``"shards"`` if the source sets `reads_in_order`, else ``"global"``. Not together with `sampler`.
        seed: Seed of the order and of the transforms' random numbers.
        tail: What to do with records that do not fill a batch: see `BatchSampler`. By default ``"partial"``, or
            ``"pad"`` on several ranks.

    Args: From records to a batch
        fields: Names of the fields to read; None means all.
        transform: ``f(sample)`` or ``f(sample, context)``, or a list of these; the context has the sample's index,
            its epoch and its own random generator.
        batch_transform: ``f(batch)``, for example `dataload.torch.to_tensors`.
        collate: Makes a batch of samples: a function, or a mapping from fields to policies for shapes that differ
            (see `Collate`, `Pad`); or a `Pack`, which packs the records of a step into rows.
        pad_value: The value with which `collate` or packing fills up; or values by field, such as ``{"labels": -100}``,
            where others get 0. None is 0, with a warning if several integer fields are padded.

    Args: Workers and epochs
        num_workers: Maximum number of workers that make batches ahead; fewer are used where more are not faster. 0
            makes batches in the consumer's thread, as do threads that do not help. ``"auto"`` allows one worker for
            each CPU that this process may use, and more threads if they mostly wait.
        executor: ``"threads"``: reading and decoding release the GIL, and nothing is copied between processes.
            ``"processes"``: for transforms that hold the GIL. Batches come in shared memory, which is reused once
            nothing refers to it. They are forks of this process if it has one thread when they start, otherwise of a
            fork server that starts with the loader; `statistics` says which. ``"fork"``, ``"forkserver"`` and
            ``"spawn"`` choose. ``"fork"`` copies this process with everything in it; others get pickled copies.
            ``"ray"``, or a `dataload.ray.Fleet` with its settings, makes batches on other machines, with all workers.
        prefetch: Batches to make ahead, per worker. Batches that take under a millisecond are grouped; `prefetch`
            counts groups. ``num_workers="auto"`` may use more. Instead of waiting for a group, the consumer's thread
            makes the next one itself if the workers leave it a CPU.
        prefetch_bytes: Approximate total bytes of batches ahead. One batch is ahead in any case, and only one until
            the first shows the size.
        in_order: If False, yield batches in completion order within each epoch. The state then belongs to this rank
            only, and if it was saved while earlier batches were missing, to steps of this size.
        changes: A JSONL log of changes of weights (see `change_weights`), which rank 0 appends to; see `load_changes`.
        epochs: Number of epochs. Nothing is read ahead after the last one, and another ``for`` yields nothing.
        timeout: Seconds to wait for a worker's batch before raising an error; None only warns, after a minute. With a
            timeout, workers make all batches, because nothing would watch the consumer's thread.

    Args: Records that fail
        on_error: What to do with a record that cannot be read or transformed: ``"raise"``; ``"skip"`` drops its row;
            ``"replace"`` uses another record of the same step. Ranks keep their number of steps.
        max_bad: Maximum number of bad records over all epochs; more are an error. As a float, their maximum fraction of
            the records that this loader has read, checked from 1,000 records on. 1.0 is no limit. Each rank counts its
            own; `load_state_dict` starts the count again.
        error_report: A JSONL file to append bad records to.
        exclude: Records never to read, and to treat as `on_error` says (``"raise"`` drops them): indices, or a file
            written by `error_report`. They are not part of the state: a state saved without them still loads.

    Args: Several processes
        rank: Number of this process, in [0, world_size). By default, `rank` and `world_size` are found when the first
            batch is wanted: in torch.distributed once it is initialised, else in RANK and WORLD_SIZE, which torchrun
            sets, or in the variables of Open MPI or of Slurm's ``srun``; without these they are 0 and 1. A JAX program
            of several processes must pass both: see `dataload.jax.distributed_place`.
        world_size: Number of processes.

    Raises:
        ConfigError: A setting is out of range, two contradict each other, or a source that knows its fields does not
            have one that `fields` or `collate` names.
        TypeError: `source` is not a source, or `sampler` not a sampler; the message says what to write instead.

    Examples:
        >>> import dataload
        >>> loader = dataload.Loader(dataload.RangeSource(10), batch_size=4)
        >>> [batch["index"].tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    @renamed(batch_sampler="sampler", start_method="executor")
    @explains_arguments
    @checked
    def __init__(
        self,
        source: RandomAccessSource[Any],
        *,
        batch_size: Annotated[int, Least(1)] | None = None,
        global_batch_size: Annotated[int, Least(1)] | None = None,
        sampler: Sampler | BatchPlanner | None = None,
        shuffle: bool | Shuffle = False,
        seed: int = 0,
        tail: Tail | None = None,
        fields: Sequence[str] | None = None,
        transform: Transform | Sequence[Transform] | None = None,
        batch_transform: Callable[[Any], BatchT] | None = None,
        collate: Callable[..., Any] | Mapping[str, Policy] | None = None,
        pad_value: PadValue | None = None,
        num_workers: Annotated[int, Least(0)] | Literal["auto"] = 0,
        executor: ExecutorName | Fleet = "threads",
        prefetch: Annotated[int, Least(1)] = 2,
        prefetch_bytes: Annotated[int, Least(1)] = 1 << 30,
        in_order: bool = True,
        changes: str | os.PathLike[str] | None = None,
        epochs: Annotated[int, Least(0)] | None = None,
        timeout: Seconds | None = None,
        on_error: OnError = "raise",
        max_bad: MaxBad = 0.01,
        error_report: str | os.PathLike[str] | None = None,
        exclude: Sequence[int] | str | os.PathLike[str] | None = None,
        rank: Annotated[int, Least(0, below="world_size")] | None = None,
        world_size: Annotated[int, Least(1)] | None = None,
    ) -> None:
        source = loadable(source)
        self._replan = functools.partial(
            plan_batches,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            sampler=sampler,
            shuffle=shuffle,
            seed=seed,
            tail=tail_of(tail, collate, sampler),
        )
        plan = self._replan(source, rank=rank, world_size=world_size)
        # Until the first batch, when the rank is asked for.
        self._asks_rank = rank is None and not (isinstance(sampler, BatchPlanner) and sampler.world_size > 1)
        function = check_batch_transform(batch_transform)
        pads = choose_collate(collate, pad_value, packs=isinstance(plan, PackedBatchSampler))
        workers = WorkerSettings.of(num_workers, executor, prefetch, timeout)
        # A function that prepares a batch for its consumer (pins it, say) must not run in another process.
        here = not workers.here and getattr(function, "runs_in_consumer", False)
        self._in_consumer = function if here else None
        fetch = BatchLoader(
            source=source,
            fields=check_fields(fields),
            transform=with_kept(source, transform, fields),
            collate=without_warning(pads),
            batch_transform=None if here else function,
            seed=seed,
            policy=ErrorPolicy(on_error, read_excluded(exclude, source)),
        )
        check_names(source, fetch.fields, fetch.collate, transformed=bool(fetch.transform))
        self._in_order = in_order
        self._prefetch_bytes: float = prefetch_bytes
        self._bad = Budget(max_bad, error_report)
        self._begin(plan, StepWork(fetch, plan, reseeds=not workers.here), workers, epochs)
        self._pads = pads
        self._log = None if changes is None else self._open_log(changes)

    def _begin(self, plan: BatchPlanner, work: StepWork, workers: WorkerSettings, epochs: int | None) -> None:
        """Start the workers, at the first step of epoch 0."""
        source, transform = work.fetch.source, work.fetch.transform
        self._source, self._planner, self._work, self._seed = source, plan, work, work.fetch.seed
        self._plans, self._sizer = EpochPlanners(plan), TaskSizer()
        self._executor, self._prefetch = workers.start(work), workers.prefetch
        self._scaling = workers.scaling(self._executor)
        self._ahead = Prefetch(None if workers.workplace == "ray" else source, work.fetch, here=workers.here)
        self._owned = ExitStack()  # closes what `from_config` has opened for this loader
        releasing = ExitStack()
        releasing.callback(self._executor.close)
        releasing.callback(self._ahead.stop)  # comes first
        self._states = States(source, plan, self._replan)
        super().__init__(
            recorder=Recorder(workers.workplace, tuple(step.name for step in transform), traffics_of(source)),
            workers=workers.most,
            epochs=epochs,
            release=releasing.close,
        )
        if self._scaling is not None:
            self._workers_allowed = self._scaling.bounds.most

    @property
    def source(self) -> RandomAccessSource[Any]:
        """The source of the records."""
        return self._source

    @property
    def seed(self) -> int:
        """The seed."""
        return self._seed

    @property
    def batch_sampler(self) -> BatchPlanner:
        """The order, batch size, rank and tail."""
        self._ask_rank(later=True)
        return self._planner

    def _ask_rank(self, *, later: bool = False) -> None:
        """Plan for the ranks that a launcher has named by now; `later` if only their number matters yet."""
        if not self._asks_rank:
            return
        rank, world_size = rank_and_world_size(rank_later=later)
        self._asks_rank = later
        if (rank, world_size) != (self._planner.rank, self._planner.world_size):
            state = self._plans.state(self._start(), source="", order="")
            plan = self._replan(self._source, rank=rank, world_size=world_size)
            self._planner = plan = self._with_changes(plan, state.changes)
            plans, cursor = self._states.resume(plan, state, self._plans.before(state.epoch))
            self._move(cursor, plans)
            self._upcoming = None if self._upcoming is None else cursor

    def _enter(self) -> EpochIteration | None:
        self._ask_rank()
        return super()._enter()

    def batch_sampler_of(self, epoch: int) -> BatchPlanner:
        """Return the plan of an epoch: `batch_sampler`, unless a loaded state divides this epoch differently."""
        self._ask_rank(later=True)
        return self._plans.of(check_count("epoch", epoch, least=0))

    def batch(self, epoch: int, step: int) -> BatchT:
        """Return the batch of any step of any epoch, as a ``for`` over the loader gets it.

        It is made in the calling thread, from its records alone. The position of the loader does not change.
        Transforms that use global random generators give the same values only with ``executor="processes"``. The states
        of these generators are restored at the end, so call it while no other thread uses them.

        Raises:
            IndexError: The epoch has no such step.
            WorkerError: The step failed.
        """
        self._check_open()
        self._ask_rank()
        steps = self.batch_sampler_of(epoch).steps(epoch)
        if not 0 <= operator.index(step) < steps:
            raise IndexError(f"step {step} is out of range: epoch {epoch} has {steps} steps on this rank")
        with ExitStack() as stack:
            stack.callback(keep_global_generators())
            result, function = self._work.make(self._plans, epoch, step), self._in_consumer
            self._look_at_padding(result.batch)
            return result.batch if function is None else apply_in_consumer(result, function, self._plans)

    def __len__(self) -> int:
        """Return the steps of the epoch, the same on every rank; a restored epoch includes those before the state."""
        self._ask_rank(later=True)
        steps = self._now.steps if self._now else None
        return self._steps(self._start()) or 0 if steps is None else steps

    def _deliver(self) -> StepDelivery | Generator[StepResult]:
        last = self._read_until()
        self._ahead.start(self._plans, self._cursor, last)
        self._delivery = delivery = StepDelivery(
            self._executor,
            self._plans,
            self._sizer,
            start=self._cursor,
            epochs=last,
            window=self._window(),
            max_bytes=self._prefetch_bytes,
            in_order=self._in_order,
            groups=self._groups(),
            together=self._work.fetch.reads_together,
        )
        return delivery

    def _window(self) -> int:
        """Return the number of tasks ahead of the one that is waited for."""
        return self._workers * self._prefetch

    def _groups(self) -> StepGroups | None:
        """Return the function that cuts the steps of an epoch into tasks; None for the usual one."""
        return None

    def _read_until(self) -> int | None:
        """Return the epoch before which reading ahead stops; None if it never does."""
        return self._epochs

    def _accept(self, step: StepResult, now: EpochIteration) -> BatchT:
        self._bad.spend(step.records, step.bad, epoch=step.epoch, step=step.step, worker=step.worker)
        if self._pads is not None:
            self._look_at_padding(step.batch)
        if self._ahead.reader is not None:
            self._ahead.reader.received()
        function = self._in_consumer
        batch = step.batch if function is None else apply_in_consumer(step, function, self._plans)
        if self._scaling is not None:
            self._scaling.look(self._recorder, self._in_flight, self._use)
        now.step += 1  # last: what is raised before, such as Ctrl-C, leaves the state before this step
        self._cursor = self._cursor.after(step.step, sys.maxsize if now.steps is None else now.steps)
        if self._upcoming is not None and not self._cursor.begun:  # the epoch is over
            self._move(self._upcoming)
        return batch

    def _lost(self, lost: WorkerLostError) -> WorkerError:
        return lost_step(lost, self._plans, self._cursor)

    def _in_flight(self) -> int:
        return self._delivery.in_flight() if isinstance(self._delivery, StepDelivery) else 0

    def _use(self, setting: Setting) -> None:
        self._recorder.end_use(self._workers)
        self._workers, self._prefetch = setting
        self._executor.use(self._workers)
        if isinstance(self._delivery, StepDelivery):
            self._delivery.set_window(self._window())

    def _start_method(self) -> str | None:
        return self._executor.start_method

    def _steps(self, cursor: Cursor) -> int | None:
        return self._plans.of(cursor.epoch).steps(cursor.epoch)

    def _stop_delivery(self) -> None:
        self._ahead.stop()  # first, so that no reader waits for data that will not come
        super()._stop_delivery()

    def close(self) -> None:
        """Stop the workers after their current work. May be called twice. The source stays open; see the class."""
        super().close()
        self._owned.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer: a small dict for JSON, the same on every rank unless ``in_order=False``.

        It counts batches that were received, not batches that were prefetched. After the last batch of an epoch it
        is the start of the next one.
        """
        self._ask_rank(later=True)
        return self._states.of(self._plans, self._cursor).to_json()

    def load_state_dict(self, state: Mapping[str, Any], *, on_growth: OnGrowth = "error") -> None:
        """Continue where `state` was saved. Reads no record, at any position.

        The number of ranks, the batch size and the workers may differ: the rest of the epoch is dealt out again, and
        no record is lost or repeated.

        Args:
            state: What `state_dict` returned.
            on_growth: What to do if shards were added since: ``"error"``, or ``"finish"`` the epoch, or each source's
                pass in a mixture without end, with its records of then. States saved until that is done need it, too.

        Raises:
            StateMismatchError: The state is of other data, another order or another seed; or it was saved with
                ``in_order=False`` and steps of another size.
        """
        self._check_idle()
        self._ask_rank(later=True)
        saved = self._states.read(state, on_growth)
        planner = self._with_saved(saved)
        plans, cursor = self._states.load(planner, saved, on_growth)
        self._planner = planner
        self._move(cursor, plans)
        self._restore(cursor)
        self._bad.start()

    def _check_files(self) -> None:
        check_files(self._source)

    def _summary(self) -> str:
        p = self._planner
        ranks = f", rank {p.rank} of {p.world_size}" if p.world_size > 1 else ""
        return f"{len(self._source)} records, {p.rows_per_step} rows per step{ranks}"
