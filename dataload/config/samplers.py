"""The section ``sampler``: one model for each kind of order, derived from the class that it builds.

Tables nest: ``[sampler.parent]`` is the order that a sampler builds upon, ``[[sampler.samplers]]`` are the orders of a
mixture's parts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, Union

from pydantic import Field, create_model

from dataload import samplers as orders
from dataload._util.randomness import derive_word
from dataload._util.settings import check_count
from dataload.config.derive import AnyWeights, NpyPath, Reference, Section, settings_of
from dataload.config.problems import REFERENCE_PATTERN, named_as, named_under, read_array, resolve_reference
from dataload.errors import ConfigError
from dataload.loader.order import default_pool_size, shard_lengths
from dataload.samplers import BatchPlanner
from dataload.samplers.mixture_weights import by_row, check_rows
from dataload.sources.base import Source
from dataload.sources.views.sequences import record_lengths, sequence_lengths
from dataload.storage.local.record_files import open_regular
from dataload.streams import MultiStreamLoader, RowMixture, StreamSampler
from dataload.types import Sampler

SectionT = TypeVar("SectionT", bound="SamplerSection")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The position of a sampler's table, and the data to build from."""

    key: str  # of the table, for messages: "sampler.parent"
    source: Source[Any]
    parts: tuple[Source[Any], ...]  # the sources that `source` joins; only itself if it joins none
    seed: int  # of samplers that have none of their own
    names: tuple[str, ...] | None = None  # of the parts
    batch_size: int | None = None
    world_size: int = 1

    def inner(self, name: str) -> BuildContext:
        """Return the context of the nested table `name`."""
        return replace(self, key=f"{self.key}.{name}")

    def part(self, i: int) -> BuildContext:
        """Return the context of the sampler of part `i`, with its own seed, so that equal parts differ in order."""
        seed = int(derive_word(self.seed, "mixture-part", i))
        inner = self.inner(f"samplers[{i}]")
        return replace(inner, source=self.parts[i], parts=(self.parts[i],), seed=seed, names=None)


class SamplerSection(Section):
    """A table of ``sampler``; `kind_of` adds the arguments of the class that it builds to what a subclass declares."""

    builds: ClassVar[Any]
    kind: str

    def build(self, context: BuildContext) -> Any:
        """Build the sampler or batch sampler; errors name settings below the key of the context."""
        with named_under(context.key, type(self).model_fields):
            seed = getattr(self, "seed", None)
            return self._build(context if seed is None else replace(context, seed=seed))

    def _build(self, context: BuildContext) -> Any:
        return self.builds(**self._arguments(context))

    def _arguments(self, context: BuildContext) -> dict[str, Any]:
        """Return the settings given, with arrays read and nested tables built, and the arguments found in the data."""
        fields = settings_of(self.builds)
        values: dict[str, Any] = {}
        for name in fields:
            value = getattr(self, name, None)
            if isinstance(value, SamplerSection):
                values[name] = value.build(context.inner(name))
            elif value is not None:
                values[name] = read_array(value, name) if name in _PER_RECORD and isinstance(value, str) else value
            elif name in _FROM_DATA and (name == "seed" or fields[name][1].is_required()):
                values[name] = _FROM_DATA[name](context)
        if "parent" in values and "length" in values:
            values["length"] = len(values["parent"])
        for name in values.keys() & _PER_RECORD:
            if len(values[name]) != len(context.source):
                found = len(values[name])
                message = f"{name} must have one value for each of the {len(context.source)} records, got {found}"
                raise ConfigError(message, key=name, value=found)
        return values


_FROM_DATA: dict[str, Callable[[BuildContext], Any]] = {
    "length": lambda context: len(context.source),
    "shard_lengths": lambda context: shard_lengths(context.source),
    "batch_size": lambda context: context.batch_size,
    "seed": lambda context: context.seed,
    "num_samples": lambda context: len(context.source),
    "pool_size": lambda context: default_pool_size(context.source, shard_lengths(context.source)),
}
_DEFAULTS = {
    "seed": "Defaults to the seed of the enclosing table, and at the top to `loader.seed`.",
    "num_samples": "Defaults to the number of records.",
    "pool_size": "Defaults to the records of two shards, at least 1,024.",
}
_NOT_SETTINGS = {
    *("length", "lengths", "shard_lengths", "batch_size", "rank", "world_size", "tail", "origin", "selection"),
    *("sequence_lengths", "rows"),
}
_PER_RECORD = {"lengths", "weights"}  # arrays

