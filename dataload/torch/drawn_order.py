"""Orders drawn by iterating over an object, such as a torch sampler."""

from __future__ import annotations

import base64
import copy
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, cast

import numpy as np
import torch
from torch.utils import data

from dataload._util.fingerprint import digest
from dataload._util.indexing import as_indices
from dataload.errors import ConfigError, StateMismatchError
from dataload.loader.state import is_count
from dataload.samplers import BatchPlan, BatchPlanner
from dataload.types import Int64Array, Sampler


@dataclass(frozen=True, slots=True)
class KeyedPlan(BatchPlan):
    """A plan of items that are not all integers, such as tuples: `keys`, where `indices` number the rows."""

    keys: Sequence[Any] = ()


class DrawnOrder:
    """One epoch's order as drawn from a sampler, and the sampler's state before the draw.

    With `records`, items must be integers in [0, records); otherwise they may be anything that the data set takes.
    `length` is that of the data set, if it has one: negative indices count from there in states.
    """

    def __init__(
        self,
        sampler: Any,
        records: int | None,
        *,
        batches: bool,
        generator: torch.Generator | None,
        length: int | None = None,
    ) -> None:
        if not isinstance(sampler, Iterable) or not hasattr(sampler, "__len__"):
            missing = "__len__, so its epoch might never end" if isinstance(sampler, Iterable) else "__iter__"
            raise ConfigError(
                f"{type(sampler).__name__} has no {missing}: a sampler is an iterable of indices with a length",
                key="batch_sampler" if batches else "sampler",
                value=sampler,
            )
        self.sampler: Any = sampler
        self.records = records
        self.batches = batches
        self._generator, self._length = generator, length or 0
        self.epoch: int = -1  # of `items`
        self.items: Sequence[Any] | Int64Array = ()
        self._state: dict[str, Any] = {}  # the sampler's state before `items` were drawn
        self._later: dict[str, Any] = {}  # what its own `state_dict` said after the first item, from which to continue

    def __getstate__(self) -> dict[str, Any]:
        return {"records": self.records, "batches": self.batches, "epoch": -1, "items": ()}  # workers get the indices

    @property
    def stateful(self) -> bool:
        """Whether the sampler has a state of its own."""
        return self._holder("load_state_dict") is not None

    def draw(self, epoch: int, *, skipped: int = 0) -> None:
        """Draw the order of `epoch` from the sampler, which has been restored to where `skipped` items were drawn."""
        generator = self._own_generator() or torch.default_generator
        state, before = self._now(), generator.get_state()
        # torch's loader draws a seed before each epoch; do the same to get the same orders.
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        given: list[Any] = [None] * skipped
        items = map(next, repeat(iter(self.sampler)))  # an iterator may begin anew if it is iterated
        given += islice(items, 1)
        later = self._later if skipped else {name: value for name, value in self._now().items() if name == "own"}
        given += items
        if torch.equal(before, generator.get_state()):
            state.pop("generator", None)
        else:
            state["generator"] = _encoded(before)
        self.items, self.epoch, self._later = self._checked(given, skipped), epoch, later
        self._state = {**state, "digest": self._digest_of(self.items)}
        if later:
            self._state["rest"] = self._digest_of(self.items[1:])

    def _checked(self, given: list[Any], skipped: int) -> Sequence[Any] | Int64Array:
        """Return the items as arrays if they are integers."""
        real = given[skipped:]
        try:
            if self.batches:
                found: Any = [self._indices(batch) for batch in real]
                return [*[np.empty(0, np.int64)] * skipped, *found]
            return np.concatenate([np.zeros(skipped, np.int64), self._indices(real)])
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            if self.records is None and (not self.batches or all(isinstance(batch, Iterable) for batch in real)):
                return [batch if batch is None else list(batch) for batch in given] if self.batches else given
            wanted = "lists of integers" if self.batches else "integers"
            name, inside = type(self.sampler).__name__, "" if self.records is None else f" in [0, {self.records})"
            key = "batch_sampler" if self.batches else "sampler"
            raise ConfigError(f"{name} must give {wanted}{inside}: {error}", key=key) from error

    def _indices(self, items: Any) -> Int64Array:
        if self.records is not None:
            return as_indices(items, self.records)
        array = np.asarray(items if isinstance(items, np.ndarray) else list(items))
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise TypeError(f"{array.dtype} of {array.ndim} dimensions")
        return array.astype(np.int64)

    def _digest_of(self, items: Any) -> str:
        if any(not isinstance(item, (np.ndarray, np.integer)) for item in items[:1]):
            return digest(repr(list(items)))
        flat = np.concatenate([*items, [len(batch) for batch in items]]) if self.batches and len(items) else items
        array = np.asarray(flat)
        return digest(np.where(array < 0, array + self._length, array).tobytes())

    def state(self, epoch: int, *, begun: bool) -> dict[str, Any]:
        """Return values from which `restore` makes the sampler repeat the order of `epoch`, or its rest if `begun`."""
        if epoch != self.epoch:
            return self._now()
        return {**self._state, **self._later, "skipped": 1} if begun and self._later else dict(self._state)

    def restore(self, state: Mapping[str, Any], epoch: int) -> None:
        """Restore a saved sampler state; if the epoch had begun, the sampler must repeat its order."""
        if (number := state.get("epoch")) is not None and not is_count(number):
            raise StateMismatchError(f"the state's sampler epoch must be an integer, found {number!r}")
        skipped = state.get("skipped", 0)
        self._later = {"own": state["own"]} if skipped else {}
        with torch.random.fork_rng(devices=[], enabled=self._own_generator() is None):
            self._put(state)
            if "digest" in state:
                self.draw(epoch, skipped=skipped)
        name = "rest" if skipped else "digest"
        if "digest" not in state:
            self.epoch = -1
        elif state[name] != self._state.get(name):
            self.epoch = -1
            raise StateMismatchError(
                f"{type(self.sampler).__name__} gives another order than when the state was saved, so the rest of the "
                "epoch is unknown: let its order depend on its arguments, its epoch, or a torch.Generator in its "
                "attribute 'generator', or give it state_dict and load_state_dict"
            )

    @contextmanager
    def undone_by_errors(self) -> Generator[None]:
        """Restore this order and its sampler if the ``with`` block raises."""
        before, state = (self.epoch, self.items, self._state, self._later), self._now()
        try:
            yield
        except BaseException:
            self.epoch, self.items, self._state, self._later = before
            self._put(state)
            raise

    def set_epoch(self, epoch: int) -> None:
        if (holder := self._holder("set_epoch")) is not None:
            holder.set_epoch(epoch)

    def _now(self) -> dict[str, Any]:
        """Return the state of the sampler: its epoch, its own state, and that of its generator."""
        state: dict[str, Any] = {}
        if isinstance(epoch := getattr(self._holder("set_epoch"), "epoch", None), int):
            state["epoch"] = epoch
        if (holder := self._holder("load_state_dict")) is not None:
            state["own"] = copy.deepcopy(holder.state_dict())
        if (generator := self._own_generator()) is not None:
            state["generator"] = _encoded(generator.get_state())
        return state

    def _put(self, state: Mapping[str, Any]) -> None:
        if state.get("epoch") is not None:
            self.set_epoch(state["epoch"])
        if (holder := self._holder("load_state_dict")) is not None and state.get("own") is not None:
            holder.load_state_dict(copy.deepcopy(state["own"]))
        if state.get("generator") is not None:
            _set_state(self._own_generator() or torch.default_generator, state["generator"])

    def _own_generator(self) -> torch.Generator | None:
        found = getattr(self._holder("generator"), "generator", None)
        return found if isinstance(found, torch.Generator) else None

    def _holder(self, name: str) -> Any:
        """Return the sampler, or the sampler in a batch sampler, that has this attribute."""
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if getattr(sampler, name, None) is not None:
                return sampler
        return None


