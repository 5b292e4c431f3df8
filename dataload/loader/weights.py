"""Weights of a mixture that the training loop changes while it runs, and the log of these changes."""

from __future__ import annotations

import json
import os
import platform
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import starmap
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from dataload._util.settings import Least, check_count, check_directory
from dataload.errors import ConfigError, CorruptFileError, DataloadError, StateMismatchError, printable
from dataload.loader.base import BatchT, EpochIteration, LoaderBase
from dataload.loader.growth import States
from dataload.loader.state import MOST_SETTINGS, Cursor, EpochPlanners, LoaderState, OrderIdentity, mixture_of
from dataload.loader.statistics import Statistics
from dataload.samplers import BatchPlanner, Mixture
from dataload.samplers.mixture_changes import Change, SourceStatistics
from dataload.samplers.mixture_weights import Row
from dataload.sources.base import Source
from dataload.storage import absolute, is_url
from dataload.storage.local.files import append_text, read_text
from dataload.types import RandomAccessSource

if TYPE_CHECKING:
    from dataload.loader.step import StepWork


class _Mark(NamedTuple):
    """Identifies a change."""

    number: int
    epoch: int
    position: int
    checksum: int  # of weights and counts


class ChangeLog:
    """The changes of weights in a file: a JSON line for each, written before the change is made.

    A line has the number of its change, and takes the place of an earlier change of this number and of all later ones:
    a run that resumes may decide otherwise. Number 0 is the start of the run, and names its order.
    """

    def __init__(self, path: str | os.PathLike[str], order: OrderIdentity) -> None:
        self._order = order
        self._ever: set[_Mark] = set()
        try:
            if is_url(os.fspath(path)):
                raise ValueError("nothing can be appended to a URL")
            self._path: str = absolute(os.fspath(path))  # the working directory may change
            check_directory(self._path, "changes")
            self._now: list[_Mark] = [mark for mark, _ in self._read()]
        except (OSError, TypeError, ValueError) as error:
            if isinstance(error, DataloadError):
                raise
            message = f"changes must be the path of a log of changes of weights, got {path!r}: {error}"
            raise ConfigError(message, key="changes", value=path) from error

    @property
    def is_new(self) -> bool:
        """True until something is written to the log."""
        return not self._now

    def changes(self) -> tuple[Change, ...]:
        """Return the changes of the run."""
        return tuple(Change.from_json(entry) for mark, entry in self._read() if mark.number)

    def check(self, changes: Sequence[Change]) -> None:
        """Refuse the changes in a state if they are not in the log; an empty log may begin with them."""
        for mark in map(_mark, changes if self._now else ()):
            if mark not in self._ever:
                raise StateMismatchError(
                    f"{self._path} is not the log of the run that saved this state: it lacks change {mark.number}, "
                    f"from position {mark.position} of epoch {mark.epoch} on; name that log, or a new file"
                )

    def follow(self, mixture: Mixture) -> None:
        """Append the changes of a mixture that the log lacks; they take precedence over earlier lines."""
        marks, known = [_mark(change) for change in mixture.changes], {*self._now}
        if self._now and self._now[-1] == (marks[-1] if marks else self._now[0]):  # counts depend on all before
            return
        # If all are known, the last one is written again, which ends those after it.
        first = next((n for n, mark in enumerate(marks) if mark not in known), max(0, len(marks) - 1))
        entries: list[dict[str, Any]] = []
        if not self._now or not marks:
            entries = [{"number": 0, "order": self._order.fingerprint, "settings": self._order.text}]
        names = mixture.names or [*map(str, range(len(mixture.samplers)))]
        for n, change in enumerate(mixture.changes[first:], first):
            before = mixture.changes[n - 1].weights.tolist() if n else [None] * len(names)
            rows = zip(names, change.weights.tolist(), before, strict=True)
            entries.append({**change.to_json(), "weights": {name: new for name, new, old in rows if new != old}})
        by = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "host": platform.node(), "pid": os.getpid()}
        append_text(self._path, "".join(json.dumps({**entry, **by}) + "\n" for entry in entries), sync=True)
        for entry in entries:
            self._put(self._now, _mark_of(entry))

    def _put(self, kept: list[_Mark], mark: _Mark) -> None:
        while kept and kept[-1].number >= mark.number:
            kept.pop()
        kept.append(mark)
        self._ever.add(mark)

    def _read(self) -> list[tuple[_Mark, dict[str, Any]]]:
        """Return the start and the changes that count; lines that were not written to their end do not."""
        kept, entries = list[_Mark](), dict[_Mark, dict[str, Any]]()
        text = ""
        with suppress(FileNotFoundError):
            text = read_text(self._path)
        for number, line in enumerate(text.splitlines(), 1):
            if (found := _parse(line)) is None:
                continue
            mark, entry = found
            if not mark.number and entry.get("order") != self._order.fingerprint:
                there = printable(str(entry.get("settings")), MOST_SETTINGS)
                raise ConfigError(
                    f"changes: {self._path} is the log of a run with another order: name another file\n"
                    f"  {there} in the log\n  {self._order.text} here",
                    key="changes",
                    value=self._path,
                )
            if kept and 0 < kept[-1].number < mark.number - 1:
                message = f"line {number} has change {mark.number} after change {kept[-1].number}: lines were lost"
                raise CorruptFileError(message, path=self._path)
            self._put(kept, mark)
            entries[mark] = entry
        return [(mark, entries[mark]) for mark in kept]


