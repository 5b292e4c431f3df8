"""What OpenTelemetry gets of loaders: metrics when a reader collects them, spans of the steps that are sampled."""

import gc
import json
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import dataload
from dataload import ConfigError, Loader, MemorySource, RangeSource, WorkerError
from dataload.analysis import record_timeline
from dataload.analysis.timeline import CONSUMER
from dataload.errors import MissingDependencyError
from dataload.loader.statistics import SourceStatistics, StageStatistics, Statistics
from dataload.storage.remote.traffic import Downloads
from dataload.streams import MultiStreamLoader
from dataload.telemetry import METRICS, instrument, log_to

sdk = pytest.importorskip("opentelemetry.sdk.metrics")

from opentelemetry import trace  # noqa: E402 - skipped where it is missing
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider, sampling  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402


@pytest.fixture
def collect():
    """Return a function that collects all metrics once: value by name, loader, rank and label."""
    reader = InMemoryMetricReader()
    collect.provider = provider = sdk.MeterProvider(metric_readers=[reader])

    def collected():
        found, data = {}, reader.get_metrics_data()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics if data and data.resource_metrics else ():
            for point in metric.data.data_points:
                about = dict(point.attributes)
                key = metric.name, about.pop("loader"), about.pop("rank"), *about.values()
                found[key] = point.value
        return found

    collected.provider = provider
    yield collected
    provider.shutdown()


def statistics(**changed):
    """Statistics in which all numbers differ."""
    fields = {"steps": 4, "rows": 40, "nbytes": 4000, "wait_seconds": 1.5, "consumer_seconds": 2.5, "workers": 3}
    fields |= {"executor": "threads", "cpus": 8, "depth": 1.75, "worker_seconds": 6.5, "bad": 5}
    fields["stages"] = {"read": StageStatistics(4, 0.25), "decode": StageStatistics(4, 0.75)}
    return Statistics(**fields | changed)


def test_each_metric_has_its_figure():
    downloads = Downloads(9, 8, 7, 6000, shards_found=11, shards_downloaded=12)
    sources = {"web": SourceStatistics(0.75, 30, 1.0, None), "books": SourceStatistics(0.25, 10, 1.0, None)}
    found = {each.name: each.value(statistics(downloads=downloads, sources=sources)) for each in METRICS}
    assert found == {
        "dataload.batches": 4,
        "dataload.rows": 40,
        "dataload.batch.bytes": 4000,
        "dataload.wait.seconds": 1.5,
        "dataload.consumer.seconds": 2.5,
        "dataload.queue.depth": 7,
        "dataload.stage.seconds": {"read": 0.25, "decode": 0.75},
        "dataload.workers": 3,
        "dataload.worker.seconds": 6.5,
        "dataload.bad_records": 5,
        "dataload.download.bytes": 6000,
        "dataload.download.requests": 9,
        "dataload.download.retries": 8,
        "dataload.download.throttled": 7,
        "dataload.cache.hits": 11,
        "dataload.cache.misses": 12,
        "dataload.source.records": {"web": 30, "books": 10},
        "dataload.source.share": {"web": 0.75, "books": 0.25},
    }
    absent = {each.name for each in METRICS if each.value(statistics()) is None}
    assert absent == {name for name in found if re.search(r"\.(download|cache|source)\.", name)}


def test_the_documents_have_the_same_table():
    page = (Path(__file__).parents[3] / "docs/how-to/telemetry.md").read_text()
    rows = re.findall(r"^\| `(dataload\.[\w.]+)` \| (\w+) \| `(\S+)` \| `?(\w*)`? \| (.+) \|$", page, re.MULTILINE)
    assert rows == [each[:-1] for each in METRICS]


