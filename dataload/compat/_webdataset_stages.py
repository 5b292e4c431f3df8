"""Functions of samples and batches that stand for WebDataset's filters. Pure, and they pickle if the user's do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataload._util.optional import load_optional
from dataload.errors import ConfigError
from dataload.sources.base import shard_of
from dataload.transforms import SampleContext
from dataload.types import Int64Array

__all__ = ["AddUrl", "Stage", "apply", "apply_by_name", "apply_by_place", "collate", "rename", "run", "to_tuple"]


class Stage:
    """A stage of a pipeline: a function of a sample or batch, under the name that errors give it."""

    def __init__(self, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        self.__qualname__ = name
        self._function = function
        self._arguments = arguments

    def __call__(self, sample: Any) -> Any:
        """What the stage makes of it."""
        return self._function(sample, *self._arguments)


@dataclass(frozen=True, slots=True)
class AddUrl:
    """Adds ``"__url__"`` and ``"__local_path__"``, both the archive of a sample.

    Attributes:
        paths: The archives.
        ends: (archives,) int64, cumulative samples.
    """

    paths: tuple[str, ...]
    ends: Int64Array

    def __call__(self, sample: dict[str, Any], context: SampleContext) -> dict[str, Any]:
        """The sample with its archive."""
        url = self.paths[shard_of(self.ends, context.index)[0]]
        return {"__key__": sample["__key__"], "__url__": url, "__local_path__": url, **sample}


def run(stages: Sequence[Callable[[Any], Any]], batch: Any) -> Any:
    """`batch` through all `stages`."""
    for stage in stages:
        batch = stage(batch)
    return batch


def apply(sample: Any, function: Callable[[Any], Any]) -> Any:
    """``map(function)``: a dict keeps its key."""
    result = function(sample)
    if result is None:
        raise TypeError(
            "the function of map() returned None: WebDataset leaves such a sample out, here each has its place; "
            "raise instead, with handler=warn_and_continue"
        )
    if isinstance(sample, dict) and isinstance(result, dict):
        result["__key__"] = sample.get("__key__")
    return result


def apply_by_name(sample: Mapping[str, Any], functions: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """``map_dict(name=function)``."""
    return {**sample, **{name: function(sample[name]) for name, function in functions.items()}}


def apply_by_place(sample: Sequence[Any], functions: Sequence[Callable[[Any], Any] | None]) -> tuple[Any, ...]:
    """``map_tuple(function, ...)``; None leaves a value alone."""
    values = list(sample)
    for place, function in enumerate(functions[: len(values)]):
        values[place] = values[place] if function is None else function(values[place])
    return tuple(values)


def rename(sample: Mapping[str, Any], names: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """``rename(new="old")``; `keep` what has no new name."""
    replaced = {old for choices in names.values() for old in _choices(choices)}
    kept = {name: value for name, value in sample.items() if name not in replaced} if keep else {}
    return {**kept, **{name: _first(sample, choices, required=True) for name, choices in names.items()}}


def to_tuple(sample: Mapping[str, Any], names: Iterable[Any], required: bool) -> tuple[Any, ...]:
    """``to_tuple("jpg;png", "cls")``."""
    return tuple(_first(sample, choices, required=required) for choices in names)


def _choices(names: Any) -> list[str]:
    return names.split(";") if isinstance(names, str) else list(names)


def _first(sample: Mapping[str, Any], names: Any, *, required: bool) -> Any:
    for name in _choices(names):
        if name in sample:
            return sample[name]
    if required:
        raise ValueError(f"the sample {sample.get('__key__')!r} has none of {names!r}; it has {', '.join(sample)}")
    return None


def collate(samples: Sequence[Any]) -> Any:
    """WebDataset's collation: numbers, arrays and tensors are stacked, all else is a list."""
    first = samples[0]
    if isinstance(first, dict):
        for sample in samples:
            if sample.keys() != first.keys():
                differing = ", ".join(sorted(map(str, sample.keys() ^ first.keys())))
                raise ConfigError(f"samples of a batch have different components ({differing}): choose with to_tuple()")
        return {name: _stack([sample[name] for sample in samples], name) for name in first}
    return tuple(_stack(list(column), place) for place, column in enumerate(zip(*samples, strict=True)))


def _stack(values: list[Any], name: Any) -> Any:
    first = values[0]
    if isinstance(first, (int, float)):
        return np.array(values)
    module = np if isinstance(first, np.ndarray) else None
    if type(first).__module__.partition(".")[0] == "torch":
        module = load_optional("torch", needed_by="batched()", extra="torch")
    if module is None:
        return values
    shapes = sorted({tuple(value.shape) for value in values})
    if len(shapes) > 1:
        raise ConfigError(
            f"component {name!r} has the shapes {shapes} in one batch: bring them to one, or pass collation_fn="
        )
    return module.stack(values)