SECTIONS: dict[str, type[SamplerSection]] = {}  # by kind


def kind_of(
    kind: str, builds: Any, *, order: str | None = None, only: tuple[str, ...] | None = None
) -> Callable[[type[SectionT]], type[SectionT]]:
    """Let the section configure `builds`, by `only` some arguments, as `kind`; `order` is the default parent's kind."""

    def register(section: type[SectionT]) -> type[SectionT]:
        plain: dict[str, Any] = {"kind": (Literal[kind], ...)}
        nested: dict[str, Any] = {}
        for name, (hint, field) in settings_of(builds).items():
            if name in section.model_fields or (name in _NOT_SETTINGS if only is None else name not in only):
                continue
            if name in _DEFAULTS and (name == "seed" or field.is_required()):
                plain[name] = (hint | None, Field(None, description=f"{field.description} {_DEFAULTS[name]}"))
            elif name in ("parent", "sampler") and order is not None:
                default = f"{field.description} Defaults to {order}."
                nested[name] = (hint, Field(default_factory=partial(_section, order), description=default))
            else:
                (nested if name == "parent" else plain)[name] = (hint, field)
        summary = str(builds.__doc__).partition("\n")[0]
        name = f"{kind.title().replace('_', '')}Config"
        model = create_model(name, __base__=section, __doc__=summary, __module__=__name__, **plain, **nested)
        model.builds = builds
        SECTIONS[kind] = model
        return model

    return register


def _section(kind: str) -> SamplerSection:
    return SECTIONS[kind](kind=kind)


kind_of("sequential", orders.Sequential)(SamplerSection)
kind_of("global_shuffle", orders.GlobalShuffle)(SamplerSection)
kind_of("shard_sequential", orders.ShardSequential)(SamplerSection)
kind_of("pool_shuffle", orders.PoolShuffle, order="shard_sequential")(SamplerSection)
kind_of("lanes", orders.Lanes, order="shard_sequential")(SamplerSection)
kind_of("repeat", orders.Repeat, order="global_shuffle")(SamplerSection)
kind_of("weighted", orders.Weighted)(SamplerSection)


