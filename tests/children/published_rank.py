"""One rank of a job that Prometheus scrapes; run by test_dashboard.py until its input ends.

Arguments: rank, URL of the data, their storage options, a folder for the cache. Prints the port of its metrics.
"""

import json
import sys
import threading
import time

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

import dataload
from dataload.telemetry import instrument


def refuse_some(record):
    if record["n"] % 8 == 0:
        raise ValueError("bad record")
    return record


def refuse_some_slowly(record):
    time.sleep(0.002)
    return refuse_some(record)


def main(rank, url, storage, cache):
    def read(name):
        remote = {"cache": cache, "mode": "shards"}
        return dataload.open(f"{url}/{name}/part-*.syr", storage_options=json.loads(storage), remote=remote)

    with read("web") as web:  # which are in the cache from here on
        list(dataload.Loader(web, batch_size=8))
    mixed = dataload.mix({"web": read("web"), "books": read("books")}, {"web": 0.75, "books": 0.25})
    transform = refuse_some_slowly if rank == 1 else refuse_some
    settings = {"transform": transform, "on_error": "skip", "max_bad": 1.0, "num_workers": 1}
    with dataload.Loader(mixed, batch_size=4, rank=rank, world_size=2, **settings) as loader:
        instrument(loader, name="train", meter_provider=MeterProvider(metric_readers=[PrometheusMetricReader()]))
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        server, _ = start_http_server(0, "127.0.0.1")
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        while not ended.is_set():
            for _ in loader:
                ended.wait(0.002)  # the model


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
