"""The section ``sampler`` of kind ``streams``: rows that continue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

from pydantic import Field

from dataload.config.arrays import NPY_PATTERN, read_array
from dataload.config.problems import Problem, named_as
from dataload.config.sampler_section import BatchesSection, BuildContext
from dataload.errors import ConfigError
from dataload.samplers import BatchPlanner
from dataload.samplers.streams.sampler import ChunkEnd, StreamMode
from dataload.sources.sequences import sequence_lengths
from dataload.streams import RowMixture, StreamSampler

__all__ = ["StreamsConfig"]

_WAYS = ("lengths", "field", "key", "shards")


class StreamsConfig(BatchesSection):
    """Each row of a batch continues what it had in the batch before."""

    kind: Literal["streams"]
    lengths: str | None = Field(
        None, pattern=NPY_PATTERN, description="Records of each sequence: a .npy file; relative to the config file."
    )
    field: str | None = Field(None, description="Field whose value changes where a sequence ends.")
    key: str | Literal[True] | None = Field(
        None,
        description="Regular expression of what the keys of a sequence's records have in common; true: all before a "
        "number at their end.",
    )
    shards: bool = Field(False, description="Each shard (file) is a sequence.")
    chunk: int = Field(1, ge=1, description="Consecutive records of a row in each batch.")
    mode: StreamMode = Field("split", description="Which sequences a row follows: see StreamSampler.")
    ends: ChunkEnd = Field("next", description="What becomes of a chunk at the end of a sequence.")
    random_start: bool = Field(False, description="Chunks begin elsewhere in each epoch.")
    epoch_steps: int | None = Field(None, ge=1, description="Steps of an epoch where rows have no end.")
    shuffled_rows: int = Field(
        0, ge=0, description="So many of loader.batch_size rows take chunks from anywhere instead."
    )
    seed: int | None = Field(None, description="Any integer; by default loader.seed.")

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        """See `SamplerSection.contradictions`."""
        yield from super().contradictions(key, parts)
        first, *others = [name for name in _WAYS if getattr(self, name)] or [""]
        for name in others:
            yield Problem(f"{key}.{name}", getattr(self, name), f"contradicts {first}: leave one out")

    def _batches(self, context: BuildContext) -> BatchPlanner:
        rows = cast("int", context.batch_size)  # which a config must give, but for length_buckets
        if self.shuffled_rows >= rows:
            raise ConfigError(
                f"shuffled_rows must be below loader.batch_size, {rows}, or no row continues; got {self.shuffled_rows}",
                key="shuffled_rows",
                value=self.shuffled_rows,
            )
        streams = StreamSampler(
            sequence_lengths=self._lengths(context),
            rows=(rows - self.shuffled_rows) * context.world_size,
            chunk=self.chunk,
            mode=self.mode,
            ends=self.ends,
            seed=context.seed_or(self.seed),
            random_start=self.random_start,
            epoch_steps=self.epoch_steps,
        )
        if not self.shuffled_rows:
            return streams
        shuffled = StreamSampler(
            sequence_lengths=streams.sequence_lengths,
            rows=self.shuffled_rows * context.world_size,
            chunk=self.chunk,
            mode="shuffled",
            ends=self.ends,
            seed=streams.seed,
        )
        return RowMixture(parts=(streams, shuffled))

    def _lengths(self, context: BuildContext) -> Any:
        way = next((name for name in _WAYS if getattr(self, name)), None)
        if way is None:
            own = getattr(context.source, "sequence_lengths", None)
            if own is None:
                raise ConfigError(
                    "lengths is missing, and the source does not know its sequences: give lengths, a .npy file, or "
                    "field, key or shards",
                    key="lengths",
                )
            return own
        value = getattr(self, way)
        with named_as(way, value):
            return read_array(value, way) if way == "lengths" else sequence_lengths(context.source, **{way: value})
