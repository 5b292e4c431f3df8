"""WebDataset's fluid interface over random access: ``import dataload.compat.webdataset as wds``.

A pipeline is an order of the samples (`shuffle`, `slice`, `repeat`), functions of a sample (`decode`, `map`) and
functions of a batch (everything after `batched`). A `dataload.Loader` runs it, so it can resume, and it gives the same
batches for any number of workers and ranks. Methods and arguments that need a sequential stream are refused by name.
"""

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import Any, Self

from dataload._util.checks import check_count
from dataload._util.randomness import derive_key
from dataload.compat import _webdataset_stages as stages
from dataload.compat._webdataset_refusals import OnFailure, archives, check_handler, refuse_arguments, refuse_method
from dataload.compat._webdataset_stages import Handler, handle_extension
from dataload.errors import ConfigError
from dataload.loader.loader import Loader
from dataload.loader.order import rank_and_world_size
from dataload.samplers import PoolShuffle, Repeat, Sequential, ShardSequential, Subset
from dataload.sources.tar.reader import TarSource
from dataload.types import Sampler

__all__ = [
    "WebDataset",
    "WebLoader",
    "handle_extension",
    "ignore_and_continue",
    "reraise_exception",
    "split_by_node",
    "split_by_worker",
    "warn_and_continue",
]

