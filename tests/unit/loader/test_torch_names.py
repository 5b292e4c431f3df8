"""Loader says what arguments and samplers of torch's DataLoader are called here."""

import inspect

import pytest

from dataload import Loader


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop_last": True}, "Loader has no argument 'drop_last': drop_last=True is tail='drop', and False is tail='"),
        ({"collate_fn": list}, "no argument 'collate_fn': it is collate=; dataload.torch.DataLoader takes torch's arg"),
        ({"pin_memory": True}, "pin_memory=True is batch_transform=dataload.torch.to_pinned"),
        ({"prefetch_factor": 4}, "it is prefetch="),
        ({"worker_init_fn": print}, r"a transform f\(sample, context\) has random numbers as context.generator"),
        ({"persistent_workers": True}, "leave it out: workers live as long as the loader"),
        ({"multiprocessing_context": "fork"}, "executor='fork'"),
        ({"generator": None}, "it is seed=, an integer"),
    ],
)
def test_arguments_of_torch(settings, message):
    with pytest.raises(TypeError, match=message):
        Loader([1, 2], batch_size=1, **settings)


def test_positional_arguments():
    for arguments, settings, message in (
        (([1, 2], 32), {}, r"Loader takes the source and then named arguments: write batch_size=32; data"),
        ((), {"dataset": [1, 2], "batch_size": 1}, "Loader has no argument 'dataset': pass it first, without a name"),
        (([1, 2],), {"bach_size": 3}, "Loader has no argument .bach_size.: did you mean .batch_size.?"),
    ):
        with pytest.raises(TypeError, match=message):
            Loader(*arguments, **settings)
    assert list(inspect.signature(Loader).parameters)[:2] == ["source", "batch_size"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("DistributedSampler", ([1, 2], 2, 0), r"a sampler of torch: leave it out: rank= and world_size= do it, "),
        ("SubsetRandomSampler", ([1],), r"pass an order: chosen = Subset\(Sequential"),
        ("WeightedRandomSampler", ([1.0], 2), r"it is dataload.samplers.Weighted\(weights, num_samples, seed\)"),
        ("RandomSampler", ([1],), "it is shuffle=True; dataload.torch.DataLoader takes it as it is"),
        ("SequentialSampler", ([1],), "leave it out: this is the order without shuffle="),
        ("BatchSampler", ([1], 1, False), "leave it out: batch_size= and tail= make batches"),
    ],
)
def test_samplers_of_torch(name, arguments, message):
    data = pytest.importorskip("torch").utils.data
    with pytest.raises(TypeError, match=message):
        Loader([1, 2], batch_size=1, sampler=getattr(data, name)(*arguments))
