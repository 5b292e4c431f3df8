"""One batch, straight down: read, transform, collate, finish. `step.py` calls `rescue.py` where that fails."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from dataload._util.failures import mark_users
from dataload._util.settings import check_call, setting_error
from dataload.catalog.facts import require_known, select_fields
from dataload.collate import Collate, Pack, PadValue, Policy, Ragged, default_collate, in_chunks
from dataload.collate.collate import check_pad_value
from dataload.collate.columns import like
from dataload.errors import ConfigError, closest
from dataload.loader.failures import ErrorPolicy, StepTrace
from dataload.samplers import BatchPlan
from dataload.sources.base import Source
from dataload.sources.views.adapt import columns_at, records_at
from dataload.transforms import DROP, NamedTransform, SampleContext
from dataload.types import BatchReader, BytesColumn, ColumnReader, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoader:
    """Makes the batch of a plan. Thread-safe."""

    # Records are read as columns if the source has `read_batch` and nothing needs single samples (`reads_columns`),
    # else with one `__getitems__`, else one by one.

    source: Any
    fields: tuple[str, ...] | None
    transform: tuple[NamedTransform, ...]  # applied to each sample, one after another
    collate: Callable[..., Any]  # makes a batch of samples, or of samples and their `Packing` if plans have one
    batch_transform: Callable[[Any], Any] | None  # applied to the batch; None for no change
    seed: int
    policy: ErrorPolicy = field(default_factory=ErrorPolicy)
    reads_columns: bool = field(init=False)
    _reads_many: bool = field(init=False)
    _is_ours: bool = field(init=False)
    _owns: bool = field(init=False)  # whether samples get into the hands of the user, who may modify them

    def __post_init__(self) -> None:
        stacks = not self.transform and self.collate is default_collate
        object.__setattr__(self, "reads_columns", stacks and isinstance(self.source, ColumnReader))
        object.__setattr__(self, "_reads_many", isinstance(self.source, BatchReader))
        object.__setattr__(self, "_is_ours", isinstance(self.source, Source))
        object.__setattr__(self, "_owns", not stacks)

    @property
    def reads_together(self) -> bool:
        """Whether `load_together` can make the batches of several steps."""
        return self.reads_columns and self.batch_transform is None

    def load(self, plan: BatchPlan, epoch: int, trace: StepTrace) -> Any:
        """Return the batch of a plan with at least one row; errors are raised unchanged."""
        trace.enter("read")
        if self.reads_columns:
            batch = self._columns(plan.indices, trace)
        else:
            samples = self.read(plan.indices, trace)
            if self.transform:
                trace.enter("transform")
                samples = self.transformed(samples, plan.indices, epoch, trace)
            trace.enter("collate")
            batch = self.collated(samples, plan)
        return self.finished(batch, plan, trace)

    def read(self, indices: Int64Array, trace: StepTrace) -> list[Any]:
        """Return the records at `indices`, in that order, with the chosen fields."""
        with trace.clock:
            if self._is_ours:
                samples = self.source.read(indices)
            else:
                samples = records_at(self.source, indices.tolist(), many=self._reads_many, own=self._owns)
        if self.fields is None:
            return samples
        return [select_fields(sample, self.fields) for sample in samples]

    def _columns(self, indices: Int64Array, trace: StepTrace) -> Any:
        with trace.clock:
            if self._is_ours:
                return self.source.read_batch(indices, self.fields)
            return columns_at(self.source, indices, self.fields)

    def transformed(self, samples: Sequence[Any], indices: Int64Array, epoch: int, trace: StepTrace) -> list[Any]:
        """Return samples after all transforms, at least one, which are applied sample by sample."""
        at_index, seed, done = trace.status.at_index, self.seed, list[Any]()
        index, transform = -1, self.transform[0]
        try:  # once for all samples: with a call and a `try` each, this took longer than a simple transform
            for index, sample in zip(indices.tolist(), samples, strict=True):
                at_index(index)
                result, context = sample, None
                for transform in self.transform:
                    if transform.takes_context:
                        context = context or SampleContext(index, epoch, seed)
                        result = transform.function(result, context)
                    else:
                        result = transform.function(result)
                    if result is None or result is DROP:
                        raise _no_sample(transform.name, result)
                done.append(result)
        except BaseException as error:
            trace.transform, trace.index = transform.name, index
            mark_users(error)
            raise
        return done

    def collated(self, samples: list[Any], plan: BatchPlan) -> Any:
        """Return the batch of samples, without what the plan adds."""
        return batch_of(
            "collate", self.collate(samples) if plan.packing is None else self.collate(samples, plan.packing)
        )

    def finished(self, batch: Any, plan: BatchPlan, trace: StepTrace) -> Any:
        """Return a collated batch with what the plan adds, after `batch_transform`."""
        trace.leave()
        batch = finish(batch, plan)
        if self.batch_transform is not None:
            trace.enter("batch_transform")
            batch = batch_of("batch_transform", self.batch_transform(batch))
            trace.leave()
        return batch

    def load_together(self, plans: Sequence[BatchPlan], trace: StepTrace) -> list[Any] | None:
        """Return the batches of several steps from one read of columns; None if they have to be loaded one by one.

        An empty list says that columns of this source cannot be cut, so that a read of several steps is wasted.
        """
        # One read of many rows takes the GIL once, and pays fixed costs once. The batches are views of one memory.
        if not (self.reads_together and all(len(plan.indices) and plan.packing is None for plan in plans)):
            return None
        indices = np.concatenate([plan.indices for plan in plans])
        if len(self.policy.excluded_among(indices)):
            return None
        trace.enter("read")
        columns = self._columns(indices, trace)
        trace.leave()
        if not _can_be_cut(columns, len(indices)):
            return []
        is_plain = isinstance(columns, dict) and not any(isinstance(each, (dict, tuple)) for each in columns.values())
        batches: list[Any] = []
        stop = 0
        for plan in plans:
            start, stop = stop, stop + len(plan.indices)
            # Without a call for each column, where there may be hundreds.
            rows = (
                {name: each[start:stop] for name, each in columns.items()} if is_plain else _cut(columns, start, stop)
            )
            batches.append(finish(rows, plan))
        return batches


def _can_be_cut(columns: Any, rows: int) -> bool:
    if isinstance(columns, (list, BytesColumn)):
        return len(cast("Sequence[Any]", columns)) == rows
    if isinstance(columns, dict):
        return all(_can_be_cut(column, rows) for column in cast("dict[str, Any]", columns).values())
    if isinstance(columns, tuple) and not isinstance(columns, Ragged):
        return all(_can_be_cut(column, rows) for column in cast("tuple[Any, ...]", columns))
    return tuple(getattr(columns, "shape", ()))[:1] == (rows,)  # an array or a tensor, for example


def _cut(columns: Any, start: int, stop: int) -> Any:
    """Return rows of columns, which may be in dicts and tuples."""
    if isinstance(columns, dict):
        return {name: _cut(column, start, stop) for name, column in cast("dict[str, Any]", columns).items()}
    if isinstance(columns, tuple):
        return like(type(columns), [_cut(column, start, stop) for column in cast("tuple[Any, ...]", columns)])
    return columns[start:stop]


def _no_sample(name: str, result: Any) -> ConfigError:
    """Return the error for a transform that returned None or `DROP`."""
    hint = "does it end without `return sample`?" if result is None else "leave records out by source.filter(...)"
    return ConfigError(f"transform {name!r} returned {result!r} instead of a sample: {hint}", key="transform")


def choose_collate(
    collate: Callable[..., Any] | Mapping[str, Policy] | None, pad_value: PadValue | None, *, packs: bool
) -> Callable[..., Any]:
    """Return the function that makes batches, from a loader's arguments."""
    if pad_value is not None and not (isinstance(collate, Mapping) or (packs and collate is None)):
        message = "pad_value goes with collate={name: 'pad'} or with packing: leave it out, or give it to Collate"
        raise ConfigError(message, key="pad_value", value=pad_value)
    check_pad_value(pad_value, None)
    if packs:
        if collate is not None and not isinstance(collate, Pack):
            message = "packed rows are laid out by dataload.Pack: leave collate out, or pass Pack(pad_value=...), got"
            raise ConfigError(f"{message} {collate!r}", key="collate", value=collate)
        if collate is not None and collate.row_length is not None:
            message = "the sampler sets the length of rows: leave row_length of Pack out"
            raise ConfigError(message, key="collate", value=collate)
        return collate or Pack(pad_value)
    if collate is None:
        return default_collate
    if isinstance(collate, Mapping):
        return Collate(collate, pad_value) if collate or pad_value is not None else default_collate
    if not callable(collate):
        raise setting_error("collate", collate, "must be a function or policies by field such as {'tokens': 'pad'}")
    check_call("collate", collate, "a list of samples")
    return collate


