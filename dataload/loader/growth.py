"""The states of a loader: of its data and order as they are, and as they were before shards were added."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, get_args

from dataload._util.fingerprint import identify
from dataload._util.settings import check_choice
from dataload.errors import StateMismatchError
from dataload.loader.blends import fitted, marks_of
from dataload.loader.state import Before, Cursor, EpochPlanners, LoaderState, OrderIdentity, mixture_of, with_changes
from dataload.samplers import BatchPlanner
from dataload.sources.base import Source
from dataload.sources.grown import before_growth, shard_marks
from dataload.sources.views.concat import ConcatSource

OnGrowth: TypeAlias = Literal["error", "finish"]
"""What to do with a state from before shards were added: refuse it, or finish its epoch without them."""


class States:
    """Saves and loads the states of a loader: its place in an order, and fingerprints of the order and the data."""

    def __init__(self, source: Any, plan: BatchPlanner, replan: partial[BatchPlanner]) -> None:
        self._source, self._replan = source, replan
        mixture, parts = mixture_of(plan), source.sources if isinstance(source, ConcatSource) else ()
        self._mixture = mixture if mixture is not None and len(mixture.samplers) == len(parts) else None
        """The mixture whose components are the sources."""
        self.order: OrderIdentity = OrderIdentity(plan)
        self.sampler_for: Callable[[Any], Any] | None = None
        """Makes the `sampler` of `replan` for another source, if anything but the user can."""

    @cached_property
    def _marks(self) -> Sequence[tuple[str, int]]:
        return shard_marks(self._source)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        names = {"source": identify(self._source), "shards": summarize(self._marks)}
        return {**names, "order": self.order.fingerprint, "settings": self.order.text}

    @cached_property
    def _parts(self) -> str:
        return "" if self._mixture is None else marks_of(self._mixture, self._source)

    def of(self, plans: EpochPlanners, cursor: Cursor) -> LoaderState:
        state = plans.state(cursor, **self._names)
        return replace(state, parts=self._parts) if state.changes and plans.before is None else state

    def read(self, state: Mapping[str, Any]) -> LoaderState:
        """Return a saved state, as the sources of a mixture that are here continue it."""
        saved = LoaderState.from_json(state)
        return saved if self._mixture is None else fitted(saved, self._names, self._mixture, self._source)

    def resume(self, planner: BatchPlanner, saved: LoaderState, before: Before | None) -> tuple[EpochPlanners, Cursor]:
        """Return the planners and the cursor that continue from a state, which may be of ranks that were not known."""
        before = None if before is None else self._plan_before(before.source, planner, saved)
        return EpochPlanners.resume(planner, saved, before)

    def load(self, planner: BatchPlanner, saved: LoaderState, on_growth: OnGrowth) -> tuple[EpochPlanners, Cursor]:
        """Return the planners and the cursor that continue from a saved state, see `Loader.load_state_dict`."""
        check_choice("on_growth", on_growth, get_args(OnGrowth))
        is_other = saved.source != self._names["source"]
        earlier = before_growth(self._source, saved.source) if is_other else None
        before = None if earlier is None else self._plan_before(earlier, planner, saved)
        plans, cursor = EpochPlanners.resume(planner, saved, before)
        here = plans.state(cursor, **self._names)
        more = find_change(saved.shards, self._marks) if is_other and before is None else ()
        saved.check(here, hint=self.order.hint if saved.order != here.order else "", more=more)
        if before is None or (on_growth == "finish" and saved.position):
            return plans, cursor
        if on_growth == "finish":  # the epoch has not begun
            return EpochPlanners(planner), Cursor(saved.epoch, 0)
        remedy = "pass load_state_dict(state, on_growth='finish'), or start over"
        raise self._growth_error(before.source, f"to finish epoch {saved.epoch} without their records, {remedy}")

    def _plan_before(self, earlier: Any, planner: BatchPlanner, saved: LoaderState) -> Before:
        replan, sampler = self._replan, self._replan.keywords["sampler"]
        if sampler is not None:
            if self.sampler_for is None:
                count = len(shard_marks(earlier))
                raise self._growth_error(
                    earlier,
                    f"to finish epoch {saved.epoch}, load the state into a loader of the first {count}, "
                    f"dataload.open(source.paths[:{count}]), with your {type(sampler).__name__} rebuilt for their "
                    f"{len(earlier)} records",
                )
            sampler = self.sampler_for(earlier)
        # Of a data set for torch's loader, only the length is used.
        chosen = earlier if isinstance(self._source, Source) else range(len(earlier))
        plan = replan(chosen, sampler=sampler, rank=planner.rank, world_size=planner.world_size)
        plan = with_changes(plan, saved.changes)
        order = OrderIdentity(plan)
        names = {"source": saved.source, "shards": summarize(shard_marks(earlier))}
        return Before(earlier, plan, {**names, "order": order.fingerprint, "settings": order.text})

    def _growth_error(self, earlier: Any, remedy: str) -> StateMismatchError:
        names, known = [name for name, _ in self._marks], len(shard_marks(earlier))
        more = f" and {len(names) - known - _SHOWN} more" if len(names) > known + _SHOWN else ""
        added = f"{', '.join(names[known : known + _SHOWN])}{more}"
        return StateMismatchError(
            f"shards were added to the data set after the state was saved: {remedy}",
            differences=[f"shards: {known} in the state, {len(names)} here; added: {added}"],
        )


_MOST_GROUPS = 32
_SHOWN = 3
_SUMMARY = re.compile(r"(\d{1,9}) ((?:[0-9a-f]{4})+)")


def summarize(marks: Sequence[tuple[str, int]]) -> str:
    """Return the number of shards and the checksums of groups of them, given name and checksum of each."""
    sums = _grouped([mark for _, mark in marks], _group_size(len(marks)))
    return f"{len(marks)} {''.join(f'{each:04x}' for each in sums)}" if marks else ""


def find_change(saved: str, marks: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line that says where the shards differ from those of a summary in a state; none if that is unknown."""
    found = _SUMMARY.fullmatch(saved)
    if found is None or not marks:
        return []
    count, now = int(found[1]), len(marks)
    size = max(_group_size(count), _group_size(now))
    sums = [int(text, 16) for text in re.findall("....", found[2])]
    then = _grouped(sums, size // _group_size(count))
    here = _grouped([mark for _, mark in marks], size)
    same = next(
        (group for group, (a, b) in enumerate(zip(then, here, strict=False)) if a != b), min(len(then), len(here))
    )
    first = min(same * size, count, now)
    where = f"number {first} ({marks[first][0]})" if first < now else f"number {first}, which is missing,"
    return [f"shards: {count} in the state, {now} here; they differ from {where} on"]


def _group_size(count: int) -> int:
    return 1 << max(0, (count - 1) // _MOST_GROUPS).bit_length()


def _grouped(sums: Sequence[int], size: int) -> list[int]:
    return [sum(sums[start : start + size]) & 0xFFFF for start in range(0, len(sums), size)]
