"""States of a loader for its present data and order, and for those before shards or sources were added."""

from __future__ import annotations

import itertools
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np

from dataload._util.fingerprint import digest, fingerprint, identify
from dataload._util.settings import check_choice
from dataload.errors import StateMismatchError
from dataload.loader.state import Before, Cursor, EpochPlanners, LoaderState, OrderIdentity, mixture_of
from dataload.samplers import BatchPlanner, BatchSampler, Mixture
from dataload.samplers.common import MAX_LENGTH
from dataload.samplers.mixture_changes import COUNTS, Change
from dataload.samplers.mixture_weights import rows_of
from dataload.sources.base import Source
from dataload.sources.grown import before_growth, files_of, shard_marks, with_shards
from dataload.sources.views.concat import ConcatSource
from dataload.types import Int64Array, Sampler

_MOST_DIFFERENCES = 5
_ADD = "at the end, with weight 0 in the mix; call change_weights when the state is loaded"


def marks_of(mixture: Mixture, source: ConcatSource) -> str:
    """Return a checksum of each source, its order and its settings in the mixture, as text."""
    columns = zip(*rows_of(mixture.weights), strict=True)
    limits = cast("Any", mixture.max_epochs or itertools.repeat(None))
    frame = mixture.stop, mixture.seed, mixture.window
    each = zip(source.sources, mixture.samplers, columns, limits, strict=False)
    texts = [digest(frame, identify(part), fingerprint(order), *more) for part, order, *more in each]
    return b64encode(np.array([zlib.crc32(text.encode()) for text in texts], "<u4").tobytes()).decode()


def fitted(saved: LoaderState, names: Mapping[str, str], mixture: Mixture, source: ConcatSource) -> LoaderState:
    """Return a state as this mixture continues it: of the same sources, or of some more or less that give nothing.

    `names` are the fields of a state that identify the mixture and its sources.
    """
    if (saved.source, saved.order) == (names["source"], names["order"]):
        return saved
    if not saved.changes:
        return replace(saved, **names) if _is_of_first(saved, mixture, source) else saved
    then, now = (np.frombuffer(b64decode(text), "<u4").tolist() for text in (saved.parts, marks_of(mixture, source)))
    places, since = list[int](), 0  # the place of each source in the state, -1 if it was added
    for mark in now:
        places.append(then.index(mark, since) if mark in then[since:] else -1)
        since = max(since, places[-1] + 1)
    if max(places) < 0:
        return saved  # of another mixture
    first, reached = saved.changes[0], (saved.epoch, min((*saved.missing, saved.position)))
    is_retired = np.all([change.weights == 0 for change in saved.changes], axis=0)
    is_retired &= (first.epoch, first.position) <= reached
    lost = [f"number {at}" for at in range(len(then)) if at not in {*places} and not is_retired[at]]
    base = np.sum(rows_of(mixture.weights), axis=0)
    known = mixture.names or [f"number {at}" for at in range(len(now))]
    added = [name for name, at, weight in zip(known, places, base, strict=True) if at < 0 and weight]
    if lost or added:
        differences = {"only in the state": lost, "only here, with a weight": added}
        raise StateMismatchError(
            "the state is of other sources (those whose data or order changed are others): leave out only sources that "
            f"were retired by weight 0, at the end; add new ones {_ADD}",
            differences=[
                f"{where}: {', '.join(which[:_MOST_DIFFERENCES])}" for where, which in differences.items() if which
            ],
        )
    at = np.array(places)

    def placed(change: Change) -> Change:
        values = {name: np.where(at < 0, 0, getattr(change, name)[at]) for name in ("weights", *COUNTS)}
        return replace(change, **values)

    return replace(saved, **names, changes=tuple(map(placed, saved.changes)), parts="")


