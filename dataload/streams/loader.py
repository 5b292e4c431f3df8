"""The loader of iterators: each row of its batches follows a stream, and each worker owns some rows."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np

from dataload._util.lazy import renamed
from dataload._util.settings import Least, Seconds, checked, setting_error
from dataload.collate import Pack, PadValue, Policy
from dataload.errors import ConfigError, SourceError, WorkerError
from dataload.executors import ExecutorName
from dataload.executors.base import Fleet, WorkerLostError
from dataload.loader.base import EpochIteration, LoaderBase
from dataload.loader.fetch import check_batch_transform, choose_collate, without_warning
from dataload.loader.growth import OnGrowth
from dataload.loader.order import rank_and_world_size
from dataload.loader.recorder import Recorder
from dataload.loader.scaling import WorkerSettings
from dataload.loader.state import Cursor
from dataload.loader.step import StepResult
from dataload.samplers.streams.sampler import ChunkEnd
from dataload.streams.batches import BatchMaker, deliver
from dataload.streams.messages import StepRows
from dataload.streams.rows import RowPosition, RowStart, SequenceMode, SequenceOrder, StreamSpec
from dataload.streams.state import (
    MultiStreamState,
    MultiStreamStatistics,
    check_added,
    identify_sequences,
    sequences_before,
)
from dataload.streams.workers import StreamWorkers
from dataload.transforms import compose

SplitTail: TypeAlias = Literal["pad", "drop"]
"""What to do with an epoch once a row has run out: fill the row with blanks, or end the epoch."""


class MultiStreamLoader(LoaderBase[Any]):
    """Batches whose rows continue: row b of a step goes on where row b of the step before stopped.

    Each row follows one sequence after another, through iterators that need not seek: decoders, sockets, generators.
    Each worker owns a fixed part of the rows, so all workers make every batch together. Batches are the same for any
    number of workers, in threads or processes.

    A batch is a dict: the fields of the samples, or ``"data"`` if samples are not dicts, and

    - ``stream_id``, (rows,) int64: number in `sequences` of the sequence that the row's first item belongs to;
    - ``offset``, (rows,) int64: number of that item within its sequence;
    - ``is_first``, (rows,) bool: whether a sequence starts, so that the model's state must be reset;
    - ``valid``, (rows,) bool: whether there is an item. If not, values are blank (zeros, empty text), and
      ``stream_id`` and ``offset`` are -1.

    With ``chunk=T > 1`` the samples, ``is_first`` and ``valid`` are (rows, T, ...).

    With ``mode="independent"`` there is no end, and a ``for`` after a ``break`` continues where that stopped. With
    ``mode="split"`` a ``for`` is one epoch, and the next ``for`` is the next epoch, also after a ``break``. An epoch
    without a step raises a `SourceError`.

    The state counts what the consumer has received. A stream with ``state_dict`` and ``load_state_dict`` is asked for
    its state after each step; that state must count the item just returned, and be JSON if the checkpoint is. Any
    other stream is made again when a state is loaded, and the items already consumed are skipped. A stream with a
    ``close`` method, such as a generator, is closed when its row leaves it, and with the loader.

    Args:
        make_stream: ``f(sequence)`` or ``f(sequence, context)``, which returns an iterable of samples; `iter` itself
            if sequences are lists. The context is a `StreamContext`. Called in the worker.
        sequences: The arguments for `make_stream`, such as file names. Sequences without items are skipped.
        batch_size: Rows of this rank.
        mode: ``"independent"``: every row goes through all sequences, without end, in its own order for each pass.
            ``"split"``: each sequence comes once an epoch; they are dealt to the rows like cards.
        shuffle: Whether orders are shuffled, for each pass of each row or for each epoch. If not, all rows of mode
            ``"independent"`` are equal.
        seed: Seed of the orders and of the contexts' random numbers.
        chunk: Items of a row per step.
        ends: What to do with a chunk at the end of a sequence: ``"next"`` continues with the next sequence, ``"pad"``
            leaves the rest blank, ``"drop"`` drops items that do not fill a chunk.
        tail: What to do with an epoch of mode ``"split"`` once a row has run out: ``"pad"`` (the default) leaves the
            row blank until all have, ``"drop"`` ends the epoch.
        epochs: Number of epochs of mode ``"split"``; another ``for`` yields nothing.
        collate: Makes a batch of samples; see `Loader`. By default workers stack their rows. Any other function is
            called in the consumer's thread, with all samples, row after row.
        pad_value: See `Loader`. Blank rows and the rest of a chunk are zeros, marked by `valid`.
        batch_transform: ``f(batch)``, for example `dataload.torch.to_tensors`, called in the consumer's thread.
        num_workers: Maximum number of workers; as many are used as divide `batch_size`. 0 works in the consumer's
            thread.
        executor: ``"threads"``, ``"processes"`` for streams that hold the GIL, or ``"ray"`` for other machines; see
            `Loader`.
        prefetch: Steps to make ahead. Steps that take under 0.8 ms are grouped, and with processes those under 30 ms;
            `prefetch` counts groups.
        timeout: Seconds to wait for a step, or for a group, before raising an error; None only warns, after a minute.
        rank: Number of this process, in [0, world_size); see `Loader`. Row b of rank r is row ``b * world_size + r``
            of all, for any number of ranks. Lengths are not known in advance, so epochs of mode ``"split"`` may have
            more steps on some ranks than on others.
        world_size: Number of processes.

    Raises:
        ConfigError: A setting is out of range, or two contradict each other.

    Examples:
        >>> from dataload.streams import MultiStreamLoader
        >>> lists = [[12, 13, 14, 15, 16, 17], [27, 28, 29], [40, 41, 42, 43]]
        >>> loader = MultiStreamLoader(iter, lists, batch_size=2, mode="split", shuffle=False)
        >>> [batch["data"].tolist() for batch in loader][:7]
        [[12, 27], [13, 28], [14, 29], [15, 0], [16, 0], [17, 0], [40, 0]]
    """

    @renamed(max_workers="num_workers", start_method="executor")
    @checked
    def __init__(
        self,
        make_stream: Callable[..., Any],
        sequences: Sequence[Any],
        *,
        batch_size: Annotated[int, Least(1)],
        mode: SequenceMode = "independent",
        shuffle: bool = True,
        seed: int = 0,
        chunk: Annotated[int, Least(1)] = 1,
        ends: ChunkEnd = "next",
        tail: SplitTail | None = None,
        epochs: Annotated[int, Least(0)] | None = None,
        collate: Callable[..., Any] | Mapping[str, Policy] | None = None,
        pad_value: PadValue | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        num_workers: Annotated[int, Least(0)] = 1,
        executor: ExecutorName | Fleet = "threads",
        prefetch: Annotated[int, Least(1)] = 2,
        timeout: Seconds | None = None,
        rank: Annotated[int, Least(0, below="world_size")] | None = None,
        world_size: Annotated[int, Least(1)] | None = None,
    ) -> None:
        (step,) = compose([make_stream], "make_stream", "a sequence", may_yield=True)
        _check_sequences(sequences)
        self._tail: SplitTail = tail or "pad"
        self._sequences, self._size = sequences, batch_size
        self._asks_rank = rank is None  # until the first batch
        self._rank, self._world_size = rank_and_world_size(rank, world_size, rank_later=True)
        order = SequenceOrder(len(sequences), batch_size * self._world_size, mode, shuffle, seed)
        order.check_ends(tail, epochs)
        if isinstance(collate, Pack):
            raise setting_error("collate", collate, "must keep the rows of a step, as packing does not")
        self._make_batch = BatchMaker(
            rows=self._size,
            chunk=chunk,
            collate=without_warning(making := choose_collate(collate, pad_value, packs=False)),
            transform=check_batch_transform(batch_transform),
        )
        self._plan = StreamSpec(step, sequences, order, chunk, ends, self._make_batch.joins)
        workers = WorkerSettings.of(num_workers, executor, prefetch, timeout)
        rows = range(self._rank, order.rows, self._world_size)
        self._stream_workers = StreamWorkers(self._plan, rows, workers)
        super().__init__(
            recorder=Recorder(workers.workplace),
            workers=self._stream_workers.workers,
            epochs=epochs,
            release=self._stream_workers.close,
        )
        self._starts = self._first_starts(0)
        self._pads = making
        self._received: StepRows | None = None  # of the last step, if any was received since `_starts` was set
        self._restored_step = 0  # of the state that this epoch continues, if any
        self._loaded: Any = None  # the last state, if nothing has moved the loader since
        self._row_seconds = np.zeros(self._size)

    if not TYPE_CHECKING:  # type checkers report a length that does not exist

        def __len__(self) -> int:
            message = (
                "a MultiStreamLoader learns its number of steps at the end of an epoch: count batches, or stop after"
            )
            raise TypeError(f"{message} n of them, as in itertools.islice(loader, n)")

        def __bool__(self) -> bool:
            return True

    @property
    def sequences(self) -> Sequence[Any]:
        """The sequences."""
        return self._sequences

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._workers

    def statistics(self) -> MultiStreamStatistics:
        """Return where the time went since the loader was built, also by row."""
        return MultiStreamStatistics.of(super().statistics(), self._row_seconds.copy())

    def _known_rank(self) -> int | None:
        return None if self._asks_rank else self._rank

    def _start_method(self) -> str | None:
        return self._stream_workers.start_method

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`.

        Raises:
            ConfigError: Rows of ``mode="independent"`` have no epochs: `epoch` is not 0.
        """
        if epoch and self._plan.order.mode == "independent":
            message = "set_epoch needs mode='split': mode='independent' has no epochs"
            raise ConfigError(message, key="epoch", value=epoch)
        super().set_epoch(epoch)

    def _ask_rank(self, *, later: bool = False) -> None:
        """Take the rows of the rank that a launcher has named by now; `later` if only the number matters yet."""
        if not self._asks_rank:
            return
        rank, world_size = rank_and_world_size(rank_later=later)
        if (rank, world_size) != (self._rank, self._world_size):
            loaded = self._loaded
            saved = None if loaded is None else self._saved(loaded, rank=rank, world_size=world_size)[0]
            order = dataclasses.replace(self._plan.order, rows=self._size * world_size)
            order.check_ends(self._tail if order.mode == "split" else None, self._epochs)
            self._rank, self._world_size = rank, world_size
            self._plan = dataclasses.replace(self._plan, order=order)
            self._stream_workers.deal(self._plan, range(rank, order.rows, world_size))
            if saved is not None:
                self._continue(saved)
        self._asks_rank = later

    def _enter(self) -> EpochIteration | None:
        self._ask_rank()
        return super()._enter()

    def _start(self) -> Cursor:
        return self._cursor if self._plan.order.mode == "independent" else super()._start()

    def _steps(self, cursor: Cursor) -> None:  # noqa: ARG002 - lengths are not known in advance
        return None

    def _deliver(self) -> Generator[StepResult]:
        self._delivery = delivery = deliver(
            self._stream_workers,
            self._make_batch,
            functools.partial(_has_ended, self._plan, self._tail),
            epoch=self._cursor.epoch,
            step=self._cursor.step,
            starts=self._here(),
        )
        return delivery

    def _accept(self, step: StepResult, now: EpochIteration) -> Any:
        self._look_at_padding(step.batch[0])
        self._row_seconds += step.batch[1].seconds
        batch, self._received = step.batch
        now.step += 1
        self._cursor = Cursor(self._cursor.epoch, step.step + 1)
        return batch

    def _end_epoch(self, now: EpochIteration) -> list[Any]:
        if not self._cursor.begun:
            reason = "no sequence of these rows gave enough items for a step"
            if self._tail == "drop":
                reason = "a row has too few items for one, and tail='drop' ends the epoch there"
            raise SourceError(f"epoch {now.epoch} has no step: {reason}")
        resumed_at_end = now.step == self._restored_step
        self._move(self._upcoming or Cursor(now.epoch + 1, 0))
        if not resumed_at_end or (self._epochs is not None and self._cursor.epoch >= self._epochs):
            return []
        # The state was saved after the last step, so this `for` is the next epoch.
        self._upcoming = None
        now.epoch, now.step = self._cursor.epoch, 0
        return self._next(now)

    def _lost(self, lost: WorkerLostError) -> WorkerError:
        self._stream_workers.replace()
        epoch, step, position = self._cursor.epoch, self._cursor.step, lost.position
        sequence, where = -1, ""
        if position.epoch == epoch:  # or else the worker has not begun it
            step = max(step, position.step)
            sequence, where = self._stream_workers.locate(position)
        message = f"step {step} of epoch {epoch} failed{where and ' '}{where}: {lost.worker} {lost.reason}"
        return WorkerError(
            f"{message}\n{lost.stacks}" if lost.stacks else message,
            step=step,
            epoch=epoch,
            indices=(sequence,) if where else (),
            worker=lost.worker,
            traceback_text=lost.stacks,
        )

    def _move(self, cursor: Cursor, starts: tuple[RowStart, ...] = ()) -> None:
        is_other = cursor.epoch != self._cursor.epoch
        super()._move(cursor)
        if is_other:
            self._follow(len(self._sequences))
        self._starts, self._received = starts or self._first_starts(cursor.epoch), None
        self._restored_step, self._loaded = 0, None

    def _first_starts(self, epoch: int) -> tuple[RowStart, ...]:
        return (RowStart(RowPosition(epoch, 0, 0)),) * self._size

    def _here(self) -> tuple[RowStart, ...]:
        """Return where each row continues."""
        if self._received is not None:
            self._starts, self._received = self._received.starts(), None
        return self._starts

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the rows of this rank: a dict for JSON if the streams' own states are."""
        self._ask_rank(later=True)
        return self._state().to_json()

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, on_growth: OnGrowth = "error"
    ) -> None:
        """Continue where `state` was saved. Workers, executor, prefetch and chunk may differ.

        Args:
            state: The state of this rank; or a list of the states of all ranks, saved at the same step. The number of
                ranks may then differ if all ranks together have as many rows. The state of a single rank that had all
                rows needs no list.
            on_growth: See `Loader.load_state_dict`, for sequences added to a list, which is known by its length.

        Raises:
            StateMismatchError: The state is of other sequences, another order or other rows.
        """
        self._check_idle()
        self._ask_rank(later=True)
        saved, count = self._saved(state)
        if count < len(self._sequences):
            check_added(on_growth, self._plan.order.mode, count, len(self._sequences))
        self._continue(saved)
        self._follow(count if saved.step else len(self._sequences))
        self._loaded = state

    def _saved(self, state: Any, **ranks: int) -> tuple[MultiStreamState, int]:
        """Return the position of this rank, or of `ranks`, in a saved state, and the sequences that there were."""
        count = sequences_before(state, self._sequences)
        here = dataclasses.replace(self._state(), sequences=identify_sequences(self._sequences, count), **ranks)
        return MultiStreamState.load(state, here), count

    def _follow(self, count: int) -> None:
        """Let the rows follow the first `count` sequences."""
        order = self._plan.order
        if order.sequences != count:
            self._plan = dataclasses.replace(self._plan, order=dataclasses.replace(order, sequences=count))
            self._stream_workers.deal(self._plan, range(self._rank, order.rows, self._world_size))

    def _continue(self, saved: MultiStreamState) -> None:
        cursor = Cursor(saved.epoch, saved.step)
        self._move(cursor, saved.starts())
        self._restore(cursor)
        self._restored_step = saved.step

    def _state(self) -> MultiStreamState:
        starts, order = self._here(), self._plan.order
        streams = tuple(start.state for start in starts)
        return MultiStreamState(
            epoch=self._cursor.epoch,
            step=self._cursor.step,
            rows=tuple(start.position for start in starts),
            streams=() if all(stream is None for stream in streams) else streams,
            sequences=identify_sequences(self._sequences, order.sequences),
            mode=order.mode,
            shuffle=order.shuffle,
            seed=order.seed,
            batch_size=self._size,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _summary(self) -> str:
        ranks = f", rank {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        return f"{len(self._sequences)} sequences, {self._size} rows{ranks}"


def _has_ended(plan: StreamSpec, tail: SplitTail, rows: StepRows) -> bool:
    """Return True for the rows of the step after the last one of an epoch."""
    if plan.order.mode == "independent":
        return False
    if tail == "pad":
        return not rows.valid.any()
    filled = rows.valid.all(axis=1) if plan.ends == "next" else rows.valid[:, 0]
    return not filled.all()


def _check_sequences(sequences: Any) -> None:
    # Each character of a text would be a sequence.
    if isinstance(sequences, str) or not hasattr(sequences, "__len__") or not hasattr(sequences, "__getitem__"):
        raise setting_error("sequences", sequences, "must be a list of arguments for make_stream")
    if not len(sequences):
        raise ConfigError("sequences is empty, but a row needs one to follow", key="sequences", value=sequences)
