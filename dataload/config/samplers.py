"""The section ``sampler``: one model for each kind of order.

Tables nest: ``[sampler.parent]`` is the order that a sampler builds upon, ``[[sampler.samplers]]`` are those of a
mixture's parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Field

from dataload.config.arrays import NPY_PATTERN, read_array
from dataload.config.problems import MISSING, Problem, named_as
from dataload.config.sampler_section import BatchesSection, BuildContext, OrderSection
from dataload.errors import ConfigError
from dataload.loader.order import default_pool_size, shard_lengths
from dataload.samplers import (
    BatchPlanner,
    BucketBatchSampler,
    GlobalShuffle,
    Lanes,
    Mixture,
    PackedBatchSampler,
    PoolShuffle,
    Repeat,
    Sequential,
    ShardSequential,
    Subset,
    Weighted,
)
from dataload.samplers.mixture import Stop
from dataload.samplers.packing import Overlong
from dataload.sources.lengths import record_lengths
from dataload.types import Array, Sampler

__all__ = [
    "GlobalShuffleConfig",
    "LanesConfig",
    "LengthBucketsConfig",
    "MixtureConfig",
    "OrderConfig",
    "PackingConfig",
    "PoolShuffleConfig",
    "RepeatConfig",
    "SequentialConfig",
    "ShardSequentialConfig",
    "SubsetConfig",
    "WeightedConfig",
]

Seed: TypeAlias = Annotated[
    int | None, Field(description="Any integer; by default that of the table around this one, at last loader.seed.")
]
NpyPath: TypeAlias = Annotated[str, Field(pattern=NPY_PATTERN)]
Integers: TypeAlias = Annotated[tuple[int, ...], Field(strict=False, min_length=1)]
Weight: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weights: TypeAlias = Annotated[tuple[Weight, ...], Field(strict=False, min_length=1)]
RowsOfWeights: TypeAlias = Annotated[tuple[Weight | Weights, ...], Field(strict=False, min_length=1)]


class SequentialConfig(OrderSection):
    """Index order."""

    kind: Literal["sequential"]

    def _order(self, context: BuildContext) -> Sampler:
        return Sequential(len(context.source))


class GlobalShuffleConfig(OrderSection):
    """All records in a random order, another one each epoch."""

    kind: Literal["global_shuffle"]
    parent: OrderConfig | None = Field(
        default=None, description="The order to shuffle; by default that of the indices."
    )
    seed: Seed = None

    def _order(self, context: BuildContext) -> Sampler:
        seed = context.seed_or(self.seed)
        if self.parent is None:
            return GlobalShuffle(len(context.source), seed)
        parent = self.parent.build(context.inner("parent", seed))
        return GlobalShuffle(len(parent), seed, parent)


class ShardSequentialConfig(OrderSection):
    """The shards (files) in a random order, each read front to back."""

    kind: Literal["shard_sequential"]
    seed: Seed = None

    def _order(self, context: BuildContext) -> Sampler:
        return ShardSequential(shard_lengths(context.source), context.seed_or(self.seed))


def _sequential() -> OrderConfig:
    return SequentialConfig(kind="sequential")


def _global_shuffle() -> OrderConfig:
    return GlobalShuffleConfig(kind="global_shuffle")


def _shard_sequential() -> OrderConfig:
    return ShardSequentialConfig(kind="shard_sequential")


class PoolShuffleConfig(OrderSection):
    """An order shuffled through a pool: random nearby, and never far from the parent's place."""

    kind: Literal["pool_shuffle"]
    pool_size: int | None = Field(None, ge=1, description="Positions in the pool; by default two shards' worth.")
    parent: OrderConfig = Field(
        default_factory=_shard_sequential, description="The order to shuffle; by default shard_sequential."
    )
    seed: Seed = None

    def _order(self, context: BuildContext) -> Sampler:
        seed = context.seed_or(self.seed)
        pool_size = default_pool_size(context.source) if self.pool_size is None else self.pool_size
        return PoolShuffle(self.parent.build(context.inner("parent", seed)), pool_size, seed)


class LanesConfig(OrderSection):
    """An order dealt into equal contiguous spans that are taken in turns, so that each rank reads its own."""

    kind: Literal["lanes"]
    lanes: int = Field(ge=1, description="Number of lanes, a multiple of every number of ranks that shall be possible.")
    pool_size: int | None = Field(None, ge=1, description="Positions in a shuffle pool of each lane; by default none.")
    parent: OrderConfig = Field(
        default_factory=_shard_sequential, description="The order to deal; by default shard_sequential."
    )
    seed: Seed = None

    def _order(self, context: BuildContext) -> Sampler:
        seed = context.seed_or(self.seed)
        return Lanes(self.parent.build(context.inner("parent", seed)), self.lanes, self.pool_size, seed)


