"""The sections of a config as pydantic models. Imported only when a config is read: pydantic takes 60 ms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from dataload.collate import Collate, Policy
from dataload.config.references import REFERENCE_PATTERN, resolve_reference
from dataload.formats.tar import OnDamage
from dataload.samplers import GlobalShuffle, Sequential
from dataload.samplers.batch import Tail
from dataload.sources.tar import Missing
from dataload.types import Sampler

__all__ = [
    "DataloadConfig",
    "GlobalShuffleConfig",
    "LoaderConfig",
    "SamplerConfig",
    "SequentialConfig",
    "SourceConfig",
]

Reference: TypeAlias = Annotated[str, Field(pattern=REFERENCE_PATTERN, examples=["package.module:function"])]
Texts: TypeAlias = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Extents: TypeAlias = Annotated[tuple[int, ...], Field(strict=False)]


class _Section(BaseModel):
    # Strict: "64" is no number here and 1 is not true, for a typing error is likelier than such a wish.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def given(self) -> dict[str, Any]:
        """The settings that were made, so that defaults stay where they are defined."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}


class SourceConfig(_Section):
    """What is read. Keys below `options` belong to formats; a format refuses those that it does not have."""

    path: str | Texts = Field(
        description="A path, pattern, directory, 'format:path', or a list; relative to the config file."
    )
    format: str | None = Field(None, description="Name of the format; by default the path decides, then the content.")
    fields: Texts | None = Field(None, description="Names of the fields to read; by default all.")
    shapes: dict[str, Extents] | None = Field(
        None,
        description="Syrah: field -> shape of a record, for files without shapes; one extent may be -1.",
    )
    codec: str | None = Field(
        None,
        description="LMDB, ArrayRecord: turns a record's bytes into fields; a name or 'module:function'.",
        examples=["tensorprotos", "example", "msgpack", "npz", "raw"],
    )
    decode: str | dict[str, str] | None = Field(
        None, description="tar: 'auto', or extension -> name of a decoder or 'module:function'."
    )
    index: str | Texts | Literal[False] | None = Field(
        None, description="tar: index files; by default those beside the archives; false scans the archives."
    )
    missing: Missing = Field("error", description="tar: what becomes of samples that lack a field.")
    case_sensitive: bool = Field(True, description="tar: false reads names of fields in lower case.")
    on_damage: OnDamage = Field("error", description="tar: 'stop' ends an archive at a damaged member.")
    verify_index: bool = Field(True, description="tar: compare the index with the archive.")
    subdatabase: str | None = Field(None, description="LMDB: name of the database to read.")
    db_num: int | None = Field(None, ge=1, description="TorchRecord: number of sub-databases; by default it is found.")
    reader_options: str | None = Field(None, description="ArrayRecord: options of its reader, in its own syntax.")
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Other options of the format, such as those of a plug-in."
    )

    def open_options(self) -> dict[str, Any]:
        """Keyword arguments for `dataload.open`, without path and format.

        Raises:
            ConfigError: A codec or decoder ``"module:function"`` cannot be imported.
        """
        options = self.given()
        for name in ("path", "format", "options"):
            options.pop(name, None)
        for name in ("codec", "decode"):
            if name in options:
                options[name] = _resolve(options[name], f"source.{name}")
        return {**options, **self.options}


class SequentialConfig(_Section):
    """Index order."""

    kind: Literal["sequential"]

    def build(self, length: int, seed: int) -> Sampler:  # noqa: ARG002 - every kind is built alike
        """The sampler for `length` records."""
        return Sequential(length)


class GlobalShuffleConfig(_Section):
    """All records in a random order, another one each epoch."""

    kind: Literal["global_shuffle"]
    seed: int | None = Field(None, description="Of the order; by default loader.seed.")

    def build(self, length: int, seed: int) -> Sampler:
        """The sampler for `length` records."""
        return GlobalShuffle(length, seed if self.seed is None else self.seed)


SamplerConfig: TypeAlias = Annotated[SequentialConfig | GlobalShuffleConfig, Field(discriminator="kind")]


class LoaderConfig(_Section):
    """How batches are made: the arguments of `dataload.Loader`."""

    batch_size: int = Field(ge=1, description="Rows per batch of one rank.")
    shuffle: bool = Field(False, description="Each epoch in another order; not together with a section 'sampler'.")
    seed: int = Field(0, description="Of the order and of the transforms' random numbers.")
    tail: Tail | None = Field(
        None,
        description="What becomes of the rows behind the last full batch; 'partial', on several ranks 'pad'.",
    )
    num_workers: int = Field(0, ge=0, description="Workers that make batches ahead; 0: the consumer's own thread.")
    executor: Literal["threads"] = Field("threads", description="Where workers run.")
    prefetch: int = Field(2, ge=1, description="Batches ahead, per worker.")
    transform: Reference | Annotated[tuple[Reference, ...], Field(strict=False)] | None = Field(
        None, description="Sample -> sample: a function, or several in turn."
    )
    batch_transform: Reference | None = Field(None, description="Batch -> batch.")
    collate: Reference | dict[str, Policy] | None = Field(
        None, description="Samples -> batch: a function; or field -> what to do with shapes that differ."
    )
    rank: int | None = Field(None, ge=0, description="Number of this process; by default from the environment.")
    world_size: int | None = Field(None, ge=1, description="Number of processes; by default from the environment.")

    def loader_options(self) -> dict[str, Any]:
        """Keyword arguments for `dataload.Loader`, functions imported.

        Raises:
            ConfigError: A function cannot be imported.
        """
        options = self.given()
        for name in ("transform", "batch_transform", "collate"):
            if name in options:
                value = options[name]
                table = isinstance(value, Mapping)
                options[name] = Collate(policies=value) if table else _resolve(value, f"loader.{name}")
        return options


class DataloadConfig(_Section):
    """Settings of a training job's data."""

    source: SourceConfig = Field(description="What is read.")
    sampler: SamplerConfig | None = Field(None, description="The order; by default loader.shuffle decides.")
    loader: LoaderConfig = Field(description="How batches are made.")

    def loader_options(self, length: int) -> dict[str, Any]:
        """Keyword arguments for `dataload.Loader`, for a source of `length` records.

        Raises:
            ConfigError: A function cannot be imported.
        """
        options = self.loader.loader_options()
        if self.sampler is not None:
            options["sampler"] = self.sampler.build(length, self.loader.seed)
        return options

    def contradictions(self) -> Iterator[tuple[str, Any, str]]:
        """Settings that are right alone and wrong together: key, value, and why."""
        loader, source = self.loader, self.source
        if self.sampler is not None and loader.shuffle:
            yield (
                "loader.shuffle",
                True,
                "contradicts the section 'sampler', which chooses the order: leave one out",
            )
        if (loader.rank is None) != (loader.world_size is None):
            name = "rank" if loader.world_size is None else "world_size"
            yield (
                f"loader.{name}",
                getattr(loader, name),
                "rank and world_size go together: give both or none",
            )
        if loader.rank is not None and loader.world_size is not None and loader.rank >= loader.world_size:
            yield "loader.rank", loader.rank, f"expected a number below world_size, {loader.world_size}"
        for name in source.options.keys() & (SourceConfig.model_fields.keys()):
            yield f"source.options.{name}", source.options[name], f"belongs one level up: source.{name}"


def _resolve(value: Any, key: str) -> Any:
    """Functions for ``"module:function"``, in lists and tables too; other text is a name that is built in."""
    if isinstance(value, Mapping):
        return {name: _resolve(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, tuple):
        return [_resolve(item, key) for item in value]
    return resolve_reference(value, key) if ":" in value else value
