"""The work of one step: read, transform, collate."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataload.collate import default_collate, empty_like
from dataload.errors import ConfigError, WorkerError
from dataload.samplers import BatchPlan
from dataload.sources.base import Source, select_fields
from dataload.transforms import SampleContext, Step
from dataload.types import BatchReader, ColumnReader, Int64Array

__all__ = ["Fetcher"]

_MESSAGE_INDICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetcher:
    """Makes the batch of a plan; called by several workers at once.

    How records are read is decided once, when this is made: as columns if the source can and nothing needs single
    samples; else with one `__getitems__`; else one by one.

    Attributes:
        source: Anything with ``__len__`` and ``__getitem__``.
        fields: Fields to keep; None means all.
        transform: Steps applied to each sample.
        collate: Samples to a batch; samples and their `Packing`, where plans have one.
        batch_transform: Steps applied to the batch; their context has the index of the first row.
        seed: The loader's seed.
        reads_columns: Whether batches come from ``source.read_batch`` without a sample being made.
    """

    source: Any
    fields: tuple[str, ...] | None
    transform: tuple[Step, ...]
    collate: Callable[..., Any]
    batch_transform: Callable[[Any], Any] | None
    seed: int
    reads_columns: bool = field(init=False)

    def __post_init__(self) -> None:
        stacks = not self.transform and self.collate is default_collate
        object.__setattr__(self, "reads_columns", stacks and isinstance(self.source, ColumnReader))

    def __call__(self, plan: BatchPlan, epoch: int) -> Any:
        """The batch of `plan`.

        Raises:
            WorkerError: Anything in it failed; names the step, the stage and what it was working on.
        """
        try:
            batch = self._batch(plan, epoch)
            if plan.valid is not None:
                batch = _with_mask(batch, plan.valid)
            if self.batch_transform is not None:
                batch = self._stage("batch_transform", self.batch_transform, batch)
        except _StageError as failure:
            raise self._worker_error(plan, epoch, failure.stage, failure.error) from failure.error
        except Exception as error:
            raise self._worker_error(plan, epoch, "", error) from error
        return batch

    def _batch(self, plan: BatchPlan, epoch: int) -> Any:
        # A step may have no row for this rank. Its batch still has the fields and shapes of any other, so it is cut
        # from the batch of a record.
        indices = plan.indices if len(plan.indices) else np.zeros(1, np.int64)
        if self.reads_columns:
            batch = self._stage("read", self.source.read_batch, indices, self.fields)
        else:
            samples = self._transformed_samples(indices, epoch)
            if plan.packing is not None:
                return self._stage("collate", self.collate, samples, plan.packing)
            batch = self._stage("collate", self.collate, samples)
        return batch if len(plan.indices) else empty_like(batch)

    def _transformed_samples(self, indices: Int64Array, epoch: int) -> list[Any]:
        samples = self._stage("read", self._samples, indices)
        if self.transform:
            samples = [
                self._transformed(sample, SampleContext(index, epoch, self.seed))
                for sample, index in zip(samples, indices.tolist(), strict=True)
            ]
        return samples

    def _samples(self, indices: Int64Array) -> list[Any]:
        source = self.source
        if isinstance(source, Source):
            samples = source.read(indices)
        elif isinstance(source, BatchReader):
            samples = source.__getitems__(indices.tolist())
        else:
            samples = [source[index] for index in indices.tolist()]
        if self.fields is None:
            return samples
        return [select_fields(sample, self.fields) for sample in samples]

    def _transformed(self, sample: Any, context: SampleContext) -> Any:
        for step in self.transform:
            try:
                sample = step(sample, context)
            except Exception as error:
                raise _StageError(f"transform {step.name!r} on index {context.index}", error) from error
        return sample

    def _stage(self, stage: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise _StageError(stage, error) from error

    def _worker_error(self, plan: BatchPlan, epoch: int, stage: str, error: Exception) -> WorkerError:
        indices = tuple(plan.indices.tolist())
        shown = ", ".join(map(str, indices[:_MESSAGE_INDICES])) + (", ..." if len(indices) > _MESSAGE_INDICES else "")
        where = f" in {stage}" if stage else ""
        return WorkerError(
            f"step {plan.step} of epoch {epoch} failed{where}: {type(error).__name__}: {error}\n"
            f"  source: {_short(self.source)}\n  indices of the step: {shown}",
            step=plan.step,
            epoch=epoch,
            indices=indices,
            worker=threading.current_thread().name,
            traceback_text="".join(traceback.format_exception(error)),
        )


class _StageError(Exception):
    """Carries a failure with the stage it happened in, within this module."""

    def __init__(self, stage: str, error: Exception) -> None:
        super().__init__(stage, error)
        self.stage = stage
        self.error = error


def _with_mask(batch: Any, valid: Any) -> Any:
    if not isinstance(batch, Mapping):
        batch = {"data": batch}
    if "valid" in batch:
        raise ConfigError(
            "tail='pad' adds the mask 'valid' to each batch, and the samples have a field of that name: "
            "rename it, or choose tail='drop' or 'partial'",
            key="tail",
            value="pad",
        )
    return {**batch, "valid": valid}


def _short(source: Any) -> str:
    text = repr(source)
    return text if len(text) <= 200 else f"{text[:197]}..."
