"""Batches as global arrays over a sharding: on four devices of one process, and layouts of several processes."""

import itertools
import json
from typing import NamedTuple

import numpy as np
import pytest

from dataload import ConfigError, Loader, MemorySource, RangeSource, WorkerError
from dataload.samplers import BucketBatchSampler
from dataload.streams import MultiStreamLoader

jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 4)  # before a test uses JAX

from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding  # noqa: E402 - skipped without JAX

from dataload.jax import (  # noqa: E402
    DeviceLoader,
    distributed_place,
    row_blocks,
)

pytestmark = pytest.mark.train  # JAX has threads, with which tests of forks in the same process do not go together

X = np.arange(26 * 6, dtype=np.float32).reshape(26, 6)
FIELDS = {"x": X, "label": np.arange(26, dtype=np.int32), "name": [f"n{i}" for i in range(26)]}
SOURCE = MemorySource(FIELDS)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"))


@pytest.fixture
def sharding(mesh):
    return NamedSharding(mesh, PartitionSpec("data", "model"))


def loader(**settings):
    return Loader(SOURCE, **{"batch_size": 4, "shuffle": True, "seed": 3, "tail": "pad", **settings})


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_arrays_are_those_of_the_loader_laid_out_over_the_devices(sharding, executor):
    expected = list(loader(epochs=1))
    workers = {"num_workers": 1, "executor": executor, "epochs": 1}
    with DeviceLoader(loader(**workers), sharding) as batches:
        assert len(batches) == 7
        kept = list(batches)  # while they are kept, the loader must not use their memory again
    for found, batch in zip(kept, expected, strict=True):
        assert found["name"] == batch["name"]
        for name in ("x", "label", "valid"):
            assert np.array_equal(found[name], batch[name])
            assert found[name].dtype == batch[name].dtype
        assert found["label"].sharding.spec == found["valid"].sharding.spec == PartitionSpec("data")
        assert {shard.data.shape for shard in found["x"].addressable_shards} == {(2, 3)}


def test_nested_batches_and_a_single_device():
    def nest(batch):
        return {"pair": (batch["label"], [batch["x"], "text"]), "step": 3, "none": None, 0: {"b": batch["x"], "a": 1}}

    with DeviceLoader(loader(batch_transform=nest, tail="partial"), SingleDeviceSharding(jax.devices()[0])) as batches:
        first, *_, last = batches
    assert isinstance(first["pair"][0], jax.Array)
    assert (first["pair"][1][1], first["step"], first["none"]) == ("text", 3, None)
    assert last["pair"][1][0].shape == (2, 6)
    assert [[*first], [*first[0]]] == [["pair", "step", "none", 0], ["b", "a"]], "as in the batches of the loader"
    assert isinstance(first[0]["b"], jax.Array)


def test_the_state_counts_what_was_received(sharding):
    plain = loader()
    states = [plain.state_dict(), *(plain.state_dict() for _ in plain)]
    whole = [batch["label"].tolist() for batch in DeviceLoader(loader(epochs=1), sharding)]
    for steps in (1, 3, 6):
        batches = DeviceLoader(loader(), sharding)
        found = [batch["label"].tolist() for batch in itertools.islice(batches, steps)]
        assert batches.state_dict() == states[steps] != batches.loader.state_dict()
        other = DeviceLoader(loader(num_workers=1), sharding, depth=1)
        other.load_state_dict(json.loads(json.dumps(batches.state_dict())))
        assert found + [batch["label"].tolist() for batch in other] == whole
        assert other.state_dict() == states[-1]
        other.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_batches_are_ahead(sharding, depth):
    made = []
    batches = DeviceLoader(loader(batch_transform=lambda batch: made.append(0) or batch), sharding, depth=depth)
    for step, _ in enumerate(batches, 1):
        assert len(made) == min(step + depth, 7)


def test_an_error_comes_after_the_batches_before_it(sharding):
    def fail(sample):
        if sample["label"] == 9:
            raise ValueError("nine")
        return sample

    batches = DeviceLoader(loader(shuffle=False, transform=fail), sharding)
    found = []
    with pytest.raises(WorkerError, match="nine"):
        found += (batch["label"].tolist() for batch in batches)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches.state_dict()["position"] == 8


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tail": "partial"}, "tail='partial' ends an epoch with a shorter batch, which the sharding cannot split"),
        (
            {"batch_size": 5},
            "batch_size must be a multiple of 2, the blocks that the sharding splits a rank's rows into; got 5",
        ),
        (
            {"rank": 1, "world_size": 2},
            "the loader has rank 1 of 2, but the sharding gives this process the rows of rank 0 of 1: build it with",
        ),
    ],
)
def test_a_loader_that_does_not_fit_the_sharding(sharding, settings, match):
    with pytest.raises(ConfigError, match=match):
        DeviceLoader(loader(**settings), sharding)


