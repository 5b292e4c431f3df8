"""Several orders mixed in stated proportions."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast

import numpy as np

from dataload._util.settings import Least, as_tuple, check_setting, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.basic import positions_without_end
from dataload.samplers.common import (
    MAX_LENGTH,
    BoolArray,
    check_lengths,
    check_sampler,
    records_of,
    set_fields,
    source_lengths_of,
)
from dataload.samplers.mixture_rules import MOST_POSITIONS, Schedule, changes_of, schedules
from dataload.samplers.together import Orders
from dataload.samplers.weighted import check_weights
from dataload.types import Int64Array, Sampler

Step: TypeAlias = Annotated[int, Least(1)]
"""Positions between those at which weights may change."""

Stop: TypeAlias = Literal["first", "longest", "never"]
"""The end of an epoch of a mixture."""

Row: TypeAlias = Sequence[float] | Mapping[str, float]
"""One weight per component, in order or by name."""

Changes: TypeAlias = Mapping[int, Row] | tuple[tuple[int, tuple[float, ...]], ...]
"""Weights by the position of the epoch from which they hold."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several orders mixed in proportions that are exact in any `window` consecutive positions.

    Use it with a `ConcatSource`, whose sources are the components in the same order. Within a window,
    the draws from a component are spread evenly, each at a random offset in its share (low discrepancy rather than coin
    flips); then the window repeats. A component that ends starts its next epoch. Thousands of components cost hardly
    more than two if they are in index order or shuffled globally.

    Weights may change within an epoch: ``{0: (9, 1), 50_000: (1, 1)}``. A new window begins at each change, and each
    component continues where it is.

    Attributes:
        samplers: The order of each component, or orders by name. Stored as a tuple.
        weights: One weight per component, in order or by name; or a mapping from the position in the epoch from which
            weights hold, first 0, to such weights; or a sequence of these, one per epoch, whose last item holds for
            later epochs. Stored as tuples, mappings as tuples of pairs.
        stop: When an epoch ends: before the ``"first"`` component to run out would repeat, once the ``"longest"`` one
            has been served completely (components that change to weight 0 before their end do not count), or
            ``"never"`` (after 2^48 positions). If weights differ between epochs, all epochs share one length that
            satisfies this in each.
        seed: Seed of the offsets in the window, any integer.
        window: Number of positions in which the proportions are exact, up to rounding of weight * window to integers.
            None uses the smallest multiple of the weights' common denominator that is at least 1,000, or 10,000 if
            that denominator is too large. Weights that change within an epoch each have a window of their own.
            ``"any"`` repeats nothing: in any number of positions, each component has its exact share up to a few
            positions, however small it is. None uses it for weights of which one is too small for 10,000 positions.
        lengths: Records of each component of the `ConcatSource`. None uses the records that each sampler chooses from.
        global_batch_size: If given, weights change at steps of this many positions instead of positions: the rows of
            all ranks per step. Not stored.

    Raises:
        ConfigError: The numbers or names of samplers, weights and lengths differ; a weight is negative, or too small
            for the window; a change of weights lies outside the epoch; a component with a positive weight is empty, or
            has fewer records than its sampler chooses from; an epoch would have more than 2^48 positions; or `stop` is
            unknown.
    """

    samplers: Sequence[Sampler] | Mapping[str, Sampler]
    weights: Row | Changes | Sequence[Row | Changes]
    stop: Stop = "first"
    seed: int = 0
    window: Annotated[int, Least(1)] | Literal["any"] | None = None
    lengths: tuple[int, ...] | None = None
    global_batch_size: InitVar[Step | None] = None
    _orders: Orders = field(init=False, repr=False, compare=False)
    _schedules: tuple[Schedule, ...] = field(init=False, repr=False, compare=False)  # one per epoch, or for all
    _length: int = field(init=False, repr=False, compare=False)
    # Epochs of each component in one epoch of the mixture, so that no two of these share a component's epoch.
    _epochs: Int64Array = field(init=False, repr=False, compare=False)
    _firsts: Int64Array = field(init=False, repr=False, compare=False)  # (components + 1,), first index of each

    def __post_init__(self, global_batch_size: int | None) -> None:
        step = check_setting("global_batch_size", 1 if global_batch_size is None else global_batch_size, Step)
        check_settings(self)
        self._check(step)
        set_fields(self, _schedules=schedules(self.weights, self.window, self.seed))
        set_fields(self, _orders=Orders(cast("tuple[Sampler, ...]", self.samplers)))
        set_fields(self, _length=self._measure())
        draws = np.max([schedule.draws(self._length) for schedule in self._schedules], axis=0)
        set_fields(self, _epochs=-(-draws // np.maximum(1, self._orders.lengths)))

    def _check(self, step: int) -> None:
        names = tuple(self.samplers) if isinstance(self.samplers, Mapping) else None
        samplers = as_tuple(self.samplers.values() if isinstance(self.samplers, Mapping) else self.samplers)
        for i, sampler in enumerate(samplers):
            check_sampler(f"samplers[{i}]", sampler)
        if not samplers:
            raise setting_error("samplers", self.samplers, "must hold one sampler per component")
        weights = _check_weights(self.weights, len(samplers), names, step)
        lengths = tuple(map(records_of, samplers)) if self.lengths is None else self.lengths
        lengths = check_lengths("lengths", lengths)
        if len(lengths) != len(samplers):
            rule = f"must hold one length for each of the {len(samplers)} samplers"
            raise setting_error("lengths", lengths, rule)
        for i, (sampler, length) in enumerate(zip(samplers, lengths, strict=True)):
            # A sampler without `records` may repeat a few, so its length says nothing.
            records = getattr(sampler, "records", None) or 0
            if records > length:
                rule = f"must be at least {records}, the records that samplers[{i}] chooses from"
                raise setting_error(f"lengths[{i}]", length, rule)
        firsts = np.cumsum([0, *lengths], dtype=np.int64)
        set_fields(self, samplers=samplers, weights=weights, lengths=lengths, _firsts=firsts)

    def _measure(self) -> int:
        """Return the number of positions per epoch."""
        ends, lengths = list[int](), self._orders.lengths
        for schedule in self._schedules:
            used = np.any([rule.uses for rule in schedule.rules], axis=0)
            if not lengths[used].all():
                key = f"samplers[{int(np.argmax(used & (lengths == 0)))}]"
                raise ConfigError(f"{key} is empty: set its weight to 0", key=key, value=0)
            # Components that are no longer used before their end would never come to it.
            lasting = used & (schedule.rules[-1].uses | (schedule.before[-1] >= lengths))

            def is_over(length: int, schedule: Schedule = schedule, lasting: BoolArray = lasting) -> bool:
                if self.stop == "first":
                    return bool((schedule.draws(length + 1) > lengths).any())
                return bool((schedule.draws(length) >= lengths)[lasting].all())

            ends.append(MAX_LENGTH if self.stop == "never" else bisect_left(range(MOST_POSITIONS), True, key=is_over))
        length = max(ends) if self.stop == "longest" else min(ends)
        late = max(int(schedule.starts[-1]) for schedule in self._schedules)
        if late >= length:
            raise ConfigError(
                f"weights change at position {late}, and stop={self.stop!r} ends epochs at {length}: change them "
                "earlier, give weights for each epoch, or use stop='never'",
                key="weights",
                value=late,
            )
        if length > MAX_LENGTH:
            raise ConfigError(
                f"stop={self.stop!r} makes epochs of {length} positions; the limit is {MAX_LENGTH}",
                key="stop",
                value=self.stop,
            )
        return length

    def __len__(self) -> int:
        return self._length

    @property
    def records(self) -> int:
        """Upper bound (exclusive) of the indices."""
        return int(self._firsts[-1])

    @property
    def source_lengths(self) -> tuple[int, ...]:
        made_for = map(source_lengths_of, cast("tuple[Sampler, ...]", self.samplers))
        lengths = cast("tuple[int, ...]", self.lengths)  # see `_check`
        return tuple(n if own is None else sum(own) for own, n in zip(made_for, lengths, strict=True))

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        """See `dataload.types.Sampler`."""
        components, draws = self._schedules[min(epoch, len(self._schedules) - 1)].turns(positions)
        found = self._orders.indices(components, draws, self._epochs * epoch)
        found += self._firsts[components]
        return found

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.inverse.positions_of`."""
        samplers = cast("tuple[Sampler, ...]", self.samplers)
        component = int(np.searchsorted(self._firsts, index, side="right")) - 1
        if component == len(samplers):
            return np.empty(0, np.int64)
        schedule = self._schedules[min(epoch, len(self._schedules) - 1)]
        draws = positions_without_end(
            samplers[component],
            index - int(self._firsts[component]),
            first_epoch=epoch * int(self._epochs[component]),
            below=int(schedule.draws(min(below, self._length))[component]),
        )
        return np.array([schedule.position(component, draw) for draw in draws.tolist()], np.int64)


