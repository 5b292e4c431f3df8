"""The sections of a config as pydantic models. Imported only when a config is read: pydantic takes 60 ms."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, Union, cast

from pydantic import ConfigDict, Field, create_model, model_validator

from dataload.config.derive import Section, settings_of
from dataload.config.problems import MISSING, Problem, named_under
from dataload.config.samplers import SECTIONS, BuildContext
from dataload.config.streams import IteratorsConfig
from dataload.executors import StartMethod
from dataload.loader.loader import Loader
from dataload.loader.order import rank_and_world_size, rows_per_rank
from dataload.samplers import BatchPlanner
from dataload.sources.base import Source
from dataload.sources.discover import split_prefix
from dataload.sources.registry import built_in_formats, format_names, get_format
from dataload.sources.views.concat import ConcatSource
from dataload.storage import RemoteOptions, is_url
from dataload.streams import MultiStreamLoader

Texts: TypeAlias = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


_BUILT_IN = {None, *(entry.name for entry in built_in_formats())}


class _SourceSection(Section):
    path: str | Texts = Field(
        description="A path, pattern, directory, 'format:path', or a list; relative to the config file."
    )
    format: str | None = Field(None, description="Name of the format. By default the path decides, then the content.")
    fields: Texts | None = Field(None, description="Names of the fields to read. By default all.")
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Options of a format that another package adds."
    )
    storage: dict[str, Any] | None = Field(
        None, repr=False, description="Arguments of obstore's stores for URLs: endpoint, region, skip_signature, ..."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_options(cls, data: Any) -> Any:
        """Accept the options of a format that another package adds beside those of the built-in formats."""
        if not isinstance(data, dict):
            return data
        table = cast("dict[str, Any]", data)
        name = table.get("format") or split_prefix(str(table.get("path")))[0]
        if name in _BUILT_IN or name not in format_names() or not isinstance(table.get("options", {}), dict):
            return table
        own = table.keys() & get_format(name).reader_options.names() - cls.model_fields.keys()
        rest = {key: value for key, value in table.items() if key not in own}
        return {**rest, "options": {**{key: table[key] for key in own}, **table.get("options", {})}}

    def open_options(self, key: str = "source") -> dict[str, Any]:
        """Return the keyword arguments for `dataload.open`, without path and format; `key` names this table."""
        options = self.resolved(key)
        storage = options.pop("storage", None)
        for name in ("path", "format", "options"):
            options.pop(name, None)
        return {**options, **self.options, **({} if storage is None else {"storage_options": storage})}

    def has_urls(self) -> bool:
        """Return whether some of the data are at URLs."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return any(is_url(split_prefix(path)[1]) for path in paths)

    def contradictions(self, key: str) -> Iterator[Problem]:
        """Find settings of this table, at `key`, that are valid alone and wrong together."""
        for name in self.options.keys() & type(self).model_fields.keys():
            yield Problem(f"{key}.options.{name}", self.options[name], f"belongs one level up: {key}.{name}")


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
    SourceConfig: TypeAlias = Any  # attributes are those of the section, and the options of all formats
    LoaderConfig: TypeAlias = Any  # attributes are the arguments of `Loader`
    SamplerConfig: TypeAlias = Any
    RemoteConfig: TypeAlias = Any  # attributes are those of `RemoteOptions`
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


