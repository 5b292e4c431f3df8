"""Transforms of samples, and the context passed to them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np

from dataload._util.randomness import generator
from dataload._util.settings import check_call
from dataload.types import Transform


class Drop(Enum):
    """The type of `DROP`, its only instance."""

    DROP = "DROP"

    def __repr__(self) -> str:
        return "dataload.DROP"


DROP: Final[Literal[Drop.DROP]] = Drop.DROP
"""Returned by the function of a conversion (``map=``) to leave out a record."""


@dataclass(frozen=True)
class SampleContext:
    """The index and epoch of a sample, and its random numbers.

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
        """The sample's random generator in this epoch, the same for any number of workers and after a resume."""
        return generator(self.seed, "transform", self.epoch, self.index)


@dataclass(frozen=True, slots=True)
class NamedTransform:
    """One transform, with its name for messages."""

    function: Callable[..., Any]  # ``f(sample)`` or ``f(sample, context)``
    name: str
    takes_context: bool


def compose(
    transform: Transform | Sequence[Transform] | None,
    setting: str = "transform",
    argument: str = "a sample",
    *,
    may_yield: bool = False,
) -> tuple[NamedTransform, ...]:
    """Return the transforms of a `setting` that is None, a function of an `argument`, or a list of functions."""
    functions: Sequence[Any] = transform if isinstance(transform, (list, tuple)) else [transform]
    named: list[NamedTransform] = []
    for function in functions if transform is not None else ():
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        takes_context = _takes_context(function)
        arguments = [argument, "its context"] if takes_context else [argument]
        check_call(setting, function, *arguments, may_yield=may_yield)
        named.append(NamedTransform(function, name, takes_context))
    return tuple(named)


def _takes_context(function: Any) -> bool:
    """Return whether the second parameter is called ``context`` or has no default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # functions written in C may have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2:
        return False
    return positional[1].name == "context" or positional[1].default is inspect.Parameter.empty
