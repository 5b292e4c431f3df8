"""Orders drawn by iterating over an object, such as a torch sampler."""

from __future__ import annotations

import base64
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from dataload._util.fingerprint import digest
from dataload._util.indexing import as_indices
from dataload.errors import ConfigError, StateMismatchError
from dataload.loader.state import is_count
from dataload.samplers import BatchPlan, BatchPlanner
from dataload.types import Int64Array


class DrawnOrder:
    """One epoch's order as drawn from a sampler, and the sampler's state before the draw."""

    def __init__(self, sampler: Any, records: int, *, batches: bool, generator: torch.Generator | None) -> None:
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
        self._generator = generator
        self.epoch: int = -1  # of `items`
        self.items: Sequence[Int64Array] | Int64Array = ()
        self._state: dict[str, Any] = {}  # the sampler's state before `items` were drawn

    def __getstate__(self) -> dict[str, Any]:
        return {"records": self.records, "batches": self.batches, "epoch": -1, "items": ()}  # workers get the indices

    def draw(self, epoch: int) -> None:
        """Draw the order of `epoch` from the sampler."""
        state, generator = self._epoch_state(), self._own_generator() or torch.default_generator
        before = generator.get_state()
        # torch's loader draws a seed before each epoch; do the same to get the same orders.
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        given = list(self.sampler)
        if not torch.equal(before, generator.get_state()):
            state["generator"] = _encoded(before)
        try:
            items = (
                [as_indices(batch, self.records) for batch in given]
                if self.batches
                else as_indices(given, self.records)
            )
        except (TypeError, ValueError, IndexError) as error:
            wanted = "lists of integers" if self.batches else "integers"
            raise ConfigError(
                f"{type(self.sampler).__name__} must give {wanted} in [0, {self.records}): {error}",
                key="batch_sampler" if self.batches else "sampler",
            ) from error
        flat = np.concatenate([*items, np.array([len(batch) for batch in items])]) if self.batches and items else items
        self.items, self.epoch = items, epoch
        self._state = {**state, "digest": digest(np.asarray(flat).tobytes())}

    def state(self, epoch: int) -> dict[str, Any]:
        """Return JSON values from which `restore` makes the sampler repeat the order of `epoch`."""
        if epoch == self.epoch:
            return dict(self._state)
        own = self._own_generator()
        return self._epoch_state() if own is None else {**self._epoch_state(), "generator": _encoded(own.get_state())}

    def restore(self, state: Mapping[str, Any], epoch: int) -> None:
        """Restore a saved sampler state; if the epoch had begun, the sampler must repeat its order."""
        if (number := state.get("epoch")) is not None:
            if not is_count(number):
                raise StateMismatchError(f"the state's sampler epoch must be an integer, found {number!r}")
            self.set_epoch(number)
        own, saved = self._own_generator(), state.get("generator")
        with nullcontext() if own is not None else torch.random.fork_rng(devices=[]):
            if saved is not None:
                _set_state(own or torch.default_generator, saved)
            if "digest" in state:
                self.draw(epoch)
        if "digest" not in state:
            self.epoch = -1
        elif state["digest"] != self._state["digest"]:
            self.epoch = -1
            raise StateMismatchError(
                f"{type(self.sampler).__name__} gives another order than when the state was saved, so the rest of the "
                "epoch is unknown: let its order depend on its arguments, its epoch, or a torch.Generator in its "
                "attribute 'generator'"
            )

    @contextmanager
    def undone_by_errors(self) -> Generator[None]:
        """Restore the sampler's present state if an error is raised."""
        before = self.epoch, self.items, self._state
        epoch, own = self._epoch_state().get("epoch"), self._own_generator()
        generator = None if own is None else own.get_state()
        try:
            yield
        except BaseException:
            self.epoch, self.items, self._state = before
            if epoch is not None:
                self.set_epoch(epoch)
            if own is not None and generator is not None:
                own.set_state(generator)
            raise

    def set_epoch(self, epoch: int) -> None:
        if (holder := self._holder("set_epoch")) is not None:
            holder.set_epoch(epoch)

    def _epoch_state(self) -> dict[str, Any]:
        epoch = getattr(self._holder("set_epoch"), "epoch", None)
        return {"epoch": epoch} if isinstance(epoch, int) else {}

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
        return self.drawn.records

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
        items, first = self.drawn.items, self.origin
        if self.drawn.batches:
            return [BatchPlan(step, cast("Int64Array", items[first + step])) for step in steps]
        size, indices = self.batch_size, cast("Int64Array", items)
        return [BatchPlan(step, indices[first + step * size : first + (step + 1) * size]) for step in steps]

    def sent(self, steps: range, *, epoch: int) -> Sequence[BatchPlan] | None:
        """See `BatchPlanner.sent`: only this process knows the drawn order."""
        return self.plans(steps, epoch=epoch)
