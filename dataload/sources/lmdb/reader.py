"""Source of plain LMDB environments, and tables of values by index: 8 to 16 bytes per record.

Keys that are decimal numbers are ordered numerically, as their writer intended; LMDB orders them as text, with "10"
before "2" unless they are padded. All other keys are in LMDB's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np

from dataload._util.arrays import check_lengths
from dataload.catalog.arrays import IndexKey, recall, require, store_cached, within
from dataload.errors import ConfigError, CorruptFileError, UnsupportedFormatError, closest
from dataload.sources.directory import ShardDirectory
from dataload.sources.encoded import EncodedShard, copy_records
from dataload.sources.file_source import FileSource
from dataload.sources.lmdb import LMDBOptions, TorchRecordOptions
from dataload.sources.lmdb.file import FileInfo, Tree, data_file
from dataload.sources.lmdb.tree import Nodes, Snapshot, open_snapshot, read_key, read_tree, subdatabases, verify_pages
from dataload.storage import RecordFile
from dataload.storage.core import PLACE_BITS
from dataload.storage.kept import CachedTable
from dataload.types import Array, Codec, Int64Array

T = TypeVar("T")

KeyOrder: TypeAlias = Literal["number", "bytes"]
"""Order of keys: numerical, or by their bytes, like LMDB."""

_LEAST_CACHED = 100_000  # minimum number of records of a cached table: about 10 ms of work
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Values:
    """Locations of values: offsets, (records,), -1 if missing; lengths in bytes, (records,) uint32 or one."""

    offsets: Array
    lengths: Array | int

    @classmethod
    def of(cls, offsets: Int64Array, lengths: Array) -> Values:
        """Return the table of these values; `lengths` is (records,) uint32."""
        length = int(lengths[0]) if len(lengths) else 0
        return cls(offsets, length if bool((lengths == length).all()) else lengths)

    def pack(self) -> dict[str, Array]:
        lengths = np.array([self.lengths], np.uint32) if isinstance(self.lengths, int) else self.lengths
        return {"offsets": self.offsets, "lengths": lengths}

    @classmethod
    def unpack(cls, arrays: Mapping[str, Array], count: int, least: int, size: int) -> Values:
        """Return the table from the cache, which must have `count` values, all inside a file of `size` bytes."""
        offsets, lengths = arrays["offsets"], arrays["lengths"]
        require(offsets.dtype == np.int64, lengths.dtype == np.uint32, len(offsets) == count)
        require(len(lengths) in (1, count), offsets >= least, offsets + lengths <= size)
        return cls(offsets, int(lengths[0]) if len(lengths) == 1 else lengths)


@dataclass(frozen=True, slots=True)
class Keys:
    """Locations of keys, which are read from the leaf pages, whose numbers are `leaves`.

    `places` (records,) are places in LMDB's order, if it is another one than `order`; `ends` (leaves,) count the
    records up to the end of each leaf.
    """

    order: KeyOrder
    places: Array | None
    leaves: Array
    ends: Array

    def read(self, file: RecordFile, info: FileInfo, index: int) -> bytes:
        place = index if self.places is None else int(self.places[index])
        return read_key(file, info, self.leaves, self.ends, place)


@dataclass(frozen=True, slots=True)
class KeyedValues:
    """A database whose records have keys of any kind."""

    values: Values
    keys: Keys

    @classmethod
    def build(cls, file: RecordFile, info: FileInfo, trees: Sequence[Tree]) -> KeyedValues:
        """Put the records of the only tree in order."""
        nodes = read_tree(file, info, *trees)
        order, places = order_of(nodes)
        offsets, lengths = nodes.offsets, nodes.lengths
        if places is not None:
            offsets, lengths = offsets[places], lengths[places]
        leaves, ends = _narrow(nodes.leaves), _narrow(nodes.ends)
        keys = Keys(order, None if places is None else _narrow(places), leaves, ends)
        return cls(Values.of(offsets, lengths), keys)

    def pack(self) -> CachedTable:
        arrays = {**self.values.pack(), "leaves": self.keys.leaves, "ends": self.keys.ends}
        if self.keys.places is not None:
            arrays["places"] = self.keys.places
        return CachedTable(arrays, {"order": self.keys.order})

    @classmethod
    def unpack(cls, found: CachedTable, trees: Sequence[Tree], info: FileInfo) -> KeyedValues:
        """Return the table from the cache, which must be a valid one of the only tree."""
        count = trees[0].entries
        values = Values.unpack(found.arrays, count, 0, info.size)
        places, leaves, ends = found.arrays.get("places"), found.arrays["leaves"], found.arrays["ends"]
        order: Any = found.extras.get("order")
        require(order in ("number", "bytes"), len(leaves) == len(ends), within(leaves, info.pages))
        require(places is None or (len(places) == count and within(places, count)))
        require(ends[-1] == count, ends[1:] >= ends[:-1])
        return cls(values, Keys(order, places, leaves, ends))


def order_of(nodes: Nodes) -> tuple[KeyOrder, Int64Array | None]:
    """Return the order of records, and their places in LMDB's order, (records,), unless it is the same."""
    numbers = nodes.numbers
    if len(numbers) and (int(numbers.min()) < 0 or int(nodes.key_sizes.max()) > _MOST_DIGITS):
        return "bytes", None
    if bool((numbers[1:] > numbers[:-1]).all()):
        return "number", None
    # Among equal numbers, "7" and "07", the shorter key comes first.
    return "number", np.lexsort((nodes.key_sizes, numbers))