def test_metrics_are_the_statistics_of_the_moment(collect):
    web, books = RangeSource(90), RangeSource(180, start=90)
    mixed = dataload.mix({"web": web, "books": books}, {"web": 0.75, "books": 0.25})
    with Loader(mixed, batch_size=4, num_workers=1) as loader:
        instrument(loader, name="train", meter_provider=collect.provider)
        batches = iter(loader)
        for received in (1, 2, 3):
            next(batches)
            found, now = collect(), loader.statistics()
            assert found["dataload.batches", "train", 0] == received
            expected = {each.name: each.value(now) for each in METRICS}
            for (name, _, _, *label), value in found.items():
                assert value == (expected[name][label[0]] if label else expected[name]), name
            assert {name for name, *_ in found} == {name for name, value in expected.items() if value is not None}
        assert found["dataload.source.share", "train", 0, "books"] == 0.25


def test_a_rank_is_published_when_it_is_known(collect, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with Loader(RangeSource(16), batch_size=2) as loader, MultiStreamLoader(iter, [[1]], batch_size=1) as streams:
        instrument(loader, meter_provider=collect.provider)
        instrument(streams, meter_provider=collect.provider)
        assert collect() == {}, "every rank would be 0"
        monkeypatch.setenv("RANK", "3")
        next(iter(streams))
        assert {key[1:3] for key in collect()} == {("loader-1", 3)}
        next(iter(loader))
        assert {key[1:3] for key in collect()} == {("loader-0", 3), ("loader-1", 3)}


def test_the_rank_of_a_loader_with_torchs_arguments(collect, monkeypatch):
    torch = pytest.importorskip("dataload.torch")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with torch.DataLoader(range(8)) as loader:
        instrument(loader, meter_provider=collect.provider)
        next(iter(loader))
        assert {key[1:3] for key in collect()} == {("loader-0", 3)}


def test_a_loader_that_was_dropped_is_gone(collect):
    loader = Loader(RangeSource(8), batch_size=4, num_workers=1)
    spans = TracerProvider()
    held = instrument(loader, name="train", spans=True, meter_provider=collect.provider, tracer_provider=spans)
    assert len([*loader]) == 2
    assert collect()
    gc.disable()
    try:
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None, "something refers to it"
    finally:
        gc.enable()
    assert collect() == {}
    with Loader(RangeSource(8), batch_size=4) as other:
        instrument(other, name="train", meter_provider=collect.provider)
        held.close()  # not of the other one
        next(iter(other))
        assert {name for _, name, *_ in collect()} == {"train"}


def test_what_instrument_refuses(collect):
    with Loader(RangeSource(8), batch_size=4) as loader, Loader(RangeSource(8), batch_size=4) as other:
        instrument(loader, name="train", meter_provider=collect.provider)
        with pytest.raises(ConfigError, match=r"^the loader is already published as 'train': close that first"):
            instrument(loader, name="again", meter_provider=collect.provider)
        with pytest.raises(ConfigError, match=r"^another loader is published under this name: give this one another"):
            instrument(other, name="train", meter_provider=collect.provider)
    with pytest.raises(TypeError, match=r"^instrument takes a Loader, .* or a DeviceLoader; found list$"):
        instrument([])


def test_opentelemetry_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with Loader(RangeSource(8), batch_size=4) as loader, pytest.raises(MissingDependencyError, match="telemetry"):
        instrument(loader)


@pytest.mark.slow_suite
def test_the_global_providers_may_be_set_later():
    code = """
import json, dataload
from dataload.telemetry import instrument
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

early, late = (dataload.Loader(dataload.RangeSource(8), batch_size=4) for _ in range(2))
instrument(early, name="early", spans=True)
reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
instrument(late, name="late")
len([*early, *late])
of_all = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
(batches,) = (metric for metric in of_all if metric.name == "dataload.batches")
print(json.dumps([
    {point.attributes["loader"]: point.value for point in batches.data.data_points},
    [span.name for span in exporter.get_finished_spans()].count("dataload.step"),
]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "", "instruments that conflict are logged"
    assert json.loads(done.stdout) == [{"early": 2, "late": 2}, 2]


def traced(sampler=sampling.ALWAYS_ON):
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def test_a_step_has_spans_of_its_wait_and_its_stages(collect, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    provider, exporter = traced()
    given = {"meter_provider": collect.provider, "tracer_provider": provider, "spans": True}
    settings = {"batch_size": 4, "num_workers": 1, "transform": lambda record: record}
    with Loader(RangeSource(16), **settings) as loader, record_timeline(loader) as timeline:
        with instrument(loader, name="train", **given):
            batches = iter(loader)
            with provider.get_tracer("mine").start_as_current_span("training step") as parent:
                next(batches)
        next(batches)  # no longer traced
    spans = exporter.get_finished_spans()
    (step,) = (span for span in spans if span.name == "dataload.step")
    assert step.parent.span_id == parent.get_span_context().span_id
    assert dict(step.attributes) == {
        "rank": 1,
        "loader": "train",
        "epoch": 0,
        "step": 0,
        "rows": 4,
        "bytes": 36,  # four integers, and which are valid
        "bad_records": 0,
        "worker": timeline.steps[0].worker.replace(CONSUMER, "MainThread"),
    }
    children = {span.name: span for span in spans if span.parent and span.parent.span_id == step.context.span_id}
    recorded = timeline.steps[0]
    assert [*children] == ["dataload.wait", *(f"dataload.{stage}" for stage, _, _ in recorded.spans)]
    wait = children["dataload.wait"]
    assert wait.end_time - wait.start_time == pytest.approx(1e9 * (recorded.received - recorded.asked), abs=2)
    for stage, begun, ended in recorded.spans:
        of_stage = children[f"dataload.{stage}"]
        assert of_stage.end_time - of_stage.start_time == pytest.approx(1e9 * (ended - begun), abs=2)
        assert of_stage.start_time - wait.start_time == pytest.approx(1e9 * (begun - recorded.asked), abs=2)
    assert step.start_time == min(span.start_time for span in children.values())
    assert step.end_time == wait.end_time
    assert parent.start_time - 1e9 < step.end_time <= parent.end_time


def test_a_step_that_fails_has_the_error(collect):
    def fails(record):
        raise ValueError("bad luck")

    provider, exporter = traced()
    with Loader(RangeSource(8), batch_size=4, transform=fails) as loader:
        instrument(loader, spans=True, meter_provider=collect.provider, tracer_provider=provider)
        with pytest.raises(WorkerError):
            next(iter(loader))
    (step,) = (span for span in exporter.get_finished_spans() if span.name == "dataload.step")
    assert (step.attributes["rank"], step.status.status_code) == (0, trace.StatusCode.ERROR)
    assert "bad luck" in step.events[0].attributes["exception.message"]


def test_steps_that_are_not_sampled_have_no_spans(collect):
    provider, exporter = traced(sampling.ALWAYS_OFF)
    with Loader(RangeSource(8), batch_size=4) as loader:
        instrument(loader, spans=True, meter_provider=collect.provider, tracer_provider=provider)
        assert len([*loader]) == 2
    assert exporter.get_finished_spans() == ()


def calls_into_telemetry(loader):
    """Return the functions of `dataload.telemetry` that are called while a loader gives an epoch."""
    called = []

    def watch(frame, event, _):
        if event == "call" and "telemetry" in (frame.f_globals.get("__name__") or ""):
            called.append(frame.f_code.co_name)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        assert len([*loader]) == 4
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return called


def test_the_loop_calls_nothing_of_it(collect):
    loaders = [Loader(MemorySource(np.zeros((8, 2))), batch_size=2, num_workers=number) for number in (0, 1)]
    for loader in loaders:
        with loader:
            assert calls_into_telemetry(loader) == [], "off"
            with instrument(loader, meter_provider=collect.provider):
                log_to(Writes(), loader)
                assert calls_into_telemetry(loader) == [], "metrics are collected, not sent"
            with instrument(loader, spans=True, meter_provider=collect.provider, tracer_provider=TracerProvider()):
                assert calls_into_telemetry(loader).count("waited") == 4, "the watch works"
            assert calls_into_telemetry(loader) == [], "off again"


class Writes:
    def log(self, values, *, step):
        raise AssertionError
