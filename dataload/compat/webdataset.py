"""The part of WebDataset's fluid interface that maps on random access: ``import dataload.compat.webdataset as wds``.

A pipeline is an order of the samples (`shuffle`, `slice`, `repeat`), functions of a sample (`decode`, `map`) and
of a batch (what follows `batched`); a `dataload.Loader` runs it. So it resumes, and is the same for any number of
workers and ranks. What needs a stream is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Self

from dataload._util.checks import check_count
from dataload._util.randomness import derive_key
from dataload.compat import _webdataset_stages as stages
from dataload.compat._webdataset_decode import Decode, Handler, handle_extension, image_handler
from dataload.compat._webdataset_pipeline import Pipeline, Plan
from dataload.compat._webdataset_refusals import OnFailure, archives, on_failure, refuse_arguments
from dataload.errors import ConfigError
from dataload.samplers import PoolShuffle, Subset
from dataload.sources.tar.reader import TarSource

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
"""For ``handler=``: a sample that fails is an error."""
warn_and_continue: OnFailure = "skip"
"""For ``handler=``, of the whole pipeline: what fails is left out, and in ``WebLoader(error_report=...)``."""
ignore_and_continue: OnFailure = "skip"
"""As `warn_and_continue`."""
split_by_node: None = None
"""For ``nodesplitter=``: needless, the loader deals samples to ranks. So is `split_by_worker`."""
split_by_worker: None = None


class WebDataset(Pipeline):
    """Samples of tar archives, as dicts of ``__key__``, ``__url__`` and the components' bytes.

    Every method gives another pipeline. Iterating one gives an epoch; the next ``for`` gives the next epoch, in another
    order if it is shuffled. Workers are those of `WebLoader`.

    Args:
        urls: Archives: a path with braces, several with ``::`` between them, or a list of paths as they are.
        shardshuffle: Take the archives in another order each epoch: all of them, whatever the number.
        seed: Of all orders. WebDataset's is another one in each process.
        handler: See `warn_and_continue`.
        nodesplitter: Needless; see `split_by_node`. So are `workersplitter`, `detshuffle` and `verbose`.
        empty_check: Raise if there is no sample.
        others: WebDataset's other arguments, which are refused by name.

    Raises:
        ConfigError: Something does not map on random access; the message says what to use.

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
        source = TarSource(archives(urls), case_sensitive=False)
        plan = Plan(seed=seed, shards=bool(shardshuffle), empty_check=empty_check, on_error=on_failure(handler))
        super().__init__(source, plan)

    def shuffle(self, size: int, *, initial: int = 0, seed: int | None = None) -> Self:
        """Shuffle through a pool of `size` samples, which is full from the start; see `PoolShuffle`."""
        del initial
        if size < 1:
            return self
        if seed is None:  # pools of one seed would draw the same slots
            seed = int(derive_key(self._plan.seed, "webdataset", len(self._plan.orders), words=1)[0])
        return self._ordered("shuffle", lambda order: PoolShuffle(order, size, seed))

    def slice(self, *bounds: int | None) -> Self:
        """Samples of the order so far: ``slice(stop)`` or ``slice(start, stop, step)``."""
        return self._ordered("slice", lambda order: Subset(order, slice(*bounds)))

    def decode(
        self,
        *handlers: str | Handler,
        only: str | Sequence[str] | None = None,
        partial: bool = False,
        handler: OnFailure = reraise_exception,
        pre: None = None,
        post: None = None,
    ) -> Self:
        """Decode components by handlers, names of image formats (``"rgb"``), and their extensions.

        Raises:
            ConfigError: There is no such format; it follows `batched`; or `pre` or `post` are given.
        """
        if pre is not None or post is not None:
            raise ConfigError("decode(pre=, post=): pass all handlers one after another", key="decode")
        if self._plan.batch is not None:
            raise ConfigError("decode() follows batched(): decode samples first", key="decode")
        chosen = tuple(image_handler(each) if isinstance(each, str) else each for each in handlers)
        names = only.split() if isinstance(only, str) else only
        step = Decode(chosen, None if names is None else frozenset(names), partial)
        return self._stage(handler, step)

    def map(self, function: Callable[[Any], Any], *, handler: OnFailure = reraise_exception) -> Self:
        """`function` of each sample, or of each batch after `batched`; what it returns takes its place."""
        return self._stage(handler, stages.Stage("map", stages.apply, function))

    def map_dict(self, *, handler: OnFailure = reraise_exception, **functions: Callable[[Any], Any]) -> Self:
        """A function of each named component."""
        return self._stage(handler, stages.Stage("map_dict", stages.apply_by_name, functions))

    def map_tuple(self, *functions: Callable[[Any], Any] | None, handler: OnFailure = reraise_exception) -> Self:
        """A function of each place of a tuple; None leaves it alone."""
        return self._stage(handler, stages.Stage("map_tuple", stages.apply_by_place, functions))

    def rename(self, *, handler: OnFailure = reraise_exception, keep: bool = True, **names: str) -> Self:
        """``rename(image="jpg;png")``; without `keep`, what has no new name is dropped."""
        return self._stage(handler, stages.Stage("rename", stages.rename, names, keep))

    def to_tuple(
        self,
        *names: str,
        handler: OnFailure = reraise_exception,
        missing_is_error: bool = True,
        none_is_error: bool | None = None,
    ) -> Self:
        """Components as a tuple: ``to_tuple("jpg;png", "cls")``; a missing one is None without `missing_is_error`."""
        del none_is_error  # no decoder gives None
        several = names[0].split() if len(names) == 1 else names
        return self._stage(handler, stages.Stage("to_tuple", stages.to_tuple, several, missing_is_error))

    def batched(self, batchsize: int, collation_fn: Any = stages.collate, partial: bool = True) -> Self:
        """Batches of samples, the last one shorter if `partial`; `collation_fn` None leaves lists of them."""
        check_count("batchsize", batchsize, least=1)
        if self._plan.batch is not None:
            raise ConfigError("batched() follows batched(): batch once, or unbatched() in between", key="batched")
        return self._with(batch=(batchsize, list if collation_fn is None else collation_fn, partial))

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Lists of samples."""
        return self.batched(batchsize, None, partial)

    def unbatched(self) -> Self:
        """Take `batched` back. Needless before shuffling: the pool is over the samples of all workers."""
        if self._plan.batch is None or self._plan.batch_steps:
            raise ConfigError("unbatched() takes batched() back, and must follow it directly", key="unbatched")
        return self._with(batch=None)

    unlisted = unbatched

    def repeat(self, nepochs: int = -1) -> Self:
        """That many passes in one epoch; with -1 there is no end."""
        return self._with(passes=nepochs if nepochs > 0 else None)

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Epochs of that many samples (batches, after `batched`) on each rank, over as many passes as it takes."""
        return self._with(epoch=check_count("nsamples", max(nsamples, nbatches), least=1))

    def with_length(self, length: int, silent: bool = True) -> Self:
        """What ``len`` gives, whatever comes."""
        del silent
        return self._with(length=length)


def WebLoader(dataset: Any, *, batch_size: int | None = None, num_workers: int = 0, **options: Any) -> WebDataset:
    """The pipeline with workers.

    Args:
        dataset: A pipeline.
        batch_size: As `WebDataset.batched`; None leaves the pipeline as it is.
        num_workers: Threads that make batches ahead; see `dataload.Loader`.
        options: Others of `dataload.Loader`: ``executor="processes"``, ``prefetch``, ``error_report``, ``rank``, ...

    Raises:
        TypeError: `dataset` is no `WebDataset`.
    """
    if not isinstance(dataset, WebDataset):
        raise TypeError(f"WebLoader takes a WebDataset of dataload.compat.webdataset, got {type(dataset).__name__}")
    batched = dataset if batch_size is None else dataset.batched(batch_size)
    return batched.with_options(num_workers=num_workers, **options)
