"""The sections of a config as pydantic models. Imported only when a config is read: pydantic takes 60 ms."""

import re
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, cast

from pydantic import Field, create_model, model_validator

from dataload.config.derive import Section, settings_of, value_section
from dataload.config.problems import REFERENCE_PATTERN, named_under, resolve_reference
from dataload.config.samplers import SECTIONS, BuildContext, IteratorsConfig
from dataload.errors import ConfigError
from dataload.executors.base import Fleet, StartMethod
from dataload.loader.loader import Loader
from dataload.loader.order import rank_and_world_size, rows_per_rank
from dataload.samplers import BatchPlanner
from dataload.sources.base import Source
from dataload.sources.registry import built_in_formats, format_names, get_format, split_prefix
from dataload.sources.views.concat import ConcatSource
from dataload.sources.views.split import select
from dataload.storage import RemoteOptions, is_url
from dataload.streams import MultiStreamLoader

Texts: TypeAlias = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


_BUILT_IN = {entry.name for entry in built_in_formats()}


class _SelectSection(Section):
    """The records to read: those that fulfil a condition, and of these a part, as `Source.split` makes it."""

    condition: str | None = Field(
        None, description="Such as \"label == 3 and name != 'b'\"; or module:function of a record."
    )
    shares: dict[str, float] | None = Field(None, description="Shares of the parts by name, which add up to 1.")
    folds: int | None = Field(None, description="Number of folds for cross-validation, instead of shares.")
    part: str | None = Field(None, description="Name of the part to read; of folds test-0, train-0, test-1, ...")
    seed: int | None = Field(None, description="Seed of the hash that deals records to parts.")
    exact: bool | None = Field(None, description="Deal exact numbers of records.")
    stratify: str | None = Field(None, description="Field whose values have the same shares in each part.")
    group: str | None = Field(None, description="Field whose values are whole in one part.")

    def apply(self, source: Source[Any], key: str) -> Source[Any]:
        """Return the records of an opened source that the section selects."""
        settings = self.given()
        condition: Any = settings.pop("condition", None)
        if condition is not None and re.fullmatch(REFERENCE_PATTERN, condition):
            condition = resolve_reference(condition, f"{key}.condition")
        with named_under(key, type(self).model_fields):
            return select(source, condition, settings)[0]


