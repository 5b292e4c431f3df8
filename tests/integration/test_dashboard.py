"""The board in examples/: Grafana's own types make it, and a Prometheus that scrapes two ranks answers its queries."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
from remote_sets import write_shards  # tests/support

pytestmark = [pytest.mark.dashboard, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin" / "prometheus"
PANELS = json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]
RANKS = {"train, rank 0", "train, rank 1"}
SOURCES = {"train: web", "train: books"}
STAGES = ("download", "read", "transform", "collate")
NAMED = {
    "The rank that waits most": {"train, rank 1"},
    "Busy workers by stage": {f"{rank}: {stage}" for rank in RANKS for stage in STAGES},
    "Records of each source": SOURCES,
    "Share of each source": SOURCES,
}


def test_the_board_is_what_the_script_makes():
    pytest.importorskip("grafana_foundation_sdk")
    from scripts.grafana_board import BOARD, text

    assert BOARD.read_text() == text(), "make dashboard"


def ranks(object_server, folder, running):
    """Start two ranks; return the ports of their metrics."""
    data = folder / "data"
    for name in ("web", "books"):
        (data / name).mkdir(parents=True)
        write_shards(data / name, "syr", 2, 64, 1000)
    bucket = object_server.bucket()
    object_server.put_directory(bucket, data)
    script = ROOT / "tests" / "children" / "published_rank.py"
    storage = json.dumps(object_server.storage_options())
    for rank in (0, 1):
        command = [sys.executable, script, rank, f"s3://{bucket}", storage, folder / f"cache-{rank}"]
        child = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=object_server.environment(object_server.endpoint),
        )
        running.callback(child.wait)
        running.callback(child.stdin.close)
        running.callback(child.stdout.close)
        yield int(child.stdout.readline())


def prometheus(ports, folder, running):
    """Start a Prometheus that scrapes these ports; return its URL."""
    binary = shutil.which("prometheus") or UNPACKED
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    targets = [f"127.0.0.1:{port}" for port in ports]
    jobs = [{"job_name": "training", "static_configs": [{"targets": targets}]}]
    config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "tsdb"}
    options |= {"web.listen-address": address}
    with (folder / "prometheus.log").open("w") as log:
        command = [binary, *(f"--{name}={value}" for name, value in options.items())]
        server = subprocess.Popen([*map(str, command)], stdout=log, stderr=log)
    running.callback(server.wait)
    running.callback(server.terminate)
    return f"http://{address}"


def series(url, panel):
    """Return the values of a panel's series by legend, as Grafana names them."""
    (target,) = panel["targets"]
    query = target["expr"].replace("$loader", ".*").replace("$__rate_interval", "5s")
    with urlopen(f"{url}/api/v1/query?{urlencode({'query': query})}") as answer:
        found = json.load(answer)["data"]["result"]
    named = re.sub(r"{{(\w+)}}", r"{\1}", target["legendFormat"])
    return {named.format(**each["metric"]): float(each["value"][1]) for each in found}


def test_each_panel_shows_its_series(object_server, tmp_path):
    if not (shutil.which("prometheus") or UNPACKED.exists()):
        pytest.skip("needs Prometheus: make test-dashboard")
    assert len(PANELS) == 15
    expected = {panel["title"]: NAMED.get(panel["title"], RANKS) for panel in PANELS}
    with ExitStack() as running:
        url = prometheus([*ranks(object_server, tmp_path, running)], tmp_path, running)
        deadline, found, shown = time.monotonic() + 60, {}, {}
        while shown != expected and time.monotonic() < deadline:
            time.sleep(0.5)  # until the next scrape
            try:
                found = {panel["title"]: series(url, panel) for panel in PANELS}
            except URLError:  # it starts
                continue
            shown = {title: {*values} for title, values in found.items()}
    assert shown == expected
    waits = found["Wait for data"]
    assert 0 <= waits["train, rank 0"] < waits["train, rank 1"] <= 1
    assert found["Bad records"]["train, rank 1"] > 0
    assert found["Share of each source"] == {"train: web": 0.75, "train: books": 0.25}
    assert 0 < found["Shards found in the cache"]["train, rank 0"] < 1
    assert found["Batches"]["train, rank 0"] > 1