def _mark(change: Change) -> _Mark:
    return _mark_of(change.to_json())


def _mark_of(entry: Mapping[str, Any]) -> _Mark:
    if not entry["number"]:
        return _Mark(0, 0, 0, 0)
    content = zlib.crc32(str(entry["sources"]).encode())
    return _Mark(int(entry["number"]), int(entry["epoch"]), int(entry["position"]), content)


def _parse(line: str) -> tuple[_Mark, dict[str, Any]] | None:
    with suppress(ValueError, TypeError, KeyError):
        entry = json.loads(line)
        return _mark_of(entry), entry
    return None


class WeightChanges(LoaderBase[BatchT]):
    """A loader whose order may be a mixture with weights that change."""

    _asks_rank: bool
    _planner: BatchPlanner
    _plans: EpochPlanners
    _source: RandomAccessSource[Any]
    _work: StepWork
    _states: States
    _log: ChangeLog | None = None

    def change_weights(self, weights: Row, *, at: Annotated[int, Least(0)] | None = None) -> None:
        """Change the weights of a mixture, from the next step on or from a later one; see `Mixture.changed`.

        Batches that were made ahead are made again. Call it on all ranks at the same step, with the same weights. The
        change is part of the state, so a run that resumes follows it, on any number of ranks.

        Args:
            weights: One weight per source, in order, or by name if the sources were named. 0 retires a source.
            at: The first step of this epoch with these weights; by default the one after the last that the loop has
                received.

        Raises:
            ConfigError: The order is not a mixture, the weights do not fit its sources, or the step is not to come.

        Examples:
            >>> import dataload
            >>> web, books = dataload.RangeSource(900), dataload.RangeSource(1800, start=900)
            >>> mixed = dataload.mix({"web": web, "books": books}, {"web": 0.5, "books": 0.5})
            >>> loader = dataload.Loader(mixed, batch_size=100)
            >>> batches = iter(loader)
            >>> int((next(batches)["index"] < 900).sum())
            50
            >>> loader.change_weights({"web": 0.9, "books": 0.1})
            >>> int((next(batches)["index"] < 900).sum())
            90
        """
        self._check_open()
        self._check_idle()
        self._ask_rank()
        cursor = self._cursor if self._now else self._start()
        planner, epoch = self._plans.of(cursor.epoch), cursor.epoch
        mixture = mixture_of(planner)
        if mixture is None:
            message = "only a mixture has weights: pass dataload.mix(...) or sampler=Mixture(...)"
            raise ConfigError(message, key="weights", value=weights)
        step = cursor.step if at is None else check_count("at", at, least=cursor.step, below=planner.steps(epoch))
        reached = planner.position(cursor.first, epoch=epoch)
        mixture = mixture.with_changes(mixture.changes_at(reached, epoch=epoch))  # history would take ever longer
        changed = mixture.changed(planner.position(step, epoch=epoch), weights, epoch=epoch)
        if self._log is not None and planner.rank == 0:
            self._log.follow(changed)
        self._follow(cursor, changed.changes)
        if self._now is not None and self._now.step != self._now.steps:  # else the change is of the next epoch
            self._now.steps = self._steps(cursor)

    def load_changes(self, path: str | os.PathLike[str]) -> None:
        """Read a log of changes, the argument `changes`, so that the order before the last change is known, too.

        Load a state first, if the order of its run after the state is wanted.

        Raises:
            ConfigError: There is no such log, it is of a run with another order, or this order is not a mixture.
            StateMismatchError: It is not the log of the run that saved the state.
        """
        self._check_idle()
        self._ask_rank(later=True)
        log, cursor = self._open_log(path), self._cursor if self._now else self._start()
        if log.is_new:
            raise ConfigError(f"there is no log of changes of weights at {path}", key="changes", value=path)
        mixture = mixture_of(self._plans.of(cursor.epoch))
        here: Sequence[Change] = () if mixture is None else mixture.changes
        log.check(here)
        found = log.changes()
        if any(each not in found for each in here):  # the run went on otherwise, from an earlier state
            first = min(each.number for each in here)
            found = (*(each for each in found if each.number < first), *here)
        self._follow(cursor, found)

    def _open_log(self, path: str | os.PathLike[str]) -> ChangeLog:
        if mixture_of(self._planner) is None:
            message = "changes is the log of weights that change, which only a mixture has: leave it out"
            raise ConfigError(message, key="changes", value=path)
        return ChangeLog(path, self._states.order)

    def _enter(self) -> EpochIteration | None:
        mixture = mixture_of(self._planner)
        if self._log is not None and mixture is not None and self._planner.rank == 0:
            self._log.follow(mixture)
        return super()._enter()

    def _follow(self, cursor: Cursor, changes: Sequence[Change]) -> None:
        epoch, planner = cursor.epoch, self._plans.of(cursor.epoch)
        self._planner = self._with_changes(self._planner, changes)
        planner = self._with_changes(planner, changes)
        self._move(cursor, EpochPlanners(self._planner, epoch, planner, self._plans.before(epoch)))

    def statistics(self) -> Statistics:
        """Return where the time went since the loader was built, and what each source of a mixture has given."""
        mixture, found = mixture_of(self._planner), super().statistics()
        if mixture is None:
            return found
        cursor = self._cursor
        position, epoch = self._plans.of(cursor.epoch).position(cursor.step, epoch=cursor.epoch), cursor.epoch
        names = mixture.names or [*map(str, range(len(mixture.samplers)))]
        records, epochs = (each.tolist() for each in mixture.given(position, epoch=epoch))
        shares = mixture.shares(position, epoch=epoch).tolist()
        each = self._source.fields.get("tokens") if isinstance(self._source, Source) else None
        tokens = None if each is None or each.shape is None or len(each.shape) != 1 else each.shape[0]
        rows = zip(shares, records, epochs, (tokens and count * tokens for count in records), strict=True)
        return replace(found, sources=dict(zip(names, starmap(SourceStatistics, rows), strict=True)))

    @abstractmethod
    def _ask_rank(self, *, later: bool = False) -> None:
        """Plan for the rank of this process; `later` if only the number of ranks matters yet."""

    def _known_rank(self) -> int | None:
        return None if self._asks_rank else self._planner.rank

    def _move(self, cursor: Cursor, plans: EpochPlanners | None = None) -> None:
        super()._move(cursor)
        if self._work.planner is not self._planner:
            self._work.plan_for(self._planner)
        self._plans = EpochPlanners(self._planner) if plans is None else plans

    def _with_saved(self, saved: LoaderState) -> BatchPlanner:
        """Return the plan with the changes of a state, which the log must have."""
        if self._log is not None:
            self._log.check(saved.changes)
        return self._with_changes(self._planner, saved.changes)

    def _with_changes(self, planner: BatchPlanner, changes: Sequence[Change]) -> BatchPlanner:
        # Workers in other processes have a copy of the first plan, so they are sent rows.
        return self._states.with_changes(planner, changes, sends=self._work.in_processes)