reraise_exception: OnFailure = "raise"
"""For ``handler=``: raise an error if a sample fails."""
warn_and_continue: OnFailure = "skip"
"""For ``handler=``: leave out failing samples of the whole pipeline; ``WebLoader(error_report=...)`` lists them."""
ignore_and_continue: OnFailure = "skip"
"""The same as `warn_and_continue`."""
split_by_node: None = None
"""For ``nodesplitter=``. It has no effect, because the loader divides the samples among ranks."""
split_by_worker: None = None
"""For ``workersplitter=``. It has no effect, because the loader divides the samples among workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The parts of a pipeline."""

    seed: int
    shuffle_archives: bool
    empty_check: bool
    on_error: OnFailure = "raise"
    orders: tuple[Callable[[Sampler], Sampler], ...] = ()  # changes to the order, applied in turn
    steps: tuple[Callable[..., Any], ...] = ()  # functions of a sample
    batch: tuple[int, Callable[[Sequence[Any]], Any], bool] | None = None  # size, collate, may the last be shorter
    batch_steps: tuple[Callable[[Any], Any], ...] = ()  # functions of a batch
    passes: int | None = 1  # over the samples in an epoch; None is endless
    epoch: int | None = None  # samples or batches in an epoch, over as many passes as needed
    length: int | None = None  # the result of len()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of dataload.Loader

    @property
    def endless(self) -> bool:
        return self.passes is None and self.epoch is None

    def order(self, lengths: tuple[int, ...], batch_size: int) -> Sampler:
        """Return the order of an epoch; `lengths` are the numbers of samples in the archives."""
        order: Sampler = ShardSequential(lengths, self.seed) if self.shuffle_archives else Sequential(sum(lengths))
        for change in self.orders:
            order = change(order)
        if self.epoch is not None and len(order):
            # As in WebDataset, each rank gets an epoch of this size.
            _, world_size = rank_and_world_size(self.options.get("rank"), self.options.get("world_size"))
            rows = self.epoch * batch_size * world_size
            return Subset(Repeat(order, -(-rows // len(order))), slice(rows))
        return order if self.passes in (None, 1) else Repeat(order, self.passes)


class WebDataset:
    """A pipeline of the samples of tar archives, as dicts of ``__key__``, ``__url__`` and the components' bytes.

    Every method returns a new pipeline. Iterating over a pipeline gives one epoch; the next ``for`` gives the next
    epoch, in a different order if it is shuffled. `WebLoader` adds workers.

    Args:
        urls: Archives: a path with braces, several of them separated by ``::``, or a list of plain paths.
        shardshuffle: If true or a number, reorder all archives in each epoch.
        seed: Seed of all orders. (In WebDataset, each process has a different one.)
        handler: What to do with samples that fail; see `warn_and_continue`.
        nodesplitter: Has no effect; see `split_by_node`. Nor do `workersplitter`, `detshuffle` and `verbose`.
        empty_check: Raise if there are no samples.
        others: Other arguments of WebDataset, which are refused by name.

    Raises:
        ConfigError: An argument does not work with random access; the message says what to use instead.

    Example:
        >>> data = WebDataset("train-{000..127}.tar", shardshuffle=True).shuffle(1000)  # doctest: +SKIP
        >>> data = data.decode("rgb").to_tuple("jpg;png", "cls").batched(64)  # doctest: +SKIP
        >>> for images, labels in WebLoader(data, num_workers=4): ...  # doctest: +SKIP
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str],
        *,
        shardshuffle: bool | int | None = None,
        seed: int = 0,
        handler: OnFailure = reraise_exception,
        nodesplitter: None = None,
        workersplitter: None = None,
        empty_check: bool = True,
        **others: Any,
    ) -> None:
        refuse_arguments({**others, "nodesplitter": nodesplitter, "workersplitter": workersplitter})
        self._source = TarSource(archives(urls), case_sensitive=False)
        check_handler(handler)
        self._plan = _Plan(seed=seed, shuffle_archives=bool(shardshuffle), empty_check=empty_check, on_error=handler)
        self._loader: Loader[Any] | None = None

    # The order

    def shuffle(self, size: int, *, initial: int = 0, seed: int | None = None) -> Self:
        """Shuffle through a pool of `size` samples; see `PoolShuffle`. The pool is always full, so ignore `initial`."""
        del initial
        if size < 1:
            return self
        if seed is None:  # pools with equal seeds would draw the same slots
            seed = int(derive_key(self._plan.seed, "webdataset", len(self._plan.orders), words=1)[0])
        return self._ordered("shuffle", lambda order: PoolShuffle(order, size, seed))

    def slice(self, *bounds: int | None) -> Self:
        """Choose samples of the order so far, as ``slice(stop)`` or ``slice(start, stop, step)``."""
        return self._ordered("slice", lambda order: Subset(order, slice(*bounds)))

    def repeat(self, nepochs: int = -1) -> Self:
        """Make `nepochs` passes over the samples in each epoch; -1 makes the epoch endless."""
        return self._with(passes=nepochs if nepochs > 0 else None)

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Set the samples (or batches, after `batched`) of an epoch on each rank, over as many passes as needed."""
        return self._with(epoch=check_count("nsamples", max(nsamples, nbatches), least=1))

    def with_length(self, length: int, silent: bool = True) -> Self:
        """Set the result of ``len``, without changing the samples."""
        del silent
        return self._with(length=length)

    # Functions of samples, or of batches after `batched`

    def decode(
        self,
        *handlers: str | Handler,
        only: str | Sequence[str] | None = None,
        partial: bool = False,
        handler: OnFailure = reraise_exception,
        pre: None = None,
        post: None = None,
    ) -> Self:
        """Decode components by handlers, by names of image formats (``"rgb"``), and by their extensions."""
        if pre is not None or post is not None:
            raise ConfigError("decode(pre=, post=): pass all handlers in order instead", key="decode")
        if self._plan.batch is not None:
            raise ConfigError("decode() follows batched(): decode samples first", key="decode")
        chosen = [stages.image_handler(each) if isinstance(each, str) else each for each in handlers]
        names = only.split() if isinstance(only, str) else only
        return self._stage("decode", handler, stages.decode, chosen, names and frozenset(names), partial)

    def map(self, function: Callable[[Any], Any], *, handler: OnFailure = reraise_exception) -> Self:
        """Replace each sample, or each batch after `batched`, by the result of `function`."""
        return self._stage("map", handler, stages.apply, function)

    def map_dict(self, *, handler: OnFailure = reraise_exception, **functions: Callable[[Any], Any]) -> Self:
        """Apply a function to each named component."""
        return self._stage("map_dict", handler, stages.apply_by_name, functions)

    def map_tuple(self, *functions: Callable[[Any], Any] | None, handler: OnFailure = reraise_exception) -> Self:
        """Apply a function to each element of a tuple; None leaves the element alone."""
        return self._stage("map_tuple", handler, stages.apply_by_position, functions)

    def rename(self, *, handler: OnFailure = reraise_exception, keep: bool = True, **names: str) -> Self:
        """Rename components: ``rename(image="jpg;png")``. Without `keep`, drop components without a new name."""
        return self._stage("rename", handler, stages.rename, names, keep)

    def to_tuple(
        self,
        *names: str,
        handler: OnFailure = reraise_exception,
        missing_is_error: bool = True,
        none_is_error: bool | None = None,
    ) -> Self:
        """Make a tuple of components: ``to_tuple("jpg;png", "cls")``. If not `missing_is_error`, some may be None."""
        del none_is_error  # no decoder returns None
        several = names[0].split() if len(names) == 1 else names
        return self._stage("to_tuple", handler, stages.to_tuple, several, missing_is_error)

    # Batches

    def batched(self, batchsize: int, collation_fn: Any = stages.collate, partial: bool = True) -> Self:
        """Batch samples, with a shorter last batch if `partial`. A `collation_fn` of None makes lists of samples."""
        check_count("batchsize", batchsize, least=1)
        if self._plan.batch is not None:
            raise ConfigError("batched() follows batched(): batch once, or call unbatched() in between", key="batched")
        return self._with(batch=(batchsize, list if collation_fn is None else collation_fn, partial))

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Batch samples as lists."""
        return self.batched(batchsize, None, partial)

    def unbatched(self) -> Self:
        """Undo `batched`. Not needed before shuffling, because the pool spans the samples of all workers."""
        if self._plan.batch is None or self._plan.batch_steps:
            raise ConfigError("unbatched() undoes batched() and must follow it directly", key="unbatched")
        return self._with(batch=None)

    unlisted = unbatched

    # Running it

    def with_options(self, **options: Any) -> Self:
        """Add options of `dataload.Loader`, such as ``num_workers=4``."""
        return self._with(options={**self._plan.options, **options})

    def loader(self) -> Loader[Any]:
        """Return the loader that runs the pipeline. Without `batched`, its batches are lists of one sample."""
        if self._loader is None:
            plan, source = self._plan, self._source
            if plan.empty_check and not len(source):
                raise ConfigError(f"there are no samples in {source!r}; empty_check=False allows that", key="urls")
            size, collate, shorter = plan.batch or (1, list, True)
            ends = list(itertools.accumulate(source.shard_lengths))
            self._loader = Loader(
                source,
                batch_size=size,
                sampler=plan.order(source.shard_lengths, size),
                tail="partial" if shorter else "drop",
                seed=plan.seed,
                transform=(bind(stages.add_url, source.paths, ends), *plan.steps),
                collate=collate,
                batch_transform=bind(stages.run, plan.batch_steps) if plan.batch_steps else None,
                on_error=plan.on_error,
                **plan.options,
            )
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`."""
        loader = self.loader()
        for _ in itertools.count() if self._plan.endless and len(loader) else range(1):
            for batch in loader:
                yield from batch if self._plan.batch is None else (batch,)

    def __len__(self) -> int:
        """Return the number of samples or batches in an epoch, or the length set by `with_length`."""
        if self._plan.length is not None:
            return self._plan.length
        if self._plan.endless:
            raise TypeError("repeat() is endless and has no length: use repeat(n), with_epoch(n) or with_length(n)")
        return len(self.loader())

    def state_dict(self) -> dict[str, Any]:
        """Return the consumer's position; see `dataload.Loader.state_dict`."""
        return self.loader().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; see `dataload.Loader.load_state_dict`."""
        self.loader().load_state_dict(state)

    def close(self) -> None:
        """Stop the workers and close the archives. Calling it again has no effect."""
        if self._loader is not None:
            self._loader.close()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        """Refuse WebDataset's other methods by name."""
        refuse_method(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _with(self, **changes: Any) -> Self:
        other = copy.copy(self)
        other._plan = replace(self._plan, **changes)
        other._source = copy.copy(self._source)  # unopened, so closing one pipeline does not affect the other
        other._loader = None
        return other

    def _ordered(self, name: str, change: Callable[[Sampler], Sampler]) -> Self:
        if self._plan.batch is not None:
            raise ConfigError(f"{name}() follows batched(): call it before, because it orders samples", key=name)
        return self._with(orders=(*self._plan.orders, change))

    def _stage(self, name: str, handler: OnFailure, function: Callable[..., Any], *arguments: Any) -> Self:
        """Add a function of a sample, or of a batch if the samples are already batched."""
        check_handler(handler)
        where = "steps" if self._plan.batch is None else "batch_steps"
        steps = (*getattr(self._plan, where), stages.Stage(name, function, *arguments))
        on_error = self._plan.on_error if handler == "raise" else handler
        return self._with(on_error=on_error, **{where: steps})


def WebLoader(dataset: Any, *, batch_size: int | None = None, num_workers: int = 0, **options: Any) -> WebDataset:
    """Return the pipeline with workers.

    Args:
        dataset: A pipeline.
        batch_size: Batch the samples, as `WebDataset.batched` does. None leaves the pipeline as it is.
        num_workers: Number of workers that prepare batches ahead; see `dataload.Loader`.
        options: Other options of `dataload.Loader`: ``executor="processes"``, ``prefetch``, ``error_report``, ``rank``.

    Raises:
        TypeError: `dataset` is not a `WebDataset` of this module.
    """
    if not isinstance(dataset, WebDataset):
        raise TypeError(f"WebLoader takes a WebDataset of dataload.compat.webdataset, got {type(dataset).__name__}")
    batched = dataset if batch_size is None else dataset.batched(batch_size)
    return batched.with_options(num_workers=num_workers, **options)