def _check_weights(weights: Any, components: int, names: tuple[str, ...] | None, step: int) -> Any:
    """Return weights as floats in tuples, with the nesting they were given in, and changes as pairs."""

    def row(given: Any) -> tuple[float, ...]:
        if isinstance(given, Mapping):
            by_name = cast("Mapping[str, float]", given)
            if names is None or {*by_name} != {*names}:
                rule = "must hold weights by position in the epoch, from 0 on, or by the names of the samplers"
                raise setting_error("weights", given, rule)
            given = [by_name[name] for name in names]
        checked = tuple(check_weights(as_tuple(given) or given).tolist())
        if len(checked) != components:
            raise setting_error("weights", checked, f"must hold one weight for each of the {components} samplers")
        return checked

    def entry(given: Any) -> Any:
        pairs = changes_of(given)
        if pairs is None:
            return row(given)
        for start, _ in pairs:
            if isinstance(start, bool) or not hasattr(start, "__index__") or not 0 <= start < MAX_LENGTH // step:
                rule = f"must hold weights by position in the epoch, from 0 on and below {MAX_LENGTH // step}"
                raise setting_error("weights", start, rule)
        starts = [int(start) * step for start, _ in pairs]
        changes = sorted(zip(starts, [row(held) for _, held in pairs], strict=True))
        if starts.count(0) != 1 or len({*starts}) < len(starts):
            raise setting_error("weights", [*dict(pairs)], "must hold weights for position 0, and once for each other")
        # Constant weights are the same value however they are written.
        return tuple(changes) if len(changes) > 1 else changes[0][1]

    if isinstance(weights, Mapping) or changes_of(weights) is not None:
        return entry(weights)
    given = as_tuple(weights)
    # Anything that is not a row of rows is checked as a single row.
    nested = [isinstance(item, (Sequence, Mapping, np.ndarray)) and not isinstance(item, str) for item in given]
    return tuple(map(entry, given)) if given and all(nested) else row(given or weights)
