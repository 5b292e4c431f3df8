"""The position of a loader in its data, in memory and in a checkpoint. Pure (no I/O)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, cast

from dataload._util.fingerprint import describe, fingerprint, shows_address
from dataload._util.randomness import ORDER_VERSION
from dataload.errors import StateMismatchError, and_more, printable
from dataload.samplers import BatchPlan, BatchPlanner, BatchSampler, Mixture
from dataload.samplers.mixture_changes import Change


@dataclass(frozen=True, slots=True)
class Cursor:
    """The steps that the consumer has received: all before `epoch`, and its steps below `step` without `missing`."""

    epoch: int
    step: int
    missing: frozenset[int] = frozenset()

    @property
    def begun(self) -> bool:
        """Whether any step of the epoch was received."""
        return self.step > 0

    @property
    def received(self) -> int:
        """Number of steps of the epoch that were received."""
        return self.step - len(self.missing)

    @property
    def first(self) -> int:
        """The first step that was not received."""
        return min(self.missing, default=self.step)

    def after(self, step: int, steps: int) -> Cursor:
        """Return the cursor after another step was received, of `steps` in the epoch."""
        missing, reached = self.missing, self.step
        if step < reached:
            missing -= {step}
        else:
            if step > reached:
                missing |= set(range(reached, step))
            reached = step + 1
        return Cursor(self.epoch, reached, missing) if missing or reached < steps else Cursor(self.epoch + 1, 0)


@dataclass(frozen=True, slots=True)
class Before:
    """The records, and their order, of an epoch that began before the data set grew."""

    source: Any
    planner: BatchPlanner
    names: Mapping[str, Any]  # by which states identify data and order


class EpochPlanners:
    """The planner of each epoch: `planner`, except one epoch, resumed with other steps or from `before`: `shifted`."""

    def __init__(
        self, planner: BatchPlanner, epoch: int = -1, shifted: BatchPlanner | None = None, before: Before | None = None
    ) -> None:
        self._before = before
        self._planner = planner
        self._epoch = epoch
        self._shifted = shifted

    def of(self, epoch: int) -> BatchPlanner:
        return self._shifted if self._shifted is not None and epoch == self._epoch else self._planner

    def before(self, epoch: int) -> Before | None:
        """Return the records and the order with which an epoch began, if the data set has grown since."""
        return self._before if epoch == self._epoch else None

    def sent(self, steps: range, *, epoch: int) -> Sequence[BatchPlan] | None:
        """See `BatchPlanner.sent`; workers do not know the order from before."""
        planner = self.of(epoch)
        if self.before(epoch) is not None:
            return planner.plans(steps, epoch=epoch)
        return planner.sent(steps, epoch=epoch)

    def epochs_from(
        self, start: Cursor, epochs: int | None
    ) -> Generator[tuple[int, BatchPlanner, Sequence[int], range]]:
        """Yield epochs up to `epochs`, or for ever: number, planner, steps missing before `start`, steps to its end."""
        epoch, step, missing = start.epoch, start.step, sorted(start.missing)
        while epochs is None or epoch < epochs:
            planner = self.of(epoch)
            steps = planner.steps(epoch)
            if not steps:
                return
            yield epoch, planner, missing, range(step, steps)
            epoch, step, missing = epoch + 1, 0, []

    @classmethod
    def resume(cls, planner: BatchPlanner, state: LoaderState, before: Before | None = None) -> tuple[Self, Cursor]:
        """Return the planners and the cursor that continue from a state, which may be of steps of another size."""
        missing, size = state.missing, planner.step_size
        # The last step of an epoch may be short, so its end does not tell where other steps begin.
        shifted, first = (planner if before is None else before.planner).resume(
            missing[0] if missing else state.position
        )
        steps = [first + (position - missing[0]) // size for position in missing]
        step = first - (missing[0] - state.position) // size if missing else first
        return cls(planner, state.epoch, shifted, before), Cursor(state.epoch, step, frozenset(steps))

    def state(self, cursor: Cursor, **names: Any) -> LoaderState:
        """Return the state of a cursor, given the `names` by which it identifies data and order."""
        epoch, planner = cursor.epoch, self.of(cursor.epoch)
        position, mixture = planner.position(cursor.step, epoch=epoch), mixture_of(planner)
        first = planner.position(cursor.first, epoch=epoch)
        if (before := self.before(epoch)) is not None:
            names = dict(before.names)
        return LoaderState(
            epoch=epoch,
            position=position,
            changes=() if mixture is None else mixture.changes_at(first, epoch=epoch),
            length=planner.items(epoch),
            **names,
            missing=tuple(planner.position(step, epoch=epoch) for step in sorted(cursor.missing)),
            step_size=planner.step_size if cursor.missing else 0,
        )


def mixture_of(planner: BatchPlanner) -> Mixture | None:
    """Return the mixture whose order a plan follows; None if it follows another one."""
    sampler = planner.sampler if isinstance(planner, BatchSampler) else None
    return sampler if isinstance(sampler, Mixture) else None


def upgrade(
    state: object, kind: type[Any], name: str, migrations: Sequence[Callable[[dict[str, Any]], dict[str, Any]]]
) -> dict[str, Any]:
    """Return a saved state, which may be anything, with the fields of `kind`; `migrations` begin with version 1."""
    if not isinstance(state, Mapping):  # from a file it may be anything
        hint = ": if it is JSON, pass json.loads(...) of it" if isinstance(state, (str, bytes)) else ""
        raise StateMismatchError(f"the state of a {name} is a dict, found {type(state).__name__}{hint}")
    values = dict(cast("Mapping[str, Any]", state))
    version, current = values.get("version"), len(migrations) + 1
    if not is_count(version) or not 0 < cast("int", version) <= current:
        newer, shown = is_count(version) and version, ", ".join([*map(str, values)][:5]) or "(none)"
        raise StateMismatchError(
            "the state was saved by a newer release of dataload: update dataload to load it"
            if newer
            else f"this is not a state of a {name}, but a dict with the keys {shown}{and_more(len(values), 5)}",
            differences=[f"version: {version!r} in the state, {current} here"],
        )
    for migrate in migrations[cast("int", version) - 1 :]:
        values = migrate(values)
    values["version"] = current
    names = {f.name for f in dataclasses.fields(kind)}
    if set(values) != names:
        wrong = ", ".join(sorted(names ^ set(values)))
        raise StateMismatchError(f"this is not a state of a {name}: missing or unknown keys: {wrong}")
    return values


def check_same(
    saved: object, here: object, meanings: Mapping[str, str], *, hint: str = "", more: Sequence[str] = ()
) -> None:
    """Check that a state was saved with the data and order of the loader that loads it: the fields in `meanings`."""
    differences = [
        f"{name} ({meaning}): {getattr(saved, name)} in the state, {getattr(here, name)} here"
        for name, meaning in meanings.items()
        if getattr(saved, name) != getattr(here, name)
    ]
    differences.extend(more)
    if differences:
        raise StateMismatchError(
            "the state was saved with other data or another order: load it into a loader with the same settings, "
            f"or start over{hint}",
            differences=differences,
        )


_GREATEST_COUNT = 1 << 62
MOST_SETTINGS = 300
"""Characters of the settings of an order in a state."""


def check_counts(values: Mapping[str, Any], *names: str) -> None:
    """Refuse a state if one of these values is not a count."""
    for name in names:
        if not is_count(values[name]):
            raise StateMismatchError(f"{name} in the state must be an integer >= 0 and < 2**62, found {values[name]!r}")


def is_count(value: Any) -> bool:
    """Return True if the value is an int in [0, 2**62), so that sums of it fit in 64 bits, and not a bool."""
    return type(value) is int and 0 <= value < _GREATEST_COUNT


_SHARDS = "; shards: "


def _split_settings(text: Any) -> dict[str, Any]:
    """Return the settings and the checksums of shards that a state of version 3 has in one text."""
    settings, _, shards = text.rpartition(_SHARDS) if isinstance(text, str) and _SHARDS in text else (text, "", "")
    return {"settings": settings, "shards": shards}


_MIGRATIONS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda state: {**state, "missing": [], "step_size": 0},
    lambda state: {**state, "settings": ""},
    lambda state: {**state, **_split_settings(state.get("settings")), "changes": []},
    lambda state: {**state, "parts": ""},
)
_MEANINGS = {
    "source": "the data set",
    "order": "the sampler or its seed",
    "length": "records per epoch",
    "order_version": "the release's orders",
    "step_size": "rows of all ranks per step, which must be the same for a state of in_order=False",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Serialized position of a loader in its data: the same on every rank, for any number of workers."""

    epoch: int
    position: int  # of the epoch's order, over all ranks: what the consumer has received
    length: int  # of the epoch
    source: str  # fingerprint of the data
    order: str  # fingerprint of the sampler, seed included
    settings: str = ""  # the sampler as text, for messages; empty in states of version 2
    shards: str = ""  # checksums of shards, see `loader.growth`; empty in states of 0.2, and without files
    # With ``in_order=False``, the first positions of the steps before `position` that this rank has not received, in
    # rising order.
    missing: tuple[int, ...] = ()
    step_size: int = 0  # positions per step if any are missing, else 0
    parts: str = ""  # with changes, a checksum of each source of the mixture and its order
    changes: tuple[Change, ...] = ()  # of a mixture: the last one before the positions to come, and later ones
    order_version: int = ORDER_VERSION
    version: int = len(_MIGRATIONS) + 1

    def to_json(self) -> dict[str, Any]:
        """Return a dict of numbers and text, under 1 KiB as JSON without changes."""
        plain = {**dataclasses.asdict(dataclasses.replace(self, changes=())), "missing": list(self.missing)}
        if self.changes:
            return {**plain, "changes": [each.to_json() for each in self.changes]}
        del plain["changes"], plain["shards"], plain["parts"]  # version 3, which 0.2 reads, says the same
        settings = f"{self.settings}{_SHARDS}{self.shards}" if self.shards else self.settings
        return {**plain, "settings": settings, "version": 3}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned, in this release or an earlier one."""
        values = upgrade(state, cls, "Loader", _MIGRATIONS)
        if not isinstance(values["missing"], (list, tuple)):
            raise StateMismatchError(f"missing in the state must be a list of positions, found {values['missing']!r}")
        values["missing"] = tuple(values["missing"])
        check_counts(values, "epoch", "position", "length", "step_size")
        for name in ("settings", "shards", "parts"):
            if type(values[name]) is not str:
                raise StateMismatchError(f"{name} in the state must be text, found {values[name]!r}")
        try:
            values["changes"] = tuple(map(Change.from_json, values["changes"]))
        except (TypeError, ValueError, KeyError) as error:
            raise StateMismatchError(f"changes in the state must be those of a mixture: {error}") from error
        loaded = cls(**values)
        if loaded.position > loaded.length:
            raise StateMismatchError(f"the state is at position {loaded.position} of {loaded.length}")
        loaded._check_missing()
        return loaded

    def _check_missing(self) -> None:
        missing, size = self.missing, self.step_size
        if not missing:
            return
        rising = all(type(position) is int for position in missing) and all(a < b for a, b in pairwise(missing))
        if not rising or missing[0] < 0 or missing[-1] >= self.position:
            raise StateMismatchError(
                f"missing in the state must be rising positions before {self.position}, found {list(missing)}"
            )
        if not size or any((position - missing[0]) % size for position in missing):
            raise StateMismatchError(
                f"positions missing in the state must be multiples of {size} apart, found {list(missing)}"
            )

    def check(self, here: LoaderState, *, hint: str = "", more: Sequence[str] = ()) -> None:
        """Refuse a state of other data or another order; see `check_same`."""
        saved = self
        texts = {saved.settings, here.settings}
        if saved.order != here.order and len(texts) > 1 and "" not in texts:  # text says more than fingerprints
            saved = dataclasses.replace(saved, order=printable(saved.settings, MOST_SETTINGS))
            here = dataclasses.replace(here, order=here.settings)
        check_same(saved, here, _MEANINGS, hint=hint, more=more)


class OrderIdentity:
    """Identifies the order of a plan in states: by a fingerprint, which is compared, and by text for messages."""

    def __init__(self, plan: BatchPlanner) -> None:
        self._plan = plan
        # An order that is not a dataclass may change while it is used: it may fill a cache, for example.
        self._at_first = None if is_dataclass(plan.order) else fingerprint(plan.order)

    @cached_property
    def fingerprint(self) -> str:
        return self._at_first or fingerprint(self._plan.order)

    @cached_property
    def text(self) -> str:
        ours = type(self._plan).__module__.startswith("dataload.")  # see `describe`
        return printable(describe(self._plan.order), MOST_SETTINGS) if ours else ""

    @property
    def hint(self) -> str:
        """Advice for states of another order."""
        return _ADDRESS_HINT if shows_address(self._plan.order) else ""


_ADDRESS_HINT = (
    ". This sampler's repr shows its memory address, by which dataload 0.1 identified it, so a state that 0.1 saved "
    "never matches: if the order is the same, copy 'order' from this loader's state_dict() into the state"
)
