"""A loader's statistics as OpenTelemetry metrics, which are computed when a reader collects them."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

from dataload._util.lazy import load_optional
from dataload.errors import ConfigError
from dataload.loader.base import LoaderBase
from dataload.loader.device import DevicePrefetcher
from dataload.loader.statistics import Statistics
from dataload.storage.remote.traffic import Downloads
from dataload.telemetry.spans import StepSpans


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, and how it follows from statistics.

    Attributes:
        name: Its stable name.
        kind: ``"counter"`` for a total since the loader was built, ``"gauge"`` for a present value.
        unit: The unit, as UCUM writes it.
        description: What it measures.
        value: A number; a dict of numbers by `label`; or None if the loader has none.
        label: Attribute that tells several numbers apart, besides ``rank`` and ``loader``.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    description: str
    value: Callable[[Statistics], float | Mapping[str, float] | None]
    label: str | None = None


def _downloads(name: str, unit: str, description: str, value: Callable[[Downloads], float]) -> Metric:
    return Metric(name, "counter", unit, description, lambda s: None if s.downloads is None else value(s.downloads))


METRICS: tuple[Metric, ...] = (
    Metric("dataload.batches", "counter", "{batch}", "batches that the consumer received", lambda s: s.steps),
    Metric("dataload.rows", "counter", "{row}", "rows of the received batches", lambda s: s.rows),
    Metric("dataload.batch.bytes", "counter", "By", "bytes of the arrays of the received batches", lambda s: s.nbytes),
    Metric(
        "dataload.wait.seconds", "counter", "s", "time that the consumer waited for batches", lambda s: s.wait_seconds
    ),
    Metric(
        "dataload.consumer.seconds",
        "counter",
        "s",
        "time that the consumer worked between batches",
        lambda s: s.consumer_seconds,
    ),
    Metric(
        "dataload.queue.depth",
        "counter",
        "{batch}",
        "batches that were ready, summed over the consumer's requests; divided by dataload.batches, the mean depth",
        lambda s: round(s.depth * s.steps),
    ),
    Metric(
        "dataload.stage.seconds",
        "counter",
        "s",
        "work on the received batches, of all workers together",
        lambda s: {name: stage.seconds for name, stage in s.stages.items()},
        "stage",
    ),
    Metric("dataload.workers", "gauge", "{worker}", "workers in use; 0 for the consumer's thread", lambda s: s.workers),
    Metric(
        "dataload.worker.seconds",
        "counter",
        "s",
        "time of the loop, times the workers in use",
        lambda s: s.worker_seconds,
    ),
    Metric("dataload.bad_records", "counter", "{record}", "records that were dropped or replaced", lambda s: s.bad),
    _downloads(
        "dataload.download.bytes", "By", "bytes received from object stores and web servers", lambda d: d.nbytes
    ),
    _downloads(
        "dataload.download.requests",
        "{request}",
        "requests to object stores and web servers, including repeated ones",
        lambda d: d.requests,
    ),
    _downloads("dataload.download.retries", "{request}", "requests that repeated a failed one", lambda d: d.retries),
    _downloads("dataload.download.throttled", "{request}", "responses with status 429 or 503", lambda d: d.throttled),
    _downloads(
        "dataload.cache.hits", "{shard}", "shards that were in the cache when first needed", lambda d: d.shards_found
    ),
    _downloads(
        "dataload.cache.misses", "{shard}", "shards that were downloaded into the cache", lambda d: d.shards_downloaded
    ),
    Metric(
        "dataload.source.records",
        "counter",
        "{record}",
        "records that a source of a mixture has given, to all ranks",
        lambda s: None if s.sources is None else {name: source.records for name, source in s.sources.items()},
        "source",
    ),
    Metric(
        "dataload.source.share",
        "gauge",
        "{fraction}",
        "share of a source of a mixture, by the weights now",
        lambda s: None if s.sources is None else {name: source.share for name, source in s.sources.items()},
        "source",
    ),
)
"""What `instrument` publishes."""


class Instrumentation:
    """A loader that is published; see `instrument`. It does not keep the loader alive."""

    def __init__(self, name: str, loader: LoaderBase[Any], published: "_Published", spans: StepSpans | None) -> None:
        self.name = name
        """The attribute ``loader`` of its metrics."""
        self._loader = weakref.ref(loader)
        self._published = published
        self._spans = spans

    def close(self) -> None:
        """Stop to publish the loader. May be called twice."""
        if self._published.loaders.get(self.name) == self._loader:
            del self._published.loaders[self.name]
        loader = self._loader()
        if loader is not None and self._spans is not None:
            recorder = loader._recorder  # pyright: ignore[reportPrivateUsage] # users have `statistics()`
            recorder.listeners = tuple(listener for listener in recorder.listeners if listener is not self._spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Published:
    """The loaders that one meter provider publishes. OpenTelemetry cannot remove instruments, so they share them."""

    def __init__(self, api: Any, provider: Any) -> None:
        self.loaders: dict[str, weakref.ref[LoaderBase[Any]]] = {}
        self._api = api
        meter = provider.get_meter("dataload")
        make = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in METRICS:
            make[metric.kind](metric.name, [self._callback(metric)], metric.unit, metric.description)

    def add(self, loader: LoaderBase[Any], name: str | None) -> str:
        """Add a loader, and return its name."""
        for known, found in [*self.loaders.items()]:
            if found() is loader:
                message = f"the loader is already published as {known!r}: close that first"
                raise ConfigError(message, key="loader", value=loader)
            if found() is None:
                del self.loaders[known]
        if name is None:
            number = 0
            while (name := f"loader-{number}") in self.loaders:
                number += 1
        elif name in self.loaders:
            message = "another loader is published under this name: give this one another, or close the other"
            raise ConfigError(message, key="name", value=name)
        self.loaders[name] = weakref.ref(loader)
        return name

    def _callback(self, metric: Metric) -> Callable[[Any], Iterator[Any]]:
        def observe(_: Any) -> Iterator[Any]:
            for name, found in [*self.loaders.items()]:
                loader = found()
                rank = None if loader is None else loader._known_rank()  # pyright: ignore[reportPrivateUsage]
                if loader is None or rank is None:
                    continue
                # What each source of a mixture has given takes time to count, so only its metrics ask for it.
                of_sources = metric.label == "source"
                value = metric.value(loader.statistics() if of_sources else LoaderBase.statistics(loader))
                each = value if isinstance(value, Mapping) else {} if value is None else {"": value}
                for key, number in each.items():
                    label = {} if metric.label is None else {metric.label: key}
                    yield self._api.Observation(number, {"rank": rank, "loader": name, **label})

        return observe


_PUBLISHED: weakref.WeakKeyDictionary[Any, _Published] = weakref.WeakKeyDictionary()
"""By meter provider; by OpenTelemetry's own module for the global one, which may be set later."""


