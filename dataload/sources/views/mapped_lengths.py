"""Lengths of what a transform makes of records, kept under the digest of the transform and the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dataload._util.code_digest import code_digest
from dataload.catalog.arrays import IndexKey, recall, store_cached
from dataload.errors import ConfigError, closest
from dataload.sources.base import Source
from dataload.storage.array_file import CachedTable
from dataload.transforms import NamedTransform, compose
from dataload.types import Int64Array


def measured_transform(transform: Any) -> tuple[NamedTransform, ...]:
    """Return the transforms whose output is measured; transforms that draw random numbers are refused."""
    functions = compose(transform)
    for each in functions:
        if each.takes_context:
            message = f"the transform {each.name!r} takes a context, so lengths may change with the epoch"
            raise ConfigError(f"{message}: apply it by `dataload convert --map`, or pack within steps", key="transform")
    return functions


def lengths_of(sample: Any, functions: tuple[NamedTransform, ...]) -> dict[str, int]:
    """Return the lengths of the fields that transforms make of a sample, if they have one."""
    for each in functions:
        sample = each.function(sample)
    if not isinstance(sample, Mapping):
        raise ConfigError(
            f"a transform whose output is measured must return a dict of fields, got {type(sample).__name__}"
        )
    return {name: len(value) for name, value in sample.items() if hasattr(value, "__len__")}


def key_of(source: Source[Any], transform: Any) -> IndexKey | None:
    """Return the key of the lengths; None if the data are not in files, or what decides the lengths is unknown."""
    files = source._files()  # pyright: ignore[reportPrivateUsage] # for sources
    try:
        options = "lengths", code_digest([each.function for each in compose(transform)]), source.fingerprint()
    except ValueError:
        return None
    return IndexKey.of_filter(files, options) if files else None


def recall_lengths(key: IndexKey | None, records: int) -> dict[str, Int64Array] | None:
    """Return the lengths that are kept, by field."""

    def unpack(table: CachedTable) -> dict[str, Int64Array] | None:
        found = {name: table.arrays[name].astype(np.int64) for name in table.arrays}
        return found if all(each.shape == (records,) and (each >= 0).all() for each in found.values()) else None

    return recall(key, unpack)


def keep_lengths(key: IndexKey | None, lengths: Mapping[str, Int64Array]) -> bool:
    """Keep lengths; return whether there is a place for them."""
    if key is not None:
        store_cached(key, CachedTable({name: each.astype(np.uint32) for name, each in lengths.items()}, {}))
    return recall_lengths(key, len(next(iter(lengths.values()), ()))) is not None


def mapped_lengths(source: Source[Any], field: str, transform: Any) -> Int64Array:
    """Return the lengths of a field of what a transform makes of each record, from where they are kept."""
    functions, key = measured_transform(transform), key_of(source, transform)
    found = recall_lengths(key, len(source))
    if found is None:
        lengths: dict[str, list[int]] = {}
        for record in source:
            for name, length in lengths_of(record, functions).items():
                lengths.setdefault(name, []).append(length)
        found = {name: np.array(each, np.int64) for name, each in lengths.items() if len(each) == len(source)}
        keep_lengths(key, found)
    if field not in found and len(source):
        raise ConfigError(f"the transform makes no field {field!r}: {closest(field, found)}", key="field", value=field)
    return found.get(field, np.empty(0, np.int64))
