"""What a transform may know about its sample, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dataload._util.randomness import generator
from dataload.errors import ConfigError
from dataload.types import Transform

__all__ = ["SampleContext", "Step", "compose"]


@dataclass(frozen=True)
class SampleContext:
    """Where a sample stands, and its own random numbers.

    Attributes:
        index: Index of the record in the source.
        epoch: Number of the epoch.
        seed: The loader's seed.
    """

    index: int
    epoch: int
    seed: int

    @cached_property
    def generator(self) -> np.random.Generator:
        """Random numbers of this sample in this epoch: the same for any number of workers, and after a resume."""
        return generator(self.seed, "transform", self.epoch, self.index)


@dataclass(frozen=True, slots=True)
class Step:
    """One transform, with its name for messages.

    Attributes:
        function: ``f(sample)`` or ``f(sample, context)``.
        name: As a user knows it.
        takes_context: Which of the two.
    """

    function: Callable[..., Any]
    name: str
    takes_context: bool

    def __call__(self, sample: Any, context: SampleContext) -> Any:
        """The transformed sample."""
        return self.function(sample, context) if self.takes_context else self.function(sample)


def compose(transform: Transform | Sequence[Transform] | None) -> tuple[Step, ...]:
    """The steps of a transform or of a list of them, in order.

    Raises:
        ConfigError: Something in it cannot be called with a sample.
    """
    if transform is None:
        return ()
    several = transform if isinstance(transform, (list, tuple)) else [transform]
    return tuple(_step(function) for function in several)


def _step(function: Any) -> Step:
    if not callable(function):
        raise ConfigError(f"a transform is a function of a sample, got {function!r}", key="transform", value=function)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return Step(function, name, _takes_context(function))


def _takes_context(function: Callable[..., Any]) -> bool:
    """Whether it asks for the context: a second parameter without a default, or one called ``context``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions written in C may not tell
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    return positional[1].name == "context" or positional[1].default is inspect.Parameter.empty
