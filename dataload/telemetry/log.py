"""A loader's statistics as scalars in the logs of a training run."""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Protocol

from dataload._util.lazy import load_optional
from dataload._util.settings import Least, check_count
from dataload.loader.statistics import Statistics
from dataload.telemetry.metrics import AnyLoader, loader_of


class ScalarWriter(Protocol):
    """Takes one value at a time: TensorBoard's ``SummaryWriter``, and writers like it."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any) -> object:
        """Write a value."""
        ...


class DictWriter(Protocol):
    """Takes the values of a step: ``wandb``, a run of it, and writers like it."""

    def log(self, data: dict[str, Any], /, *, step: Any) -> object:
        """Write the values."""
        ...


def figures(recent: Statistics) -> dict[str, float]:
    """Return the scalars for the work of an interval."""
    downloads, seconds = recent.downloads, recent.wait_seconds + recent.consumer_seconds
    found = {
        "rows_per_second": recent.rows_per_second,
        "wait_share": recent.wait_share,
        "queue_depth": recent.depth,
        "workers": recent.workers,
        "bad_records": recent.bad,
        **{f"work/{name}": stage.seconds / (recent.work_seconds or 1) for name, stage in recent.stages.items()},
        **{f"source/{name}": source.share for name, source in (recent.sources or {}).items()},
    }
    if downloads is not None:
        found["download_bytes_per_second"] = downloads.nbytes / (seconds or 1)
        if shards := downloads.shards_found + downloads.shards_downloaded:
            found["cache_hits"] = downloads.shards_found / shards
    return found


class StatisticsLog:
    """Writes a loader's statistics to a log; see `log_to`."""

    def __init__(self, loader: AnyLoader, send: Callable[[dict[str, float], int], object], every: int) -> None:
        self._loader = loader_of(loader, "log_to")
        self._send = send
        self._every = check_count("every", every, least=1)
        self._last = self._loader.statistics()
        self._written: int | None = None  # the last step

    def __call__(self, step: int) -> None:
        """Write what happened since the last time, if `step` is a multiple of `every`."""
        if step % self._every == 0 and step != self._written:  # with accumulated gradients it comes several times
            now = self._loader.statistics()
            recent, self._last, self._written = now.since(self._last), now, step
            self._send({f"dataload/{name}": value for name, value in figures(recent).items()}, step)


def log_to(
    writer: ScalarWriter | DictWriter, loader: AnyLoader, *, every: Annotated[int, Least(1)] = 100
) -> StatisticsLog:
    """Return a function of the step that writes a loader's statistics to TensorBoard, W&B and the like.

    Call it in the training loop with the number of the step. Each value covers the time since the last one. They are
    ``rows_per_second``, ``wait_share``, ``queue_depth``, ``workers``, ``bad_records``, the share of each stage as
    ``work/decode`` and so on, of each source of a mixture as ``source/NAME``, and of data at URLs
    ``download_bytes_per_second`` and ``cache_hits``, all below ``dataload/``.

    Args:
        writer: Has ``add_scalar(tag, value, step)`` or ``log(values, step=step)``.
        loader: A `Loader`, `MultiStreamLoader`, `dataload.torch.DataLoader` or device loader.
        every: Steps between two values.

    Raises:
        TypeError: `writer` has neither method.

    Examples:
        >>> import dataload
        >>> from dataload.telemetry import log_to
        >>> class Run:
        ...     def log(self, values, *, step):
        ...         print(step, "dataload/wait_share" in values)
        >>> loader = dataload.Loader(dataload.RangeSource(12), batch_size=3)
        >>> log = log_to(Run(), loader, every=2)
        >>> for step, batch in enumerate(loader, 1):
        ...     log(step)
        2 True
        4 True
    """
    target: Any = writer
    if callable(getattr(target, "add_scalar", None)):

        def send(values: dict[str, float], step: int) -> None:
            for tag, value in values.items():
                target.add_scalar(tag, value, step)

    elif callable(getattr(target, "log", None)):

        def send(values: dict[str, float], step: int) -> None:
            target.log(values, step=step)

    else:
        expected = "a writer with add_scalar(tag, value, step), as TensorBoard's, or log(values, step=...), as W&B's"
        raise TypeError(f"log_to takes {expected}; found {type(writer).__name__}")
    return StatisticsLog(loader, send, every)


def lightning_callback(loader: AnyLoader, *, every: Annotated[int, Least(1)] = 100) -> Any:
    """Return a callback for Lightning's ``Trainer`` that gives its loggers what `log_to` writes."""
    name = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    lightning: Any = load_optional(name, needed_by="dataload.telemetry.lightning_callback", extra="examples")

    class LoaderStatistics(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.trainer = trainer
            log(trainer.global_step)

    callback = LoaderStatistics()

    def send(values: dict[str, float], step: int) -> None:
        for logger in callback.trainer.loggers:
            logger.log_metrics(values, step=step)

    log = StatisticsLog(loader, send, every)
    return callback


def trainer_callback(trainer: Any, loader: AnyLoader, *, every: Annotated[int, Least(1)] = 100) -> Any:
    """Return a callback for a ``Trainer`` of transformers that logs what `log_to` writes, wherever the Trainer logs.

    Examples:
        >>> trainer.add_callback(trainer_callback(trainer, loader))  # doctest: +SKIP
    """
    transformers: Any = load_optional("transformers", needed_by="dataload.telemetry.trainer_callback", extra="text")
    log = StatisticsLog(loader, lambda values, _: trainer.log(values), every)

    class LoaderStatistics(transformers.TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            logs_then = control.should_log  # `Trainer.log` forgets that its own values are due
            log(state.global_step)
            control.should_log = logs_then

    return LoaderStatistics()
