"""Several orders mixed in stated proportions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Annotated, Literal, TypeAlias, cast

import numpy as np

from dataload._util.caches import Memo
from dataload._util.fingerprint import ADDED
from dataload._util.settings import Least, as_tuple, check_count, check_setting, check_settings, setting_error
from dataload.errors import ConfigError
from dataload.samplers.common import (
    MAX_LENGTH,
    BoolArray,
    Float64Array,
    check_lengths,
    check_sampler,
    records_of,
    set_fields,
    source_lengths_of,
)
from dataload.samplers.mixture_changes import Change
from dataload.samplers.mixture_weights import (
    Changes,
    MaxEpochs,
    Row,
    Schedule,
    by_row,
    check_max_epochs,
    check_rows,
    forgotten,
    schedules,
)
from dataload.samplers.quotas import MOST_POSITIONS, Quotas
from dataload.samplers.together import Orders
from dataload.samplers.weighted import scaled
from dataload.types import Int64Array, Sampler

Step: TypeAlias = Annotated[int, Least(1)]
"""Positions between those at which weights may change."""

Stop: TypeAlias = Literal["first", "longest", "never"]
"""The end of an epoch of a mixture."""

_MOST_SHOWN = 64


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
            positions, however small it is. None uses it if a weight is too small for 10,000 positions.
        lengths: Records of each component of the `ConcatSource`. None uses the records that each sampler chooses from.
        global_batch_size: If given, weights change at steps of this many positions instead of positions: the rows of
            all ranks per step. Not stored.
        max_epochs: The most passes over a component in an epoch of the mixture (with ``stop="never"``, in the run):
            one number for all, one for each, or numbers by name for some; 0.5 is half of the records. A component that
            is used up leaves its share to the others, in proportion to their weights. The epoch ends at the latest when
            all are used up. The rule is then that of ``window="any"``. Stored as a tuple; infinity is no limit.

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
    max_epochs: MaxEpochs | None = field(default=None, metadata=ADDED)
    _orders: Orders = field(init=False, repr=False, compare=False)
    _limits: Int64Array | None = field(init=False, repr=False, compare=False)  # the most draws in an epoch
    _schedules: tuple[Schedule, ...] = field(init=False, repr=False, compare=False)  # one per epoch, or for all
    _length: int = field(init=False, repr=False, compare=False)
    _draws: Int64Array = field(init=False, repr=False, compare=False)  # (schedules, components), in one epoch
    _firsts: Int64Array = field(init=False, repr=False, compare=False)  # (components + 1,), first index of each
    changes: tuple[Change, ...] = field(default=(), init=False, repr=False, compare=False)
    names: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _plans: Memo[tuple[Schedule, Change]] = field(default_factory=Memo, init=False, repr=False, compare=False)
    _lengths: Memo[int] = field(default_factory=Memo, init=False, repr=False, compare=False)  # of changed epochs

    def __post_init__(self, global_batch_size: int | None) -> None:
        step = check_setting("global_batch_size", 1 if global_batch_size is None else global_batch_size, Step)
        check_settings(self)
        self._check(step)
        set_fields(self, _orders=Orders(cast("tuple[Sampler, ...]", self.samplers)))
        set_fields(self, _limits=self._start(0).limits(self._orders, self._most))
        set_fields(self, _schedules=schedules(self.weights, self.window, self.seed, self._limits))
        set_fields(self, _length=self._measure(self._schedules))
        set_fields(self, _draws=np.array([schedule.draws(self._length) for schedule in self._schedules]))

    def _check(self, step: int) -> None:
        names = tuple(self.samplers) if isinstance(self.samplers, Mapping) else None
        samplers = as_tuple(self.samplers.values() if isinstance(self.samplers, Mapping) else self.samplers)
        for i, sampler in enumerate(samplers):
            check_sampler(f"samplers[{i}]", sampler)
        if not samplers:
            raise setting_error("samplers", self.samplers, "must hold one sampler per component")
        weights = check_rows(self.weights, len(samplers), names, step)
        limits = check_max_epochs(self.max_epochs, len(samplers), names)
        if limits is not None and isinstance(self.window, int):
            raise setting_error("window", self.window, "must be None or 'any' with max_epochs")
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
        set_fields(
            self, samplers=samplers, weights=weights, lengths=lengths, names=names, _firsts=firsts, max_epochs=limits
        )

    def _measure(self, schedules: Sequence[Schedule]) -> int:
        """Return the number of positions per epoch of these schedules."""
        ends, lengths, limits = list[int](), self._orders.lengths, self._limits
        passes = lengths if limits is None else np.minimum(lengths, limits)
        for schedule in schedules:
            used = np.any([rule.row > 0 for rule in schedule.rules], axis=0)
            self._check_filled(used)
            # Components that are no longer used before their end would never come to it.
            lasting = used & ((schedule.rules[-1].row > 0) | (schedule.before[-1] >= passes))

            def is_over(length: int, schedule: Schedule = schedule, lasting: BoolArray = lasting) -> bool:
                if self.stop == "first":
                    return bool((schedule.draws(length + 1) > lengths).any())
                return bool((schedule.draws(length) >= passes)[lasting].all())

            most = MAX_LENGTH if self.stop == "never" else MOST_POSITIONS
            most = min(most, schedule.length)
            ends.append(most if self.stop == "never" else bisect_left(range(most), True, key=is_over))
        length = max(ends) if self.stop == "longest" else min(ends)
        used_up = min(schedule.length for schedule in schedules)
        if length > used_up:
            message = f"max_epochs ends an epoch at position {used_up}, and all end at {length} with stop='longest'"
            raise ConfigError(
                f"{message}: raise max_epochs, or use stop='first'", key="max_epochs", value=self.max_epochs
            )
        late = max(int(schedule.starts[-1]) for schedule in schedules)
        if late and late >= length:
            ending = f"stop={self.stop!r}" if limits is None else f"stop={self.stop!r} with max_epochs"
            raise ConfigError(
                f"weights change at position {late}, and {ending} ends epochs at {length}: change them "
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

    def _check_filled(self, used: BoolArray) -> None:
        """Raise ConfigError if a component that is used, (components,), has no records."""
        empty = used & (self._orders.lengths == 0)
        if empty.any():
            key = f"samplers[{np.argmax(empty)}]"
            named = key if self.names is None else f"{key}, {self.names[np.argmax(empty)]!r},"
            raise ConfigError(f"{named} is empty: set its weight to 0", key=key, value=0)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        count, shown = len(self.samplers), ((f.name, getattr(self, f.name)) for f in fields(self) if f.repr)
        if count > _MOST_SHOWN:
            return f"Mixture({count} samplers, stop={self.stop!r}, seed={self.seed})"
        shown = ((name, value) for name, value in shown if (name, value) != ("max_epochs", None))
        return f"Mixture({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def length_in(self, epoch: int) -> int:
        """Return the number of positions of an epoch, which a change may have made longer or shorter."""
        is_endless = self.stop == "never" and self.max_epochs is None
        if not self.changes or epoch < self.changes[0].epoch or is_endless:
            return self._length
        return self._lengths.recall(epoch) or self._lengths.keep(epoch, self._measure([self._plan(epoch)[0]]))

    def changed(self, position: int, weights: Row, *, epoch: int = 0) -> Mixture:
        """Return this mixture with other weights from a position of an epoch on, also in later epochs.

        Each component continues where it is, and positions before do not change. From there on, the rule is that of
        ``window="any"``. A component of weight 0 is retired. Changes that were made for later positions stay.

        Args:
            position: The first position with these weights.
            weights: One weight per component, in order or by name.
            epoch: The epoch of the position.

        Raises:
            ConfigError: The weights do not fit the components, or the position is not in the epoch.
        """
        row = np.array(check_rows(weights, len(self._orders.lengths), self.names, 1))
        check_count("position", position, least=0, below=self.length_in(check_count("epoch", epoch, least=0)))
        if row.ndim != 1:
            raise setting_error("weights", weights, "must be one weight for each component")
        self._check_filled(row > 0)
        earlier = [each for each in self.changes if (each.epoch, each.position) <= (epoch, position)]
        schedule, held = self.with_changes(earlier)._plan(epoch)
        number, drawn = earlier[-1].number + 1 if earlier else 1, schedule.draws(position)
        change = replace(held, position=position, number=number, weights=row, drawn=drawn).ended()
        found = self.with_changes([*earlier, change])
        found.length_in(epoch)  # which checks that the epoch goes on
        for later in self.changes[len(earlier) :]:
            found = found.changed(later.position, later.weights.tolist(), epoch=later.epoch)
        return found

    def with_changes(
        self, changes: Sequence[Change], before: Mapping[tuple[int, int], Sampler] | None = None
    ) -> Mixture:
        """Return this mixture with these changes instead of those that it has."""
        found = copy(self)
        set_fields(found, changes=tuple(changes), _plans=Memo(), _lengths=Memo())
        if before is not None:
            set_fields(found, _orders=Orders(self._orders.samplers, before))
        return found

    def grown(self, before: Mixture, shards: Int64Array, position: int, *, epoch: int) -> tuple[Change, ...]:
        """Return the changes with which this mixture continues one of fewer records from a position of an epoch on.

        Each component finishes its pass in the order of `before`; its next pass goes over all. Weights stay. `shards`,
        (components,), are the shards that a component had before it grew, 0 for those that did not grow.
        """
        (schedule, held), orders = before._plan(epoch), before._orders
        change = held.grown(orders, schedule.draws(position), shards)
        number = 1 + max((c.number for c in before.changes if (c.epoch, c.position) <= (epoch, position)), default=0)
        at = int(np.searchsorted(schedule.starts, position, side="right")) - 1
        weights = [rule.row for rule in schedule.rules[at:]]
        change = replace(change, position=position, number=number, weights=weights[0])
        ending = {(i, int(change.shards[i])): orders.samplers[i] for i in np.flatnonzero(change.shards).tolist()}
        found = self.with_changes([change], {**ending, **orders.before})
        for start, row in zip(schedule.starts[at + 1 :].tolist(), weights[1:], strict=True):
            found = found.changed(start, row.tolist(), epoch=epoch)
        return found.changes

    def placed(self, lengths: Sequence[int]) -> Mixture:
        """Return this mixture for a `ConcatSource` whose sources have at least the records of its components."""
        found = copy(self)
        set_fields(found, lengths=tuple(lengths), _firsts=np.cumsum([0, *lengths], dtype=np.int64))
        return found

    def first(self, count: int) -> Mixture:
        """Return this mixture with its first `count` components only; one of them must have a weight."""
        limits = self.max_epochs and cast("tuple[float, ...]", self.max_epochs)[:count]
        lengths, samplers = self.lengths and self.lengths[:count], cast("tuple[Sampler, ...]", self.samplers)
        weights = by_row(self.weights, lambda row: row[:count])
        return replace(self, samplers=samplers[:count], weights=weights, lengths=lengths, max_epochs=limits)

    def known_from(self, epoch: int) -> int:
        """Return the first position of an epoch that is known; those before an early change may be forgotten."""
        return int(self._plan(epoch)[0].starts[0])

    def changes_at(self, position: int, *, epoch: int) -> tuple[Change, ...]:
        """Return the changes that decide the positions from this one on: the last one before, and later ones."""
        past = [each for each in self.changes if (each.epoch, each.position) <= (epoch, position)]
        return self.changes[max(0, len(past) - 1) :]

    def given(self, position: int, *, epoch: int) -> tuple[Int64Array, Float64Array]:
        """Return the records of each component before a position, in all epochs, and their number in passes.

        Earlier epochs count in full; those without end do not count.
        """
        schedule, held = self._plan(epoch)
        return held.given(self._orders, schedule.draws(position))

    def shares(self, position: int, *, epoch: int) -> Float64Array:
        """Return the share of each component from a position on, (components,)."""
        schedule, held = self._plan(epoch)
        limits = held.limits(self._orders, self._most)
        row = scaled(schedule.rules[int(np.searchsorted(schedule.starts, position, side="right")) - 1].row)
        row = row if limits is None else row * (schedule.draws(position) < limits)
        return row / (row.sum() or 1)

    @property
    def _most(self) -> tuple[float, ...] | None:
        return cast("tuple[float, ...] | None", self.max_epochs)  # see `_check`

    def _start(self, epoch: int, firsts: int | Int64Array = 0, earlier: int | Int64Array = 0) -> Change:
        """Return the counts at the start of an epoch without changes; the schedule has its weights, so these are 0."""
        zeros = self._firsts[1:] * 0
        return Change(epoch, 0, 0, np.zeros(zeros.shape), zeros, zeros + firsts, zeros + earlier, zeros, zeros, zeros)

    def _plan(self, epoch: int) -> tuple[Schedule, Change]:
        """Return the schedule of an epoch, and the counts that hold from its first known position on."""
        return self._plans.recall(epoch) or self._plans.keep(epoch, self._new_plan(epoch))

    def _new_plan(self, epoch: int) -> tuple[Schedule, Change]:
        past = [each for each in self.changes if each.epoch <= epoch]
        if past:
            return self._changed_plan(past, epoch)
        if self.changes and self.changes[0].number > 1:
            raise forgotten(f"epoch {self.changes[0].epoch}")
        # No two epochs share a component's pass.
        passes = -(-self._draws.max(axis=0) // np.maximum(1, self._orders.lengths))
        last = len(self._draws) - 1
        earlier = self._draws[: min(epoch, last)].sum(axis=0) + max(0, epoch - last) * self._draws[last]
        held = self._start(epoch, passes * epoch, 0 if self._length == MAX_LENGTH else earlier)
        return self._schedules[min(epoch, last)], held

    def _changed_plan(self, past: list[Change], epoch: int) -> tuple[Schedule, Change]:
        own, zeros = [each for each in past if each.epoch == epoch], self._firsts[1:] * 0

        def rule(change: Change, drawn: Int64Array, limits: Int64Array | None) -> Quotas:
            left = None if limits is None else limits - drawn
            return Quotas(change.weights.tolist(), self.seed, "change", change.number, limits=left)

        if own:
            known, first = past[: -len(own)], own[0]
            starts, before, rules = np.empty(0, np.int64), zeros[:0].reshape(0, len(zeros)), ()
            if first.number == (known[-1].number + 1 if known else 1) and not first.origins.any():
                schedule, _ = self.with_changes(known)._plan(epoch)
                if np.array_equal(schedule.draws(first.position), first.drawn):  # not if retired ones were left out
                    starts, before, rules = schedule
            count = int(np.searchsorted(starts, first.position, side="right"))
            starts = np.append(starts[:count], [each.position for each in own])
            before = np.vstack([before[:count], *(each.drawn for each in own)])
            limits = first.limits(self._orders, self._most)
            rules = (*rules[:count], *(rule(each, each.drawn, limits) for each in own))
            return Schedule(starts, before, rules), first
        last = past[-1]
        schedule, held = self._plan(last.epoch)
        length = self.length_in(last.epoch)
        held = self._start(epoch, *held.following(self._orders, schedule.draws(length), length))
        schedule = Schedule(np.zeros(1, np.int64), zeros[None], (rule(last, zeros, self._limits),))
        if more := epoch - last.epoch - 1:
            length = self._measure([schedule])
            firsts, earlier = self._start(0).following(self._orders, schedule.draws(length), length)
            held = self._start(epoch, held.firsts + more * firsts, held.earlier + more * earlier)
        return schedule, held

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
        schedule, held = self._plan(epoch)
        components, draws = schedule.turns(positions)
        found = held.indices(self._orders, components, draws)
        found += self._firsts[components]
        return found

    def positions_of(self, index: int, *, epoch: int, below: int) -> Int64Array:
        """See `dataload.samplers.batch.positions_of`."""
        component = int(np.searchsorted(self._firsts, index, side="right")) - 1
        if component == len(self.samplers):
            return np.empty(0, np.int64)
        schedule, held = self._plan(epoch)
        below = min(below, self.length_in(epoch))
        draws = range(int(schedule.before[0, component]), int(schedule.draws(below)[component]))
        wanted = held.draws_of(self._orders, component, index - int(self._firsts[component]), draws)
        return schedule.positions_of(component, wanted, below)