def _is_of_first(saved: LoaderState, mixture: Mixture, source: ConcatSource) -> bool:
    """Return whether a state is of this mixture without the last sources, whose weight is 0."""
    is_used = np.any(rows_of(mixture.weights), axis=0)
    return any(
        fingerprint(mixture.first(count)) == saved.order
        and ConcatSource(source.sources[:count]).fingerprint() == saved.source
        for count in range(int(np.flatnonzero(is_used)[-1]) + 1, len(is_used))
    )


OnGrowth: TypeAlias = Literal["error", "finish"]
"""What to do with a state from before shards were added: refuse it, or finish its epoch without them."""


class States:
    """Saves and loads the states of a loader: its place in an order, and fingerprints of the order and the data."""

    def __init__(self, source: Any, plan: BatchPlanner, replan: partial[BatchPlanner]) -> None:
        self._source, self._replan, self._plan = source, replan, plan
        mixture, parts = mixture_of(plan), source.sources if isinstance(source, ConcatSource) else ()
        self._mixture = mixture if mixture is not None and len(mixture.samplers) == len(parts) else None
        """The mixture whose components are the sources."""
        self.order: OrderIdentity = OrderIdentity(plan)
        self.sampler_for: Callable[[Any], Any] | None = None
        """Makes the `sampler` of `replan` for another source, if anything but the user can."""

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return _names(self._source, self.order)

    @cached_property
    def _parts(self) -> str:
        return "" if self._mixture is None else marks_of(self._mixture, self._source)

    def of(self, plans: EpochPlanners, cursor: Cursor) -> LoaderState:
        state = plans.state(cursor, **self._names)
        return replace(state, parts=self._parts) if state.changes and plans.before(cursor.epoch) is None else state

    def with_changes(self, planner: BatchPlanner, changes: Sequence[Change], *, sends: bool = False) -> BatchPlanner:
        """Return a plan whose mixture has these changes; `sends` if workers have a copy of the plan without them."""
        mixture = mixture_of(planner)
        if changes and (mixture is None or any(len(each.weights) != len(mixture.samplers) for each in changes)):
            found = "no mixture" if mixture is None else f"a mixture of {len(mixture.samplers)}"
            message = f"the state has weights of {len(changes[0].weights)} sources, and this loader has {found}"
            raise StateMismatchError(message)
        if mixture is None or tuple(changes) == mixture.changes:
            return planner
        return planner.with_ranks(sampler=mixture.with_changes(changes, self._orders_before(changes)), sends=sends)

    def _orders_before(self, changes: Sequence[Change]) -> Mapping[tuple[int, int], Sampler]:
        """Return the order of each source before it grew, by its place and number of shards; see `Change.shards`."""
        orders: dict[tuple[int, int], Sampler] = {}
        for counts in {tuple(each.shards.tolist()): each.shards for each in changes if each.shards.any()}.values():
            grown = np.flatnonzero(counts).tolist()
            files = [files_of(self._source.sources[part])[0] for part in grown]
            earlier = with_shards(self._source, [*zip(files, counts[grown].tolist(), strict=True)])
            samplers = cast("tuple[Sampler, ...]", self._mixture_of(self._plan_for(earlier, self._plan)).samplers)
            orders |= {(part, int(counts[part])): samplers[part] for part in grown}
        return orders

    def read(self, state: Mapping[str, Any], on_growth: OnGrowth) -> LoaderState:
        """Return a saved state, as the sources of a mixture that are here continue it."""
        check_choice("on_growth", on_growth, get_args(OnGrowth))
        saved = LoaderState.from_json(state)
        if (mixture := self._mixture) is None:
            return saved
        earlier = self._before(saved)
        if isinstance(earlier, ConcatSource):
            plan = self._plan_for(earlier, self._plan)
            names = _names(earlier, OrderIdentity(plan))
            found = fitted(saved, names, self._mixture_of(plan), earlier)
            if (found.source, found.order) == (names["source"], names["order"]):
                then = self._mixture_of(self.with_changes(plan, found.changes))
                is_endless = then.length_in(found.epoch) == MAX_LENGTH
                if not is_endless:
                    return saved
                if on_growth == "error" or saved.missing:
                    remedy = f"so that each source ends its pass without their records, {_FINISH}"
                    if saved.missing:
                        remedy = "the state lacks steps of in_order=False: go on without those shards for a few steps"
                    raise self._growth_error(earlier, f"{remedy}, or start over")
                pairs = zip(earlier.sources, self._source.sources, strict=True)
                shards = np.array([0 if part is now else len(shard_marks(part)) for part, now in pairs])
                changes = mixture.grown(then, shards, saved.position, epoch=saved.epoch)
                return replace(saved, **self._names, changes=changes, parts="")
        return fitted(saved, self._names, mixture, self._source)

    @staticmethod
    def _mixture_of(plan: BatchPlanner) -> Mixture:
        """Return the mixture of a plan for other records, where this plan has one."""
        return cast("Mixture", mixture_of(plan))

    def _before(self, saved: LoaderState) -> Source[Any] | None:
        if saved.source == self._names["source"]:
            return None
        total, counts = _counts(saved.shards)
        return before_growth(self._source, saved.source, counts, total)

    def resume(self, planner: BatchPlanner, saved: LoaderState, before: Before | None) -> tuple[EpochPlanners, Cursor]:
        """Return the planners and the cursor that continue from a state, which may be of ranks that were not known."""
        before = None if before is None else self._plan_before(before.source, planner, saved)
        return EpochPlanners.resume(planner, saved, before)

    def load(self, planner: BatchPlanner, saved: LoaderState, on_growth: OnGrowth) -> tuple[EpochPlanners, Cursor]:
        """Return the planners and the cursor that continue from a saved state, see `Loader.load_state_dict`."""
        earlier = self._before(saved)
        is_before = earlier is not None and earlier.fingerprint() == saved.source
        before = self._plan_before(earlier, planner, saved) if is_before else None
        plans, cursor = EpochPlanners.resume(planner, saved, before)
        here, is_other = plans.state(cursor, **self._names), saved.source != self._names["source"]
        more = find_change(saved.shards, shard_marks(self._source)) if is_other and before is None else []
        if more and len(files_of(self._source)) > 1 and not _counts(saved.shards)[1]:
            more.append("shards of each source: too many numbers for the state, so only one source may have grown")
        hint = self.order.hint if saved.order != here.order else ""
        if is_other and saved.settings.startswith("Mixture(") and self._mixture is not None:
            hint += f". Add new sources {_ADD}"
        saved.check(here, hint=hint, more=more)
        if before is None or (on_growth == "finish" and saved.position):
            return plans, cursor
        if on_growth == "finish":  # the epoch has not begun
            return EpochPlanners(planner), Cursor(saved.epoch, 0)
        remedy = f"to finish epoch {saved.epoch} without their records, {_FINISH}, or start over"
        raise self._growth_error(before.source, remedy)

    def _plan_for(self, earlier: Any, like: BatchPlanner) -> BatchPlanner:
        """Return the plan of the source as it was."""
        sampler = self._replan.keywords["sampler"]
        if sampler is not None:
            if self.sampler_for is None:
                count = len(shard_marks(earlier))
                files = f"of the first {count}, dataload.open(source.paths[:{count}])"
                files = "of the sources as they were" if isinstance(earlier, ConcatSource) else files
                rebuilt = f"with your {type(sampler).__name__} rebuilt for their {len(earlier)} records"
                raise self._growth_error(earlier, f"to finish the epoch, load it into a loader {files}, {rebuilt}")
            sampler = self.sampler_for(earlier)
        # Of a data set for torch's loader, only the length is used.
        chosen = earlier if isinstance(self._source, Source) else range(len(earlier))
        return self._replan(chosen, sampler=sampler, rank=like.rank, world_size=like.world_size)

    def _plan_before(self, earlier: Any, planner: BatchPlanner, saved: LoaderState) -> Before:
        plan = self._plan_for(earlier, planner)
        names = _names(earlier, OrderIdentity(plan))
        if isinstance(self._source, ConcatSource):
            lengths, mixture = [*map(len, self._source.sources)], mixture_of(plan)
            if mixture is not None:
                plan = plan.with_ranks(sampler=mixture.placed(lengths))
            elif isinstance(plan, BatchSampler):
                plan = plan.with_ranks(sampler=_Placed(plan.sampler, tuple(map(len, earlier.sources)), tuple(lengths)))
            else:
                message = f"{type(plan).__name__} cannot finish an epoch of several sources; start over"
                raise self._growth_error(earlier, message)
        return Before(earlier, self.with_changes(plan, saved.changes), names)

    def _growth_error(self, earlier: Any, remedy: str) -> StateMismatchError:
        names, known = list[str](), len(shard_marks(earlier))
        for leaf, was in zip(files_of(self._source), files_of(earlier), strict=True):
            names += [name for name, _ in shard_marks(leaf)[len(shard_marks(was)) :]]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return StateMismatchError(
            f"shards were added to the data set after the state was saved: {remedy}",
            differences=[
                f"shards: {known} in the state, {known + len(names)} here; added: {', '.join(names[:_SHOWN])}{more}"
            ],
        )


