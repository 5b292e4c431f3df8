"""Telemetry: the time that it takes, and its share of that of a loader of a thousand batches a second."""

import os
from contextlib import ExitStack
from time import thread_time

import dataload
from benchmarks.harness import aim, show
from dataload.telemetry import instrument

BATCHES, ROUNDS = 1000, 15
RATE = 1000  # batches a second of a loader
COLLECTIONS = 1  # a second; Prometheus asks every 15 s or so, an exporter every 60 s
SAMPLED = {"none sampled": 0.0, "one in a hundred sampled": 0.01, "all sampled": 1.0}


class Providers:
    """Providers whose metrics are collected every second and thrown away, as are their spans."""

    def __init__(self, held, sampled):
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

        null = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        held.callback(null.close)
        exporter = ConsoleMetricExporter(out=null, formatter=lambda _: "")
        self.reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 / COLLECTIONS)
        self.given = {
            "meter_provider": MeterProvider(metric_readers=[self.reader]),
            "tracer_provider": TracerProvider(TraceIdRatioBased(sampled)),
        }
        spans = BatchSpanProcessor(ConsoleSpanExporter(out=null, formatter=lambda _: ""))
        self.given["tracer_provider"].add_span_processor(spans)
        for provider in self.given.values():
            held.callback(provider.shutdown)


def telemetry():
    """The time that telemetry takes, and its share of the time at a thousand batches a second."""
    names = [f"{number}" for number in range(5)]
    mixed = dataload.mix({name: dataload.RangeSource(5000) for name in names}, dict.fromkeys(names, 0.2))
    rows, shares = [], {}
    with ExitStack() as held:
        loader = held.enter_context(dataload.Loader(mixed, batch_size=4))
        for name, sampled in SAMPLED.items():
            providers, batches = Providers(held, sampled), []
            for _ in range(ROUNDS):
                plain = seconds(loader)
                with instrument(loader, spans=True, **providers.given):
                    batches.append((plain, seconds(loader)))
            each = (min(each for _, each in batches) - min(plain for plain, _ in batches)) / BATCHES
            rows.append({"case": f"spans, {name}", "us_a_batch": 1e6 * each})
            shares[rows[-1]["case"]] = each * RATE
        with instrument(loader, **providers.given):
            providers.reader.collect()  # the first one makes more
            each = min(timed(providers.reader.collect) for _ in range(ROUNDS))
        rows.append({"case": "metrics, a collection", "us": 1e6 * each})
        shares["metrics, collected every second"] = each * COLLECTIONS
    title = "telemetry: its time"
    del shares["spans, all sampled"]
    found = show(title, title, rows)
    return found + [aim(title, f"share of the time: {name}", share, most=0.01) for name, share in shares.items()]


def timed(act):
    """The seconds of CPU that this thread takes."""
    begun = thread_time()
    act()
    return thread_time() - begun


def seconds(loader):
    """The time of so many batches of an epoch."""
    return timed(lambda: [None for _, _ in zip(range(BATCHES), loader, strict=False)])
