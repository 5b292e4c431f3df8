"""The sections of a config as pydantic models. Imported only when a config is read: pydantic takes 60 ms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import ConfigDict, Field

from dataload.collate import Collate, Policy
from dataload.config.problems import MISSING, Problem
from dataload.config.references import REFERENCE_PATTERN, resolve_reference
from dataload.config.sampler_section import BuildContext
from dataload.config.samplers import LengthBucketsConfig, OrderConfig, PackingConfig
from dataload.config.section import Section
from dataload.config.streams import StreamsConfig
from dataload.executors import StartMethod
from dataload.loader.order import Shuffle, rank_and_world_size
from dataload.loader.rescue import OnError
from dataload.loader.workers import ExecutorName
from dataload.samplers import BatchPlanner
from dataload.samplers.batch import Tail
from dataload.sources.base import Source
from dataload.sources.concat import ConcatSource
from dataload.sources.tar.header import OnDamage
from dataload.sources.tar.reader import Missing
from dataload.sources.tokens.reader import Ends

__all__ = ["DataloadConfig", "LoaderConfig", "SourceConfig", "missing_settings"]

SamplerConfig: TypeAlias = Annotated[
    OrderConfig | LengthBucketsConfig | PackingConfig | StreamsConfig,
    Field(discriminator="kind"),
]
Reference: TypeAlias = Annotated[str, Field(pattern=REFERENCE_PATTERN, examples=["package.module:function"])]
Texts: TypeAlias = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
Extents: TypeAlias = Annotated[tuple[int, ...], Field(strict=False)]


class SourceConfig(Section):
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
    window: int | None = Field(None, ge=1, description="tokens: how many a record has; T + 1 to predict T.")
    stride: int | None = Field(
        None, ge=1, description="tokens: from one window to the next; by default one less than the window."
    )
    dtype: str = Field("uint16", description="tokens: integer type of raw files; .npy files say their own.")
    documents: str | Texts | None = Field(
        None, description="tokens: .npy files of the starts of documents, one for each file; relative to the config."
    )
    end_token: int | None = Field(None, description="tokens: what ends a document, and belongs to it.")
    ends: Ends = Field("across", description="tokens: what windows do at the end of a document.")
    pad_token: int = Field(0, description="tokens: what fills windows where ends is 'pad'.")
    field: str = Field("tokens", description="tokens: name of the field.")
    cache: bool = Field(
        True, description="tar, LMDB: keep what opening large files finds out in a hidden file, for the next time."
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Other options of the format, such as those of a plug-in."
    )

    def open_options(self, key: str = "source") -> dict[str, Any]:
        """Keyword arguments for `dataload.open`, without path and format.

        Args:
            key: Of this table, for messages.

        Raises:
            ConfigError: A codec or decoder ``"module:function"`` cannot be imported.
        """
        options = self.given()
        for name in ("path", "format", "options"):
            options.pop(name, None)
        for name in ("codec", "decode"):
            if name in options:
                options[name] = _resolve(options[name], f"{key}.{name}")
        return {**options, **self.options}

    def contradictions(self, key: str) -> Iterator[Problem]:
        """Settings that are right alone and wrong together, of this table at `key`."""
        for name in self.options.keys() & SourceConfig.model_fields.keys():
            yield Problem(f"{key}.options.{name}", self.options[name], f"belongs one level up: {key}.{name}")


class LoaderConfig(Section):
    """How batches are made: the arguments of `dataload.Loader`."""

    batch_size: int | None = Field(
        None, ge=1, description="Rows per batch of one rank; not where max_tokens of length_buckets decides."
    )
    shuffle: bool | Shuffle = Field(
        False,
        description="Each epoch in another order: 'global' mixes all records, 'shards' reads files in turn through a "
        "pool, true leaves it to the source. Not together with a section 'sampler'.",
    )
    seed: int = Field(0, description="Of the order and of the transforms' random numbers.")
    tail: Tail | None = Field(
        None,
        description="What becomes of the rows behind the last full batch; 'partial', on several ranks 'pad'.",
    )
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0, description="Workers that make batches ahead; 0: the consumer's own thread; 'auto': as many as help."
    )
    executor: ExecutorName = Field(
        "threads", description="Where workers run; 'processes' for transforms that hold the GIL."
    )
    start_method: StartMethod = Field("forkserver", description="How worker processes come into being.")
    prefetch: int = Field(2, ge=1, description="Batches ahead, per worker.")
    prefetch_bytes: int = Field(1 << 30, ge=1, description="Bytes of batches ahead, about, in all.")
    in_order: bool = Field(True, description="false: batches as they are made, within an epoch.")
    epochs: int | None = Field(None, ge=0, description="How many there will be; by default nobody knows.")
    timeout: float | None = Field(
        None, gt=0, description="Seconds after which a batch that does not come is an error; by default a warning."
    )
    on_error: OnError = Field("raise", description="What becomes of a record that cannot be read or transformed.")
    max_bad: int = Field(1000, ge=0, description="Records left out or replaced after which it is an error.")
    error_report: str | None = Field(None, description="A JSONL file that bad records are added to.")
    exclude: str | Annotated[tuple[int, ...], Field(strict=False)] | None = Field(
        None, description="Records that are not to be tried: indices, or the path of an error_report."
    )
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


class DataloadConfig(Section):
    """Settings of a training job's data."""

    # `missing_settings` says the same in words.
    model_config = ConfigDict(
        json_schema_extra={
            "if": {
                "properties": {"sampler": {"properties": {"kind": {"const": "length_buckets"}}, "required": ["kind"]}},
                "required": ["sampler"],
            },
            "else": {"properties": {"loader": {"required": ["batch_size"]}}},
        }
    )

    source: SourceConfig | Annotated[tuple[SourceConfig, ...], Field(strict=False, min_length=1)] = Field(
        description="What is read; several tables [[source]] are joined in their order."
    )
    sampler: SamplerConfig | None = Field(None, description="The order; by default loader.shuffle decides.")
    loader: LoaderConfig = Field(description="How batches are made.")

    def sources(self) -> dict[str, SourceConfig]:
        """The tables of the section ``source`` by their keys, as messages name them."""
        if isinstance(self.source, SourceConfig):
            return {"source": self.source}
        return {f"source[{i}]": section for i, section in enumerate(self.source)}

    def loader_options(self, source: Source[Any]) -> dict[str, Any]:
        """Keyword arguments for `dataload.Loader`.

        Args:
            source: What the section ``source`` stands for.

        Raises:
            ConfigError: A function cannot be imported, a sampler does not fit the source, or a file that it needs
                cannot be read.
        """
        options = self.loader.loader_options()
        if self.sampler is None:
            return options
        context = BuildContext(
            key="sampler",
            source=source,
            parts=source.sources if isinstance(source, ConcatSource) else (source,),
            seed=self.loader.seed,
            batch_size=self.loader.batch_size,
            world_size=rank_and_world_size(self.loader.rank, self.loader.world_size)[1],
        )
        built = self.sampler.build(context)
        if not isinstance(built, BatchPlanner):
            return {**options, "sampler": built}
        options.pop("batch_size", None)
        return {**options, "batch_sampler": built}

    def contradictions(self) -> Iterator[Problem]:
        """Settings that are right alone and wrong together."""
        loader = self.loader
        for key, section in self.sources().items():
            yield from section.contradictions(key)
        if self.sampler is not None:
            yield from self.sampler.contradictions("sampler", len(self.source) if isinstance(self.source, tuple) else 0)
            if loader.shuffle:
                yield Problem(
                    "loader.shuffle",
                    loader.shuffle,
                    "contradicts the section 'sampler', which chooses the order: leave one out",
                )
        if isinstance(self.sampler, LengthBucketsConfig):
            if self.sampler.max_tokens is None and loader.batch_size is None:
                yield Problem("loader.batch_size", MISSING, "give it, or sampler.max_tokens")
            if self.sampler.max_tokens is not None and loader.batch_size is not None:
                yield Problem(
                    "loader.batch_size",
                    loader.batch_size,
                    "contradicts sampler.max_tokens, which decides how many rows a batch has: leave one out",
                )
        if (loader.rank is None) != (loader.world_size is None):
            name = "rank" if loader.world_size is None else "world_size"
            yield Problem(f"loader.{name}", getattr(loader, name), "rank and world_size go together: give both or none")
        if loader.rank is not None and loader.world_size is not None and loader.rank >= loader.world_size:
            yield Problem("loader.rank", loader.rank, f"expected a number below world_size, {loader.world_size}")


def missing_settings(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What no section can tell to be missing by itself, as pydantic's findings: how many rows a batch has."""
    loader, sampler = data.get("loader"), data.get("sampler")
    kind = cast("dict[str, Any]", sampler).get("kind") if isinstance(sampler, dict) else None
    if not isinstance(loader, dict) or kind == "length_buckets":
        return []
    if cast("dict[str, Any]", loader).get("batch_size") is not None:
        return []
    return [{"type": "missing", "loc": ("loader", "batch_size")}]


def _resolve(value: Any, key: str) -> Any:
    """Functions for ``"module:function"``, in lists and tables too; other text is a name that is built in."""
    if isinstance(value, Mapping):
        return {name: _resolve(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, tuple):
        return [_resolve(item, key) for item in value]
    return resolve_reference(value, key) if ":" in value else value