@dataclass(frozen=True, slots=True)
class _Placed:
    """An order of several sources before they grew, as indices of the sources as they are now."""

    sampler: Sampler
    lengths: tuple[int, ...]
    here: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def records(self) -> int:
        return sum(self.here)

    def indices(self, positions: Int64Array, *, epoch: int) -> Int64Array:
        found, ends = self.sampler.indices(positions, epoch=epoch), np.cumsum(self.lengths, dtype=np.int64)
        shifts: Int64Array = np.cumsum(self.here, dtype=np.int64) - self.here - ends + self.lengths
        return found + shifts[np.searchsorted(ends, found, side="right")]


def _names(source: Any, order: OrderIdentity) -> Mapping[str, str]:
    """Return the fields of a state that identify data and order."""
    counts = [len(leaf.shard_lengths) for leaf in files_of(source)]
    shards = summarize(shard_marks(source), counts, _ROOM - len(order.text))
    return {"source": identify(source), "shards": shards, "order": order.fingerprint, "settings": order.text}


_FINISH = "pass load_state_dict(state, on_growth='finish')"
_MOST_GROUPS = 32
_SHOWN = 3
_ROOM = 600
"""Characters of a state for the settings of the order and for the numbers of shards."""
_SUMMARY = re.compile(rf"(\d{{1,9}}) ((?:[0-9a-f]{{4}})+)(?: (\S{{1,{_ROOM}}}))?")


def summarize(marks: Sequence[tuple[str, int]], counts: Sequence[int], room: int = _ROOM) -> str:
    """Return the number of shards and the checksums of groups of them, given name and checksum of each.

    With several sources, the number of shards of each follows, if there is room: in base 64, compressed, the low bytes
    of all first.
    """
    sums = _grouped([mark for _, mark in marks], _group_size(len(marks)))
    planes = np.array(counts, "<u4").view(np.uint8).reshape(-1, 4).T
    packed = b64encode(zlib.compress(planes.tobytes(), 9)).decode()
    more = f" {packed}" if len(counts) > 1 and len(packed) <= room else ""
    return f"{len(marks)} {''.join(f'{each:04x}' for each in sums)}{more}" if marks else ""


def _counts(summary: str) -> tuple[int, list[int]]:
    """Return the number of shards in a summary, and of each source; 0 and none if it does not say so."""
    found = _SUMMARY.fullmatch(summary)
    if found is None:
        return 0, []
    with suppress(ValueError, zlib.error):
        planes = np.frombuffer(zlib.decompress(b64decode(found[3] or "", validate=True)), np.uint8)
        return int(found[1]), np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4").ravel().tolist()
    return int(found[1]), []


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
