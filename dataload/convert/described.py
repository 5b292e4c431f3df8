"""Describe shards by opening them: their fields, and the marks of their content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from dataload.catalog.checks import ContentMark
from dataload.catalog.facts import Evidence, ShardFacts
from dataload.catalog.fields import spec_of
from dataload.sources.file_source import FileSource
from dataload.sources.format import Format
from dataload.types import FieldSpec


def with_etag(entry: Format, shard: ShardFacts) -> ShardFacts:
    """Return facts for a manifest, which knows no times, and ETags of single files only."""
    return replace(shard, evidence=Evidence(0, shard.evidence.etag if entry.directory_file is None else None))


def fields_of(entry: Format, paths: Iterable[str], options: Mapping[str, Any]) -> Mapping[str, FieldSpec]:
    """Return the fields of the first shard with records; none if records are bytes."""
    for path in paths:
        with entry.open([path], options=without_cache(entry, options)) as source:
            if len(source):
                if source.fields:
                    return source.fields
                record = source[0]
                known = cast("Mapping[str, Any]", record if isinstance(record, Mapping) else {})
                return {name: spec_of(value) for name, value in known.items()}
    return {}


def contents_of(entry: Format, paths: Sequence[str], options: Mapping[str, Any]) -> list[ContentMark | None]:
    """Return the marks of the shards' content, for the data set's fingerprint."""
    with entry.open(paths, options=without_cache(entry, options)) as source:
        return [*source.shard_identities()] if isinstance(source, FileSource) else [None] * len(paths)


def without_cache(entry: Format, options: Mapping[str, Any]) -> dict[str, Any]:
    return {**({"cache": False} if "cache" in entry.reader_options.names() else {}), **options}
