import gc
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import dataload
from benchmarks.peers import PEERS, open_peer, why_missing
from benchmarks.peers.field import Field
from dataload.bench.task import MODULUS, Task, check_batch
from dataload.errors import ConfigError

COUNT, BATCH = 50, 16
READINGS = [
    pytest.param(peer, form, id=f"{peer.name}-{form}", marks=[pytest.mark.slow_suite] * (peer.name == "Grain"))
    for peer in PEERS.values()
    if find_spec(peer.imports[0].partition(".")[0]) and why_missing(peer) is None
    for form in peer.readings
]


class Data:
    """Records of one field, written once for each format."""

    def __init__(self, directory):
        self.directory = directory
        self.paths = {}
        self.values = [*np.random.default_rng(0).standard_normal((COUNT, 2, 3), np.float32)]
        self.field = Field.of_record({"x": self.values[0]})
        self.checksum = sum(check_batch({"x": [value]})[2] for value in self.values) % MODULUS

    def path(self, peer, form):
        key = peer.name, form
        if key not in self.paths:
            self.paths[key] = self.write(peer, form)
        return self.paths[key]

    def write(self, peer, form):
        directory = self.directory / f"{peer.name} {form}"
        directory.mkdir()
        if form == peer.own_format:
            return peer.write(dataload.MemorySource({"x": self.values}), self.field, str(directory))
        path = directory / f"x.{form}"
        with dataload.create(path) as writer:
            writer.extend({"x": v} if form == "tar" else v.tobytes() for v in self.values)
        return str(path)

    def task(self, peer, form, order, **changes):
        values = {"workload": "w", "kind": "peer", "name": peer.name, "format": form, "order": order}
        task = Task(
            **values,
            reading="benchmarks.peers:open_peer",
            path=self.path(peer, form),
            workers=0,
            batch_size=BATCH,
            options=self.field.to_options(),
        )
        return replace(task, **changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return Data(tmp_path_factory.mktemp("data"))


@contextmanager
def opened(task):
    reading = open_peer(Task(**json.loads(json.dumps(asdict(task)))))
    try:
        yield reading
    finally:
        reading.close()
        if task.name == "WebDataset":
            gc.collect()  # it leaves the files that it read to the collector, which warns of them: here, if anywhere


def epoch_of(reading, epoch):
    counts, sizes, sums = zip(*[reading.check(batch) for batch in reading.batches(epoch)], strict=True)
    return sum(counts), sum(sizes), sum(sums) % MODULUS


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(("peer", "form"), READINGS)
def test_a_peer_reads_every_record_once_in_each_epoch_and_keeps_to_the_order(peer, form, data):
    size, seen = COUNT * data.field.nbytes, {}
    for order in peer.orders:
        with opened(data.task(peer, form, order)) as reading:
            assert [epoch_of(reading, epoch) for epoch in range(2)] == [(COUNT, size, data.checksum)] * 2
            assert json.loads(json.dumps(reading.settings))
            batches = map(reading.columns, reading.batches(0))
            seen[order] = np.concatenate([batch["x"].reshape(len(batch["x"]), -1)[:, 0] for batch in batches])
    wanted = [value[0, 0] for value in data.values]
    assert seen.pop("sequential").tolist() == wanted
    assert seen
    for items in seen.values():
        assert items.tolist() != wanted
        assert sorted(items) == sorted(wanted)


def test_a_peer_with_workers_reads_the_same_and_ends_them(data):
    with opened(data.task(PEERS["torch DataLoader"], "lmdb", "global", workers=2)) as reading:
        assert [epoch_of(reading, epoch)[2] for epoch in range(2)] == [data.checksum] * 2
        assert reading.settings["num_workers"] == 2
    with pytest.raises(ConfigError, match="this reading is closed"):
        reading.batches(2)


def test_the_modules_of_peers_import_nothing_but_numpy():
    code = (
        f"import sys; sys.path.append({str(Path(dataload.__file__).parents[1])!r})\n"
        "import benchmarks.peers.plan\n"
        "print(*{name.partition('.')[0] for name in sys.modules if getattr(sys.modules[name], '__file__', None) "
        "and 'site-packages' in sys.modules[name].__file__})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(found.split()) - {"_distutils_hack"} == {"numpy"}


def test_a_peer_that_is_not_there_says_so(tmp_path):
    absent = replace(PEERS["Grain"], imports=("no_such.inner",), packages=("no-such-package",))
    missing = "not installed (no module {}): pip install no-such-package"
    assert why_missing(replace(absent, imports=("sys",))) is None
    assert why_missing(replace(absent, imports=("no_such_module",))) == missing.format("no_such_module")
    assert why_missing(absent) == missing.format("no_such.inner")
    assert why_missing(replace(absent, imports=("sys", "no_such_need"))) == missing.format("no_such_need")
    where = f"not installed in the environment of {sys.executable}"
    assert why_missing(absent, sys.executable).startswith(where)
    assert why_missing(replace(absent, imports=("numpy",)), sys.executable) is None
    assert why_missing(absent, str(tmp_path / "python")).startswith("cannot run ")