def without_warning(collate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function for workers, which leave it to the loader to warn of padding without a `pad_value`."""
    if isinstance(collate, (Collate, Pack)) and collate is not default_collate and collate.pad_value is None:
        return replace(collate, pad_value=0)
    return collate


def check_batch_transform(function: Any) -> Any:
    """Return `batch_transform`, checked to be a function of a batch, or None."""
    if function is not None:
        check_call("batch_transform", function, "a batch")
    return function


def batch_of(stage: str, batch: Any) -> Any:
    """Return what a function of the user made of a step, unless that is None."""
    if batch is None:
        raise ConfigError(f"{stage} returned None instead of a batch: does it end without `return`?", key=stage)
    return batch


def check_names(source: Any, fields: Sequence[str] | None, collate: Any, *, transformed: bool) -> None:
    """Check the names in `fields`, and those in the policies of `collate` unless transforms may add fields."""
    policies = collate.policies if isinstance(collate, Collate) and not transformed else {}
    if not isinstance(source, Source) or not (fields or policies):
        return
    known: Sequence[str] = tuple(cast("Source[Any]", source).fields)
    require_known((fields or ()) if known else (), known, source)
    known = known if fields is None or not known else fields
    for name in policies if known else ():
        if name not in known and not any(name.startswith(f"{outer}.") for outer in known):
            message = f"collate names the field {name!r}, which the samples do not have: {closest(name, known)}"
            raise ConfigError(message, key=f"collate.{name}", value=name)


def finish(batch: Any, plan: BatchPlan) -> Any:
    """Return a collated batch with the chunk axis, the mask and the columns of its plan; see `BatchPlan`."""
    # If something is added to a batch that is not a mapping, the batch becomes the field "data".
    if plan.valid is None and plan.columns is None:
        return batch
    if plan.chunk > 1:
        batch = in_chunks(batch, plan.rows, plan.chunk)
    fields = cast("Mapping[str, Any]", batch) if isinstance(batch, Mapping) else {"data": batch}
    added = {**(plan.columns or {}), **({} if plan.valid is None else {"valid": plan.valid})}
    for name in added:
        if name in fields and plan.columns is None:
            raise ConfigError(
                "tail='pad' adds the mask 'valid' to each batch, and the samples have a field of that name: rename "
                "it, or choose tail='drop' or 'partial'",
                key="tail",
                value="pad",
            )
        if name in fields:
            raise ConfigError(
                f"streams add {name!r} to each batch, and the samples have a field of that name: rename it", key=name
            )
    # Copies, because consumers may write to a batch, and plans share the memory of these columns with other plans.
    return {**fields, **{name: column.copy() for name, column in added.items()}}
