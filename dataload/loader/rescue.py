"""Steps that cannot be loaded straight: they fail, have no rows, or have excluded records. Entered only then."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NoReturn

import numpy as np

from dataload._util.randomness import derive_word, hash64
from dataload.collate import Pack, Packing, empty_like
from dataload.errors import ConfigError, SourceError, message_of, printable
from dataload.loader.failures import BadRecord, StageError, StepTrace, is_for_consumer, shown, step_error
from dataload.loader.fetch import BatchLoader
from dataload.samplers import BatchPlan
from dataload.sources.shards import locate
from dataload.sources.views.adapt import entering_hint
from dataload.types import Int64Array

_SHOWN_INDICES = 8
_EXAMPLE_SECONDS = 10.0  # after which no other record is tried: each may wait for its shard


class Rescue:
    """Makes the batch of one step from its good records."""

    def __init__(self, fetch: BatchLoader, plan: BatchPlan, epoch: int, trace: StepTrace) -> None:
        self._fetch = fetch
        self._policy = fetch.policy
        self._plan = plan
        self._epoch = epoch
        self._trace = trace
        self._excluded = set[int](fetch.policy.excluded_among(plan.indices).tolist())
        self._bad: dict[int, BadRecord] = {}

    def load_rest(self) -> Any:
        """Return the batch of a step without rows or with excluded records; errors are raised unchanged."""
        plan, _ = self._arrange()
        if len(plan.indices):
            return self._fetch.load(plan, self._epoch, self._trace)
        return self._collate([self._example()[1]], plan)

    def recover(self, failure: StageError) -> Any:
        """Return the batch of a step that failed; raise a `WorkerError` if the policy forbids it or nothing helps."""
        if not failure.record_may_be_at_fault:
            self.fail(failure)
        if self._policy.action == "raise":
            self.fail(self._narrow(failure))
        try:
            return self._salvage()
        except BaseException as error:
            if is_for_consumer(error):
                raise
            self.fail(self._trace.failure(error))  # without a name: the traceback refers to this frame

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
            f"the step has no good record, and {len(tried)} others were tried in vain for the fields of an empty batch;"
            f" the last: {reason}"
        )
        raise StageError("on_error", error)

    def _last_text(self) -> str:
        """Return the failure of the last bad record; "" without one."""
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
        pack = self._fetch.collate
        if not len(plan.indices) and plan.packing is None and isinstance(pack, Pack):
            none = np.empty(0, np.int64)
            plan = replace(plan, packing=Packing(none, none, none, (0, pack.row_length or 0)))
        batch = self._fetch.collated(samples, plan)
        if not len(plan.indices) and plan.packing is None:
            batch = _without_rows(batch)
        return self._fetch.finished(batch, plan, self._trace)

    def fail(self, failure: StageError) -> NoReturn:
        """Raise the `WorkerError` of this step for a failure."""
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
        details = "".join(f"\n  {line}" for line in lines) + (self._beyond(failure, indices) or failure.advice)
        raise step_error(self._plan.step, self._epoch, where, failure.error, indices, details) from failure.error

    def _beyond(self, failure: StageError, indices: tuple[int, ...]) -> str:
        """Return advice for a step that has indices which the source has not; "" for others."""
        if not isinstance(failure.error, IndexError) or max(indices, default=0) < (size := len(self._fetch.source)):
            return ""
        return f"\n  the source has {size} records: the sampler is for another one, or the source became shorter"


def substitute(seed: int, epoch: int, index: int, good: Int64Array) -> int:
    """Return the record of `good`, (n,) int64, that replaces a bad one: the same in every run."""
    # Good records are of the same step, so that no record is served that the order does not have.
    candidates = np.unique(good)
    key = derive_word(seed, "replace", epoch, index)
    return int(candidates[np.argmin(hash64(key, candidates))])


def shorten(indices: Sequence[int]) -> str:
    """Return the first few of some indices, for messages."""
    return ", ".join(map(str, indices[:_SHOWN_INDICES])) + (", ..." if len(indices) > _SHOWN_INDICES else "")


def _without_rows(batch: Any) -> Any:
    try:
        return empty_like(batch)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"a step has no rows, and the result of collate cannot be cut to none ({error}): return arrays and lists, "
            "or avoid such steps with tail='drop' or on_error='replace'",
            key="collate",
        ) from error
