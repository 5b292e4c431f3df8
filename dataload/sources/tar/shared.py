"""The samples of many archives as one table, if all of their samples have the same components."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataload.sources.directory import WITHIN, ShardDirectory, ShardNumbers
from dataload.sources.tar.header import BLOCK
from dataload.sources.tar.samples import Keys, SampleTable, key_column
from dataload.storage.core import core
from dataload.types import Array, Int64Array, TextColumn


class SharedSamples:
    """The tables of many archives, with the methods of `SampleTable`. Samples, components and offsets are places."""

    ends = None

    def __init__(self, directory: ShardDirectory, table: SampleTable) -> None:
        self.extensions: tuple[str, ...] = table.extensions
        self.codes: npt.NDArray[np.unsignedinteger[Any]] = table.codes
        self.first: Callable[[Sequence[int]], Array | int] = table.first
        self.keys: SharedKeys = SharedKeys(directory)
        self._blocks: ShardNumbers = directory.numbers(BLOCK, is_place=True)
        self._sizes: ShardNumbers = directory.numbers()
        self.offsets: Callable[[Int64Array], Int64Array] = self._blocks.__getitem__
        self.lengths: Callable[[Int64Array], Int64Array] = self._sizes.__getitem__

    def join(self, shard: int, table: SampleTable) -> None:
        """Add the table of an archive."""
        self._blocks.put(shard, table.blocks)
        self._sizes.put(shard, table.sizes)
        if table.keys is not None:
            self.keys.join(shard, table.keys, len(table))

    def components(self, first: int, samples: Int64Array) -> Int64Array:
        """See `SampleTable.components`."""
        if first < 0:
            return np.full(len(samples), -1, np.int64)
        within = samples & WITHIN
        return samples - within + within * len(self.codes) + first


class SharedKeys:
    """The keys of many archives; see `Keys`."""

    def __init__(self, directory: ShardDirectory) -> None:
        self._lengths: set[int | None] = set()  # of the keys of each archive; None if they vary
        self._ends: ShardNumbers = directory.numbers()
        self._texts = core().Maps(len(self._ends))

    def join(self, shard: int, keys: Keys, samples: int) -> None:
        """Add the keys of an archive."""
        self._texts.put_memory(shard, keys.text)
        length = int(keys.ends[0]) if len(keys.ends) == 1 else None
        self._lengths.add(length)
        if length is not None:
            self._ends.put_line(shard, length, length, samples)
        else:
            self._ends.put(shard, keys.ends)

    def names(self, samples: Int64Array) -> list[str]:
        """Return the keys of samples, (rows,) int64."""
        return [*self.column(samples)]

    def column(self, samples: Int64Array) -> TextColumn | list[str]:
        """See `Keys.column`."""
        within, same = samples & WITHIN, next(iter(self._lengths)) if len(self._lengths) == 1 else None
        if same is not None:
            starts, lengths = within * same, np.full(len(samples), same)
        else:
            starts = np.where(within > 0, self._ends[samples - (within > 0)], 0)
            lengths = self._ends[samples] - starts
        places = samples - within + starts
        return key_column(lengths, lambda out: self._texts.gather_ranges(out, places, lengths))