class SubsetConfig(OrderSection):
    """Some positions of an order: those in `indices`, or the slice start:stop:step."""

    kind: Literal["subset"]
    parent: OrderConfig = Field(
        default_factory=_sequential, description="The order to choose from; by default sequential."
    )
    start: int | None = Field(None, description="First position; a negative one counts from the end.")
    stop: int | None = Field(None, description="Position behind the last; a negative one counts from the end.")
    step: int | None = Field(None, description="From one position to the next; not 0.")
    indices: NpyPath | Integers | None = Field(
        None, description="Positions in any order: a list, or a .npy file; relative to the config file."
    )

    def _order(self, context: BuildContext) -> Sampler:
        parent = self.parent.build(context.inner("parent"))
        if self.indices is None:
            return Subset(parent, slice(self.start, self.stop, self.step))
        with named_as("indices", self.indices):
            return Subset(parent, _array(self.indices, "indices"))

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        """See `SamplerSection.contradictions`."""
        yield from super().contradictions(key, parts)
        sliced = [name for name in ("start", "stop", "step") if getattr(self, name) is not None]
        if self.indices is None and not sliced:
            yield Problem(f"{key}.indices", MISSING, "expected indices, or one of start, stop and step")
        if self.indices is not None and sliced:
            name = sliced[0]
            yield Problem(f"{key}.{name}", getattr(self, name), "contradicts indices: leave one out")
        if self.step == 0:
            yield Problem(f"{key}.step", 0, "expected a whole number other than 0")


class RepeatConfig(OrderSection):
    """An order several times in one epoch, each time as in another epoch of its own."""

    kind: Literal["repeat"]
    times: int = Field(ge=1, description="How often.")
    parent: OrderConfig = Field(
        default_factory=_global_shuffle, description="The order to repeat; by default global_shuffle."
    )

    def _order(self, context: BuildContext) -> Sampler:
        return Repeat(self.parent.build(context.inner("parent")), self.times)


class WeightedConfig(OrderSection):
    """Records drawn by weight."""

    kind: Literal["weighted"]
    weights: NpyPath | Weights = Field(
        description="One number for each record: a list, or a .npy file; relative to the config file."
    )
    num_samples: int | None = Field(None, ge=0, description="Draws per epoch; by default the number of records.")
    replacement: bool = Field(True, description="Whether a record may come more than once an epoch.")
    seed: Seed = None

    def _order(self, context: BuildContext) -> Sampler:
        weights = _for_each_record(_array(self.weights, "weights"), "weights", context)
        num_samples = len(context.source) if self.num_samples is None else self.num_samples
        return Weighted(weights, num_samples, context.seed_or(self.seed), self.replacement)


