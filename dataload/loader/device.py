"""Batches on their way to a device while the consumer works on earlier ones."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, Self, TypeAlias, TypeVar

from dataload.loader.base import LoaderBase
from dataload.loader.state import LoaderState

SentT = TypeVar("SentT")


class DevicePrefetcher(ABC, Generic[SentT]):
    """Base of the device loaders: sends batches ahead, and counts in its state those that the consumer received."""

    def __init__(self, loader: Any, depth: int) -> None:
        if not hasattr(loader, "state_dict"):
            raise TypeError(f"a {type(self).__name__} takes a Loader, found {type(loader).__name__}")
        self.loader = loader
        self._depth = depth  # batches sent ahead of the one that the consumer has
        self._ahead: deque[tuple[SentT, dict[str, Any]]] | None = None  # of the current iteration, with states after it
        self._state: dict[str, Any] | None = None  # the consumer's state; None if it is the loader's
        self._now: tuple[int, int] | None = None  # epoch and step of the `for` in progress

    @abstractmethod
    def _send(self, batch: Any) -> SentT:
        """Start to copy a batch to the device."""

    def _receive(self, sent: SentT) -> Any:
        """Return a batch that the consumer may use from now on."""
        return sent

    @property
    def epoch(self) -> int:
        """See `Loader.epoch`."""
        return self._now[0] if self._now else self.loader.epoch

    @property
    def step(self) -> int:
        """See `Loader.step`. Counts the batches handed over, not those still being copied to the device."""
        return self._now[1] if self._now else self.loader.step

    def __len__(self) -> int:
        """Return the number of steps per epoch; a `TypeError` for a `MultiStreamLoader`, which does not know it."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch, or over the rest of it after `load_state_dict`; see `Loader`."""
        return self._iterate(iter(self.loader))

    def _iterate(self, batches: Iterator[Any]) -> Generator[Any]:
        if self._state is None:
            self._state = self.loader.state_dict()
        self._drop_ahead()
        self._ahead = ahead = deque[tuple[SentT, dict[str, Any]]]()
        failure: Exception | None = None
        ended = False
        try:
            while True:
                if self._ahead is not ahead:
                    iter(self.loader)  # raises if it is closed
                    raise RuntimeError(
                        "this iteration ended when another one began or the loader's state was set: "
                        "build two loaders to iterate twice at the same time"
                    )
                while not ended and len(ahead) <= self._depth:
                    try:
                        ahead.append((self._send(next(batches)), self.loader.state_dict()))
                        self._now = self._now or (self.loader.epoch, self.loader.step - 1)
                    except StopIteration:
                        ended = True
                    except Exception as error:  # raised below, after the earlier batches
                        ended, failure = True, error
                if not ahead:
                    break
                yield self._hand_over(ahead, ended)
            if failure is not None:
                raise failure
            self._state = None  # the loader may have had nothing left
        finally:
            del failure  # its traceback refers to this frame
            if self._ahead is ahead:
                self._ahead = self._now = None

    def _hand_over(self, ahead: deque[tuple[SentT, dict[str, Any]]], ended: bool) -> Any:
        """Return the oldest batch, which a local variable of the generator would keep alive on the device."""
        oldest, state = ahead.popleft()
        received = self._receive(oldest)
        if self._now:
            self._now = self._now[0], self._now[1] + 1
        self._state = None if ended and not ahead else state  # `set_epoch` may have moved the loader in between
        return received

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.clear()
        self._ahead = self._now = None

    def set_epoch(self, epoch: int) -> None:
        """See `Loader.set_epoch`."""
        before = self.loader.state_dict()
        self.loader.set_epoch(epoch)
        if self._ahead is None and self.loader.state_dict() != before:
            self._state = None

    def change_weights(self, weights: Any, *, at: int | None = None) -> None:
        """See `Loader.change_weights`. Batches that are being copied to the device keep the earlier weights."""
        self.loader.change_weights(weights, at=at)
        now = LoaderState.from_json(self.loader.state_dict())
        first = now.changes[0].number
        for state in [*(state for _, state in self._ahead or ()), self._state]:
            if state is not None:  # of a batch before the change, so it does not know it
                known = LoaderState.from_json(state)
                earlier = [each for each in known.changes if each.number < first]
                length = now.length if known.epoch == now.epoch else known.length
                state |= replace(known, changes=(*earlier, *now.changes), length=length, parts=now.parts).to_json()

    def state_dict(self) -> dict[str, Any]:
        """See `Loader.state_dict`. Counts the batches handed over, not those still being copied to the device."""
        return self.loader.state_dict() if self._state is None else dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> None:
        """See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state, **options)
        self._drop_ahead()
        self._state = None

    def close(self) -> None:
        """Close the loader and drop the batches being copied. Calling it again has no effect."""
        self._drop_ahead()
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


AnyLoader: TypeAlias = LoaderBase[Any] | DevicePrefetcher[Any]
"""A loader, or a device loader around it."""


def loader_of(loader: Any, caller: str) -> LoaderBase[Any]:
    """Return a loader, or the one of a device loader."""
    inner = loader.loader if isinstance(loader, DevicePrefetcher) else loader
    if not isinstance(inner, LoaderBase):
        expected = "a Loader, a MultiStreamLoader, a dataload.torch.DataLoader or a DeviceLoader"
        raise TypeError(f"{caller} takes {expected}; found {type(loader).__name__}")
    return inner
