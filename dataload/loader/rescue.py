"""Steps that cannot be loaded straight: they fail, have no rows, or have excluded records. Entered only then."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, cast, get_args

import numpy as np

from dataload._util.failures import BUG, RAISE, Owner, owner_of
from dataload._util.randomness import derive_key, hash64
from dataload._util.settings import check_choice
from dataload.collate import empty_like
from dataload.errors import ConfigError, SourceError, WorkerError, message_of, printable, traceback_of
from dataload.executors import worker_name
from dataload.loader.bad_records import BadRecord, shown
from dataload.samplers import BatchPlan
from dataload.sources.shards import locate
from dataload.sources.views.adapt import entering_hint
from dataload.types import Int64Array

if TYPE_CHECKING:
    from dataload.loader.fetch import BatchLoader, StepTrace

OnError: TypeAlias = Literal["raise", "skip", "replace"]
"""Treatment of a record that fails; see `ErrorPolicy`."""

_SHOWN_INDICES = 8
_NONE = np.empty(0, np.int64)
_SPREAD_EXAMPLES = 16
_EXAMPLE_SECONDS = 10.0  # after which no other record is tried: each may wait for its shard


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """The treatment of records that fail.

    Only reading and transforming are a record's own fault, and only if `owner_of` the failure says so. A failing
    collate or batch transform, a store, the machine and bugs of dataload are raised whatever `action` is.

    The action `raise` ends the iteration. `skip` leaves the row out; a step without a good record gives a batch without
    rows. `replace` puts another record of the same step in the row; a step without a good record is an error. Packed
    records have room for their own length, so `replace` leaves a gap, as `skip` does.

    `excluded`, (n,) int64, ascending, are records known to be bad, which are never read. `raise` leaves them out, too.
    """

    action: OnError = "raise"
    excluded: Int64Array | None = None

    def __post_init__(self) -> None:
        check_choice("on_error", self.action, get_args(OnError))

    def excluded_among(self, indices: Int64Array) -> set[int]:
        """Return those of `indices` that must not be read."""
        return set(self._excluded(indices).tolist())

    def read_of(self, indices: Int64Array) -> int:
        """Return how many of `indices` may be read."""
        return len(indices) - len(self._excluded(indices))

    def _excluded(self, indices: Int64Array) -> Int64Array:
        if self.excluded is None or not len(self.excluded):
            return _NONE
        positions = np.minimum(np.searchsorted(self.excluded, indices), len(self.excluded) - 1)
        return indices[self.excluded[positions] == indices]

    def examples(self, near: int, length: int) -> list[int]:
        """Return some records that may be read, out of `length`, those closest to the record `near` first.

        Their distances double, so the first are in a shard that the step has read, which need not be waited for. Some
        are spread over the whole source, because many records in a row may be damaged.
        """
        excluded = _NONE if self.excluded is None else self.excluded
        left = length - len(excluded)
        rank = near - int(np.searchsorted(excluded, near))
        away = 1 << np.arange(max(left, 0).bit_length())
        spread = np.linspace(0, left - 1, min(_SPREAD_EXAMPLES, left)).astype(np.int64)
        ranks = np.unique(np.concatenate([[rank], rank - away, rank + away, spread]))
        ranks = ranks[(ranks >= 0) & (ranks < left)]
        ranks = ranks[np.argsort(np.abs(ranks - rank), kind="stable")]
        # The r-th remaining record follows those excluded records that have at most r remaining ones before them.
        return (ranks + np.searchsorted(excluded - np.arange(len(excluded)), ranks, side="right")).tolist()


class StageError(Exception):
    """A failure, its stage ("" if it happened between stages), and the record at fault if it is a single one.

    Internal: it becomes a `WorkerError`.
    """

    def __init__(self, stage: str, error: BaseException, index: int | None = None) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error
        self.index = index

    @property
    def record_may_be_at_fault(self) -> bool:
        """Whether other records might succeed."""
        return self._owner == "record"

    @property
    def advice(self) -> str:
        """What to do, where the error does not say it; "" if nothing."""
        return f"\n  {BUG}" if self._owner == "dataload" else ""

    @property
    def _owner(self) -> Owner | None:
        about_records = self.stage.startswith(("read", "transform")) and isinstance(self.error, Exception)
        return owner_of(self.error) if about_records else None


class Rescue:
    """Makes the batch of one step from those of its records that are good."""

    def __init__(self, fetch: BatchLoader, plan: BatchPlan, epoch: int, trace: StepTrace) -> None:
        self._fetch = fetch
        self._policy = fetch.policy
        self._plan = plan
        self._epoch = epoch
        self._trace = trace
        self._excluded = fetch.policy.excluded_among(plan.indices)
        self._bad: dict[int, BadRecord] = {}

    def load_rest(self) -> Any:
        """Return the batch of a step without rows or with excluded records; raise whatever goes wrong."""
        plan, _ = self._arrange()
        if len(plan.indices):
            return self._fetch.load(plan, self._epoch, self._trace)
        return self._collate([self._example()[1]], plan)

    def recover(self, failure: StageError) -> Any:
        """Return the batch of a step that failed; raise a `WorkerError` if the policy forbids it or nothing helps."""
        if not failure.record_may_be_at_fault:
            self._fail(failure)
        if self._policy.action == "raise":
            self._fail(self._narrow(failure))
        try:
            return self._salvage()
        except BaseException as error:
            if is_for_consumer(error):
                raise
            self._fail(self._trace.failure(error))  # without a name: the traceback refers to this frame

    def _salvage(self) -> Any:
        """Return the batch without its bad records, or with others in their rows."""
        good: dict[int, Any] = {}
        for index in dict.fromkeys(self._plan.indices.tolist()):
            if index in self._excluded:
                continue
            try:
                good[index] = self._sample(index)
            except StageError as failure:
                if not failure.record_may_be_at_fault:
                    raise
                # Keep text only: the traceback refers to this frame, and a name in this frame would refer to it.
                self._bad[index] = BadRecord.of(
                    self._fetch.source, index, failure.stage, failure.error, epoch=self._epoch, step=self._plan.step
                )
        plan, replaced = self._arrange()
        wanted = set(self._plan.wanted.tolist())
        self._trace.bad += [
            replace(bad, replaced_by=replaced.get(index)) for index, bad in self._bad.items() if index in wanted
        ]
        for index in set(plan.indices.tolist()) - good.keys():
            good[index] = self._sample(index)
        if not len(plan.indices):
            return self._collate([self._example()[1]], plan)
        firsts = set(np.unique(plan.indices, return_index=True)[1].tolist())
        samples = [
            good[index] if row in firsts else copy.deepcopy(good[index])  # rows do not share a sample
            for row, index in enumerate(plan.indices.tolist())
        ]
        return self._collate(samples, plan)

    def _arrange(self) -> tuple[BatchPlan, dict[int, int]]:
        """Return the plan without its bad and excluded records or with others instead, and which replace which."""
        plan, gone = self._plan, self._excluded | self._bad.keys()
        if not gone:
            return plan, {}
        is_gone = np.isin(plan.indices, list(gone))
        good = plan.indices[~is_gone]
        replaces = self._policy.action == "replace"
        if plan.columns is not None and not (replaces and len(good)):
            return plan.filled(is_gone, int(good[0]) if len(good) else self._example()[0]), {}
        if not replaces or plan.packing is not None:
            return plan.without(is_gone), {}
        if len(good):
            seed = self._fetch.seed
            replaced = {index: substitute(seed, self._epoch, index, good) for index in gone}
        elif not len(plan.wanted):  # rows that only fill up the batch; any record can do that
            replaced = dict.fromkeys(gone, self._example()[0])
        else:
            reason = f"; the last: {self._last_text()}" if self._bad else ", all of them by exclude="
            error = SourceError(
                f"all {len(gone)} records of the step are bad, and only records of the same step can replace them"
                f"{reason}. Use a larger batch_size, or on_error='skip'"
            )
            raise StageError("on_error='replace'", error)
        indices = np.array([replaced.get(index, index) for index in plan.indices.tolist()], np.int64)
        return replace(plan, indices=indices), replaced

    def _example(self) -> tuple[int, Any]:
        """Return some good record and its sample, so that a step without rows has the usual fields and shapes."""
        reason = self._last_text() or "the source has no others"
        indices = self._plan.indices
        tried = self._policy.examples(int(indices[0]) if len(indices) else 0, len(self._fetch.source))
        deadline = monotonic() + _EXAMPLE_SECONDS
        for number, index in enumerate(tried):
            if monotonic() > deadline:
                tried = tried[:number]
                break
            try:
                return index, self._sample(index)
            except StageError as failure:
                if not failure.record_may_be_at_fault:
                    raise
                reason = f"{failure.stage}: {message_of(failure.error)}"
        error = SourceError(
            f"the step has no good record, and none of {len(tried)} others could be read to show the fields of a batch "
            f"without rows; the last: {reason}"
        )
        raise StageError("on_error", error)

    def _last_text(self) -> str:
        """Return the failure of the last bad record; "" if there is none."""
        last = next(reversed(self._bad.values()), None)
        return last.text if last else ""

    def _sample(self, index: int, *, transforms: bool = True) -> Any:
        """Return one sample, read by itself; raise a `StageError` if it cannot be read or transformed."""
        fetch, trace = self._fetch, self._trace
        trace.status.at_index(index)
        trace.enter("read", index)
        try:
            alone = np.array([index], np.int64)
            samples = fetch.read(alone, trace)
            if transforms and fetch.transform:
                trace.enter("transform")
                samples = fetch.transformed(samples, alone, self._epoch, trace)
        except BaseException as error:
            if is_for_consumer(error):
                raise
            raise trace.failure(error) from error
        trace.leave()
        return samples[0]

    def _narrow(self, failure: StageError) -> StageError:
        """Return the failure of the first record that fails by itself, if several were read at once."""
        if failure.index is None and not isinstance(failure.error, ConfigError):
            for index in self._plan.indices.tolist():
                try:
                    if index not in self._excluded:
                        self._sample(index, transforms=False)
                except StageError as found:
                    return found
        return failure

    def _collate(self, samples: list[Any], plan: BatchPlan) -> Any:
        """Return the batch of samples: one per row, or a single one that shows the fields if there are no rows."""
        self._trace.enter("collate")
        batch = self._fetch.collated(samples, plan)
        if not len(plan.indices) and plan.packing is None:
            batch = _without_rows(batch)
        return self._fetch.finish(batch, plan, self._trace)

    def _fail(self, failure: StageError) -> NoReturn:
        indices = tuple(self._plan.indices.tolist())
        where = f" in {failure.stage}" if failure.stage else ""
        lines = [f"source: {shown(self._fetch.source)}"]
        if failure.index is not None:
            where += f" on index {failure.index}"
            location = locate(self._fetch.source, failure.index)
            if location.shard is not None or location.key is not None:
                lines.append(f"location: {printable(str(location))}")
        lines.append(f"indices of the step: {shorten(indices)}")
        if failure.stage.startswith(("read", "on_error")) and (hint := entering_hint(self._fetch.source)):
            lines.append(hint)
        details = "".join(f"\n  {line}" for line in lines) + failure.advice
        raise step_error(self._plan.step, self._epoch, where, failure.error, indices, details) from failure.error


def step_error(
    step: int, epoch: int, where: str, error: BaseException, indices: tuple[int, ...] = (), details: str = ""
) -> WorkerError:
    """Return the error of a step, such as "step 3 of epoch 0 failed in collate: no memory", with details at its end."""
    return WorkerError(
        f"step {step} of epoch {epoch} failed{where}: {message_of(error)}{details}",
        step=step,
        epoch=epoch,
        indices=indices,
        worker=worker_name(),
        traceback_text=traceback_of(error),
    )


def is_for_consumer(error: BaseException) -> bool:
    """Return whether `error` is meant to end the consumer's thread: Ctrl-C, or what a signal handler raises.

    Workers never receive these. Other exceptions like them were raised by, say, a transform that calls `sys.exit`, and
    are failures of the step, whoever makes it.
    """
    if isinstance(error, Exception) or worker_name().startswith("dataload-"):
        return False
    return _is_from_signal(error)


def _is_from_signal(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`."""
    entry = error.__traceback__
    if entry is None:
        return False
    while (called := entry.tb_next) is not None:
        # A handler gets the frame that it interrupts, and is called by it.
        code, interrupted = called.tb_frame.f_code, entry.tb_frame
        if code.co_flags & inspect.CO_OPTIMIZED:
            for value in called.tb_frame.f_locals.values():
                several = cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,)  # of *args
                if any(item is interrupted for item in several):
                    return True
        entry = called
    # Python's own handler of Ctrl-C has no frame. What Python code raises ends with its `raise`.
    return isinstance(error, KeyboardInterrupt) and entry.tb_frame.f_code.co_code[entry.tb_lasti] != RAISE


def substitute(seed: int, epoch: int, index: int, good: Int64Array) -> int:
    """Return the record that replaces a bad one: the same in every run, and a different one for each bad record.

    It is one of `good`, (n,) int64, at least one: the good records of the same step, so that no record is served that
    the order does not have.
    """
    candidates = np.unique(good)
    key = derive_key(seed, "replace", epoch, index, words=1)[0]
    return int(candidates[np.argmin(hash64(key, candidates))])


def shorten(indices: Sequence[int]) -> str:
    """Return the first few of some indices, for messages."""
    return ", ".join(map(str, indices[:_SHOWN_INDICES])) + (", ..." if len(indices) > _SHOWN_INDICES else "")


def _without_rows(batch: Any) -> Any:
    try:
        return empty_like(batch)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"a step without rows needs a batch without rows, and the result of collate cannot be cut to that "
            f"({error}): let its values be arrays and lists, or avoid such steps with tail='drop' or "
            "on_error='replace'",
            key="collate",
        ) from error
