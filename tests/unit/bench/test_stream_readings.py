"""The workload of streams: all of its readings give the same numbers, epoch after epoch."""

import importlib
import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.limits import bare_generators, multistream, plan_readers
from benchmarks.peers.torch_loader import groups as torch_groups
from benchmarks.workloads import get_workload, made_data, write_made
from dataload.bench.data import Choices
from dataload.bench.task import MODULUS, Task

ROWS, STEPS = 5, 7


@pytest.fixture(
    params=[bare_generators, multistream, torch_groups], ids=["bare_generators", "multistream", "torch_groups"]
)
def reading(request):
    if request.param is torch_groups:
        pytest.importorskip("torch")
    return request.param


def task(**changes):
    values = {"workload": "streams", "kind": "peer", "name": "name", "reading": "", "path": "", "format": "generator"}
    made = Task(**values, order="sequential", workers=0, batch_size=ROWS, options={"open": {"records": ROWS * STEPS}})
    return replace(made, **changes)


def numbers(sequence, count):
    """As `busy_numbers` should give them: a congruential generator, a thousand times a number."""
    value = sequence
    for _ in range(count):
        for i in range(1000):
            value = (31 * value + i) % 65536
        yield value


def expected(rows=ROWS, steps=STEPS):
    return np.array([list(numbers(row, steps)) for row in range(rows)]).T


def checksum(items):
    """Of 8 bytes each, little-endian: their sum, and their size."""
    return sum(sum(int(item).to_bytes(8, "little")) + 8 for item in np.ravel(items)) % MODULUS


def epochs(made, count):
    return [[made.check(batch) for batch in made.batches(epoch)] for epoch in range(count)]


def test_an_epoch_is_every_row_to_its_end(reading):
    with closing(reading(task())) as made:
        wanted = [(ROWS, 8 * ROWS, checksum(items)) for items in expected()]
        assert epochs(made, 2) == [wanted, wanted]
        assert [made.columns(batch)["data"].tolist() for batch in made.batches(2)] == expected().tolist()
        assert json.loads(json.dumps(dict(made.settings)))


@pytest.mark.parametrize("function", [multistream, torch_groups])
def test_workers_give_the_same(function):
    if function is torch_groups:
        pytest.importorskip("torch")
    with closing(function(task(workers=2, batch_size=4, options={"open": {"records": 12}}))) as made:
        sums = [sum(found for _, _, found in batches) % MODULUS for batches in epochs(made, 2)]
        assert sums == [checksum(expected(4, 3))] * 2
        assert made.settings.get("loaders", made.settings["num_workers"]) == 2


# The plan


@pytest.fixture
def written(tmp_path):
    data = made_data(get_workload("streams"), 32)
    return data, {"generator": write_made(data, "generator", tmp_path)}


def test_one_limit_and_a_row_for_each_number_of_workers(written):
    choices = Choices(orders=("global", "pool"), workers=(0, 2), batch_size=16)
    limit, *loaders = plan_readers(*written, choices)
    assert [(t.kind, t.name, t.workers) for t in [limit]] == [("limit", "bare generators, 1 process", 0)]
    assert [(t.kind, t.name, t.order, t.workers) for t in loaders] == [
        ("dataload", "dataload", "sequential", workers) for workers in (0, 2)
    ]
    for planned in (limit, *loaders):
        module, _, name = planned.reading.partition(":")
        made = getattr(importlib.import_module(module), name)(replace(planned, workers=0))
        with closing(made):
            assert sum(found for _, _, found in epochs(made, 1)[0]) % MODULUS == checksum(expected(16, 2))