AnyLoader: TypeAlias = LoaderBase[Any] | DevicePrefetcher[Any]
"""What has statistics, or wraps it."""


def loader_of(loader: Any, caller: str) -> LoaderBase[Any]:
    """Return a loader, or the one of a device loader."""
    inner = loader.loader if isinstance(loader, DevicePrefetcher) else loader
    if not isinstance(inner, LoaderBase):
        expected = "a Loader, a MultiStreamLoader, a dataload.torch.DataLoader or a DeviceLoader"
        raise TypeError(f"{caller} takes {expected}; found {type(loader).__name__}")
    return inner


def instrument(
    loader: AnyLoader,
    *,
    name: str | None = None,
    spans: bool = False,
    meter_provider: Any = None,
    tracer_provider: Any = None,
) -> Instrumentation:
    """Publish a loader's statistics as OpenTelemetry metrics, from its first batch until it is dropped.

    They are computed when a reader collects them, so the loop does not change. `METRICS` has their names and units.
    Each has the attributes ``rank`` and ``loader``.

    Args:
        loader: A `Loader`, `MultiStreamLoader`, `dataload.torch.DataLoader` or device loader.
        name: The attribute ``loader``, by default ``"loader-0"`` and so on. A name is free again when its loader is
            closed here or dropped.
        spans: Whether to trace each step that the tracer samples: a span ``dataload.step``, with a span for the
            consumer's wait and for each stage of the work. It is a child of the span that is current when the consumer
            receives the batch.
        meter_provider: A provider, by default the global one, which may be set later.
        tracer_provider: The same for spans.

    Returns:
        What to close, or to use in a ``with``, to end this earlier.

    Raises:
        ConfigError: The loader is already published, or its name is taken.
        MissingDependencyError: OpenTelemetry is not installed.

    Examples:
        >>> import dataload
        >>> from dataload.telemetry import instrument
        >>> loader = dataload.Loader(dataload.RangeSource(8), batch_size=4)
        >>> instrument(loader, name="train").name
        'train'
    """
    loader = loader_of(loader, "instrument")
    needs = {"needed_by": "dataload.telemetry.instrument", "extra": "telemetry", "package": "opentelemetry-api"}
    api = load_optional("opentelemetry.metrics", **needs)
    provider = api if meter_provider is None else meter_provider
    published = _PUBLISHED.get(provider)
    if published is None:
        published = _PUBLISHED[provider] = _Published(api, provider)
    name = published.add(loader, name)
    listener = None
    if spans:
        trace = load_optional("opentelemetry.trace", **needs)
        listener = StepSpans(trace, trace if tracer_provider is None else tracer_provider, loader, name)
        loader._recorder.listeners += (listener,)  # pyright: ignore[reportPrivateUsage]
    return Instrumentation(name, loader, published, listener)
