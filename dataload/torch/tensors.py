"""Batches as tensors that share the memory of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch

from dataload.errors import ConfigError

__all__ = ["mapped", "pin", "to_pinned", "to_tensors"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _runs_in_consumer(function: FunctionT) -> FunctionT:
    """Keep a `batch_transform` out of worker processes: what it makes would be copied on the way back."""
    cast("Any", function).runs_in_consumer = True
    return function


@_runs_in_consumer
def to_tensors(batch: Any) -> Any:
    """Arrays of a batch as tensors, without copying; text, bytes and other objects stay as they are.

    Meant as ``Loader(..., batch_transform=to_tensors)``, or from a config as ``"dataload.torch:to_tensors"``. With
    worker processes it runs in the consumer: a tensor keeps the memory that the batch came in.

    Args:
        batch: An array, or a dict, tuple, list or `Ragged` of such.

    Returns:
        The same structure. A tensor and the array it came from share memory.

    Raises:
        ConfigError: torch has no dtype for an array.
    """
    return mapped(batch, _as_tensor)


@_runs_in_consumer
def to_pinned(batch: Any) -> Any:
    """`to_tensors`, copied to pinned memory if there is a CUDA device to pin it for.

    `DeviceLoader` pins what is not pinned, in the consumer's thread. With this as `batch_transform` worker threads do
    it, which pays for batches of many megabytes.

    Args:
        batch: See `to_tensors`.

    Raises:
        ConfigError: See `to_tensors`.
    """
    batch = to_tensors(batch)
    return mapped(batch, pin) if torch.cuda.is_available() else batch


def mapped(value: Any, function: Callable[[Any, str], Any], name: str = "the batch") -> Any:
    """The same structure with `function(leaf, name)` in the place of each leaf."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: mapped(item, function, f"field {key!r}") for key, item in items}
    if isinstance(value, tuple):
        parts = [mapped(item, function, name) for item in cast("tuple[Any, ...]", value)]
        return getattr(type(value), "_make", tuple)(parts)
    if isinstance(value, list):
        elements = cast("list[Any]", value)
        if elements and isinstance(elements[0], (str, bytes)):  # has nothing inside, a thousand times
            return elements
        return [mapped(item, function, name) for item in elements]
    return function(value, name)


def _as_tensor(value: Any, name: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    array = cast("np.ndarray[Any, Any]", value)
    if not array.flags.writeable:
        # torch would share it and write through; a read-only array is somebody else's.
        array = array.copy()
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"{name}: torch has no dtype for {array.dtype}; cast it in a transform") from error


def pin(value: Any, _: str = "") -> Any:
    """A tensor in pinned memory, where it is one of the CPU; whatever else it is, as it is."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_pinned():
        return value.pin_memory()
    return value
