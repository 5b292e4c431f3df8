"""Arguments and samplers of torch's DataLoader, given to `Loader`: what they are called here."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

SelfT = TypeVar("SelfT")
P = ParamSpec("P")

_INSTEAD = "; dataload.torch.DataLoader takes torch's arguments"
_ARGUMENTS = {
    "dataset": "pass it first, without a name",
    "drop_last": "drop_last=True is tail='drop', and False is tail='partial'",
    "collate_fn": "it is collate=",
    "pin_memory": "pin_memory=True is batch_transform=dataload.torch.to_pinned",
    "pin_memory_device": "leave it out; batch_transform=dataload.torch.to_pinned pins for the current device",
    "prefetch_factor": "it is prefetch=",
    "worker_init_fn": "leave it out: a transform f(sample, context) has random numbers as context.generator",
    "persistent_workers": "leave it out: workers live as long as the loader",
    "multiprocessing_context": "multiprocessing_context='fork' is executor='processes', start_method='fork'",
    "generator": "it is seed=, an integer",
}
_SAMPLERS = {
    "DistributedSampler": "leave it out: rank= and world_size= do it, or torchrun's RANK and WORLD_SIZE",
    "SubsetRandomSampler": "pass source[indices] and shuffle=True, or an order: dataload.samplers.Subset",
    "WeightedRandomSampler": "it is dataload.samplers.Weighted(weights, num_samples, seed)",
    "RandomSampler": "it is shuffle=True",
    "SequentialSampler": "leave it out: this is the order without shuffle=",
    "BatchSampler": "leave it out: batch_size= and tail= make batches",
    "Sampler": "dataload.samplers.Subset is the order of a list of indices",
}


def explains_torch_names(init: Callable[Concatenate[SelfT, P], None]) -> Callable[Concatenate[SelfT, P], None]:
    """Decorate the constructor of a loader: an argument of torch's loader raises a TypeError with its name here."""

    @functools.wraps(init)
    def checked(self: SelfT, /, *args: P.args, **settings: P.kwargs) -> None:
        name = type(self).__name__
        if len(args) > 1:
            message = f"{name} takes the source and then named arguments: write batch_size={args[1]!r}"
            raise TypeError(message + _INSTEAD)
        for argument, instead in _ARGUMENTS.items():
            if argument in settings:
                raise TypeError(f"{name} has no argument {argument!r}: {instead}{_INSTEAD}")
        init(self, *args, **settings)

    return checked


def refuse_torch_sampler(sampler: Any) -> None:
    """Raise TypeError for a sampler of torch."""
    for kind in type(sampler).__mro__:
        if kind.__module__.startswith("torch.") and kind.__name__ in _SAMPLERS:
            instead = f"{_SAMPLERS[kind.__name__]}; dataload.torch.DataLoader takes it as it is"
            raise TypeError(f"{type(sampler).__name__} is a sampler of torch: {instead}")
