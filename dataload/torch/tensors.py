"""Conversion of batches to tensors that share memory with their arrays."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from dataload.errors import ConfigError


def to_tensors(batch: Any) -> Any:
    """Convert the arrays of a batch to tensors without copying. Text, bytes and other objects are left alone.

    Use it as ``Loader(..., batch_transform=to_tensors)``, or in a config as ``"dataload.torch:to_tensors"``. With
    worker processes it runs in the consumer, and the tensors keep the shared memory of the batch alive.

    Args:
        batch: An array, or a dict, tuple, list or `Ragged` of arrays.

    Returns:
        The same structure. Each tensor shares memory with its array; read-only arrays, and arrays with negative
        strides or foreign byte order, are copied.

    Raises:
        ConfigError: torch has no dtype for an array.
    """
    return map_leaves(batch, _as_tensor)


def to_pinned(batch: Any) -> Any:
    """Convert a batch like `to_tensors`, and copy it to pinned memory if there is a CUDA device.

    `DeviceLoader` also pins memory, but in the consumer's thread. As a `batch_transform`, this function runs in worker
    threads instead, which pays off for batches of many megabytes. See `to_tensors` for the arguments and errors.
    """
    batch = to_tensors(batch)
    return map_leaves(batch, pin) if torch.cuda.is_available() else batch


# Tensors made in a worker process would have to be copied on the way back.
for _function in (to_tensors, to_pinned):
    cast("Any", _function).runs_in_consumer = True


def map_leaves(value: Any, function: Callable[[Any, str], Any], name: str = "the batch") -> Any:
    """Return the same structure with each leaf replaced by ``function(leaf, name)``."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: map_leaves(item, function, f"field {key!r}") for key, item in items}
    if isinstance(value, tuple):
        parts = [map_leaves(item, function, name) for item in cast("tuple[Any, ...]", value)]
        return getattr(type(value), "_make", tuple)(parts)
    if isinstance(value, list):
        elements = cast("list[Any]", value)
        if elements and isinstance(elements[0], (str, bytes)):  # nothing to convert in a possibly long list
            return elements
        return [map_leaves(item, function, name) for item in elements]
    return function(value, name)


def _as_tensor(value: Any, name: str) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    array = cast("np.ndarray[Any, Any]", value)
    if not array.flags.writeable:
        # torch ignores the flag, so writing to the tensor would change an array that belongs to someone else.
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
    """Return a CPU tensor in pinned memory, and any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_pinned():
        return value.pin_memory()
    return value