class MixtureConfig(OrderSection):
    """Several sources, each a table ``[[source]]``, in exact proportions."""

    kind: Literal["mixture"]
    weights: RowsOfWeights = Field(
        description="One number for each source; or a list of these for each epoch, of which the last stays."
    )
    stop: Stop = Field("first", description="An epoch ends with the first part, with the longest, or never.")
    window: int | None = Field(
        None, ge=1, description="Positions in which proportions are exact; by default as many as the weights need."
    )
    samplers: Annotated[tuple[OrderConfig, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="The order of each source; by default global_shuffle. Without a seed each gets one of its own.",
    )
    seed: Seed = None

    def _order(self, context: BuildContext) -> Sampler:
        seed = context.seed_or(self.seed)
        sections = self.samplers or tuple(_global_shuffle() for _ in context.parts)
        return Mixture(
            tuple(section.build(context.part(i, seed)) for i, section in enumerate(sections)),
            cast("tuple[float, ...]", self.weights),  # or rows of them, and not both: see contradictions
            stop=self.stop,
            seed=seed,
            window=self.window,
            lengths=tuple(map(len, context.parts)),
        )

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        """See `SamplerSection.contradictions`."""
        if not parts:
            yield Problem(f"{key}.kind", self.kind, "it mixes several sources, each a table [[source]]; here is one")
            return
        expected = f"expected one for each of the {parts} sources"
        rows = [row for row in self.weights if isinstance(row, tuple)]
        if not rows and len(self.weights) != parts:
            yield Problem(f"{key}.weights", list(self.weights), expected)
        for i, row in enumerate(self.weights if rows else ()):
            if not isinstance(row, tuple):
                yield Problem(f"{key}.weights[{i}]", row, "expected a list, as for the other epochs")
            elif len(row) != parts:
                yield Problem(f"{key}.weights[{i}]", list(row), expected)
        if self.samplers is not None and len(self.samplers) != parts:
            yield Problem(f"{key}.samplers", [section.kind for section in self.samplers], expected)
        for i, section in enumerate(self.samplers or ()):
            yield from section.contradictions(f"{key}.samplers[{i}]", 0)


class LengthsSection(BatchesSection):
    """A table that goes by the lengths of the records."""

    lengths: NpyPath | None = Field(
        None, description="The length of each record: a .npy file of integers; relative to the config file."
    )
    length_of: str | None = Field(
        None, description="Field whose length is the record's; counted by reading all records once."
    )

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        """See `SamplerSection.contradictions`."""
        yield from super().contradictions(key, parts)
        if self.lengths is None and self.length_of is None:
            yield Problem(f"{key}.lengths", MISSING, "expected a .npy file, or length_of, the field to count")
        if self.lengths is not None and self.length_of is not None:
            yield Problem(f"{key}.length_of", self.length_of, "contradicts lengths: leave one out")

    def _record_lengths(self, context: BuildContext) -> Array:
        if self.length_of is None:
            return _for_each_record(_array(self.lengths, "lengths"), "lengths", context)
        with named_as("length_of", self.length_of):
            return record_lengths(context.source, self.length_of)


class LengthBucketsConfig(LengthsSection):
    """Batches of about one length, of loader.batch_size rows or as many as `max_tokens` allows."""

    kind: Literal["length_buckets"]
    max_tokens: int | None = Field(
        None, ge=1, description="Rows times longest length of a batch, at most; in the place of loader.batch_size."
    )
    boundaries: Integers | None = Field(
        None, description="Longest length of each bucket, rising; by default in steps of a quarter."
    )
    group: int = Field(1, ge=1, description="So many batches of one bucket come one after the other.")
    shuffle: bool = Field(True, description="False serves records in order of length, as for an evaluation.")
    seed: Seed = None

    def _batches(self, context: BuildContext) -> BatchPlanner:
        return BucketBatchSampler(
            lengths=self._record_lengths(context),
            max_tokens=self.max_tokens,
            batch_size=context.batch_size,
            boundaries=self.boundaries,
            group=self.group,
            shuffle=self.shuffle,
            seed=context.seed_or(self.seed),
        )


class PackingConfig(LengthsSection):
    """Rows of one length, each filled with several records."""

    kind: Literal["packing"]
    row_length: int = Field(ge=1, description="Places in a row.")
    window: int = Field(1024, ge=1, description="Records that are packed together; more fill rows better.")
    overlong: Overlong = Field("error", description="What becomes of a record longer than a row.")
    sampler: OrderConfig = Field(
        default_factory=_global_shuffle, description="The order of the records; by default global_shuffle."
    )

    def _batches(self, context: BuildContext) -> BatchPlanner:
        return PackedBatchSampler(
            sampler=self.sampler.build(context.inner("sampler")),
            lengths=self._record_lengths(context),
            row_length=self.row_length,
            batch_size=cast("int", context.batch_size),  # which a config must give, but for length_buckets
            window=self.window,
            overlong=self.overlong,
        )


OrderConfig: TypeAlias = Annotated[
    SequentialConfig
    | GlobalShuffleConfig
    | ShardSequentialConfig
    | PoolShuffleConfig
    | LanesConfig
    | SubsetConfig
    | RepeatConfig
    | WeightedConfig
    | MixtureConfig,
    Field(discriminator="kind"),
]


def _array(value: Any, key: str) -> Any:
    return read_array(value, key) if isinstance(value, str) else value


def _for_each_record(values: Any, key: str, context: BuildContext) -> Any:
    """`values`, of which there is one for each record."""
    if len(values) != len(context.source):
        raise ConfigError(
            f"{key} must be one for each of the {len(context.source)} records, got {len(values)}",
            key=key,
            value=len(values),
        )
    return values


for _section in (
    GlobalShuffleConfig,
    PoolShuffleConfig,
    LanesConfig,
    SubsetConfig,
    RepeatConfig,
    MixtureConfig,
    PackingConfig,
):
    _section.model_rebuild()  # OrderConfig was not there yet when their class was made