def _narrow(numbers: Array) -> Array:
    """Return numbers as uint32 if they fit."""
    return numbers.astype(np.uint32) if not len(numbers) or int(numbers.max()) < 1 << 32 else numbers


def open_table(
    path: str,
    options: LMDBOptions | TorchRecordOptions,
    kind: str,
    choose: Callable[[RecordFile, FileInfo], tuple[Sequence[Tree], tuple[Any, ...]]],
    unpack: Callable[[CachedTable, Sequence[Tree], FileInfo], T],
    build: Callable[[RecordFile, FileInfo, Sequence[Tree]], T],
    pack: Callable[[T], CachedTable],
) -> tuple[Snapshot, T]:
    """Open an environment; return its table, as it was kept, or as it is built and kept.

    `choose` returns the databases to read, and what distinguishes their table from others of the same environment.
    """

    def parse(file: RecordFile, info: FileInfo) -> tuple[T, IndexKey | None]:
        trees, names = choose(file, info)
        if options.verify:
            verify_pages(file, info, [info.main, *(tree for tree in trees if tree.name is not None)])
        if not options.cache or sum(tree.entries for tree in trees) < _LEAST_CACHED:
            return build(file, info, trees), None
        # A writer with a writable map updates the file's time late, but the transaction number immediately.
        state, remote = (info.transaction, info.main.root), options.remote_settings
        key = IndexKey.of(kind, (file.path,), names, state=state, beside=path, remote=remote)
        table = recall(key, lambda found: unpack(found, trees, info))
        return (build(file, info, trees), key) if table is None else (table, None)

    snapshot, (table, key) = open_snapshot(path, parse, mapped=options.map, remote=options.remote_settings)
    if key is not None:  # `open_snapshot` starts again if the file was written to while the table was built
        store_cached(key, pack(table))
    return snapshot, table


class SharedSnapshots:
    """The snapshots of many environments, which are read together."""

    def __init__(self, directory: ShardDirectory, meta_bytes: int) -> None:
        self._file = directory.files
        shards = self._file.size >> PLACE_BITS
        self._places = np.empty(shards, np.int64)  # of meta pages, and their content
        self._metas = np.empty((shards, meta_bytes), np.uint8)

    def join(self, shard: int, snapshot: Snapshot) -> None:
        """Add an environment."""
        self._places[shard] = (shard << PLACE_BITS) + snapshot.info.offset
        self._metas[shard] = np.frombuffer(snapshot.info.meta, np.uint8)

    @contextmanager
    def reading(self, indices: Int64Array) -> Generator[RecordFile]:
        """Raise after reading records, given by places, unless all meta pages are as they were."""
        yield self._file
        shards = indices >> PLACE_BITS
        found = self._file.gather(self._places[shards], self._metas.shape[1])
        if found.tobytes() != self._metas.take(shards, axis=0).tobytes():  # a third of the time of comparing arrays
            raise CorruptFileError("an environment was written to: its own reader knows whether that matters")


T_co = TypeVar("T_co", covariant=True)


