"""Batches on a device, copied ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import torch

from dataload._util.checks import check_count
from dataload.errors import ConfigError
from dataload.torch.tensors import mapped, pin, to_tensors

__all__ = ["DeviceLoader"]


class _EpochLoader(Protocol):
    """What `DeviceLoader` needs of a loader."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int, /) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...
    def close(self) -> None: ...


class _Sent(NamedTuple):
    batch: Any
    copied: Any


class _StreamTransfer:
    """Copies batches on a stream of its own, while the consumer's stream works on others."""

    def __init__(self, device: torch.device, streams: Any, *, pins: bool) -> None:
        self._device = device
        self._streams = streams
        self._pins = pins
        self._stream = streams.Stream(device)

    def send(self, batch: Any) -> _Sent:
        if self._pins:  # from other memory a copy keeps the host waiting
            batch = mapped(batch, pin)
        with self._streams.stream(self._stream):
            return _Sent(mapped(batch, self._copied), self._stream.record_event())

    def receive(self, sent: _Sent) -> Any:
        consumer = self._streams.current_stream(self._device)
        consumer.wait_event(sent.copied)

        def keep(value: Any, _: str) -> None:
            # The memory belongs to the stream of copies, which would fill it again as soon as Python drops the
            # batch, while kernels that were queued with it have yet to run.
            if isinstance(value, torch.Tensor):
                value.record_stream(consumer)

        mapped(sent.batch, keep)
        return sent.batch

    def _copied(self, value: Any, _: str) -> Any:
        return value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value


class _DirectTransfer:
    """For devices without streams; the CPU's tensors stay what they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, batch: Any) -> _Sent:
        return _Sent(mapped(batch, self._moved), None)

    def receive(self, sent: _Sent) -> Any:
        return sent.batch

    def _moved(self, value: Any, _: str) -> Any:
        return value.to(self._device) if isinstance(value, torch.Tensor) else value


class _Ahead(NamedTuple):
    sent: _Sent
    state: dict[str, Any]


class DeviceLoader:
    """Batches of a loader as tensors on a device, copied there while the model works on those before.

    Copies run on a stream of their own. When a batch is handed over, the current stream of the device waits for its
    copy, and the host does not. Where there are no streams, as on the CPU, each batch is converted when it is asked
    for, so that the same program runs there.

    Take `state_dict` from here, not from `loader`: that one has given out batches that are still on their way.

    Args:
        loader: A `dataload.Loader`.
        device: Where batches go; ``"cuda"`` is the device that is current now.
        depth: Batches on the device ahead of the one that the consumer has.
        pin: Whether to copy through pinned memory what is not in it (see `to_pinned`). Without, the host waits for
            each copy.

    Attributes:
        loader: The loader.
        device: Where batches go, with its index.

    Raises:
        ConfigError: torch knows no such device, or finds none here; or `depth` is less than 1.

    Example:
        >>> import dataload
        >>> with DeviceLoader(dataload.Loader(dataload.RangeSource(5), batch_size=3), "cpu") as loader:
        ...     [batch["index"] for batch in loader]
        [tensor([0, 1, 2]), tensor([3, 4])]
    """

    def __init__(
        self, loader: _EpochLoader, device: str | int | torch.device = "cuda", *, depth: int = 2, pin: bool = True
    ) -> None:
        check_count("depth", depth, least=1)
        self.loader = loader
        self.device, streams = _find_device(device)
        if streams is None:
            self._transfer, self._depth = _DirectTransfer(self.device), 0
        else:
            self._transfer, self._depth = _StreamTransfer(self.device, streams, pins=pin), depth
        self._ahead: deque[_Ahead] | None = None  # of the iteration that is under way
        self._state: dict[str, Any] | None = None  # where the consumer stands; None where the loader does

    def __len__(self) -> int:
        """Steps per epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """One epoch, or what is left of it after `load_state_dict`; see `Loader`."""
        return self._iterate(iter(self.loader))

    def _iterate(self, batches: Iterator[Any]) -> Generator[Any]:
        if self._state is None:
            self._state = self.loader.state_dict()
        self._drop_ahead()
        self._ahead = ahead = deque()
        failure: Exception | None = None
        ended = False
        try:
            while True:
                self._check_current(ahead)
                while not ended and len(ahead) <= self._depth:
                    try:
                        ahead.append(_Ahead(self._transfer.send(to_tensors(next(batches))), self.loader.state_dict()))
                    except StopIteration:
                        ended = True
                    except Exception as error:  # it comes after the batches before it
                        ended, failure = True, error
                if not ahead:
                    break
                yield self._hand_over(ahead, ended)
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback refers to this frame
            if self._ahead is ahead:
                self._ahead = None

    def _check_current(self, ahead: deque[_Ahead]) -> None:
        if self._ahead is not ahead:
            iter(self.loader)  # raises if it is closed
            raise RuntimeError(
                "this iteration ended when another one was begun (or the loader's state was set): "
                "for two at a time build two loaders"
            )

    def _hand_over(self, ahead: deque[_Ahead], ended: bool) -> Any:
        sent, state = ahead.popleft()
        self._state = None if ended and not ahead else state  # `set_epoch` may have moved the loader meanwhile
        return self._transfer.receive(sent)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.clear()
        self._ahead = None

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        before = self.loader.state_dict()
        self.loader.set_epoch(epoch)
        if self._ahead is None and self.loader.state_dict() != before:
            self._state = None

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`; counts what was handed over, not what is on its way to the device."""
        return self.loader.state_dict() if self._state is None else dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)
        self._drop_ahead()
        self._state = None

    def close(self) -> None:
        """Close the loader, and drop what is on its way. May be called twice."""
        self._drop_ahead()
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DeviceLoader({self.loader!r}, device={str(self.device)!r})"


def _find_device(device: str | int | torch.device) -> tuple[torch.device, Any]:
    """A device with its index, and the module that has its streams; None where it has none.

    Raises:
        ConfigError: There is no such device.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"torch knows no device {device!r}: {error}", key="device", value=device) from error
    module: Any = getattr(torch, found.type, None)
    if not getattr(module, "is_available", lambda: True)():
        raise ConfigError(
            f"device is {str(found)!r}, and torch finds none here (torch.{found.type}.is_available() is False): "
            "install the build of torch for it, or pass device='cpu'",
            key="device",
            value=device,
        )
    if found.type == "cpu" or not hasattr(module, "Stream"):
        return found, None
    has_index = ":" in str(found)  # torch's annotations say that the index is always a number
    return (found if has_index else torch.device(found.type, module.current_device())), module
