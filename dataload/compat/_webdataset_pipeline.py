"""What a WebDataset pipeline consists of, and how `dataload.Loader` runs it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from dataload.compat._webdataset_refusals import OnFailure, on_failure, refuse_method
from dataload.compat._webdataset_stages import AddUrl, run
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.samplers import Repeat, Sequential, ShardSequential, Subset
from dataload.sources.range import RangeSource
from dataload.sources.tar.reader import TarSource
from dataload.types import Sampler

__all__ = ["Pipeline", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a pipeline consists of.

    Attributes:
        seed: Of all orders.
        shards: Whether archives come in another order each epoch.
        empty_check: Whether no samples are an error.
        on_error: What becomes of samples that fail.
        orders: What is done to the order, one after another.
        steps: Functions of a sample.
        batch: Samples of a batch, what collates them, and whether a shorter one is given at the end.
        batch_steps: Functions of a batch.
        passes: Passes over the samples in an epoch; None without end.
        epoch: Samples or batches of an epoch, over as many passes as it takes.
        length: What ``len`` gives.
        options: Of `dataload.Loader`.
    """

    seed: int
    shards: bool
    empty_check: bool
    on_error: OnFailure = "raise"
    orders: tuple[Callable[[Sampler], Sampler], ...] = ()
    steps: tuple[Callable[..., Any], ...] = ()
    batch: tuple[int, Callable[[Sequence[Any]], Any], bool] | None = None
    batch_steps: tuple[Callable[[Any], Any], ...] = ()
    passes: int | None = 1
    epoch: int | None = None
    length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Pipeline:
    """An order over the samples of archives, and functions of samples and batches."""

    def __init__(self, source: TarSource, plan: Plan) -> None:
        self._source = source
        self._plan = plan
        self._loader: Loader[Any] | None = None

    def with_options(self, **options: Any) -> Self:
        """With more options of `dataload.Loader`: ``num_workers=4``."""
        return self._with(options={**self._plan.options, **options})

    def loader(self) -> Loader[Any]:
        """The loader that runs the pipeline; without `batched` its batches are lists of one sample."""
        if self._loader is None:
            plan, source = self._plan, self._source
            if plan.empty_check and not len(source):
                raise ConfigError(f"no samples in {source!r}; with empty_check=False it is empty", key="urls")
            size, collate, partly = plan.batch or (1, list, True)
            self._loader = Loader(
                source,
                batch_size=size,
                sampler=self._order(size),
                tail="partial" if partly else "drop",
                seed=plan.seed,
                transform=(AddUrl(source.paths, np.cumsum(source.shard_lengths)), *plan.steps),
                collate=collate,
                batch_transform=partial(run, plan.batch_steps) if plan.batch_steps else None,
                on_error=plan.on_error,
                **plan.options,
            )
        return self._loader

    def _order(self, batch_size: int) -> Sampler:
        plan, lengths = self._plan, self._source.shard_lengths
        order: Sampler = ShardSequential(lengths, plan.seed) if plan.shards else Sequential(sum(lengths))
        for change in plan.orders:
            order = change(order)
        if plan.epoch is not None and len(order):
            rows = plan.epoch * batch_size * self._ranks()
            return Subset(Repeat(order, -(-rows // len(order))), slice(rows))
        return order if plan.passes in (None, 1) else Repeat(order, plan.passes)

    def _ranks(self) -> int:
        """How many processes share an epoch: each gets what ``with_epoch`` says, as in WebDataset."""
        rank, world_size = (self._plan.options.get(name) for name in ("rank", "world_size"))
        with Loader(RangeSource(1), batch_size=1, rank=rank, world_size=world_size) as loader:
            return loader.batch_sampler.world_size

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or what is left of it after `load_state_dict`."""
        loader = self.loader()
        for _ in itertools.count() if self._endless and len(loader) else range(1):
            for batch in loader:
                yield from batch if self._plan.batch is None else (batch,)

    @property
    def _endless(self) -> bool:
        return self._plan.passes is None and self._plan.epoch is None

    def __len__(self) -> int:
        """Samples or batches of an epoch, or what ``with_length`` said."""
        if self._plan.length is not None:
            return self._plan.length
        if self._endless:
            raise TypeError("repeat() has no end, and so no length: use repeat(n), with_epoch(n) or with_length(n)")
        return len(self.loader())

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands: see `dataload.Loader.state_dict`."""
        return self.loader().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: see `dataload.Loader.load_state_dict`."""
        self.loader().load_state_dict(state)

    def close(self) -> None:
        """Stop the workers and close the archives. May be called twice."""
        if self._loader is not None:
            self._loader.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Refuses WebDataset's other methods by name."""
        refuse_method(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        other._plan = replace(self._plan, **changes)
        other._source = copy.copy(self._source)  # unopened, so that closing one pipeline leaves the other
        other._loader = None
        return other

    def _ordered(self, name: str, change: Callable[[Sampler], Sampler]) -> Self:
        if self._plan.batch is not None:
            raise ConfigError(f"{name}() follows batched(): call it before, the order is one of samples", key=name)
        return self._with(orders=(*self._plan.orders, change))

    def _stage(self, handler: OnFailure, step: Callable[[Any], Any]) -> Self:
        """With another function of a sample, or of a batch if they are batched by now."""
        plan = self._plan
        failing = plan.on_error if on_failure(handler) == "raise" else handler
        if plan.batch is None:
            return self._with(on_error=failing, steps=(*plan.steps, step))
        return self._with(on_error=failing, batch_steps=(*plan.batch_steps, step))
