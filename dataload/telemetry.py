"""Publish a loader's statistics: as OpenTelemetry metrics and spans, to TensorBoard and W&B, in trainers."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from time import perf_counter_ns, time_ns
from typing import Any, Literal, NamedTuple, cast

from dataload._util.lazy import load_optional
from dataload._util.settings import check_count
from dataload.errors import ConfigError
from dataload.loader.base import LoaderBase
from dataload.loader.device import AnyLoader, loader_of
from dataload.loader.statistics import Statistics
from dataload.loader.step import StepResult
from dataload.storage.remote.traffic import ratio

__all__ = ["METRICS", "Metric", "instrument", "lightning_callback", "log_to", "trainer_callback"]


class StepSpans:
    """Traces each step that a consumer receives: its wait, and the stages of the work."""

    def __init__(self, api: Any, provider: Any, loader: LoaderBase[Any], name: str) -> None:
        self._api = api
        self._tracer = provider.get_tracer("dataload")
        self._loader = weakref.ref(loader)  # whose recorder refers to this object
        self._name = name

    def waited(self, step: StepResult, asked: float, received: float) -> None:
        """Add the spans of a step; called by the loader."""
        origin = time_ns() - perf_counter_ns()
        begun = min([asked, *(start for _, start, _ in step.spans)])
        span = self._tracer.start_span("dataload.step", start_time=origin + int(1e9 * begun))
        if not span.is_recording():  # most often, so this comes first
            return
        loader = self._loader()
        rank = loader and loader._known_rank()  # pyright: ignore[reportPrivateUsage] # it has begun, so it knows
        about = {"rank": rank or 0, "loader": self._name, "epoch": step.epoch, "step": step.step}
        about |= {"rows": step.rows, "bytes": step.nbytes, "bad_records": len(step.bad), "worker": step.worker}
        span.set_attributes(about)
        if step.error is not None:
            span.record_exception(step.error)
            span.set_status(self._api.StatusCode.ERROR, type(step.error).__name__)
        context = self._api.set_span_in_context(span)
        for name, start, end in [("wait", asked, received), *step.spans]:
            child = self._tracer.start_span(f"dataload.{name}", context, start_time=origin + int(1e9 * start))
            child.end(origin + int(1e9 * end))
        span.end(origin + int(1e9 * received))

    def worked(self, begun: float, ended: float) -> None:
        """Do nothing; called by the loader."""


class Metric(NamedTuple):
    """A metric of `instrument`: its name, what it is and how it follows from statistics."""

    name: str
    kind: Literal["counter", "gauge"]  # a total since the loader was built, or a present value
    unit: str  # as UCUM writes it
    label: str  # the attribute that tells its values apart, besides rank and loader; "" for a single value
    description: str
    value: Callable[[Statistics], float | Mapping[str, float] | None]  # by label if it has one; None if there is none


def _metric(name: str, unit: str, path: str, description: str, kind: Literal["counter", "gauge"] = "counter") -> Metric:
    """Return the metric at ``name``, or ``group.name``, of statistics."""
    group, _, last = path.rpartition(".")

    def value(statistics: Statistics) -> float | Mapping[str, float] | None:
        held: Any = getattr(statistics, group) if group else statistics
        if isinstance(held, Mapping):
            return {key: getattr(each, last) for key, each in cast("Mapping[str, Any]", held).items()}
        return None if held is None else getattr(held, last)

    label = {"stages": "stage", "sources": "source"}.get(group, "")
    return Metric(f"dataload.{name}", kind, unit, label, description, value)


def _ready(statistics: Statistics) -> int:
    return round(statistics.depth * statistics.steps)


_DEPTH = "batches that were ready, summed over the consumer's requests; divided by dataload.batches, the mean depth"

METRICS: tuple[Metric, ...] = (
    _metric("batches", "{batch}", "steps", "batches that the consumer received"),
    _metric("rows", "{row}", "rows", "rows of the received batches in the order, with those left out as bad"),
    _metric("batch.bytes", "By", "nbytes", "bytes of the arrays of the received batches"),
    _metric("wait.seconds", "s", "wait_seconds", "time that the consumer waited for batches"),
    _metric("consumer.seconds", "s", "consumer_seconds", "time that the consumer worked between batches"),
    Metric("dataload.queue.depth", "counter", "{batch}", "", _DEPTH, _ready),
    _metric("stage.seconds", "s", "stages.seconds", "work on the received batches, of all workers together"),
    _metric("workers", "{worker}", "workers", "workers in use; 0 for the consumer's thread", "gauge"),
    _metric("worker.seconds", "s", "worker_seconds", "time of the loop, times the workers in use"),
    _metric("bad_records", "{record}", "bad", "records that were dropped or replaced"),
    _metric("download.bytes", "By", "downloads.nbytes", "bytes received from object stores and web servers"),
    _metric("download.requests", "{request}", "downloads.requests", "requests to them, including repeated ones"),
    _metric("download.retries", "{request}", "downloads.retries", "requests that repeated a failed one"),
    _metric("download.throttled", "{request}", "downloads.throttled", "responses with status 429 or 503"),
    _metric("cache.hits", "{shard}", "downloads.shards_found", "shards that were in the cache when first needed"),
    _metric("cache.misses", "{shard}", "downloads.shards_downloaded", "shards that were downloaded into the cache"),
    _metric(
        "source.records", "{record}", "sources.records", "records that a source of a mixture has given, to all ranks"
    ),
    _metric(
        "source.share", "{fraction}", "sources.share", "share of a source of a mixture, by the weights now", "gauge"
    ),
)
"""What `instrument` publishes."""


class _Published:
    """The loaders that one meter provider publishes. OpenTelemetry cannot remove instruments, so they share them."""

    def __init__(self, api: Any, provider: Any) -> None:
        self._loaders: dict[str, weakref.ref[LoaderBase[Any]]] = {}
        self._api = api
        meter = provider.get_meter("dataload")
        make = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in METRICS:
            make[metric.kind](metric.name, [self._callback(metric)], metric.unit, metric.description)

    def add(self, loader: LoaderBase[Any], name: str | None) -> str:
        """Add a loader, and return its name."""
        self._loaders = {known: found for known, found in self._loaders.items() if found() is not None}
        for known, found in self._loaders.items():
            if found() is loader:
                message = f"the loader is already published as {known!r}: close that first"
                raise ConfigError(message, key="loader", value=loader)
        if name in self._loaders:
            message = "another loader is published under this name: give this one another, or close the other"
            raise ConfigError(message, key="name", value=name)
        name = name or next(each for n in count() if (each := f"loader-{n}") not in self._loaders)
        self._loaders[name] = weakref.ref(loader)
        return name

    def remove(self, name: str, loader: "weakref.ref[LoaderBase[Any]]") -> None:
        """Remove a loader, unless another one has its name by now."""
        if self._loaders.get(name) == loader:
            del self._loaders[name]

    def _callback(self, metric: Metric) -> Callable[[Any], Iterator[Any]]:
        # What each source of a mixture has given takes time to count, so only its metrics ask for it.
        def read(loader: LoaderBase[Any]) -> Statistics:
            return loader.statistics() if metric.label == "source" else LoaderBase.statistics(loader)

        def observe(_: Any) -> Iterator[Any]:
            for name, found in [*self._loaders.items()]:
                loader = found()
                if loader is None or (rank := loader._known_rank()) is None:  # pyright: ignore[reportPrivateUsage]
                    continue
                value = metric.value(read(loader))
                each = value if isinstance(value, Mapping) else {} if value is None else {"": value}
                for key, number in each.items():
                    label = {metric.label: key} if metric.label else {}
                    yield self._api.Observation(number, {"rank": rank, "loader": name, **label})

        return observe


_PUBLISHED: weakref.WeakKeyDictionary[Any, _Published] = weakref.WeakKeyDictionary()
"""By meter provider; by OpenTelemetry's own module for the global one, which may be set later."""


