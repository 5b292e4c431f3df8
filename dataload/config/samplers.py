"""The section ``sampler``: one model for each kind of order, derived from the class that it builds.

Tables nest: ``[sampler.parent]`` is the order that a sampler builds upon, ``[[sampler.samplers]]`` are those of a
mixture's parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, Union, cast

from pydantic import Field, create_model

from dataload import samplers as orders
from dataload._util.randomness import derive_key
from dataload.config.derive import NpyPath, Section, settings_of
from dataload.config.problems import MISSING, Problem, named_as, named_under
from dataload.config.references import read_array
from dataload.errors import ConfigError
from dataload.loader.order import default_pool_size, shard_lengths
from dataload.sources.base import Source
from dataload.sources.views.sequences import record_lengths
from dataload.types import Sampler

SectionT = TypeVar("SectionT", bound="SamplerSection")
Weight: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Weights: TypeAlias = Annotated[tuple[Weight, ...], Field(strict=False, min_length=1)]
Position: TypeAlias = Annotated[int, Field(strict=False, ge=0)]  # keys are text
Changes: TypeAlias = Annotated[dict[Position, Weights], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The position of a sampler's table, and the data to build from."""

    key: str  # of the table, for messages: "sampler.parent"
    source: Source[Any]
    parts: tuple[Source[Any], ...]  # the sources that `source` joins; only itself if it joins none
    seed: int  # of samplers that have none of their own
    batch_size: int | None = None
    world_size: int = 1

    def inner(self, name: str) -> BuildContext:
        """Return the context of the nested table `name`."""
        return replace(self, key=f"{self.key}.{name}")

    def part(self, i: int) -> BuildContext:
        """Return the context of the sampler of part `i`, with its own seed, so that equal parts differ in order."""
        seed = int(derive_key(self.seed, "mixture-part", i, words=1)[0])
        return replace(self.inner(f"samplers[{i}]"), source=self.parts[i], parts=(self.parts[i],), seed=seed)


class SamplerSection(Section):
    """A table of the section ``sampler``.

    Subclasses declare what a config adds to the arguments of the class that they build; `kind_of` derives the rest.
    """

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

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        """Find settings of this table, and of those in it, that are valid alone and wrong together.

        `parts` is the number of sources in a list of them, or 0 for a single one.
        """
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SamplerSection):
                yield from value.contradictions(f"{key}.{name}", parts)