class LMDBShard(EncodedShard):
    """One environment, whose file is closed between `release` and the next read. Values have at most `limit` bytes."""

    whole = True

    def __init__(self, snapshot: Snapshot, values: Values, codec: Codec | None, limit: int) -> None:
        super().__init__(snapshot.info.path, codec)
        self._snapshot = snapshot
        self._snapshots: SharedSnapshots | None = None  # of a reader of many environments
        self._file = snapshot.file
        snapshot.sample(values.offsets, values.lengths)
        gaps = int(values.offsets.min(initial=0)) < 0
        self._values = values if gaps else Values(_narrow(values.offsets), values.lengths)
        self._limit = limit
        self._has_large = int(np.max(values.lengths, initial=0)) > limit

    def __len__(self) -> int:
        return len(self._values.offsets)

    def shared(self) -> tuple[RecordFile, Any]:
        return self._file, len(self._snapshot.info.meta)

    def joined(self, directory: ShardDirectory) -> Self:
        joined = directory.copy_of(self)
        joined._snapshots, joined._has_large = SharedSnapshots(directory, len(self._snapshot.info.meta)), False
        joined._values = Values(directory.numbers(is_place=True), directory.numbers())
        return joined

    def join(self, joined: Any, shard: int) -> None:
        offsets, lengths = self._values.offsets, self._values.lengths
        joined._snapshots.join(shard, self._snapshot)
        joined._values.offsets.put(shard, offsets)
        if isinstance(lengths, int):
            joined._values.lengths.put_line(shard, lengths, 0, len(offsets))
        else:
            joined._values.lengths.put(shard, lengths)
        joined._has_large |= self._has_large

    def _reading(self, indices: Int64Array) -> AbstractContextManager[RecordFile]:
        return self._snapshot.reading() if self._snapshots is None else self._snapshots.reading(indices)

    def _offsets(self, indices: Int64Array) -> Int64Array:
        return np.asarray(self._values.offsets.take(indices, mode="clip"), np.int64)

    def _locations(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        table = self._values.lengths
        offsets = self._offsets(indices)
        if isinstance(table, int):
            lengths = np.full(len(indices), table, np.int64)
        else:
            lengths = table.take(indices, mode="clip").astype(np.int64)
        if self._has_large:
            check_lengths(lengths, self._limit, indices, self._path)
        return offsets, lengths

    def stored(self, indices: Int64Array) -> list[bytes]:
        """Return records as they are stored."""
        with self._reading(indices):
            return self._stored(indices, copy_records)

    def offset(self, index: int) -> int:
        return int(self._offsets(np.array([index]))[0])

    def identity(self) -> list[str]:
        """Return hashes of the first and the last record: LMDB keeps its own pages at both ends of a file."""
        ends = np.unique([0, len(self) - 1]) if len(self) else np.empty(0, np.int64)
        return [hashlib.blake2b(data, digest_size=16).hexdigest() for data in self.stored(ends)]


class LMDBFileSource(FileSource[T_co]):
    """A data set in LMDB environments, each a directory or a file; its shards are `LMDBShard`."""

    def _data_file(self, path: str) -> str:
        return data_file(path, self._remote)

    def _add_mapped(self, paths: list[str], versions: dict[int, Int64Array]) -> None:
        """Add nothing: LMDB may write to a file that is read, and each read looks for that."""


class LMDBSource(LMDBFileSource[Any]):
    """Records of LMDB environments, each a directory with ``data.mdb`` or a single file.

    Records are the values, as bytes or decoded by a codec. Keys that are decimal numbers are ordered numerically, all
    others in LMDB's order; see `key_order`.

    What others commit later is not seen; after their second transaction, reads raise an error. Options: `LMDBOptions`.
    """

    format_name = "lmdb"

    options_type: ClassVar[Any] = LMDBOptions

    def _open_shard(self, path: str) -> LMDBShard:
        return _LMDBShard(path, self.options)

    @property
    def key_order(self) -> KeyOrder:
        """Order of the keys in the first environment: ``"number"`` or ``"bytes"``."""
        shard = self._data_set().reader(0)
        assert isinstance(shard, _LMDBShard)
        return shard.keys.order


class _LMDBShard(LMDBShard):
    def __init__(self, path: str, options: LMDBOptions) -> None:
        def choose(file: RecordFile, info: FileInfo) -> tuple[Sequence[Tree], tuple[Any, ...]]:
            tree = _choose(subdatabases(file, info), info.main, path, options.subdatabase)
            return [tree], () if tree.name is None else (tree.name,)

        snapshot, table = open_table(
            path, options, "lmdb-values", choose, KeyedValues.unpack, KeyedValues.build, KeyedValues.pack
        )
        super().__init__(snapshot, table.values, cast("Codec | None", options.codec), options.max_record_bytes)
        self.keys = table.keys
        if self._codec is not None:
            self._fields = self.first_fields()

    def key(self, index: int) -> str:
        with self._snapshot.reading() as file:
            return self.keys.read(file, self._snapshot.info, index).decode(errors="backslashreplace")


def _choose(named: Sequence[Tree], main: Tree, path: str, subdatabase: str | None) -> Tree:
    """Return the database to read."""
    names = [tree.name.decode(errors="replace") for tree in named if tree.name is not None]
    if subdatabase is None and names:
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        hint = "; this is a TorchRecord, which format='torchrecord' reads as a whole" if names[0] == "db0" else ""
        message = f"{path} contains the sub-databases {listed}: choose one with subdatabase={names[0]!r}{hint}"
        raise ConfigError(message, key="subdatabase")
    if subdatabase is None:
        tree = main
    elif subdatabase in names:
        tree = named[names.index(subdatabase)]
    else:
        message = f"{path} has no sub-database {subdatabase!r}: {closest(subdatabase, names)}"
        raise ConfigError(message, key="subdatabase", value=subdatabase)
    if tree.has_duplicates:
        message = f"{path}: keys of this database may have several values (DUPSORT), so values have no index"
        raise UnsupportedFormatError(message, path=path)
    return tree
