"""Batches copied to a device before they are used."""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from dataload._util.arrays import MASKED, is_masked
from dataload._util.settings import check_count
from dataload.collate.columns import like
from dataload.errors import ConfigError
from dataload.loader.device import DevicePrefetcher
from dataload.loader.loader import Loader
from dataload.streams.loader import MultiStreamLoader
from dataload.torch.ranks import check_ranks_at_start


def to_tensors(batch: Any) -> Any:
    """Convert the arrays of a batch to tensors without copying. Text, bytes and other objects are left alone.

    Of a table, numbers, bool, tensors, lists of one size and categories become tensors, structs dicts of tensors; text,
    bytes, decimals and lists of Python stay as they are. Times are an error: torch has none.

    Use it as ``Loader(..., batch_transform=to_tensors)``, or in a config as ``"dataload.torch:to_tensors"``. With
    worker processes it runs in the consumer, and the tensors keep the shared memory of the batch alive.

    Args:
        batch: An array, or a dict, tuple, list or `Ragged` of arrays.

    Returns:
        The same structure. Each tensor shares memory with its array; read-only arrays, and arrays with strides
        or a byte order that torch lacks, are copied.
    """
    return map_leaves(batch, _as_tensor)


def to_pinned(batch: Any) -> Any:
    """Convert a batch like `to_tensors`, and copy it to pinned memory if there is a CUDA device.

    `DeviceLoader` also pins memory, but in the consumer's thread. As a `batch_transform`, this function runs in worker
    threads instead, which pays off for batches of many megabytes. See `to_tensors` for the arguments and errors.
    """
    batch = to_tensors(batch)
    return map_leaves(batch, pin) if torch.cuda.is_available() else batch


# Tensors made in a worker process would be copied on the way back.
for _function in (to_tensors, to_pinned):
    cast("Any", _function).runs_in_consumer = True


def map_leaves(value: Any, function: Callable[[Any, str], Any], name: str = "the batch") -> Any:
    """Return the same structure with each leaf replaced by ``function(leaf, name)``."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: map_leaves(item, function, f"field {key!r}") for key, item in items}
    if isinstance(value, tuple):
        parts = [map_leaves(item, function, name) for item in cast("tuple[Any, ...]", value)]
        return like(type(value), parts)
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
    if is_masked(array):
        raise ConfigError(f"{name}: {MASKED}")
    if not array.flags.writeable:
        # torch ignores the read-only flag, so writing to the tensor would change an array owned by other code.
        array = array.copy()
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 or stride % (array.itemsize or 1) for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        if array.dtype.name.startswith(("bfloat16", "float8")) and hasattr(torch, array.dtype.name):  # of ml_dtypes
            return torch.from_numpy(array.view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))
        raise ConfigError(f"{name}: torch has no dtype for {array.dtype}; cast it in a transform") from error


def pin(value: Any, _: str = "") -> Any:
    """Return a CPU tensor in pinned memory; return any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_pinned():
        return value.pin_memory()
    return value


class _Ahead(NamedTuple):
    """A batch being copied to the device, and the event that marks the end of the copy."""

    batch: Any
    copied: Any


class DeviceLoader(DevicePrefetcher[_Ahead]):
    """Gives a loader's batches as tensors on a device, copied there while the model works on earlier batches.

    Copies run on a separate stream. When a batch is handed over, the device's current stream waits for the copy, but
    the host does not. On a device without streams, such as the CPU, batches are converted on request, so the same
    program runs there.

    Take `state_dict` from this object and not from `loader`, whose position is ahead by the batches being copied.

    If torch.distributed is initialised and `loader` has one rank per process, all processes must ask for their first
    batch: each waits for the others, to compare data, order, seed, batch size and position. See `check_ranks`, which
    raises the error.

    Args:
        loader: A `dataload.Loader`.
        device: The device to copy to; ``"cuda"`` is the current CUDA device.
        depth: Number of batches to keep on the device beyond the consumer's current one.
        pin: Copy unpinned batches through pinned memory (see `to_pinned`). Otherwise the host waits for each copy.

    Examples:
        >>> import dataload
        >>> with DeviceLoader(dataload.Loader(dataload.RangeSource(5), batch_size=3), "cpu") as loader:
        ...     [batch["index"] for batch in loader]
        [tensor([0, 1, 2]), tensor([3, 4])]
    """

    def __init__(
        self,
        loader: Loader[Any] | MultiStreamLoader,
        device: str | int | torch.device = "cuda",
        *,
        depth: int = 2,
        pin: bool = True,
    ) -> None:
        check_count("depth", depth, least=1)
        self.device: torch.device
        self.device, self._streams = _find_device(device)
        self._stream = None if self._streams is None else self._streams.Stream(self.device)
        self._pins = pin
        super().__init__(loader, 0 if self._stream is None else depth)
        self._checked = False

    def _send(self, batch: Any) -> _Ahead:
        batch = to_tensors(batch)
        if self._stream is None:
            return _Ahead(map_leaves(batch, self._move), None)
        if self._pins:  # the host would wait for a copy from unpinned memory
            batch = map_leaves(batch, pin)
        with self._streams.stream(self._stream):
            return _Ahead(map_leaves(batch, self._move), self._stream.record_event())

    def _receive(self, sent: _Ahead) -> Any:
        if self._stream is None:
            return sent.batch
        consumer = self._streams.current_stream(self.device)
        consumer.wait_event(sent.copied)

        def keep(value: Any, _: str) -> None:
            # The memory belongs to the copying stream. Without this call, that stream could reuse it as soon as Python
            # drops the batch, before the consumer's kernels for the batch have run.
            if isinstance(value, torch.Tensor):
                value.record_stream(consumer)

        map_leaves(sent.batch, keep)
        return sent.batch

    def _move(self, value: Any, _: str) -> Any:
        has_streams = self._stream is not None
        return value.to(self.device, non_blocking=has_streams) if isinstance(value, torch.Tensor) else value

    def _iterate(self, batches: Iterator[Any]) -> Generator[Any]:
        if not self._checked:
            check_ranks_at_start(self.loader)
            self._checked = True
        yield from super()._iterate(batches)

    def __repr__(self) -> str:
        return f"DeviceLoader({self.loader!r}, device={str(self.device)!r})"


def _find_device(device: str | int | torch.device) -> tuple[torch.device, Any]:
    """Return the device with its index, and the torch module of its streams (None without streams)."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"torch does not know device {device!r}: {error}", key="device", value=device) from error
    module: Any = getattr(torch, found.type, None)
    if not getattr(module, "is_available", lambda: True)():
        raise ConfigError(
            f"device is {str(found)!r}, but torch finds none on this machine (torch.{found.type}.is_available() is "
            "False): install a build of torch that supports it, or pass device='cpu'",
            key="device",
            value=device,
        )
    if found.type == "cpu" or not hasattr(module, "Stream"):
        return found, None
    has_index = ":" in str(found)  # torch's annotations say that the index is never None
    return (found if has_index else torch.device(found.type, module.current_device())), module
