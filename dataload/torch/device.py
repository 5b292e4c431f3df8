"""Batches copied to a device ahead of their use."""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import torch

from dataload._util.checks import check_count
from dataload.errors import ConfigError
from dataload.loader.device import AheadLoader
from dataload.loader.loader import Loader
from dataload.streams.loader import MultiStreamLoader
from dataload.torch.place import check_ranks_at_start
from dataload.torch.tensors import map_leaves, pin, to_tensors


class _Ahead(NamedTuple):
    """A batch on its way to the device, and the event that ends its copy."""

    batch: Any
    copied: Any


class _Transfer:
    """Copies batches to a device, on a separate stream if the device has streams."""

    def __init__(self, device: torch.device, streams: Any, *, pins: bool) -> None:
        self._device = device
        self._streams = streams
        self._pins = pins
        self._stream = None if streams is None else streams.Stream(device)

    def send(self, batch: Any) -> _Ahead:
        if self._stream is None:
            return _Ahead(map_leaves(batch, self._move), None)
        if self._pins:  # the host would wait for a copy from unpinned memory
            batch = map_leaves(batch, pin)
        with self._streams.stream(self._stream):
            return _Ahead(map_leaves(batch, self._move), self._stream.record_event())

    def receive(self, ahead: _Ahead) -> Any:
        if self._stream is None:
            return ahead.batch
        consumer = self._streams.current_stream(self._device)
        consumer.wait_event(ahead.copied)

        def keep(value: Any, _: str) -> None:
            # The memory belongs to the copying stream. Without this, that stream could reuse it as soon as Python drops
            # the batch, before the kernels that the consumer has queued for the batch have run.
            if isinstance(value, torch.Tensor):
                value.record_stream(consumer)

        map_leaves(ahead.batch, keep)
        return ahead.batch

    def _move(self, value: Any, _: str) -> Any:
        has_streams = self._stream is not None
        return value.to(self._device, non_blocking=has_streams) if isinstance(value, torch.Tensor) else value


class DeviceLoader(AheadLoader[_Ahead]):
    """Gives a loader's batches as tensors on a device, copied there while the model works on earlier batches.

    Copies run on a separate stream. When a batch is handed over, the current stream of the device waits for the copy,
    but the host does not. On a device without streams, such as the CPU, each batch is converted on request, so the
    same program runs there.

    Take `state_dict` from this object and not from `loader`, which is already ahead by the batches being copied.

    If torch.distributed is initialised and `loader` has as many ranks as there are processes, all of them must ask for
    their first batch: each waits for the others, to compare data, order, seed, batch size and position. See
    `check_ranks`, which raises the error.

    Args:
        loader: A `dataload.Loader`.
        device: The device to copy to; ``"cuda"`` is the current CUDA device.
        depth: Number of batches on the device ahead of the one that the consumer has.
        pin: Copy unpinned batches through pinned memory (see `to_pinned`). Otherwise the host waits for each copy.

    Attributes:
        loader: The loader.
        device: The device to copy to, with its index.

    Raises:
        ConfigError: torch does not know the device or finds none on this machine, or `depth` is less than 1.

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
        self.device, streams = _find_device(device)
        self._transfer = _Transfer(self.device, streams, pins=pin)
        super().__init__(loader, 0 if streams is None else depth)
        self._checked = False

    def _send(self, batch: Any) -> _Ahead:
        return self._transfer.send(to_tensors(batch))

    def _receive(self, sent: _Ahead) -> Any:
        return self._transfer.receive(sent)

    def _iterate(self, batches: Iterator[Any]) -> Generator[Any]:
        if not self._checked:
            check_ranks_at_start(self.loader)
            self._checked = True
        yield from super()._iterate(batches)

    def __repr__(self) -> str:
        return f"DeviceLoader({self.loader!r}, device={str(self.device)!r})"


def _find_device(device: str | int | torch.device) -> tuple[torch.device, Any]:
    """Return a device with its index, and the torch module with its streams (None if it has no streams)."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
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
    has_index = ":" in str(found)  # torch's annotations say that the index is always a number
    return (found if has_index else torch.device(found.type, module.current_device())), module