class _SourceSection(Section):
    path: str | Texts = Field(
        description="A path, pattern, directory, 'format:path', or a list; relative to the config file."
    )
    name: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="The name of the source in a mixture; give it to all sources, or to none."
    )
    format: str | None = Field(None, description="Name of the format. By default the path decides, then the content.")
    fields: Texts | None = Field(None, description="Names of the fields to read. By default all.")
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Options of a format that another package adds."
    )
    select: _SelectSection | None = Field(None, description="The records to read. By default all.")
    storage: dict[str, Any] | None = Field(
        None, repr=False, description="Arguments of obstore's stores for URLs: endpoint, region, skip_signature, ..."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_options(cls, data: Any) -> Any:
        """Accept the options of a format that another package adds to the options of the built-in formats."""
        if not isinstance(data, dict):
            return data
        table = cast("dict[str, Any]", data)
        name = table.get("format") or split_prefix(str(table.get("path")))[0]
        if not isinstance(name, str) or name in _BUILT_IN or name not in format_names():
            return table
        if not isinstance(table.get("options", {}), dict):
            return table
        own = table.keys() & get_format(name).reader_options.names() - _SourceSection.model_fields.keys()
        rest = {key: value for key, value in table.items() if key not in own}
        return {**rest, "options": {**{key: table[key] for key in own}, **table.get("options", {})}}

    def open_options(self, key: str = "source") -> dict[str, Any]:
        """Return the keyword arguments for `dataload.open`, without path and format; `key` names this table."""
        options = self.resolved(key)
        storage = options.pop("storage", None)
        for name in ("path", "name", "format", "options", "select"):
            options.pop(name, None)
        return {**options, **self.options, **({} if storage is None else {"storage_options": storage})}

    def has_urls(self) -> bool:
        """Return whether some of the data are at URLs."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return any(is_url(split_prefix(path)[1]) for path in paths)


_OWN_TABLES = ("storage_options", "remote")


def _format_options() -> dict[str, tuple[Any, Any]]:
    """Return the reading options of the built-in formats as fields, described with the names of their formats."""
    found: dict[str, tuple[Any, Any, list[str]]] = {}
    for entry in built_in_formats():
        if entry.takes_paths:
            for name, (hint, field) in settings_of(entry.reader_options).items():
                if name in _OWN_TABLES:
                    continue
                found.setdefault(name, (hint, field, []))[2].append(entry.name)
    fields: dict[str, tuple[Any, Any]] = {}
    for name, (hint, field, formats) in found.items():
        # An option that one format requires does not exist for the others.
        default = None if field.is_required() else field.default
        fields[name] = (hint | None, Field(default, description=f"{', '.join(formats)}: {field.description}"))
    return fields


_ELSEWHERE = ("source", "sampler", "fields")  # arguments of `Loader` that other sections configure

if TYPE_CHECKING:
    SourceConfig: TypeAlias = Any  # attributes: the keys of the section, and the options of all formats
    LoaderConfig: TypeAlias = Any  # attributes are the arguments of `Loader`
    SamplerConfig: TypeAlias = Any
    RemoteConfig: TypeAlias = Any  # attributes: as `RemoteOptions`
else:
    SourceConfig = create_model(
        "SourceConfig", __base__=_SourceSection, __doc__="The data to read.", __module__=__name__, **_format_options()
    )
    LoaderConfig = create_model(
        "LoaderConfig",
        __base__=Section,
        __doc__="How batches are made: the arguments of `dataload.Loader`.",
        __module__=__name__,
        **{name: field for name, field in settings_of(Loader).items() if name not in _ELSEWHERE},
        start_method=(StartMethod | None, Field(None, description="Deprecated: `executor` says it.")),
    )
    RemoteConfig = create_model(
        "RemoteConfig",
        __base__=Section,
        __doc__="How data at URLs are read: `dataload.RemoteOptions`.",
        __module__=__name__,
        **settings_of(RemoteOptions),
    )
    SamplerConfig = Annotated[Union[tuple(SECTIONS.values())], Field(discriminator="kind")]  # noqa: UP007


_SIZES = ("batch_size", "global_batch_size")


class DataloadConfig(Section):
    """Settings of a training job's data."""

    source: SourceConfig | Annotated[tuple[SourceConfig, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="The data to read; several tables [[source]] are joined in their order."
    )
    sampler: SamplerConfig | None = Field(None, description="The order. By default `loader.shuffle` decides.")
    loader: LoaderConfig = Field(default_factory=LoaderConfig, description="How batches are made.")
    remote: RemoteConfig | None = Field(None, description="How data at URLs are read.")

    def sources(self) -> dict[str, SourceConfig]:
        """Return the tables of the section ``source`` by their keys, as messages name them."""
        if isinstance(self.source, tuple):
            return {f"source[{i}]": section for i, section in enumerate(self.source)}
        return {} if self.source is None else {"source": self.source}

    def _names(self) -> tuple[str, ...] | None:
        """Return the names of the sources; None if they have none."""
        sections = self.sources()
        counts = Counter(section.name for section in sections.values())
        if counts.keys() == {None}:
            return None
        for key, section in sections.items():
            if section.name is None or counts[section.name] > 1:
                message = f"{key}.name: sources have different names, or none"
                raise ConfigError(message, key=f"{key}.name", value=section.name)
        return tuple(counts)

    def build(self, open_source: Callable[..., Source[Any]]) -> Loader[Any] | MultiStreamLoader:
        if isinstance(self.sampler, IteratorsConfig):
            if self.source is not None:
                reason = "does not apply to sampler.kind 'iterators', whose streams read the data: remove the section"
                raise ConfigError(f"source {reason}", key="source", value=self.source)
            with named_under("loader", type(self.loader).model_fields):
                return self.sampler.build_loader(self.loader.resolved("loader"))
        if self.source is None:
            raise ConfigError("source is missing: give a table with the path of the data", key="source")
        self._names()  # before data are opened
        with ExitStack() as opened:
            parts: list[Source[Any]] = []
            for key, section in self.sources().items():
                options = section.open_options(key)
                if self.remote is not None and section.has_urls():
                    options["remote"] = self.remote.given()
                with named_under(key, type(section).model_fields), named_under("remote", RemoteOptions.names()):
                    source = open_source(section.path, format=section.format, **options)
                opened.enter_context(source)
                parts.append(source if section.select is None else section.select.apply(source, f"{key}.select"))
            source, numbered = parts[0], getattr(self.sampler, "with_source", False)
            if isinstance(self.source, tuple) or numbered:
                opened.pop_all()  # it closes them
                source = opened.enter_context(ConcatSource(parts, with_source=numbered))
            # Only the loader knows the number of ranks that lanes must suit.
            with (
                named_under("sampler", ("lanes", "with_source")),
                named_under("loader", type(self.loader).model_fields),
            ):
                loader = Loader(source, **self.loader_options(source))
            loader._owned.push(opened.pop_all())  # pyright: ignore[reportPrivateUsage] # only configs open for a loader
            loader._states.sampler_for = lambda earlier: self.loader_options(earlier).get("sampler")  # pyright: ignore[reportPrivateUsage]
        return loader

    def loader_options(self, source: Source[Any]) -> dict[str, Any]:
        """Return the keyword arguments for `dataload.Loader`, except the source."""
        options = self.loader.resolved("loader")
        if self.sampler is None:
            return options
        loader = self.loader
        world_size = rank_and_world_size(loader.rank, loader.world_size, rank_later=True)[1]
        with named_under("loader", _SIZES):
            rows = rows_per_rank(loader.batch_size, loader.global_batch_size, world_size)  # None: the sampler decides
        context = BuildContext(
            key="sampler",
            source=source,
            parts=source.sources if isinstance(source, ConcatSource) else (source,),
            seed=loader.seed,
            batch_size=rows,
            world_size=world_size,
            names=self._names(),
        )
        built = self.sampler.build(context)
        if isinstance(built, BatchPlanner):
            for name in _SIZES:
                options.pop(name, None)
        return {**options, "sampler": built}


def tables() -> dict[str, Collection[str]]:
    """Return the keys of each table, by its name in the locations of pydantic's findings."""
    sections: dict[str, Any] = {
        "source": SourceConfig,
        "loader": LoaderConfig,
        "remote": RemoteConfig,
        "": DataloadConfig,
    }
    sections["Fleet"] = value_section(Fleet)
    found: dict[str, Collection[str]] = {name: model.model_fields for name, model in {**SECTIONS, **sections}.items()}
    return {**found, "sampler": {key for model in SECTIONS.values() for key in model.model_fields}}