@kind_of("subset", orders.Subset, order="sequential")
class _Subset(SamplerSection):
    start: int | None = Field(None, description="First position; a negative one counts from the end.")
    stop: int | None = Field(None, description="Position after the last; a negative one counts from the end.")
    step: int | None = Field(None, description="Distance from one position to the next; not 0.")
    indices: NpyPath | Annotated[tuple[int, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="Positions in any order: a list, or a .npy file relative to the config file."
    )

    def _build(self, context: BuildContext) -> Sampler:
        values, limits = self._arguments(context), (self.start, self.stop, self.step)
        if (self.indices is None) == (limits == (None, None, None)):
            message = "give either indices, or some of start, stop and step"
            raise ConfigError(message, key="indices", value=self.indices)
        chosen: Any = slice(*limits) if self.indices is None else self.indices
        with named_as("step" if self.indices is None else "indices", chosen):
            chosen = read_array(chosen, "indices") if isinstance(chosen, str) else chosen
            return orders.Subset(**values, selection=chosen)


@kind_of("mixture", orders.Mixture)
class _Mixture(SamplerSection):
    weights: AnyWeights | None = Field(
        None,
        description="One number for each source, in their order or by their names; or a table of these by the position "
        "of the epoch from which they hold; or a list of either for each epoch; the last one then stays.",
    )
    temperature: float | None = Field(
        None,
        ge=1,
        description="Instead of weights: they are the lengths of the sources, in records or in length_of, to the power "
        "of 1 / temperature. 1 mixes them in proportion, greater ones more evenly.",
    )
    min_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="The least share of a source with a weight above 0; the others share the rest."
    )
    with_source: bool = Field(
        False, description="Whether to add the field source, int32, the number of the record's source."
    )
    samplers: Annotated[tuple[OrderConfig, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="The order of each source. Defaults to global_shuffle, with a seed derived for each source."
    )
    length_of: str | None = Field(
        None, description="A field: the weights are then shares of its length, such as tokens, instead of records."
    )

    def _build(self, context: BuildContext) -> Sampler:
        parts = context.parts
        sections = self.samplers or tuple(_section("global_shuffle") for _ in parts)
        if len(sections) != len(parts):
            message = f"samplers must hold one table for each of the {len(parts)} sources, got {len(sections)}"
            raise ConfigError(message, key="samplers", value=len(sections))
        samplers = tuple(section.build(context.part(i)) for i, section in enumerate(sections))
        given = {name: value for name, value in self.given().items() if name in settings_of(orders.Mixture)}
        names = context.names
        weights = self._weights(tuple(map(len, parts)), names)
        named = samplers if names is None else dict(zip(names, samplers, strict=True))
        values: dict[str, Any] = {"seed": context.seed, **given, "samplers": named, "weights": weights}
        make: Any = partial(orders.Mixture, lengths=tuple(map(len, parts)))
        mixture = make(**values)  # checks the weights before records are measured
        if self.length_of is None:
            return mixture
        with named_as("length_of", self.length_of):
            return make(**{**values, "weights": self._weights_of_records(parts, names, self.length_of)})

    def _weights_of_records(
        self, parts: tuple[Source[Any], ...], names: tuple[str, ...] | None, field: str
    ) -> tuple[Any, ...]:
        """Return how often records must be drawn, so that the weights are shares of the lengths of `field`."""
        counts = [record_lengths(part, field) for part in parts]
        means = [float(each.mean()) if len(each) else 1.0 for each in counts]
        if not min(means):
            raise ConfigError(
                f"all records of source[{means.index(0)}] have the length 0", key="length_of", value=field
            )

        weights = self._weights([float(each.sum()) for each in counts], names)
        return by_row(weights, lambda row: tuple(weight / mean for weight, mean in zip(row, means, strict=True)))

    def _weights(self, sizes: Sequence[float], names: tuple[str, ...] | None) -> Any:
        """Return the given weights, or weights computed from the sizes of the sources, none below the least share."""
        if (self.weights is None) == (self.temperature is None):
            message = "give either weights, or temperature to have them by the lengths of the sources"
            raise ConfigError(message, key="weights", value=self.weights)
        if self.temperature is None:
            weights: Any = self.weights if names is None else check_rows(self.weights, len(sizes), names, step=1)
        else:
            weights = orders.blend_weights(sizes, temperature=self.temperature)
        if least := self.min_share:
            return by_row(weights, lambda row: orders.blend_weights(row, min_share=least))
        return weights


class _ByLength(SamplerSection):
    """A table that goes by the lengths of the records."""

    lengths: NpyPath | None = Field(
        None, description="The length of each record: a .npy file of integers, relative to the config file."
    )
    length_of: str | None = Field(
        None,
        description="The field whose length is the record's: from `dataload stats`, or by reading all records once.",
    )
    length_map: Reference | None = Field(
        None, description="The transform that makes this field, from `dataload stats --map`: the loader's transform."
    )

    def _arguments(self, context: BuildContext) -> dict[str, Any]:
        values = super()._arguments(context)
        if (self.lengths is None) == (self.length_of is None):
            message = "give either lengths, a .npy file, or length_of, the field to measure"
            raise ConfigError(message, key="lengths", value=self.lengths)
        if self.length_of is not None:
            transform = self.length_map and resolve_reference(self.length_map, "length_map")
            with named_as("length_of", self.length_of):
                values["lengths"] = record_lengths(context.source, self.length_of, transform=transform)
        return values


@kind_of("length_buckets", orders.BucketBatchSampler)
class _LengthBuckets(_ByLength):
    def _arguments(self, context: BuildContext) -> dict[str, Any]:
        return {**super()._arguments(context), "batch_size": context.batch_size}


kind_of("packing", orders.PackedBatchSampler, order="global_shuffle")(_ByLength)

_ORDERS = tuple(model for model in SECTIONS.values() if not issubclass(model.builds, orders.BatchPlanner))
if TYPE_CHECKING:
    OrderConfig: TypeAlias = SamplerSection
else:
    OrderConfig = Annotated[Union[_ORDERS], Field(discriminator="kind")]  # noqa: UP007 - made at run time
for _model in SECTIONS.values():
    _model.model_rebuild(_types_namespace={**globals()})


_WAYS = ("lengths", "field", "key", "shards")


@kind_of("streams", StreamSampler)
class _Streams(SamplerSection):
    lengths: NpyPath | None = Field(
        None, description="Records of each sequence: a .npy file, relative to the config file."
    )
    field: str | None = Field(None, description="Field whose value changes where a sequence ends.")
    key: str | Literal[True] | None = Field(
        None,
        description="Regular expression that matches the part that the keys of a sequence's records have in common; "
        "true: everything before a number at the end.",
    )
    shards: bool = Field(False, description="Each shard (file) is a sequence.")
    shuffled_rows: int = Field(
        0, ge=0, description="Rows, of the `loader.batch_size`, that take chunks from anywhere instead of continuing."
    )

    def _build(self, context: BuildContext) -> BatchPlanner:
        rows = check_count("batch_size", context.batch_size, least=1)
        others = self.shuffled_rows
        if others >= rows:
            message = f"shuffled_rows must be below loader.batch_size, {rows}, or no row continues; got {others}"
            raise ConfigError(message, key="shuffled_rows", value=others)
        arguments = {**self._arguments(context), "sequence_lengths": self._lengths(context)}
        streams = StreamSampler(**arguments, rows=(rows - others) * context.world_size)
        if not others:
            return streams
        rows = others * context.world_size
        shuffled = replace(streams, rows=rows, mode="shuffled", random_start=False, epoch_steps=None)
        return RowMixture(parts=(streams, shuffled))

    def _lengths(self, context: BuildContext) -> Any:
        ways = [name for name in _WAYS if getattr(self, name)]
        way = ways[0] if ways else None
        for name in ways[1:]:
            message = f"{way} and {name} both tell where sequences end: give one of them"
            raise ConfigError(message, key=name, value=getattr(self, name))
        if way is None:
            own = getattr(context.source, "sequence_lengths", None)
            if own is None:
                message = "lengths is missing, and the source does not know its sequences: "
                raise ConfigError(f"{message}give lengths, a .npy file, or field, key or shards", key="lengths")
            return own
        value = getattr(self, way)
        with named_as(way, value):
            return read_array(value, way) if way == "lengths" else sequence_lengths(context.source, **{way: value})


@kind_of("iterators", MultiStreamLoader, only=("make_stream", "mode", "shuffle", "chunk", "ends"))
class IteratorsConfig(SamplerSection):
    """Rows that continue, over iterators."""

    sequences: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        description="What streams are made of: a list of text; 'module:function', which returns a sequence; or a text "
        "file with one name per line, relative to the config file."
    )

    def build_loader(self, loader: Mapping[str, Any]) -> MultiStreamLoader:
        """Build the loader from this section and the section ``loader``, whose functions are already imported."""
        arguments = {*inspect.signature(MultiStreamLoader).parameters, "start_method"} - type(self).model_fields.keys()
        for name in loader.keys() - arguments:
            own = f"set sampler.{name}" if name in type(self).model_fields else "remove it"
            message = f"{name} does not apply to sampler.kind 'iterators': {own}"
            raise ConfigError(message, key=name, value=loader[name])
        options: dict[str, Any] = {"batch_size": None, **self.resolved("sampler"), **loader}
        del options["kind"]
        with named_under("sampler", type(self).model_fields):
            return MultiStreamLoader(**{**options, "sequences": self._sequences()})

    def _sequences(self) -> Any:
        if not isinstance(self.sequences, str):
            return self.sequences
        if re.match(REFERENCE_PATTERN, self.sequences):
            return resolve_reference(self.sequences, "sampler.sequences")()
        try:
            with open(self.sequences, encoding="utf-8", opener=open_regular) as stream:
                return [line.strip() for line in stream if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error.reason})"
            message = f"cannot read {self.sequences}: {reason}"
            raise ConfigError(message, key="sequences", value=self.sequences) from error
