"""A loader's statistics as scalars in the logs of a training run."""

import sys
from collections.abc import Callable
from typing import Any

from dataload._util.lazy import load_optional
from dataload._util.settings import check_count
from dataload.loader.statistics import Statistics
from dataload.telemetry.metrics import AnyLoader, loader_of


def figures(recent: Statistics) -> dict[str, float]:
    """Return the scalars for the work of an interval."""
    found = {
        "rows_per_second": recent.rows_per_second,
        "wait_share": recent.wait_share,
        "queue_depth": recent.depth,
        "workers": recent.workers,
        "bad_records": recent.bad,
        **{f"work/{name}": stage.seconds / (recent.work_seconds or 1) for name, stage in recent.stages.items()},
        **{f"source/{name}": source.share for name, source in (recent.sources or {}).items()},
    }
    if (downloads := recent.downloads) is not None:
        found["download_bytes_per_second"] = downloads.nbytes / (recent.wait_seconds + recent.consumer_seconds or 1)
        if shards := downloads.shards_found + downloads.shards_downloaded:
            found["cache_hits"] = downloads.shards_found / shards
    return found


def _log(loader: AnyLoader, send: Callable[[dict[str, float], int], object], every: int) -> Callable[[int], None]:
    """Return the function that sends a loader's figures at some steps."""
    inner, every = loader_of(loader, "log_to"), check_count("every", every, least=1)
    last = inner.statistics()
    written: int | None = None  # the last step

    def log(step: int) -> None:
        nonlocal last, written
        if step % every == 0 and step != written:  # with accumulated gradients it comes several times
            now = inner.statistics()
            recent, last, written = now.since(last), now, step
            send({f"dataload/{name}": value for name, value in figures(recent).items()}, step)

    return log


def log_to(writer: Any, loader: AnyLoader, *, every: int = 100) -> Callable[[int], None]:
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
    if callable(getattr(writer, "add_scalar", None)):
        return _log(loader, lambda values, step: [writer.add_scalar(tag, x, step) for tag, x in values.items()], every)
    if callable(getattr(writer, "log", None)):
        return _log(loader, lambda values, step: writer.log(values, step=step), every)
    expected = "a writer with add_scalar(tag, value, step), as TensorBoard's, or log(values, step=...), as W&B's"
    raise TypeError(f"log_to takes {expected}; found {type(writer).__name__}")


def lightning_callback(loader: AnyLoader, *, every: int = 100) -> Any:
    """Return a callback for Lightning's ``Trainer`` that gives its loggers what `log_to` writes."""
    name = "lightning.pytorch" if "lightning.pytorch" in sys.modules else "pytorch_lightning"
    lightning: Any = load_optional(name, needed_by="dataload.telemetry.lightning_callback", extra="examples")
    loggers: list[Any] = []
    log = _log(loader, lambda values, step: [logger.log_metrics(values, step=step) for logger in loggers], every)

    class LoaderStatistics(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            loggers[:] = trainer.loggers
            log(trainer.global_step)

    return LoaderStatistics()


def trainer_callback(trainer: Any, loader: AnyLoader, *, every: int = 100) -> Any:
    """Return a callback for transformers' `trainer`, by whose ``log`` it writes what `log_to` does.

    Pass it to ``trainer.add_callback``.
    """
    transformers: Any = load_optional("transformers", needed_by="dataload.telemetry.trainer_callback", extra="text")
    log = _log(loader, lambda values, _: trainer.log(values), every)

    class LoaderStatistics(transformers.TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            logs_then = control.should_log  # `Trainer.log` forgets that its own values are due
            log(state.global_step)
            control.should_log = logs_then

    return LoaderStatistics()