def test_wrong_arguments(mesh, sharding):
    with pytest.raises(ConfigError, match=r"sharding must be a jax\.sharding\.Sharding, such as .* got Mesh\("):
        DeviceLoader(loader(), mesh)
    with pytest.raises(ConfigError, match="depth must be an integer >= 1, got 0"):
        DeviceLoader(loader(), sharding, depth=0)


def first_of(source, sharding, **settings):
    return next(iter(DeviceLoader(Loader(source, **{"tail": "pad", **settings}), sharding)))


def test_batches_that_do_not_fit_the_sharding(sharding):
    days = MemorySource({"day": np.array(["2020-01-01"] * 4, "M8[D]")})
    with pytest.raises(
        ConfigError, match=r"batch\['day'\]: JAX has no dtype for datetime64\[D\]; cast it in a transform"
    ):
        first_of(days, sharding, batch_size=4)
    with pytest.raises(ConfigError, match=r"batch\['x'\]: some values are masked"):
        first_of(days, sharding, batch_size=4, batch_transform=lambda _: {"x": np.ma.masked_array([1, 2], [0, 1])})
    ragged = MemorySource([{"x": np.zeros(i)} for i in range(4)])
    with pytest.raises(
        ConfigError, match=r"batch\['x'\] is ragged, so its rows cannot be split: collate it with 'pad'"
    ):
        first_of(ragged, sharding, batch_size=4, collate={"x": "ragged"})
    whole = first_of(ragged, SingleDeviceSharding(jax.devices()[0]), batch_size=4, collate={"x": "ragged"})
    assert whole["x"].values.shape == (6,)
    odd = BucketBatchSampler(lengths=[1] * 9, max_tokens=3)
    with pytest.raises(ConfigError, match=r"the rows of batch\['index'\] must be a multiple of 2, .* got 3"):
        first_of(RangeSource(9), sharding, sampler=odd)


def test_streams(sharding):
    with MultiStreamLoader(iter, [[{"i": i}] * 9 for i in range(4)], batch_size=4, mode="split") as streams:
        batches = DeviceLoader(streams, sharding)
        first = next(iter(batches))
        assert sorted(first["i"].tolist()) == [0, 1, 2, 3]
        assert first["is_first"].sharding.spec == PartitionSpec("data")


class Device(NamedTuple):
    id: int
    process_index: int


class Layout(Sharding):
    """Devices of several processes: the process and the row block of each, as in "0a 0b 1a 1b"."""

    def __init__(self, text):
        self.text, self.words = text, text.split()

    @property
    def num_devices(self):
        return len(self.words)

    def devices_indices_map(self, shape):
        rows = shape[0] // len({word[1] for word in self.words})
        firsts = [rows * (ord(word[1]) - ord("a")) for word in self.words]
        places = [(slice(first or None, first + rows),) for first in firsts]
        return {Device(i, int(word[0])): place for i, (word, place) in enumerate(zip(self.words, places, strict=True))}


@pytest.mark.parametrize(
    ("layout", "ranks", "blocks"),
    [
        ("0a 0b 1c 1d", (0, 1), 2),  # data parallel
        ("0c 0d 1a 1b", (1, 0), 2),  # the other way round
        ("0a 0c 1b 1d", (0, 1), 2),  # devices by turns
        ("0a 0a 1b 1b", (0, 1), 1),  # the model over the devices of a process
        ("0a 0b 1a 1b", (0, 0), 2),  # the model over the processes
        ("0a 1a 2b 3b", (0, 0, 1, 1), 1),  # two pairs of processes
        ("0a 0b 1a 1b 2c 2d 3c 3d", (0, 0, 1, 1), 2),
        ("0a 0a 1a 1a", (0, 0), 1),  # replicated
    ],
)
def test_processes_with_the_same_rows_have_the_same_rank(layout, ranks, blocks, monkeypatch):
    for process, rank in enumerate(ranks):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert row_blocks(Layout(layout)) == (rank, max(ranks) + 1, blocks)
        assert distributed_place(Layout(layout)) == {"rank": rank, "world_size": max(ranks) + 1}


@pytest.mark.parametrize("layout", ["0a 0b 1b 1c 2c 2a", "0a 0b 0b 1c"])
def test_processes_whose_rows_overlap(layout, monkeypatch):
    match = (
        "any two processes must hold either the same rows or different rows, .* blocks of the sharding begin at proc"
    )
    with pytest.raises(ConfigError, match=match):
        row_blocks(Layout(layout))


def test_ranks_of_processes_by_default_and_without_a_device(monkeypatch):
    assert distributed_place() == {"rank": 0, "world_size": 1}
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    monkeypatch.setattr(jax, "process_count", lambda: 5)
    assert distributed_place() == {"rank": 2, "world_size": 5}
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    with pytest.raises(ConfigError, match="process 2 has no device of the sharding, so it needs no data: do not build"):
        distributed_place(Layout("0a 1b"))
