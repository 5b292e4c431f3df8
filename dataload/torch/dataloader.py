"""torch's DataLoader with our loader underneath: the same arguments and batches."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.utils import data
from torch.utils.data._utils.pin_memory import pin_memory as pinned

from dataload.errors import ConfigError, StateMismatchError
from dataload.loader.loader import Loader
from dataload.samplers import BatchPlanner, BatchSampler, Sequential, Subset
from dataload.sources.views.adapt import loadable
from dataload.torch.datasets import MapDataset, as_torch_collates, columns_of
from dataload.torch.drawn_order import DrawnOrder, GivenOrder

_ITERABLE = (
    "an IterableDataset has no records by index, so torch's own DataLoader reads it. You lose state_dict() to resume, "
    "batches that do not depend on num_workers, statistics, and errors that name the record"
)


class DataLoader(Loader[Any], data.DataLoader[Any]):
    """A `Loader` with the arguments, defaults, attributes and batches of torch's `DataLoader`.

    ``state_dict`` and ``load_state_dict`` resume at any step, ``statistics`` says what limits training, and errors name
    the step and the record. Other differences are listed in docs/from-torch.md:

    - ``shuffle=True`` uses an order of dataload, seeded once from `generator`. Your own sampler is iterated once, at
      the start of each epoch. Sequential orders are computed and give the same batches.
    - Your own data sets are read in processes, started as torch starts them. dataload's sources, arrays, tensors and
      `TensorDataset` are read in threads, unless `collate_fn`, `worker_init_fn` or `multiprocessing_context` is given.
    - An `IterableDataset` returns torch's own `DataLoader`, with a warning.

    Args:
        dataset: A map-style data set: anything with ``__len__`` and ``__getitem__``; or columns, as for `Loader`.
        batch_size: Samples per batch; None returns samples that are not collated.
        shuffle: Use a new random order in each epoch.
        sampler: An iterable of indices with a length.
        batch_sampler: An iterable of lists of indices with a length, instead of `batch_size`, `shuffle`, `sampler` and
            `drop_last`.
        num_workers: Number of processes, or maximum number of threads.
        collate_fn: Makes a batch from a list of samples; by default `torch.utils.data.default_collate`.
        pin_memory: Copy batches to pinned memory if a CUDA device is available.
        drop_last: Drop the last batch if it is not full.
        timeout: Seconds to wait for a worker's batch; 0 waits forever.
        worker_init_fn: Called with the number of each worker process when it starts.
        multiprocessing_context: Start method of the processes, by default that of `multiprocessing`.
        generator: Source of the seed for ``shuffle=True``, by default torch's global generator.
        prefetch_factor: Batches to prefetch per worker.
        persistent_workers: Keep worker processes from one epoch to the next, and prefetch across the end of an epoch.
            Otherwise each epoch starts new processes, which see changes to `dataset`.
        pin_memory_device: As in torch.
        in_order: If False, batches come in completion order.

    Raises:
        ValueError: Arguments contradict each other, as in torch. A `ConfigError` if a sampler has no length. From the
            iterator: the number of records has changed, and `sampler` is not given.
        TypeError: `dataset` is not a data set; the message says what to pass instead.
    """

    batch_sampler: Any = None  # torch's; the loader's own plan is `Loader.batch_sampler`

    def __new__(cls, dataset: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return torch's own loader for an `IterableDataset`, which cannot support our methods."""
        if cls is DataLoader and isinstance(dataset, data.IterableDataset):
            warnings.warn(_ITERABLE, UserWarning, stacklevel=2)
            return data.DataLoader(cast("Any", dataset), *args, **kwargs)
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
    ) -> None:
        if isinstance(dataset, data.IterableDataset):
            raise TypeError(
                "a subclass cannot read an IterableDataset: derive it from torch.utils.data.DataLoader instead"
            )
        dataset = loadable(dataset)  # refuses a path, for example
        own: Any = data.DataLoader.__init__  # checks the arguments and sets all attributes
        own(
            self, dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers, pin_memory_device=pin_memory_device,
            **({} if in_order else {"in_order": in_order}),  # new in torch 2.6
        )  # fmt: skip
        plan = None if shuffle else self._plan()
        self._drawn = plan.drawn if isinstance(plan, GivenOrder) else None
        self._records = len(dataset)
        self._fresh = False  # whether the next epoch's order is already drawn
        self._map: MapDataset | None = None
        self._settings = self._loader_settings(plan)
        self._build(_draw_seed(generator, keeps=not shuffle))
        # Threads run only dataload's code, which does not change between epochs.
        self._starts_anew = self._map is not None and num_workers > 0 and not persistent_workers
        self._reads_on = self._drawn is None and not self._starts_anew

    def _build(self, seed: int) -> None:
        Loader.__init__(self, **self._settings, seed=seed)
        if self._map is not None:
            self._scaling = None  # use exactly num_workers processes, as torch does

    def _loader_settings(self, plan: BatchPlanner | None) -> dict[str, Any]:
        """Return the arguments of `Loader`; plan None means ``shuffle=True``."""
        own_code = self.worker_init_fn, self.multiprocessing_context
        makes_batches = self.batch_sampler is not None
        columns = columns_of(self.dataset) if makes_batches and self.collate_fn is data.default_collate else None
        if columns is None or any(part is not None for part in own_code):
            whole = not makes_batches and isinstance(self.sampler, data.BatchSampler)
            self._map = MapDataset(self.dataset, whole=whole, num_workers=self.num_workers)
        collate: Any = self.collate_fn if makes_batches else functools.partial(_alone, self.collate_fn)
        order = {"batch_size": self.batch_size or 1, "shuffle": True} if plan is None else {"sampler": plan}
        ranks = {"rank": 0, "world_size": 1} if plan is None else {"rank": plan.rank, "world_size": plan.world_size}
        return {
            **order,
            **ranks,
            "source": columns if self._map is None else self._map,
            "tail": "drop" if self.drop_last or getattr(self.batch_sampler, "drop_last", False) else "partial",
            "collate": collate if self._map is not None else None,
            "batch_transform": _batch_transform(columns=self._map is None, pins=self.pin_memory),
            "num_workers": self.num_workers,
            "executor": "threads" if self._map is None else _start_method(self.multiprocessing_context),
            "prefetch": max(1, self.prefetch_factor or 1),
            "timeout": self.timeout or None,
            "in_order": getattr(self, "in_order", True),
        }

    def _plan(self) -> BatchPlanner:
        """Return the planned batches: computed where the result is the same, otherwise drawn from the sampler."""
        sampler: Any = self.sampler
        size, records = self.batch_size or 1, len(cast("Any", self.dataset))
        if type(self.batch_sampler) is data.BatchSampler:
            sampler, size = self.batch_sampler.sampler, self.batch_sampler.batch_size
        elif self.batch_sampler is not None or isinstance(sampler, data.BatchSampler):
            batches = sampler if self.batch_sampler is None else self.batch_sampler
            return GivenOrder(drawn=DrawnOrder(batches, records, batches=True, generator=self.generator))
        if type(sampler) is data.SequentialSampler:
            return BatchSampler(sampler=Sequential(len(sampler)), batch_size=size)
        if type(sampler) is data.DistributedSampler and not sampler.shuffle:
            rank, ranks, total = sampler.rank, sampler.num_replicas, sampler.total_size
            if total <= records == len(cast("Any", sampler.dataset)):  # without repeated records
                order = Subset(Sequential(records), range(total))
                return BatchSampler(sampler=order, batch_size=size, rank=rank, world_size=ranks)
        drawn = DrawnOrder(sampler, records, batches=False, generator=self.generator)
        return GivenOrder(drawn=drawn, batch_size=size)

    def check_worker_number_rationality(self) -> None:
        """Do nothing: torch would warn about more processes than CPUs, even if the workers are threads."""

    def _read_until(self) -> int | None:
        return super()._read_until() if self._reads_on else self._cursor.epoch + 1

    def _iterate(self) -> Generator[Any]:
        self._check_open()
        if self._drawn is None and (found := len(cast("Any", self.dataset))) != self._records:
            raise ConfigError(
                f"the data set had {self._records} records when the loader was built and now has {found}: build "
                "a new loader, or pass a sampler",
                key="dataset",
            )
        if self._map is not None:
            self._map.worker_init_fn = self.worker_init_fn  # trainers set it after construction
        if not self._reads_on:
            self._stop_delivery()
        epoch = self._start().epoch
        if self._drawn is not None and not (self._fresh and self._drawn.epoch == epoch):
            self._drawn.draw(epoch)
        self._fresh = False
        try:
            yield from super()._iterate()
        finally:
            if self._starts_anew and self._now is None:
                self._executor.restart()

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`; also calls the sampler's `set_epoch`."""
        if self._drawn is not None:
            self._drawn.set_epoch(epoch)
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`. A sampler that draws from a `torch.Generator` adds its state, 7 KB."""
        state = super().state_dict()
        drawn = {} if self._drawn is None else self._drawn.state(state["epoch"])
        return {**state, "sampler": {"seed": self._seed, **drawn}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`.

        The loader takes the seed of ``shuffle=True`` from the state. A sampler is iterated again and must give the same
        order, from its arguments, its epoch, or a `torch.Generator`, whose state is restored.

        Raises:
            StateMismatchError: As for `Loader.load_state_dict`; or the sampler gives another order.
        """
        plain = dict(state)
        extra = plain.pop("sampler", None)
        if not isinstance(extra, Mapping) or type(cast("Mapping[str, Any]", extra).get("seed")) is not int:
            raise StateMismatchError("this is not a state of a dataload.torch.DataLoader: it has no seed in 'sampler'")
        saved = cast("Mapping[str, Any]", extra)
        if saved["seed"] != self._seed:
            with Loader(**self._settings, seed=saved["seed"]) as trial:  # a refused state changes nothing
                trial.load_state_dict(plain)
            self._stop_delivery()
            self._release()
            self._build(saved["seed"])
        with nullcontext() if self._drawn is None else self._drawn.undone_by_errors():
            if self._drawn is not None:
                self._drawn.restore(saved, plain.get("epoch", 0))
            super().load_state_dict(plain)
        self._fresh = True


def _draw_seed(generator: torch.Generator | None, *, keeps: bool) -> int:
    """Draw a seed from a torch generator; with `keeps`, leave the generator's state unchanged."""
    own = torch.default_generator if generator is None else generator
    state = own.get_state()
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=own).item())
    if keeps:
        own.set_state(state)
    return seed


def _alone(convert: Callable[[Any], Any], samples: list[Any]) -> Any:
    return convert(samples[0])


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
