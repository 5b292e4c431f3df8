"""The section ``sampler`` of the kinds ``streams`` and ``iterators``: rows that continue."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from dataload._util.settings import check_count
from dataload.config.derive import NpyPath
from dataload.config.problems import named_as, named_under
from dataload.config.references import REFERENCE_PATTERN, read_array, resolve_reference
from dataload.config.samplers import BuildContext, SamplerSection, kind_of
from dataload.errors import ConfigError
from dataload.samplers import BatchPlanner
from dataload.sources.views.sequences import sequence_lengths
from dataload.storage.local.record_files import open_regular
from dataload.streams import MultiStreamLoader, RowMixture, StreamSampler

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