def instrument(
    loader: AnyLoader,
    *,
    name: str | None = None,
    spans: bool = False,
    meter_provider: Any = None,
    tracer_provider: Any = None,
) -> ExitStack:
    """Publish a loader's statistics as OpenTelemetry metrics, from its first batch until it is dropped.

    They are computed when a reader collects them, so the loop does not change. `METRICS` has their names and units.
    Each has the attributes ``rank`` and ``loader``.

    Args:
        loader: A `Loader`, `MultiStreamLoader`, `dataload.torch.DataLoader` or device loader.
        name: The attribute ``loader``, by default ``"loader-0"`` and so on. A name is free again when its loader is
            no longer published.
        spans: Whether to trace each step that the tracer samples: a span ``dataload.step``, with a span for the
            consumer's wait and for each stage of the work. It is a child of the span that is current when the consumer
            receives the batch.
        meter_provider: A provider, by default the global one, which may be set later.
        tracer_provider: The same for spans.

    Returns:
        What to close, or to use in a ``with``, to end this earlier. It does not keep the loader alive.

    Raises:
        ConfigError: The loader is already published, or its name is taken.
        MissingDependencyError: OpenTelemetry is not installed.
    """
    loader = loader_of(loader, "instrument")
    needs = {"needed_by": "dataload.telemetry.instrument", "extra": "telemetry", "package": "opentelemetry-api"}
    api, trace = (load_optional(f"opentelemetry.{part}", **needs) for part in ("metrics", "trace"))
    provider = api if meter_provider is None else meter_provider
    published = _PUBLISHED.get(provider)
    if published is None:
        published = _PUBLISHED[provider] = _Published(api, provider)
    name = published.add(loader, name)
    held = ExitStack()
    held.callback(published.remove, name, weakref.ref(loader))
    if spans:
        recorder = loader._recorder  # pyright: ignore[reportPrivateUsage] # users have `statistics()`
        listener = StepSpans(trace, trace if tracer_provider is None else tracer_provider, loader, name)
        recorder.listen(listener)
        held.callback(recorder.unlisten, listener)
    return held


def figures(recent: Statistics) -> dict[str, float]:
    """Return the scalars for the work of an interval."""
    found = {
        "rows_per_second": recent.rows_per_second,
        "wait_share": recent.wait_share,
        "queue_depth": recent.depth,
        "workers": recent.workers,
        "bad_records": recent.bad,
        **{f"work/{name}": ratio(stage.seconds, recent.work_seconds) for name, stage in recent.stages.items()},
        **{f"source/{name}": source.share for name, source in (recent.sources or {}).items()},
    }
    if (downloads := recent.downloads) is not None:
        found["download_bytes_per_second"] = ratio(downloads.nbytes, recent.wait_seconds + recent.consumer_seconds)
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
