"""`Loader.batch`: the batch of any step equals what a ``for`` over the loader gets."""

import random

import numpy as np
import pytest

from dataload import ConfigError, Loader, MemorySource, WorkerError
from dataload.errors import ClosedSourceError
from dataload.samplers import GlobalShuffle, Mixture, PackedBatchSampler, PoolShuffle, Sequential, ShardSequential
from dataload.samplers.buckets import BucketBatchSampler
from dataload.streams import StreamSampler

LENGTHS = np.random.default_rng(0).integers(1, 9, 50)


def source():
    return MemorySource({"x": np.arange(50.0), "text": [f"record {i}" for i in range(50)]})


PACKED = PackedBatchSampler(sampler=GlobalShuffle(50, 0), lengths=LENGTHS, row_length=16, batch_size=2)
TOKENS = MemorySource({"tokens": [np.arange(n) for n in LENGTHS.tolist()]})


def noisy(sample, context):
    return {**sample, "x": sample["x"] + context.generator.standard_normal()}


def with_global_generators(sample):
    return {"x": sample["x"], "python": random.random(), "numpy": np.random.random()}  # noqa: NPY002


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, column in first.items():
        other = second[name]
        assert np.array_equal(column, other) if isinstance(column, np.ndarray) else list(column) == list(other), name


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 8, "shuffle": True},
        {"batch_size": 8, "shuffle": True, "transform": noisy},
        {"batch_size": 8, "shuffle": True, "transform": noisy, "num_workers": 2},
        {"batch_size": 4, "sampler": PoolShuffle(ShardSequential((20, 30), 1), 10, 1), "num_workers": 1},
        {"batch_size": 8, "rank": 1, "world_size": 3, "shuffle": True, "tail": "pad"},
        {"batch_size": 4, "sampler": Mixture((Sequential(20), GlobalShuffle(30, 3)), (1, 2), "longest", 0)},
        {"sampler": BucketBatchSampler(lengths=LENGTHS, max_tokens=40)},
        {"sampler": StreamSampler(sequence_lengths=(20, 30), rows=4, chunk=3, mode="split", seed=2)},
        {"batch_size": 8, "on_error": "replace", "exclude": [3, 17], "shuffle": True},
        {"source": TOKENS, "sampler": PACKED},
    ],
    ids=["shuffled", "transformed", "workers", "pool", "rank", "mixture", "buckets", "streams", "excluded", "packed"],
)
def test_any_batch_equals_that_of_the_epoch(settings):
    with Loader(**{"source": source(), "seed": 5, **settings}) as loader:
        for epoch in range(2):
            served = list(loader)
            for step in reversed(range(len(served))):
                assert_equal(loader.batch(epoch, step), served[step])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_that_seed_global_generators():
    settings = {"batch_size": 25, "transform": with_global_generators, "executor": "fork"}
    with Loader(source(), num_workers=1, **settings) as loader:
        served = list(loader)
        before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        again = [loader.batch(0, step) for step in range(2)]
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    for one, other in zip(served, again, strict=True):
        assert_equal(one, other)


def test_errors():
    def fails_on_9(sample):
        if sample["x"] == 9:
            raise RuntimeError("nine")
        return sample

    loader = Loader(source(), batch_size=8, transform=fails_on_9)
    for step in (-1, 7):
        with pytest.raises(IndexError, match=rf"step {step} is out of range: epoch 0 has 7 steps on this rank"):
            loader.batch(0, step)
    with pytest.raises(ConfigError, match="epoch"):
        loader.batch(-1, 0)
    with pytest.raises(WorkerError) as caught:
        loader.batch(3, 1)
    assert (caught.value.epoch, caught.value.step, caught.value.indices) == (3, 1, tuple(range(8, 16)))
    assert len(loader.batch(3, 0)["x"]) == 8
    loader.close()
    with pytest.raises(ClosedSourceError, match="the loader is closed"):
        loader.batch(0, 0)