def _unless(kind: str, requirement: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of a requirement for all kinds of samplers but one; `missing_settings` says the same in words."""
    sampler = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
    return {"if": {"properties": {"sampler": sampler}, "required": ["sampler"]}, "else": requirement}


_SIZES = ("batch_size", "global_batch_size")
_REQUIRED: list[Any] = [
    _unless(
        "length_buckets",
        {"properties": {"loader": {"anyOf": [{"required": [name]} for name in _SIZES]}}, "required": ["loader"]},
    ),
    _unless("iterators", {"required": ["source"]}),
]


class DataloadConfig(Section):
    """Settings of a training job's data."""

    model_config: ClassVar[ConfigDict] = ConfigDict(json_schema_extra={"allOf": _REQUIRED})

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

    def build(self, open_source: Callable[..., Source[Any]]) -> Loader[Any] | MultiStreamLoader:
        """Open the sources with `dataload.open`, and build the loader."""
        if isinstance(self.sampler, IteratorsConfig):
            with named_under("loader", type(self.loader).model_fields):
                return self.sampler.build_loader(self.loader.resolved("loader"))
        with ExitStack() as opened:
            parts: list[Source[Any]] = []
            for key, section in self.sources().items():
                options = section.open_options(key)
                if self.remote is not None and section.has_urls():
                    options["remote"] = self.remote.given()
                with named_under(key, type(section).model_fields), named_under("remote", RemoteOptions.names()):
                    source = open_source(section.path, format=section.format, **options)
                parts.append(opened.enter_context(source))
            source = ConcatSource(parts) if isinstance(self.source, tuple) else parts[0]
            options = self.loader_options(source)
            # Only the loader knows the number of ranks that lanes must suit.
            with named_under("sampler", ("lanes",)), named_under("loader", type(self.loader).model_fields):
                loader = Loader(source, **options)
            loader._owned.push(opened.pop_all())  # pyright: ignore[reportPrivateUsage] # only configs open for a loader
        return loader

    def loader_options(self, source: Source[Any]) -> dict[str, Any]:
        """Return the keyword arguments for `dataload.Loader`, except the source."""
        options = self.loader.resolved("loader")
        if self.sampler is None:
            return options
        context = BuildContext(
            key="sampler",
            source=source,
            parts=source.sources if isinstance(source, ConcatSource) else (source,),
            seed=self.loader.seed,
            batch_size=self.rows_per_rank(),
            world_size=rank_and_world_size(self.loader.rank, self.loader.world_size)[1],
        )
        built = self.sampler.build(context)
        if isinstance(built, BatchPlanner):
            for name in _SIZES:
                options.pop(name, None)
        return {**options, "sampler": built}

    def rows_per_rank(self) -> int | None:
        """Return the rows per batch of one rank; None if the sampler decides."""
        loader = self.loader
        world_size = rank_and_world_size(loader.rank, loader.world_size)[1]
        with named_under("loader", _SIZES):
            return rows_per_rank(loader.batch_size, loader.global_batch_size, world_size)

    def contradictions(self) -> Iterator[Problem]:
        """Find settings that are valid alone and wrong together."""
        sampler, loader = cast("Any", self.sampler), self.loader
        kind: str | None = getattr(sampler, "kind", None)
        for key, section in self.sources().items():
            if kind == "iterators":
                reason = "does not apply to sampler.kind 'iterators', whose streams read the data: remove the section"
                yield Problem(key, section.path, reason)
            yield from section.contradictions(key)
        if kind is not None:
            yield from sampler.contradictions("sampler", len(self.source) if isinstance(self.source, tuple) else 0)
        if kind == "iterators":
            yield from sampler.inapplicable(loader.given())
        elif kind is not None and loader.shuffle:
            reason = "conflicts with the section 'sampler', which chooses the order: remove one of them"
            yield Problem("loader.shuffle", loader.shuffle, reason)
        sizes = {name: getattr(loader, name) for name in _SIZES if getattr(loader, name) is not None}
        if len(sizes) > 1:
            reason = "conflicts with loader.batch_size, which is for one rank: remove one of them"
            yield Problem("loader.global_batch_size", loader.global_batch_size, reason)
        if kind == "length_buckets":
            if sampler.max_tokens is None and not sizes:
                yield Problem("loader.batch_size", MISSING, "give it, or sampler.max_tokens")
            if sampler.max_tokens is not None:
                reason = "conflicts with sampler.max_tokens, which decides how many rows a batch has: remove one"
                yield from (Problem(f"loader.{name}", value, reason) for name, value in sizes.items())
        if (loader.rank is None) != (loader.world_size is None):
            name = "rank" if loader.world_size is None else "world_size"
            yield Problem(f"loader.{name}", getattr(loader, name), "rank and world_size go together: give both or none")
        elif loader.rank is not None and loader.rank >= loader.world_size:
            yield Problem("loader.rank", loader.rank, f"expected a number below world_size, {loader.world_size}")


def missing_settings(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return pydantic's findings for required settings that depend on another section: source and batch size."""
    loader, sampler = data.get("loader"), data.get("sampler")
    kind = cast("dict[str, Any]", sampler).get("kind") if isinstance(sampler, dict) else None
    sized = not isinstance(loader, dict) or any(cast("dict[str, Any]", loader).get(name) is not None for name in _SIZES)
    missing = {
        ("source",): kind != "iterators" and data.get("source") is None,
        ("loader", "batch_size"): kind != "length_buckets" and not sized,
    }
    return [{"type": "missing", "loc": location} for location in missing if missing[location]]