_FROM_DATA: dict[str, Callable[[BuildContext], Any]] = {
    "length": lambda context: len(context.source),
    "shard_lengths": lambda context: shard_lengths(context.source),
    "batch_size": lambda context: context.batch_size,
    "seed": lambda context: context.seed,
    "num_samples": lambda context: len(context.source),
    "pool_size": lambda context: default_pool_size(context.source),
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
    """Add the arguments of the class `builds` to the section that configures it, and register the section as `kind`.

    `order` is the default kind of the order that the sampler builds upon. `only` names the arguments that are settings;
    None takes all that do not come from the data or the loader.
    """

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
        values = self._arguments(context)
        if self.indices is None:
            return orders.Subset(**values, selection=slice(self.start, self.stop, self.step))
        with named_as("indices", self.indices):
            chosen = read_array(self.indices, "indices") if isinstance(self.indices, str) else self.indices
            return orders.Subset(**values, selection=chosen)

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        yield from super().contradictions(key, parts)
        sliced = [name for name in ("start", "stop", "step") if getattr(self, name) is not None]
        if self.indices is None and not sliced:
            yield Problem(f"{key}.indices", MISSING, "expected indices, or one of start, stop and step")
        if self.indices is not None and sliced:
            name = sliced[0]
            yield Problem(f"{key}.{name}", getattr(self, name), "conflicts with indices: remove one of them")
        if self.step == 0:
            yield Problem(f"{key}.step", 0, "expected a whole number other than 0")


@kind_of("mixture", orders.Mixture)
class _Mixture(SamplerSection):
    weights: Changes | Annotated[tuple[Weight | Changes | Weights, ...], Field(strict=False, min_length=1)] = Field(
        description="One number for each source; or a table of these by the position of the epoch from which they "
        "hold; or a list of either for each epoch, the last of which then stays."
    )
    samplers: Annotated[tuple[OrderConfig, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="The order of each source. Defaults to global_shuffle, with a seed derived for each source."
    )
    length_of: str | None = Field(
        None, description="A field: the weights are then shares of its length, such as tokens, instead of records."
    )

    def _arguments(self, context: BuildContext) -> dict[str, Any]:
        sections = self.samplers or tuple(_section("global_shuffle") for _ in context.parts)
        samplers = tuple(section.build(context.part(i)) for i, section in enumerate(sections))
        given = {name: value for name, value in self.given().items() if name not in ("kind", "length_of")}
        if self.length_of is not None:
            with named_as("length_of", self.length_of):
                given["weights"] = self._weights_of_records(context.parts, self.length_of)
        return {"seed": context.seed, **given, "samplers": samplers, "lengths": tuple(map(len, context.parts))}

    def _weights_of_records(self, parts: tuple[Source[Any], ...], field: str) -> tuple[Any, ...]:
        """Return how often records must be drawn, so that the weights are shares of the lengths of `field`."""
        means = [float(record_lengths(part, field).mean()) if len(part) else 1.0 for part in parts]
        if not min(means):
            raise ConfigError(
                f"all records of source[{means.index(0)}] have the length 0", key="length_of", value=field
            )

        def divided(weights: Any) -> Any:
            if isinstance(weights, dict):
                return {start: divided(row) for start, row in cast("dict[int, Any]", weights).items()}
            if isinstance(weights[0], (tuple, dict)):
                return tuple(map(divided, weights))
            return tuple(weight / mean for weight, mean in zip(weights, means, strict=True))

        return divided(self.weights)

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        if not parts:
            yield Problem(f"{key}.kind", self.kind, "it mixes several sources, each a table [[source]]; there is one")
            return
        expected = f"expected one for each of the {parts} sources"
        by_epoch = isinstance(self.weights, tuple) and any(isinstance(item, (tuple, dict)) for item in self.weights)
        named: dict[str, Any] = {f"{key}.weights": self.weights}
        if by_epoch:
            named = {f"{key}.weights[{i}]": item for i, item in enumerate(cast("Any", self.weights))}
        for name, item in named.items():
            if isinstance(item, float):
                yield Problem(name, item, "expected a list or a table, as for the other epochs")
                continue
            changes = cast("dict[int, Any]", item) if isinstance(item, dict) else None
            rows = {name: item} if changes is None else {f"{name}.{start}": row for start, row in changes.items()}
            for at, row in rows.items():
                if len(row) != parts:
                    yield Problem(at, list(row), expected)
        if self.samplers is not None and len(self.samplers) != parts:
            yield Problem(f"{key}.samplers", [section.kind for section in self.samplers], expected)
        for i, section in enumerate(self.samplers or ()):
            yield from section.contradictions(f"{key}.samplers[{i}]", 0)


class _ByLength(SamplerSection):
    """A table that goes by the lengths of the records."""

    lengths: NpyPath | None = Field(
        None, description="The length of each record: a .npy file of integers, relative to the config file."
    )
    length_of: str | None = Field(
        None,
        description="The field whose length is the record's: from `dataload stats`, or by reading all records once.",
    )

    def _arguments(self, context: BuildContext) -> dict[str, Any]:
        values = super()._arguments(context)
        if self.length_of is not None:
            with named_as("length_of", self.length_of):
                values["lengths"] = record_lengths(context.source, self.length_of)
        return values

    def contradictions(self, key: str, parts: int) -> Iterator[Problem]:
        yield from super().contradictions(key, parts)
        if self.lengths is None and self.length_of is None:
            yield Problem(f"{key}.lengths", MISSING, "expected a .npy file, or length_of, the field to measure")
        if self.lengths is not None and self.length_of is not None:
            yield Problem(f"{key}.length_of", self.length_of, "conflicts with lengths: remove one of them")


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
