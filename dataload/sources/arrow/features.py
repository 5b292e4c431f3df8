"""What Hugging Face's library writes about columns, and the decoders of fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dataload.codecs.arrow import spec_of_type
from dataload.codecs.decoders import DECODERS, Decoder, find_decoder, for_extension
from dataload.errors import ConfigError, closest
from dataload.sources.arrow.format import TableOptions


def features_of(schema: Any) -> Mapping[str, Any]:
    """Return what Hugging Face's library has written about the columns."""
    try:
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def shape_of(feature: Any) -> tuple[int, ...] | None:
    """Return the shape that Hugging Face declares for a list of lists, if it is constant."""
    shape = feature.get("shape") if isinstance(feature, dict) else None
    if isinstance(shape, list) and shape and all(type(extent) is int and extent > 0 for extent in shape):
        return tuple(shape)
    return None


def classes_of(feature: Any) -> tuple[str, ...] | None:
    """Return the names of classes that Hugging Face declares for a column of numbers."""
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    return tuple(names) if isinstance(names, list) and all(type(name) is str for name in names) else None


def plan_decoders(schema: Any, features: Mapping[str, Any], options: TableOptions, path: str) -> dict[str, Decoder]:
    """Return the decoder of each field that has one."""
    chosen: Mapping[str, Any] = options.decode if isinstance(options.decode, Mapping) else {}
    if options.decode == "auto":
        kinds = {name: str(each.get("_type")).lower() for name, each in features.items() if isinstance(each, dict)}
        chosen = {name: kind for name, kind in kinds.items() if kind in DECODERS and name in schema.names}
    for name in chosen:
        spec = spec_of_type(schema.field(name).type) if name in schema.names else None
        if spec is None or spec.dtype != "bytes":
            known = closest(name, schema.names) if spec is None else f"it is {spec}, and decoders take bytes"
            raise ConfigError(f"decode names the field {name!r} of {path}: {known}", key="decode", value=name)
    return {
        name: for_extension(find_decoder(what, name), "", options.max_record_bytes) for name, what in chosen.items()
    }
