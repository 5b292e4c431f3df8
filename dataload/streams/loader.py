"""The loader of iterators: each row of its batches follows one, worker by worker."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Self, get_args

import numpy as np

from dataload._util.checks import check_choice, check_count, check_seconds
from dataload._util.randomness import check_seed
from dataload.collate import Policy
from dataload.errors import ClosedSourceError, SourceError, WorkerError
from dataload.executors import Result, StartMethod, WorkerLostError
from dataload.loader.fetch import choose_collate
from dataload.loader.order import rank_and_world_size
from dataload.loader.pipeline import ordered_map
from dataload.loader.workers import ExecutorName
from dataload.streams.batches import BatchMaker
from dataload.streams.order import Cursor, Mode, SequenceOrder
from dataload.streams.parts import Part, Rows
from dataload.streams.rows import Ends, RowStart, StreamPlan
from dataload.streams.settings import Tail, check_epochs, check_streams
from dataload.streams.state import MultiStreamState, identify_sequences
from dataload.streams.statistics import MultiStreamStatistics
from dataload.streams.workers import StreamWorkers
from dataload.transforms import compose

__all__ = ["MultiStreamLoader"]


class MultiStreamLoader:
    """Batches whose rows continue: row b of a step goes on where row b of the step before has stopped.

    Each row follows one sequence after another, through iterators that need not seek: decoders, sockets, generators.
    Every worker owns a fixed part of the rows, so all of them work on the same batch. Batches are the same for any
    number of workers, in threads or processes.

    A batch is a dict: the fields of the samples, or ``"data"`` where these are no dicts, and

    - ``stream_id``, (rows,) int64: number in `sequences` of the sequence that the row's first item is of;
    - ``offset``, (rows,) int64: number of that item within its sequence;
    - ``is_first``, (rows,) bool: whether a sequence begins, so that the model's state is to be reset;
    - ``valid``, (rows,) bool: whether there is an item. Where not, values are blank (zeros, empty text), and
      ``stream_id`` and ``offset`` -1.

    With ``chunk=T > 1`` the samples, ``is_first`` and ``valid`` are (rows, T, ...).

    With ``mode="independent"`` there is no end, and a ``for`` after a ``break`` goes on where that has stopped. With
    ``mode="split"`` a ``for`` gives one epoch, and the next one the next, also after a ``break``.

    The state counts what the consumer has received. A stream with ``state_dict`` and ``load_state_dict`` is asked for
    its own after each step (its state has to count the item that it has just given, and for a checkpoint in JSON be
    something for that); another one is made again when a state is loaded, and the items that were consumed skipped.
    A stream with ``close``, as generators have, is closed when its row leaves it, and with the loader.

    Args:
        make_stream: ``f(sequence)`` or ``f(sequence, context)``, which gives an iterable of samples: `iter` itself for
            sequences that are lists. The context is a `StreamContext`. Called in the worker.
        sequences: What streams are made of, such as names of files; those without an item are skipped.
        batch_size: Rows of this rank.
        mode: ``"independent"``: every row goes through all sequences, without end, in an order of its own for each
            pass. ``"split"``: each sequence once an epoch; they are dealt to the rows like cards.
        shuffle: Whether orders are shuffled, for each pass of each row or for each epoch. If not, all rows of mode
            ``"independent"`` give the same.
        seed: Of the orders and of the contexts' random numbers.
        chunk: Items of a row per step.
        ends: What becomes of a chunk at the end of a sequence: ``"next"`` goes on with the next sequence, ``"pad"``
            leaves the rest blank, ``"drop"`` drops the items that fill none.
        tail: What becomes of an epoch of mode ``"split"`` once a row has run out: ``"pad"`` (the default) leaves it
            blank until all have, ``"drop"`` ends.
        epochs: Of mode ``"split"``: how many there will be; another ``for`` gives nothing.
        collate: Samples to a batch; see `Loader`. By default workers stack their rows; another one is called in the
            consumer's thread, with all samples, row after row.
        batch_transform: ``f(batch)``, for example `dataload.torch.to_tensors`, in the consumer's thread.
        max_workers: Workers at most; as many are used as divide `batch_size`. 0 works in the consumer's thread.
        executor: ``"threads"``, or ``"processes"`` for streams that hold the GIL.
        start_method: Of processes: ``"forkserver"``, ``"spawn"`` or ``"fork"``.
        prefetch: Steps ahead.
        timeout: Seconds after which a step that does not come is an error; None only warns, after a minute.
        rank: Number of this process, in [0, world_size); see `Loader`. Row b of rank r is row ``b * world_size + r``
            of all, whatever the number of ranks. Lengths are not known ahead, so epochs of mode ``"split"`` may have
            more steps on some ranks than on others.
        world_size: Number of processes.

    Raises:
        ConfigError: A setting is out of its range, or two contradict each other.

    Example:
        >>> from dataload.streams import MultiStreamLoader
        >>> lists = [[12, 13, 14, 15, 16, 17], [27, 28, 29], [40, 41, 42, 43]]
        >>> loader = MultiStreamLoader(iter, lists, batch_size=2, mode="split", shuffle=False)
        >>> [batch["data"].tolist() for batch in loader][:7]
        [[12, 27], [13, 28], [14, 29], [15, 0], [16, 0], [17, 0], [40, 0]]
    """

    def __init__(
        self,
        make_stream: Callable[..., Any],
        sequences: Sequence[Any],
        *,
        batch_size: int,
        mode: Mode = "independent",
        shuffle: bool = True,
        seed: int = 0,
        chunk: int = 1,
        ends: Ends = "next",
        tail: Tail | None = None,
        epochs: int | None = None,
        collate: Callable[..., Any] | Mapping[str, Policy] | None = None,
        batch_transform: Callable[[Any], Any] | None = None,
        max_workers: int = 1,
        executor: ExecutorName = "threads",
        start_method: StartMethod = "forkserver",
        prefetch: int = 2,
        timeout: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_streams(make_stream, sequences)
        for key, value, kind in (("mode", mode, Mode), ("ends", ends, Ends), ("tail", tail or "pad", Tail)):
            check_choice(key, value, get_args(kind))
        rank, world_size = rank_and_world_size(rank, world_size)
        self._sequences = sequences
        self._size = check_count("batch_size", batch_size, least=1)
        self._world_size = check_count("world_size", world_size, least=1)
        self._rank = check_count("rank", rank, least=0, below=self._world_size)
        order = SequenceOrder(len(sequences), self._size * self._world_size, mode, bool(shuffle), check_seed(seed))
        self._order = order
        self._tail: Tail = check_epochs(order, tail, epochs)
        self._epochs = None if epochs is None else check_count("epochs", epochs, least=0)
        self._make_batch = BatchMaker(
            rows=self._size,
            chunk=check_count("chunk", chunk, least=1),
            collate=choose_collate(collate, packs=False),
            transform=batch_transform,
        )
        (step,) = compose(make_stream)
        self._plan = StreamPlan(step, sequences, order, chunk, ends, self._make_batch.joins)
        workers = check_count("max_workers", max_workers, least=0)
        self._window = check_count("prefetch", prefetch, least=1) if workers else 0
        self._crew = StreamWorkers(
            self._plan,
            range(self._rank, order.rows, self._world_size),
            workers,
            executor=executor,
            start_method=start_method,
            window=self._window,
            timeout=check_seconds("timeout", timeout),
        )
        weakref.finalize(self, self._crew.close)
        self._sessions = itertools.count()
        self._steps: Generator[list[Part]] | None = None  # what is under way
        self._epoch = self._step = 0
        self._starts = self._first_starts(0)
        self._received: Rows | None = None  # of the last step, if any was received since `_starts` was said
        self._resumes = False  # whether the next `for` goes on in the epoch
        self._current: object = None  # the `for` that is under way
        self._closed = False
        self._seconds, self._waited, self._count = np.zeros(self._size), 0.0, 0

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._crew.workers

    @property
    def epoch(self) -> int:
        """The epoch that the present ``for`` is in, or that the next one serves; 0 with ``mode="independent"``."""
        return self._epoch + (self._current is None and self._leaves_epoch())

    @property
    def step(self) -> int:
        """Steps of that epoch that the consumer has received."""
        return 0 if self._current is None and self._leaves_epoch() else self._step

    def statistics(self) -> MultiStreamStatistics:
        """Which row's streams took how long."""
        return MultiStreamStatistics(self._count, self._waited, self._seconds.copy())

    def __iter__(self) -> Iterator[Any]:
        """Batches, without end or of one epoch; see the class.

        There is one iteration at a time: a new one ends the one before.

        Raises:
            ClosedSourceError: The loader is closed.
            RuntimeError: By the iterator: another iteration was begun, or a state was loaded.
            WorkerError: By the iterator: a stream failed, or a worker; names row, sequence and item, and has the number
                of the sequence as its ``indices``. The state stays before the step.
            ConfigError: By the iterator: a sample has a field that is added to batches.
            SourceError: By the iterator: an epoch has no step.
        """
        self._check_open()
        return self._iterate()

    def _iterate(self) -> Generator[Any]:
        self._check_open()
        if self._leaves_epoch():
            self._begin(self._epoch + 1)
        resumes, self._resumes = self._resumes, False
        self._current = now = object()
        try:
            while self._epochs is None or self._epoch < self._epochs:
                self._check_current(now)
                batch = [self._next()]  # in a list, for no name here may hold on to it while the consumer has it
                if batch[0] is not None:
                    resumes = False
                    yield batch.pop()
                    continue
                if not self._step:
                    raise SourceError(self._no_step())
                self._begin(self._epoch + 1)
                if not resumes:  # else the state was saved behind the last step, and this is the next epoch's `for`
                    return
        finally:
            if self._current is now:
                self._current = None

    def _no_step(self) -> str:
        if self._tail == "drop":
            return f"epoch {self._epoch} has no step: a row has no items for one, and tail='drop' ends the epoch there"
        return f"epoch {self._epoch} has no step: no sequence of these rows gave an item, or a chunk of them"

    def _leaves_epoch(self) -> bool:
        """Whether the next ``for`` serves another epoch than the one before."""
        return self._order.mode == "split" and self._step > 0 and not self._resumes

    def _next(self) -> Any:
        """The next batch; None at the end of an epoch. Where anything fails, the rows stand before the step."""
        steps = self._steps or self._deliver()
        parts: list[Part] = []
        failures: list[WorkerError] = []
        begun = perf_counter()
        try:
            parts = next(steps)
            waited = perf_counter() - begun
            failures = [part.failures.pop() for part in parts if part.failures]
            if failures:
                raise failures[0]
            rows = Rows.join([part.rows for part in parts if part.rows is not None])
            if self._has_ended(rows):
                self._stop()
                return None
            batch = self._make_batch([part.stacked for part in parts], rows, epoch=self._epoch, step=self._step)
        except WorkerLostError as lost:
            self._stop()
            self._crew.replace()
            raise self._lost(lost) from None
        except BaseException:  # Ctrl-C while waiting, too: what is in flight would be a step short
            parts, failures = [], []  # its traceback refers to this frame: each, and the loader, would keep the other
            self._stop()
            raise
        self._received = rows
        self._step += 1
        self._count += 1
        self._waited += waited
        self._seconds += rows.seconds
        return batch

    def _deliver(self) -> Generator[list[Part]]:
        submit = functools.partial(_submit, self._crew, next(self._sessions))
        tasks = _tasks(self._epoch, self._step, self._now())
        window = self._window
        self._steps = ordered_map(submit, tasks, window=lambda: window)
        return self._steps

    def _has_ended(self, rows: Rows) -> bool:
        if self._order.mode == "independent":
            return False
        if self._tail == "pad":
            return not rows.valid.any()
        filled = rows.valid.all(axis=1) if self._plan.ends == "next" else rows.valid[:, 0]
        return not filled.all()

    def _lost(self, lost: WorkerLostError) -> WorkerError:
        """What the loss of a worker means for a consumer that waits for a step."""
        place, naming = lost.place, self._crew.naming
        step = max(place.step, self._step)
        where = naming.text(place)
        message = f"step {step} of epoch {self._epoch} failed{where and ' '}{where}: {lost.worker} {lost.reason}"
        return WorkerError(
            f"{message}\n{lost.stacks}" if lost.stacks else message,
            step=step,
            epoch=self._epoch,
            indices=(naming.sequence(place),) if place.index >= 0 else (),
            worker=lost.worker,
            traceback_text=lost.stacks,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the rows of this rank stand: a dict for JSON, if what streams say of themselves is."""
        return self._state().to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; workers, executor, prefetch and chunk may have changed.

        Raises:
            StateMismatchError: The state is of other sequences, another order, other rows or another rank.
        """
        saved = MultiStreamState.from_json(state)
        saved.check(self._state())
        self._stop()
        self._epoch, self._step = saved.epoch, saved.step
        self._starts, self._received = saved.starts(), None
        self._resumes, self._current = True, None

    def _state(self) -> MultiStreamState:
        starts = self._now()
        streams = tuple(start.state for start in starts)
        return MultiStreamState(
            epoch=self._epoch,
            step=self._step,
            rows=tuple(start.cursor for start in starts),
            streams=() if all(stream is None for stream in streams) else streams,
            sequences=identify_sequences(self._sequences),
            mode=self._order.mode,
            shuffle=self._order.shuffle,
            seed=self._order.seed,
            batch_size=self._size,
            rank=self._rank,
            world_size=self._world_size,
        )

    def _now(self) -> tuple[RowStart, ...]:
        """Where each row goes on."""
        if self._received is not None:
            self._starts = tuple(self._received.start(row) for row in range(self._size))
            self._received = None
        return self._starts

    def _begin(self, epoch: int) -> None:
        self._stop()
        self._epoch, self._step = epoch, 0
        self._starts, self._received = self._first_starts(epoch), None

    def _first_starts(self, epoch: int) -> tuple[RowStart, ...]:
        return (RowStart(Cursor(epoch, 0, 0)),) * self._size

    def _stop(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedSourceError("the loader is closed: build another one to iterate")

    def _check_current(self, now: object) -> None:
        if self._current is not now:
            self._check_open()
            raise RuntimeError(
                "this iteration ended when another one was started (or the loader's state was set): "
                "for two at a time build two loaders"
            )

    def close(self) -> None:
        """Stop the workers, after the items that they are at, and close the streams. May be called twice."""
        self._closed = True
        self._current = None
        self._stop()
        self._crew.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ranks = f", rank {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        place = f"epoch {self.epoch}, step {self.step}"
        return f"MultiStreamLoader({len(self._sequences)} sequences, {self._size} rows{ranks}, {place})"


def _submit(crew: StreamWorkers, session: int, task: tuple[int, int, tuple[RowStart, ...]]) -> Result[list[Part]]:
    epoch, step, starts = task
    return crew.submit(epoch, step, session, starts)


def _tasks(epoch: int, first: int, starts: tuple[RowStart, ...]) -> Iterator[tuple[int, int, tuple[RowStart, ...]]]:
    yield epoch, first, starts
    del starts
    for step in itertools.count(first + 1):
        yield epoch, step, ()