def _set_state(generator: torch.Generator, saved: Any) -> None:
    try:
        generator.set_state(torch.from_numpy(np.frombuffer(base64.b64decode(saved), np.uint8).copy()))
    except (TypeError, ValueError, RuntimeError) as error:
        raise StateMismatchError(f"the state's torch.Generator cannot be restored: {error}") from error


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOrder(BatchPlanner):
    """The batches of a `DrawnOrder`: as drawn (`batch_size` 1), or cut from its indices. Copies share `drawn`."""

    drawn: DrawnOrder
    batch_size: int = 1

    @property
    def order(self) -> Any:
        """The sampler's class. `DrawnOrder` compares the order itself."""
        return "given", type(self.drawn.sampler).__qualname__, self.drawn.batches

    @property
    def records(self) -> int:
        return self.drawn.records or 0

    @property
    def items_per_step(self) -> int:
        return self.batch_size

    def items(self, epoch: int) -> int:
        """Return the number of items drawn, or the sampler's length for an epoch not drawn yet."""
        return len(self.drawn.items if epoch == self.drawn.epoch else self.drawn.sampler)

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:
        if epoch != self.drawn.epoch:
            name = type(self.drawn.sampler).__name__
            raise ConfigError(
                f"{name} draws its order when an epoch begins, so the order of epoch {epoch} is not known yet"
            )
        items, first, size = self.drawn.items, self.origin, self.batch_size
        if self.drawn.batches:
            return [_plan_of(step, items[first + step]) for step in steps]
        return [_plan_of(step, items[first + step * size : first + (step + 1) * size]) for step in steps]

    def sent(self, steps: range, *, epoch: int) -> Sequence[BatchPlan] | None:
        """See `BatchPlanner.sent`: only this process knows the drawn order."""
        return self.plans(steps, epoch=epoch)


def _plan_of(step: int, items: Any) -> BatchPlan:
    if isinstance(items, np.ndarray):
        return BatchPlan(step, cast("Int64Array", items))
    return KeyedPlan(step, np.arange(len(items)), keys=items)


_ENDLESS = (1 << 62) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder(BatchPlanner):
    """The steps of an `IterableDataset`: their number is unknown before its end. Worker k mod n makes step k."""

    batch_size: int
    drop_last: bool

    @property
    def order(self) -> Any:
        return self._settings()

    @property
    def records(self) -> int:
        return 0

    @property
    def items_per_step(self) -> int:
        return 1

    def items(self, epoch: int) -> int:  # noqa: ARG002 - of any epoch
        return _ENDLESS

    def plans(self, steps: range, *, epoch: int) -> Sequence[BatchPlan]:  # noqa: ARG002 - of any epoch
        return [BatchPlan(step, np.empty(0, np.int64)) for step in steps]


class ShuffledSampler(data.RandomSampler):
    """The sampler of ``shuffle=True``: gives the order that the loader serves in its next epoch.

    Where another library sets its generator, to have the same order in all processes, it is torch's sampler.
    """

    def __init__(self, dataset: Any, generator: torch.Generator | None) -> None:
        super().__init__(dataset, generator=generator)
        self._given = generator
        self.served: Sampler | None = None
        self.epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        if self.served is None or self.generator is not self._given:
            return super().__iter__()
        epoch, self.epoch = self.epoch, self.epoch + 1
        return iter(self.served.indices(np.arange(len(self.served)), epoch=epoch).tolist())
