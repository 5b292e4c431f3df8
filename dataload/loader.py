"""The loader: step k of this rank, ahead of the consumer and in order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Literal, Self, TypeVar, get_args

from dataload.collate import Collate, Policy, default_collate
from dataload.errors import ClosedSourceError, ConfigError, WorkerError, closest
from dataload.executors import Executor, SerialExecutor, ThreadExecutor
from dataload.fetch import Fetcher
from dataload.packing import Pack
from dataload.plan import BlockedPlans, Shuffle, plan_batches
from dataload.prefetch import Pace, ordered_map
from dataload.randomness import check_seed
from dataload.samplers import BatchPlanner, PackedBatchSampler
from dataload.samplers.batch import Tail
from dataload.state import LoaderState, digest, fingerprint
from dataload.transforms import compose
from dataload.types import RandomAccessSource, Sampler, Transform

__all__ = ["ExecutorName", "Loader"]

BatchT = TypeVar("BatchT")

ExecutorName = Literal["threads"]
"""Where batches are made when `num_workers` is not 0."""


@dataclass(frozen=True, slots=True)
class _Cursor:
    """What the consumer has received: all epochs before `epoch`, and `step` steps of it."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class _Failure:
    """Stands in the place of a batch that could not be made."""

    error: WorkerError


class Loader(Generic[BatchT]):
    """Batches of a source, in an order that depends on the seed and the epoch alone.

    Iterating gives one epoch; the next ``for`` gives the next epoch, also after a ``break``. Batches are the same
    for any number of workers, and together the same for any number of ranks.

    A `WorkerError` at step k comes after the batches before it; its ``__cause__`` is the original.

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
        num_workers: Threads that make batches ahead; 0 makes them in the consumer's thread.
        executor: ``"threads"``: reading and decoding release the GIL, and nothing is copied between processes.
        prefetch: Batches ahead, per worker. Batches that take less than a millisecond are made several at a time, and
            this counts the times; and where the consumer's thread would have to wait for such a one, it makes the next
            itself.
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
        num_workers: int = 0,
        executor: ExecutorName = "threads",
        prefetch: int = 2,
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
        self._fetch = Fetcher(
            source=source,
            fields=_names(fields),
            transform=compose(transform),
            collate=_collate(collate, packs=isinstance(self._planner, PackedBatchSampler)),
            batch_transform=batch_transform,
            seed=self._seed,
        )
        self._window = _count("num_workers", num_workers, 0) * _count("prefetch", prefetch, 1)
        self._executor = _executor(executor, num_workers)
        # An epoch that went on with another global batch size has its steps counted from another origin.
        self._shifted: tuple[int, BatchPlanner] | None = None
        self._cursor = _Cursor(0, 0)
        self._resumes = True  # the next `for` starts at the cursor, not behind what it stands in
        self._current: object = None
        self._fingerprints: tuple[str, str] | None = None
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
        """The epoch that the next ``for`` serves, or that the present one is in."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Steps of the epoch that the consumer has received."""
        return self._cursor.step

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        epoch = self._cursor.epoch
        return self._plan(epoch).steps(epoch)

    def _plan(self, epoch: int) -> BatchPlanner:
        if self._shifted is not None and self._shifted[0] == epoch:
            return self._shifted[1]
        return self._planner

    def __iter__(self) -> Iterator[BatchT]:
        """One epoch, or what is left of it after `load_state_dict`.

        There is one iteration at a time: a new one ends the one before.
        """
        if self._closed:
            raise ClosedSourceError("the loader is closed: build another one to iterate")
        if not self._resumes and self._cursor.step > 0:
            self._cursor = _Cursor(self._cursor.epoch + 1, 0)
        self._resumes = False
        self._current = token = object()
        return self._iterate(self._cursor, token)

    def _iterate(self, start: _Cursor, token: object) -> Generator[BatchT]:
        plans = BlockedPlans(self._plan(start.epoch), start.epoch)
        fetch = self._fetch

        def load(steps: range) -> list[Any]:
            begun = perf_counter()
            made: list[Any] = []
            for step in steps:
                try:
                    made.append(fetch(plans[step], start.epoch))
                except WorkerError as error:
                    made.append(_Failure(error))  # the steps before it are delivered first
                    break
            pace.note(len(made), perf_counter() - begun)
            return made

        def submit(steps: range) -> Any:
            return self._executor.submit(load, steps)

        pace = Pace()
        steps = range(start.step, len(plans))
        # Without workers nothing is handed over: each step is a task of its own, made when it is asked for.
        tasks = pace.groups(steps) if self._window else (range(step, step + 1) for step in steps)
        step = start.step
        with closing(ordered_map(submit, tasks, window=self._window, helps=pace.is_quick)) as loaded:
            for made in loaded:
                made.reverse()
                while made:
                    self._check_current(token)
                    if isinstance(made[-1], _Failure):
                        raise made[-1].error
                    step += 1
                    last = step == len(plans)
                    self._cursor = _Cursor(start.epoch + 1, 0) if last else _Cursor(start.epoch, step)
                    yield made.pop()  # no name here holds on to the batch while the consumer has it

    def _check_current(self, token: object) -> None:
        if self._current is not token:
            raise RuntimeError(
                "this iteration ended when another one was begun (or the loader's state was set): "
                "for two at a time build two loaders"
            )

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` serve `epoch`. Needless otherwise: epochs count on by themselves.

        In an epoch that `load_state_dict` has restored its position stays.
        """
        _count("epoch", epoch, 0)
        upcoming = self._cursor.epoch + (not self._resumes and self._cursor.step > 0)
        if epoch != upcoming:
            self._start_at(_Cursor(epoch, 0))

    def _start_at(self, cursor: _Cursor) -> None:
        self._cursor = cursor
        self._resumes = True
        self._current = None

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: a small dict for JSON, the same on every rank.

        It counts batches that were received, not those that were prefetched. After the last batch of an epoch it
        is the start of the next one.
        """
        position = self._plan(self._cursor.epoch).position(self._cursor.step, epoch=self._cursor.epoch)
        return self._state(self._cursor.epoch, position).to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: reads no record, whatever the position.

        The number of ranks, the batch size and the workers may have changed: what is left of the epoch is dealt
        anew, and no record is lost or repeated.

        Raises:
            StateMismatchError: The state is of other data, another order or another seed.
        """
        saved = LoaderState.from_json(state)
        saved.check(self._state(saved.epoch, saved.position))
        planner, step = self._planner.resume(saved.position)
        self._shifted = (saved.epoch, planner) if planner.origin else None
        self._start_at(_Cursor(saved.epoch, step))

    def _state(self, epoch: int, position: int) -> LoaderState:
        if self._fingerprints is None:
            self._fingerprints = _identify(self._source), fingerprint(self._planner.order)
        source, order = self._fingerprints
        return LoaderState(
            epoch=epoch,
            position=position,
            length=self._planner.items(epoch),
            source=source,
            order=order,
        )

    def close(self) -> None:
        """Stop the workers, after the batches that they are at. May be called twice; leaves the source open."""
        self._closed = True
        self._current = None
        self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        p = self._planner
        ranks = f", rank {p.rank} of {p.world_size}" if p.world_size > 1 else ""
        place = f"epoch {self.epoch}, step {self.step}"
        return f"Loader({len(self._source)} records, {p.rows_per_step} rows a step{ranks}, {place})"


def _names(fields: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of names, got the text {fields!r}", key="fields", value=fields)
    return None if fields is None else tuple(fields)


def _collate(collate: Callable[..., Any] | Mapping[str, Policy] | None, *, packs: bool) -> Callable[..., Any]:
    if packs:
        if collate is not None and not isinstance(collate, Pack):
            raise ConfigError(
                f"packed rows are laid out by dataload.Pack: pass Pack(pad_value=...) or nothing, got {collate!r}",
                key="collate",
                value=collate,
            )
        return collate or Pack()
    if collate is None:
        return default_collate
    if isinstance(collate, Mapping):
        return Collate(policies=collate) if collate else default_collate
    if not callable(collate):
        raise ConfigError(f"collate is a function of a list of samples, got {collate!r}", key="collate", value=collate)
    return collate


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}", key=name, value=value)
    return value


def _executor(name: str, num_workers: int) -> Executor:
    if name not in get_args(ExecutorName):
        raise ConfigError(f"executor is {name!r}: {closest(name, get_args(ExecutorName))}", key="executor", value=name)
    return ThreadExecutor(num_workers) if num_workers else SerialExecutor()


def _identify(source: Any) -> str:
    own: Any = getattr(source, "fingerprint", None)
    return str(own()) if callable(own) else digest(type(source).__qualname__, len(source))
