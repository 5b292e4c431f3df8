"""torch's DataLoader with our loader underneath: the same arguments and batches."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils import data
from torch.utils.data import DataLoader as TorchDataLoader  # by its own name: programs replace torch's by ours
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from dataload.errors import ConfigError, StateMismatchError
from dataload.loader.base import BatchT, EpochIteration
from dataload.loader.growth import OnGrowth
from dataload.loader.loader import Loader
from dataload.loader.order import rank_and_world_size
from dataload.loader.state import Cursor
from dataload.samplers import BatchPlanner, BatchSampler, Sequential, Subset
from dataload.sources.views.adapt import loadable
from dataload.torch.datasets import as_torch_collates, columns_of
from dataload.torch.drawn_order import DrawnOrder, GivenOrder, ShuffledSampler, StreamOrder
from dataload.torch.user_loader import EpochIterator, UserLoader
from dataload.torch.worker import DataSetSource, Reading, has_state

_PIPE = (
    "torch's own DataLoader reads a DataPipe, which it shards and shuffles itself. You lose state_dict() to resume, "
    "batches that do not depend on num_workers, statistics, and errors that name the record"
)


class DataLoader(UserLoader[BatchT], TorchDataLoader[BatchT]):
    """A `Loader` with the arguments, defaults, attributes and batches of torch's `DataLoader`.

    ``state_dict`` and ``load_state_dict`` resume at any step, ``statistics`` says what limits training, and errors name
    the step and the record. docs/from-torch.md lists the differences. ``shuffle=True`` has an order of dataload, seeded
    once from `generator`; your own sampler is iterated once, when an epoch begins. Your own data sets are read in
    processes, which take turns as torch's do; dataload's sources, arrays, tensors and `TensorDataset` in threads, if
    none of `collate_fn`, `worker_init_fn` and `multiprocessing_context` is given.

    Args:
        dataset: A map-style data set: anything with ``__len__`` and ``__getitem__``; columns, as for `Loader`; or an
            `IterableDataset`. A DataPipe returns torch's own loader, with a warning.
        batch_size: This and the arguments that are not named here are torch's.
        sampler: An iterable of indices with a length.
        batch_sampler: An iterable of lists of indices with a length.
        num_workers: Number of processes, or maximum number of threads.
        generator: Source of the seed for ``shuffle=True``, by default torch's global generator.
        persistent_workers: Keep worker processes from one epoch to the next, and prefetch across the end of an epoch.
            Otherwise each epoch starts new processes, which see changes to `dataset`.
        snapshot_every_n_steps: Steps between two states of an `IterableDataset` that workers send; a loader that
            resumes repeats the steps since then, and drops their batches.

    Raises:
        ValueError: Arguments contradict each other, as in torch. A `ConfigError` if a sampler has no length.
        TypeError: `dataset` is not a data set; the message says what to pass instead.
    """

    batch_sampler: Any = None  # torch's; the loader's own plan is `Loader.batch_sampler`

    def __new__(cls, dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return torch's own loader for a DataPipe, which cannot support our methods."""
        if cls is DataLoader and isinstance(dataset, getattr(data, "IterDataPipe", ())):
            warnings.warn(_PIPE, UserWarning, stacklevel=2)
            kwargs.pop("snapshot_every_n_steps", None)
            return TorchDataLoader(dataset, *args, **kwargs)
        return super().__new__(cls)

    def __init__(  # pyright: ignore[reportInconsistentConstructor] - torch's signature; `__new__` takes any
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], object] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        stream = isinstance(dataset, data.IterableDataset)
        plain = sampler is None and batch_sampler is None
        if not stream and (plain or hasattr(dataset, "__len__")):
            dataset = loadable(dataset)  # refuses a path, for example
        self._shuffled: ShuffledSampler | None = None
        if shuffle and plain and not stream:
            sampler = self._shuffled = ShuffledSampler(dataset, generator)
            shuffle = None
        own: Any = TorchDataLoader.__init__  # checks the arguments and sets all attributes
        own(
            self, dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
            **({} if in_order else {"in_order": in_order}),  # new in torch 2.6
        )  # fmt: skip
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._stream = stream
        self._fresh = False  # whether the next epoch's order is already drawn
        self._prepare(_draw_seed(generator, keeps=self._shuffled is None))

    def _prepare(self, seed: int) -> None:
        """Plan and build the loader for the data set as it is now."""
        self._collates = self.collate_fn
        own_code = self.worker_init_fn, self.multiprocessing_context
        dataset: Any = self.dataset
        columns = None
        if self._auto_collation and self.collate_fn is data.default_collate and own_code == (None, None):
            columns = columns_of(dataset)
        self._records = len(dataset) if hasattr(dataset, "__len__") and not self._stream else None
        plan = None if self._shuffled is not None else self._plan(None if columns is None else self._records)
        self._drawn = plan.drawn if isinstance(plan, GivenOrder) else None
        reading = None
        if columns is None:
            reading = Reading(
                num_workers=self.num_workers,
                stream=self._stream,
                collates=self._auto_collation,
                batch_size=self.batch_size or 1,
                drop_last=self.drop_last,
                keeps_state=self._stream or has_state(dataset),
                every=max(1, self.snapshot_every_n_steps or 1) if self._stream and self._keeps_order else 1,
                in_turns=self._keeps_order,
            )
        self._settings = self._loader_settings(plan, columns)
        self._build(seed, reading)
        self._starts_anew = reading is not None and self.num_workers > 0 and not self.persistent_workers
        # Otherwise the next epoch would not see what the user changes in place between two epochs.
        self._reads_on = self.persistent_workers and self._drawn is None and not self._keeps_state

    @property
    def _keeps_order(self) -> bool:
        return getattr(self, "in_order", True)  # new in torch 2.6

    def _build(self, seed: int, reading: Reading | None) -> None:
        self._set_up(self.dataset, reading, {**self._settings, "seed": seed})
        plan = self._settings.get("sampler")
        if type(plan) is BatchSampler and type(plan.sampler) is Sequential:
            self._states.sampler_for = lambda earlier: replace(plan, sampler=Sequential(len(earlier)))
        if self._shuffled is not None:
            planned: Any = Loader[Any].batch_sampler
            self._shuffled.served = planned.fget(self).sampler

    def _loader_settings(self, plan: BatchPlanner | None, columns: Any) -> dict[str, Any]:
        """Return the arguments of `Loader`; plan None means ``shuffle=True``."""
        order = {"batch_size": self.batch_size or 1, "shuffle": True} if plan is None else {"sampler": plan}
        ranks = {"rank": 0, "world_size": 1} if plan is None else {"rank": plan.rank, "world_size": plan.world_size}
        return {
            **order,
            **ranks,
            "source": DataSetSource(self.dataset, self._records or 0) if columns is None else columns,
            "tail": "drop" if self.drop_last or getattr(self.batch_sampler, "drop_last", False) else "partial",
            "collate": self.collate_fn if columns is None else None,
            "batch_transform": _batch_transform(columns=columns is not None, pins=self.pin_memory),
            "num_workers": self.num_workers,
            "executor": "threads" if columns is not None else _start_method(self.multiprocessing_context),
            "prefetch": max(1, self.prefetch_factor or 1),
            "timeout": self.timeout or None,
            "in_order": self._keeps_order,
        }

    def _plan(self, records: int | None) -> BatchPlanner:
        """Return the planned batches: computed where the result is the same, otherwise drawn from the sampler."""
        sampler: Any = self.sampler
        size = self.batch_size or 1
        if self._stream:
            return StreamOrder(batch_size=size, drop_last=self.drop_last)
        if type(self.batch_sampler) is data.BatchSampler:
            sampler, size = self.batch_sampler.sampler, self.batch_sampler.batch_size
        elif self.batch_sampler is not None:
            sampler, size = self.batch_sampler, 1
        batches = sampler is self.batch_sampler
        if type(sampler) is data.SequentialSampler and not batches:
            return BatchSampler(sampler=Sequential(len(sampler)), batch_size=size)
        if type(sampler) is data.DistributedSampler and not (sampler.shuffle or batches):
            rank, ranks, total = sampler.rank, sampler.num_replicas, sampler.total_size
            if self._records is not None and total <= self._records == len(cast("Any", sampler.dataset)):
                order = Subset(Sequential(self._records), range(total))  # without repeated records
                return BatchSampler(sampler=order, batch_size=size, rank=rank, world_size=ranks)
        drawn = DrawnOrder(sampler, records, batches=batches, generator=self.generator, length=self._records)
        return GivenOrder(drawn=drawn, batch_size=size)

    def _follow_growth(self) -> None:
        """Plan again if the number of records has changed and is not fixed by a sampler of one's own."""
        if self._records is None or self._drawn is not None or self._now is not None:
            return
        if len(cast("Any", self.dataset)) != self._records:
            epoch = self._start().epoch
            self._stop_delivery()
            self._release()
            self._prepare(self._seed)
            self._move(Cursor(epoch, 0))

    def __len__(self) -> int:
        """Return the steps of the epoch. Of an `IterableDataset` it is torch's estimate, from its length."""
        if self._stream:
            return TorchDataLoader.__len__(self)
        self._follow_growth()
        return super().__len__()

    def __iter__(self) -> Any:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`; see `Loader`.

        Worker processes start here. After an error, the iteration may go on with the next batch.
        """
        self._check_open()
        if self._reading is None:
            return EpochIterator(self, self._iterate())
        now = self._enter()
        batches = iter(()) if now is None else self._serve(now)
        return EpochIterator(self, batches, getattr(self, "_IterableDataset_len_called", None))

    def _enter(self) -> EpochIteration | None:
        if self.collate_fn is not self._collates:
            raise ConfigError("collate_fn was set after the loader was built: pass it to DataLoader", key="collate_fn")
        self._follow_growth()
        if not self._reads_on:
            self._stop_delivery()
        epoch = self._start().epoch
        if self._drawn is not None and not (self._fresh and self._drawn.epoch == epoch):
            self._drawn.draw(epoch)
        self._fresh = False
        now = super()._enter()
        if self._shuffled is not None:
            self._shuffled.epoch = epoch + 1
        if self._reading is not None and now is not None:
            self._start_workers(self.worker_init_fn)  # trainers set it after construction
        return now

    def _serve(self, now: EpochIteration) -> Generator[Any]:
        try:
            yield from super()._serve(now)
        finally:
            if self._starts_anew and self._now is None:
                self._executor.restart()

    def _known_rank(self) -> int | None:
        return rank_and_world_size(rank_later=True)[0]  # of the process: its plan is that of its own sampler

    def _read_until(self) -> int | None:
        return super()._read_until() if self._reads_on else self._cursor.epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`; also calls the sampler's `set_epoch`."""
        if self._drawn is not None:
            self._drawn.set_epoch(epoch)
        super().set_epoch(epoch)
        if self._shuffled is not None:
            self._shuffled.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`. A sampler that draws from a `torch.Generator` adds its state, 7 KB.

        If the data set, its iterator or the sampler has a state, the state has ``"kind": "stateful"``, and those
        states, in the layout of torchdata's `StatefulDataLoader`.
        """
        cursor, parts = self._stateful()
        state = self._states.of(self._plans, cursor).to_json()
        drawn = {} if self._drawn is None else self._drawn.state(state["epoch"], begun=state["position"] > 0)
        if self._drawn is not None and self._drawn.stateful and not parts:
            parts = {"kind": "stateful", "rank": [*rank_and_world_size(rank_later=True)]}
        return {**state, "sampler": {"seed": self._seed, **drawn}, **parts}

    def load_state_dict(self, state: Mapping[str, Any], *, on_growth: OnGrowth = "error") -> None:
        """See `Loader.load_state_dict`.

        The loader takes the seed of ``shuffle=True`` from the state. A sampler is iterated again and must give the same
        order, from its arguments, its epoch, its own state, or a `torch.Generator`, whose state is restored.

        Raises:
            StateMismatchError: As for `Loader.load_state_dict`; the sampler gives another order; or a state with those
                of data sets is of another rank or number of workers.
        """
        self._check_idle()
        plain, parts, since = self._split(state)
        extra = plain.pop("sampler", None)
        if not isinstance(extra, Mapping) or type(cast("Mapping[str, Any]", extra).get("seed")) is not int:
            raise StateMismatchError("this is not a state of a dataload.torch.DataLoader: it has no seed in 'sampler'")
        saved = cast("Mapping[str, Any]", extra)
        if saved["seed"] != self._seed:
            with Loader(**self._settings, seed=saved["seed"]) as trial:  # a refused state changes nothing
                trial._states.sampler_for = self._states.sampler_for
                trial.load_state_dict(plain, on_growth=on_growth)
            self._stop_delivery()
            self._release()
            self._build(saved["seed"], self._reading)
        with nullcontext() if self._drawn is None else self._drawn.undone_by_errors():
            if self._drawn is not None:
                self._drawn.restore(saved, plain.get("epoch", 0))
            super().load_state_dict(plain, on_growth=on_growth)
        self._fresh = True
        self._continue(parts, since)
        if self._shuffled is not None:
            self._shuffled.epoch = self._cursor.epoch


def _draw_seed(generator: torch.Generator | None, *, keeps: bool) -> int:
    """Draw a seed from a torch generator; with `keeps`, leave the generator's state unchanged."""
    own = torch.default_generator if generator is None else generator
    state = own.get_state()
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=own).item())
    if keeps:
        own.set_state(state)
    return seed


def _start_method(context: Any) -> Any:
    method = multiprocessing.get_start_method(allow_none=True) if context is None else context.get_start_method()
    return method or multiprocessing.get_all_start_methods()[0]


def _batch_transform(*, columns: bool, pins: bool) -> Callable[[Any], Any] | None:
    """Return the function that turns columns, or a collated batch, into the final batch."""
    if pins and torch.cuda.is_available():
        return _pinned_columns if columns else _pinned
    return as_torch_collates if columns else None


def _pinned(batch: Any) -> Any:
    return pinned(batch)


def _pinned_columns(batch: Any) -> Any:
    return pinned(as_torch_collates(batch))


cast("Any", _pinned).runs_in_consumer = True
