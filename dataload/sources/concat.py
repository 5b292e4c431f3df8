"""Concatenation of sources."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from dataload._util.fingerprint import digest
from dataload._util.indexing import split_by_shard
from dataload.collate import scatter_columns
from dataload.errors import ConfigError
from dataload.sources.base import Source
from dataload.sources.classes import common_classes
from dataload.sources.location import Location, shard_of
from dataload.sources.parts_ahead import SeveralAhead, StepsByPart
from dataload.storage.remote.traffic import Traffic
from dataload.types import AheadReader, Batch, FieldSpec, Int64Array, ReadsAhead, StepsAhead

_KEY = "__key__"


class ConcatSource(Source[Any]):
    """The records of several sources, one source after the other. Formats may differ, fields may not.

    Only ``__key__`` is left out if some sources have it and others do not.

    Args:
        sources: At least one built-in source.

    Raises:
        ConfigError: There is no source. On first use: labels stand for other classes in one source than in another.
    """

    def __init__(self, sources: Sequence[Source[Any]]) -> None:
        if not sources:
            raise ConfigError("a ConcatSource needs at least one source, got none", key="sources", value=sources)
        self._sources = tuple(sources)
        self._ends: Int64Array | None = None
        self._drops_key: bool | None = None  # once it is known

    @property
    def sources(self) -> tuple[Source[Any], ...]:
        """The concatenated sources, in index order."""
        return self._sources

    def _bounds(self) -> Int64Array:
        if self._ends is None:
            ends = np.cumsum([len(source) for source in self._sources], dtype=np.int64)
            common_classes(((f"source {n}", source.fields) for n, source in enumerate(self._sources)), "sources")
            self._ends = ends
        return self._ends

    def _without_key(self, record: Any) -> Any:
        """Return a record or a batch without its key, unless all sources have keys."""
        if self._drops_key is None:
            keyed = {_KEY in source.fields for source in self._sources if source.fields}
            self._drops_key = len(keyed) > 1
        if self._drops_key and isinstance(record, dict):
            cast("dict[str, Any]", record).pop(_KEY, None)
        return record

    def __len__(self) -> int:
        return int(self._bounds()[-1])

    def _read(self, indices: Int64Array) -> list[Any]:
        records: list[Any] = [None] * len(indices)
        for part, local, where in split_by_shard(self._bounds(), indices):
            for row, record in zip(where.tolist(), self._sources[part].read(local), strict=True):
                records[row] = self._without_key(record)
        return records

    def _read_columns(self, indices: Int64Array, fields: tuple[str, ...] | None) -> Batch:
        pieces = (
            (where, self._sources[part].read_batch(local, fields))
            for part, local, where in split_by_shard(self._bounds(), indices)
        )
        if fields is None:
            pieces = ((where, self._without_key(batch)) for where, batch in pieces)
        return scatter_columns(pieces, len(indices))

    def read_ahead(
        self, steps: Iterator[StepsAhead], fields: Sequence[str] | None, *, here: bool, share: float = 1.0
    ) -> AheadReader | None:
        """See `dataload.types.ReadsAhead`; sources share the cache by their numbers of records."""
        ends = self._bounds()
        parts = StepsByPart(steps, ends)
        found: list[AheadReader] = []
        try:
            for part, source in enumerate(self._sources):
                reader = None
                if isinstance(source, ReadsAhead):
                    own = min(1.0, share * max(1, len(source)) / max(1, len(self)))
                    reader = source.read_ahead(parts.of(part), fields, here=here, share=own)
                if reader is None:
                    parts.drop(part)
                else:
                    found.append(reader)
        except BaseException:
            for reader in found:
                reader.close()
            raise
        return SeveralAhead(found) if found else None

    @property
    def fields(self) -> Mapping[str, FieldSpec]:
        """Fields of the first source."""
        return self._without_key(dict(self._sources[0].fields))

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Number of records per shard of all sources, in index order."""
        return tuple(length for source in self._sources for length in source.shard_lengths)

    def _locate(self, index: int) -> Location:
        part, local = shard_of(self._bounds(), index)
        return self._sources[part].locate(local)

    @property
    def reads_in_order(self) -> bool:
        """See `Source.reads_in_order`: whether it is true of any source."""
        return any(source.reads_in_order for source in self._sources)

    def _traffics(self) -> Sequence[Traffic]:
        # Sources may share one.
        return [*{id(each): each for source in self._sources for each in source._traffics()}.values()]

    def _files(self) -> Sequence[str]:
        files = [source._files() for source in self._sources]
        return [file for some in files for file in some] if all(files) else ()

    def fingerprint(self) -> str:
        return digest("concat", *(source.fingerprint() for source in self._sources))

    def close(self) -> None:
        """Close all sources."""
        for source in self._sources:
            source.close()

    def __repr__(self) -> str:
        return f"ConcatSource({len(self._sources)} sources)"
