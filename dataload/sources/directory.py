"""The shards of a data set that are read together: a batch is located and copied for all of its shards at once."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dataload._util.interactive import ShownProgress
from dataload._util.threads import run_each
from dataload.catalog.checks import ContentMark
from dataload.catalog.evidence import ENDS_BYTES, hash_ends
from dataload.errors import DataloadError
from dataload.storage.core import MOST_SHARDS, PLACE_BITS, can_map, compiled_core
from dataload.storage.local.record_files import MappedFile
from dataload.storage.local.shard_maps import ShardMaps
from dataload.storage.paths import is_url
from dataload.types import Array, FieldSpec, Int64Array

_UNUSED, _ALONE = -2, -1
_MOST_KINDS = 16  # shards that are all different gain nothing from being read together
_MOST_COMPARED = 1 << 16  # bytes of the layout of a file
_COMPARED_AT_ONCE = 256  # files
_SLOW_SECONDS = 0.01  # what takes longer waits for the disk, or releases the GIL

WITHIN = (1 << PLACE_BITS) - 1
"""The bits of a place that are an offset in a file, or an index in a table."""

T = TypeVar("T")
SizedT = TypeVar("SizedT", bound=Sized)


class KnownShards(NamedTuple):
    """Facts about local shards that are not open: paths, numbers of records, `versions_of` and contents, if known."""

    paths: Sequence[str]
    lengths: Sequence[int]
    versions: Int64Array
    contents: Sequence[ContentMark | None] | None


class ShardNumbers:
    """Tables of many shards as one array, whose indices are places. Its numbers are multiplied by `scale`.

    With `is_place`, they are offsets or indices in the shard, so that items are places. Negative ones are not.
    """

    def __init__(self, shards: int, scale: int = 1, *, is_place: bool = False) -> None:
        self._tables, self._shards = compiled_core().Tables(shards), shards
        self._scale, self._is_place = scale, is_place

    def put(self, shard: int, array: Array) -> None:
        """Set the numbers of a shard."""
        self._tables.put(shard, np.ascontiguousarray(array))

    def put_line(self, shard: int, start: int, stride: int, count: int) -> None:
        """Set the numbers of a shard: number i is ``start + i * stride``."""
        self._tables.put_line(shard, start, stride, count)

    def __len__(self) -> int:
        """Return the number of shards."""
        return self._shards

    def __getitem__(self, places: Int64Array) -> Int64Array:
        """Return the numbers at places, (rows,) int64."""
        out = np.empty(len(places), np.int64)
        self._tables.take(out, places, self._scale, self._is_place)
        return out

    def take(self, places: Int64Array, *, mode: str) -> Int64Array:  # noqa: ARG002 - as an array's
        """Return the numbers at valid places. Callers pass ``mode="clip"``, with which arrays do this fastest."""
        return self[places]

    def search(self, places: Int64Array) -> Int64Array:
        """Return, as a place in its shard, how many of the ascending numbers are at most the index in each place."""
        out = np.empty(len(places), np.int64)
        self._tables.search(out, places)
        return out


class ShardDirectory:
    """Readers of many shards each. Shards enter on first use; those that cannot be read together are read alone.

    `files` are the files of all shards as one, `known` are facts about the shards before they are opened.
    """

    def __init__(self, shards: int) -> None:
        self.files: ShardMaps = ShardMaps(shards)
        self._shards = shards
        self._ends = self._places = np.empty(0, np.int64)
        # The length of all shards, if it is the same (the last may be shorter), and what it adds to a place for each
        # shard before. As arrays, because numpy takes half a microsecond to make one of a number.
        self._even: tuple[Array, Array] | None = None
        # What shards have in common, the reader of such shards, and whether it reads their maps.
        self._readers: list[tuple[Any, Any, bool]] = []
        self._reader_of = np.full(shards, _UNUSED, np.int8)
        self._alike = 0  # shards in the first reader
        self.known: KnownShards | None = None
        self._lock = threading.Lock()

    def place(self, ends: Int64Array) -> None:
        """Set the cumulative numbers of records, (shards,) int64, which `split` needs."""
        starts = ends - np.diff(ends, prepend=0)
        length = int(ends[0])
        self._ends = ends
        self._places = (np.arange(self._shards) << PLACE_BITS) - starts  # to be added to an index
        edges = np.arange(self._shards + 1) * length
        if length and int(ends[-1]) <= edges[-1] and bool((starts == edges[:-1]).all()):
            self._even = np.array(length), np.array((1 << PLACE_BITS) - length)

    def numbers(self, scale: int = 1, *, is_place: bool = False) -> Any:
        """Return an empty table, which takes the place of an array in a reader of many shards."""
        return ShardNumbers(self._shards, scale, is_place=is_place)

    def copy_of(self, reader: T) -> T:
        """Return a copy of a reader that reads the files of all shards."""
        copied: Any = copy.copy(reader)
        copied._file = self.files
        return copied

    def split(
        self, indices: Int64Array, reader: Callable[[int], Any]
    ) -> Iterator[tuple[Array | None, Any, Int64Array]]:
        """Yield readers of many shards with the rows of the request that each reads, None for all, and their places.

        `reader` returns the reader of a shard.
        """
        even = self._even
        shards = np.searchsorted(self._ends, indices, side="right") if even is None else indices // even[0]
        if self._alike == self._shards and (not self._readers[0][2] or self.files.has_all(self._shards)):
            yield None, self._readers[0][1], self._places_of(indices, shards)
            return
        numbers = self._reader_of[shards]
        if int(numbers.min()) == _UNUSED:
            unused = sorted({*shards[numbers == _UNUSED].tolist()})  # np.unique imports numpy.ma: 20 ms
            self._add_first(unused, reader)
            for shard in unused:
                if self._reader_of[shard] == _UNUSED:
                    self.add(shard, reader(shard))
            numbers = self._reader_of[shards]
        places = self._places_of(indices, shards)
        least, most = int(numbers.min()), int(numbers.max())
        if least == most >= 0:
            if not self._readers[most][2] or self.files.use(shards):
                yield None, self._readers[most][1], places
            return
        for number in range(max(0, least), most + 1):
            rows = np.flatnonzero(numbers == number)
            if len(rows) and (not self._readers[number][2] or self.files.use(shards[rows])):
                yield rows, self._readers[number][1], places[rows]

    def _places_of(self, indices: Int64Array, shards: Int64Array) -> Int64Array:
        return indices + (self._places[shards] if self._even is None else shards * self._even[1])

    def add(self, shard: int, reader: Any) -> None:
        """Add a shard to the reader of those like it, and close its file; or note that it is read alone."""
        with self._lock:
            if self._reader_of[shard] == _UNUSED:
                self._reader_of[shard] = number = self._join(shard, reader)
                self._alike += number == 0

    def _add_first(self, shards: Sequence[int], reader: Callable[[int], Any]) -> None:
        """Add the first of several shards, and those whose files differ from its file only in the values of records.

        Such shards need no readers: the files are mapped at once, and the bytes that say where values are compared.
        """
        known, first = self.known, shards[0]
        if known is None or len(shards) == 1:
            return
        opened = reader(first)
        layout = _compared(opened)
        self.add(first, opened)
        if layout is None or self._reader_of[first] == _ALONE:
            return
        for start in range(1, len(shards), _COMPARED_AT_ONCE):
            with self._lock:
                some = [each for each in shards[start : start + _COMPARED_AT_ONCE] if self._reader_of[each] == _UNUSED]
                if not some:  # another thread has added them
                    continue
                found = np.array(some, np.int64)
                for shard, like in _map_alike(self.files, first, found, opened, layout, known).items():
                    self._reader_of[shard] = number = self._reader_of[first]
                    self._alike += int(number == 0)
                    like.join(self._readers[number][1], shard)
                self.files.drop(found[self._reader_of[found] == _UNUSED])

    def count_alike(self, reader: Any, paths: Sequence[str], versions: Int64Array, threads: int) -> Int64Array:
        """Return the number of records of each shard that is like the first one, which was added; -1 for others."""
        layout, counts = _compared(reader), np.full(len(paths), -1)
        reader.release()
        counts[0] = len(reader)
        file = None if layout is None or self._reader_of[0] == _ALONE else reader.shared()[0]
        if layout is None or file is None:
            return counts

        def count(shards: Int64Array) -> None:
            if not layout.size:
                likes = reader.like([paths[each] for each in shards.tolist()], versions[shards])
                counts[shards] = [-1 if like is None else len(like) for like in likes]
                return
            files = ShardMaps(self._shards)  # for a moment: shards are mapped again when they are read
            files.add(0, file)
            known = KnownShards(paths, (), versions, None)
            counts[[*_map_alike(files, 0, shards, reader, layout, known)]] = counts[0]

        shards = np.arange(1, len(paths))
        blocks = [shards[start : start + _COMPARED_AT_ONCE] for start in range(0, len(shards), _COMPARED_AT_ONCE)]
        for _ in run_each(count, blocks, threads, _SLOW_SECONDS):
            pass
        return counts

    def _join(self, shard: int, reader: Any) -> int:
        """Add a shard to a reader of many; return the number of that."""
        shared = reader.shared()
        if shared is None:
            return _ALONE
        file, kind = shared
        if file is not None and (not isinstance(file, MappedFile) or not file.is_plain or file.size > WITHIN):
            return _ALONE
        number = next((number for number, (known, *_) in enumerate(self._readers) if known == kind), len(self._readers))
        if number == _MOST_KINDS or len(reader) > WITHIN:
            return _ALONE
        if number == len(self._readers):
            self._readers.append((kind, reader.joined(self), file is not None))
        reader.join(self._readers[number][1], shard)
        return number if file is None or self.files.add(shard, file) else _ALONE


def _compared(reader: Any) -> Array | None:
    """Return the ranges of a file to compare with others, (n, 2) int64; None if others matter, or too many bytes."""
    ranges = reader.layout_ranges()
    layout = None if ranges is None else np.array(ranges, np.int64).reshape(-1, 2)
    return layout if layout is not None and int(layout[:, 1].sum()) <= _MOST_COMPARED else None


def _map_alike(
    files: ShardMaps, first: int, shards: Int64Array, reader: Any, layout: Array, known: KnownShards
) -> dict[int, Any]:
    """Map shards like the first one, of the known version, length and content; return their readers by number."""
    numbers, ends = [first, *shards.tolist()], min(ENDS_BYTES, int(known.versions[first, 0]))
    likes = reader.like([known.paths[each] for each in numbers[1:]], known.versions[shards])
    found = {
        number: like
        for number, like in zip(numbers[1:], likes, strict=True)
        if like is not None and (not known.lengths or len(like) == known.lengths[number])
    }
    shards = np.array([*found], np.int64)
    sizes = known.versions[shards, 0]
    if not layout.size:
        sizes = np.minimum(sizes, ENDS_BYTES)
    shards = shards[sizes == (known.versions[first, 0] if layout.size else ends)]
    versions = files.add_alike(first, shards, [known.paths[int(each)] for each in shards])
    rows = np.append(first, shards[(versions == known.versions[shards]).all(axis=1)])
    offsets, lengths = np.repeat(layout.T[:, None], len(rows), axis=1)
    if known.contents is not None:
        last = known.versions[rows, :1] - ends
        offsets, lengths = np.hstack([offsets, 0 * last, last]), np.hstack([lengths, np.full((len(rows), 2), ends)])
    try:
        data = files.gather_ranges(((rows << PLACE_BITS)[:, None] + offsets).reshape(-1), lengths.reshape(-1))
    except DataloadError:  # raised again where the shard is opened
        return {}
    values, end, same = data.parts()[0][0].reshape(lengths.shape[0], int(lengths[0].sum())), int(layout[:, 1].sum()), {}
    for row in np.flatnonzero((values[:, :end] == values[0, :end]).all(axis=1)).tolist()[1:]:
        number = int(rows[row])
        mark = None if known.contents is None else known.contents[number]
        if mark is None or mark[:2] == (known.versions[number, 0], hash_ends(values[row, end:].tobytes())):
            same[number] = found[number]
    return same


def directory_of(shards: int) -> ShardDirectory | None:
    """Return a directory of so many shards; None if there is only one, or files are not mapped."""
    return ShardDirectory(shards) if 1 < shards <= MOST_SHARDS and can_map() else None


def open_different(
    opened: Callable[[int], tuple[SizedT, Mapping[str, FieldSpec]]],
    paths: Sequence[str],
    versions: Int64Array,
    directory: ShardDirectory | None,
    threads: int,
) -> tuple[dict[int, tuple[SizedT, Mapping[str, FieldSpec]]], tuple[int, ...]]:
    """Return what `opened` makes of each shard that is not like the first one, and the number of records of each shard.

    A terminal shows how many are open.
    """
    if len(paths) == 1:  # a pool takes longer than a file, and a program may open thousands
        alone = opened(0)
        return {0: alone}, (len(alone[0]),)
    progress, found, counts = ShownProgress("shards are open"), dict[int, Any](), np.full(len(paths), -1)
    if directory is not None and len(versions) == len(paths):
        found[0] = opened(0)
        counts = directory.count_alike(found[0][0], paths, versions, threads)
    shards: list[int] = np.flatnonzero(counts < 0).tolist()
    results = run_each(opened, shards, threads, 0 if any(map(is_url, paths)) else _SLOW_SECONDS)
    for done, (shard, result) in enumerate(zip(shards, results, strict=True), len(paths) - len(shards) + 1):
        found[shard], counts[shard] = result, len(result[0])
        progress(done, len(paths))
    return found, tuple(counts.tolist())
